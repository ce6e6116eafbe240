"""The pushes from this node to its peers: which slices go next, and when a push is over. No sockets, no threads here.

Layers are grouped until a write is worth its cost (`group_bytes`), or nothing more is to be filled. The push that lacks
the fewest bytes of its prefill goes first: its decoder waits soonest. What a peer has not acknowledged is bounded by
`window_bytes`, so that the order still matters when there is more to send than the wire takes.

What is filled, acknowledged and granted is only noted; `pump`, once per turn of the control loop, submits what comes of
all of it. A message costs what it changes, whatever else is under way.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pdx.errors import ChannelError, ProtocolError
from pdx.node.peers.job import Job
from pdx.node.peers.push import Item, Push, Way, alike
from pdx.node.peers.push_table import SenderState, SenderStep
from pdx.store.chunk import Chunk
from pdx.store.store import Store
from pdx.wire.peer_messages import Granted, LetGo, Offer

log = logging.getLogger("pdx.node")


class Queue:
    """What goes to one peer: its pushes by number, and the ranks of those with a write to make, in their order."""

    __slots__ = ("due", "in_window", "pushes", "wanted_bytes", "wants")

    def __init__(self) -> None:
        self.pushes: dict[int, Push] = {}
        self.due: list[tuple[int, int]] = []  # sorted (bytes to be filled, number)
        self.in_window = 0  # bytes submitted and not over
        self.wants = 0  # pushes that the peer asked for …
        self.wanted_bytes = 0  # … and what they hold


class Outgoing:
    """All pushes to all peers. Owned by the control loop; the clock is a parameter."""

    def __init__(
        self,
        store: Store,
        *,
        group_bytes: int,
        window_bytes: int,
        counters: Counter[str],
        on_over: Callable[[Push, bool], None],
    ) -> None:
        self._store = store
        self._group_bytes = group_bytes
        self._window_bytes = window_bytes
        self._counters = counters
        self._on_over = on_over
        self._numbers = itertools.count(1)
        self._pushes: dict[int, Push] = {}
        self._queues: defaultdict[str, Queue] = defaultdict(Queue)  # by peer
        self._of_transfer: defaultdict[str, list[Push]] = defaultdict(list)
        self._items: defaultdict[Chunk, list[Item]] = defaultdict(list)  # those that wait for a chunk's slices
        self._touched: dict[Push, None] = {}  # pushes whose next write may be another since the last `pump` …
        self._may_write: set[str] = set()  # … and the peers that may be written to

    def __len__(self) -> int:
        return len(self._pushes)

    def to(self, name: str) -> list[Push]:
        """The pushes to a peer."""
        return list(self._queues[name].pushes.values()) if name in self._queues else []

    def of_transfer(self, transfer: str, name: str) -> Push | None:
        """The push of a transfer to a peer, if one is under way."""
        return next((push for push in self._of_transfer.get(transfer, ()) if push.way.name == name), None)

    def in_window(self, name: str) -> int:
        """Bytes that were submitted to a peer and are not over."""
        return self._queues[name].in_window if name in self._queues else 0

    def wants(self, name: str) -> tuple[int, int]:
        """The pushes under way that a peer asked for, and the bytes of the chunks that they hold."""
        queue = self._queues.get(name)
        return (queue.wants, queue.wanted_bytes) if queue is not None else (0, 0)

    # ---- starting ---------------------------------------------------------------------------

    def start(
        self,
        way: Way,
        keys: Sequence[bytes],
        shards: int,
        *,
        transfer: str | None,
        layout: bytes,
        wait_s: float,
        now: float,
        push_s: float,
        want: int = 0,
    ) -> int:
        """Push the leading run of these keys that is here or being filled; returns how many chunks that are."""
        found: list[tuple[bytes, list[Chunk]]] = []
        for key in keys:
            chunks = self._store.known(key, shards)
            if chunks is None or chunks[0].slot.nbytes < chunks[0].layers:  # a slice without a byte is no write
                break
            found.append((key, chunks))
        for run in alike(found):
            held = [chunk for _, chunks in run for chunk in chunks]
            self._store.hold(held)
            first, last = held[0], held[-1]
            offer = Offer(
                next(self._numbers),
                [key for key, _ in run],
                first.slot.nbytes,
                first.layers,
                shards,
                tail_nbytes=last.slot.nbytes if last.tail else 0,
                transfer=transfer,
                layout=layout,
                wait_s=wait_s,
                want=want,
            )
            push = Push(way, offer, held, now + push_s)
            self._add(push)
            self._counters["pushes"] += 1
            self._offer(push)
        return len(found)

    def _add(self, push: Push) -> None:
        self._pushes[push.number] = push
        queue = self._queues[push.way.name]
        queue.pushes[push.number] = push
        if push.offer.want:
            queue.wants += 1
            queue.wanted_bytes += push.held_bytes
        if push.transfer is not None:
            self._of_transfer[push.transfer].append(push)

    def _offer(self, push: Push) -> None:
        if push.way.is_usable and not push.is_offered and push.state is SenderState.OFFERED:
            push.is_offered = True
            push.way.send(push.offer)

    def usable(self, name: str) -> None:
        """The way to this peer is open: offer what waited for it."""
        self._may_write.add(name)
        for push in self.to(name):
            self._offer(push)

    # ---- what the peer says -----------------------------------------------------------------

    def granted(self, name: str, granted: Granted) -> None:
        """The peer has room for these keys of an offer.

        :raises ProtocolError: it is not an answer to that offer.
        """
        push = self._pushes.get(granted.push)
        if push is None or push.way.name != name:
            return  # given up meanwhile; the peer knows, or is being told
        if push.state is not SenderState.OFFERED:
            if push.state is SenderState.STREAMING:
                raise ProtocolError(f"{name} answers the offer {granted.push} twice")
            return
        held, held_bytes = push.chunks, push.held_bytes
        try:
            push.grant(granted)
        except ProtocolError:
            self._give_up(push, SenderStep.CANCEL)  # the peer keeps room for it until it is told
            raise
        push.step(SenderStep.GRANT)
        wanted, shards = set(granted.granted), push.offer.shards
        self._store.unhold([chunk for at, chunk in enumerate(held) if at // shards not in wanted])
        if push.offer.want:
            self._queues[name].wanted_bytes -= held_bytes - push.held_bytes
        for item in push.items:
            self._items[item.chunk].append(item)
        self._counters["offered_chunks"] += len(push.offer.keys) * push.offer.shards
        self._counters["granted_chunks"] += len(push.items)
        if any(item.is_dead for item in push.items):
            self._source_is_gone(push)
        elif push.is_all_sent:  # nothing was granted
            push.step(SenderStep.ALL_SENT)
            self._drain(push)
        else:
            self._touched[push] = None

    def stopped(self, name: str, number: int, text: str) -> None:
        """The peer does not want this push any more."""
        push = self._pushes.get(number)
        if push is not None and push.way.name == name and push.state is not SenderState.DRAINING:
            if text:
                log.warning("%s stopped a push: %r", name, text)
            self._counters["pushes_stopped"] += 1
            self._give_up(push, SenderStep.STOP)

    def lost(self, name: str) -> None:
        """The link to this peer is gone; its writes end with errors, or have ended."""
        for push in self.to(name):
            push.is_lost = True
            self._counters["pushes_lost"] += not push.is_given_up
            if push.state is SenderState.DRAINING:
                push.is_given_up = True  # all was sent; whether it arrived nobody will know
            else:
                self._give_up(push, SenderStep.LOST)

    # ---- what happens here ------------------------------------------------------------------

    def changed(self, chunks: Iterable[Chunk]) -> None:
        """Slices of these chunks were filled, or their writers gave up."""
        dead: dict[Push, None] = {}
        for chunk in chunks:
            for item in self._items.get(chunk, ()):
                if item.push.state is not SenderState.STREAMING:
                    continue
                if item.is_dead:
                    dead[item.push] = None
                elif item.push.note(item):
                    self._touched[item.push] = None
        for push in dead:
            self._source_is_gone(push)

    def cancel(self, transfer: str) -> None:
        """The transfer was given up."""
        for push in list(self._of_transfer.get(transfer, ())):
            if push.state is not SenderState.DRAINING:
                self._counters["pushes_cancelled"] += 1
                self._give_up(push, SenderStep.CANCEL)

    def tick(self, now: float) -> None:
        """Give up what is too late."""
        for push in [push for push in self._pushes.values() if push.deadline <= now]:
            if push.state is not SenderState.DRAINING:
                self._counters["pushes_late"] += 1
                log.warning("%r is dropped: it was not over in time", push)
                self._give_up(push, SenderStep.CANCEL)

    def acked_bytes(self, transfer: str) -> int:
        """What peers have acknowledged of a transfer's pushes that are under way."""
        return sum(push.acked_bytes for push in self._of_transfer.get(transfer, ()))

    # ---- writing ----------------------------------------------------------------------------

    def pump(self) -> None:
        """Submit what may be written since the last call, to each peer the most urgent first, as long as its window has
        room. To be called after each turn of the control loop."""
        while self._touched:
            self._rank(self._touched.popitem()[0])
        while self._may_write:
            name = self._may_write.pop()
            queue = self._queues.get(name)
            while queue is not None and queue.due and queue.in_window < self._window_bytes:
                push = queue.pushes[queue.due[0][1]]
                if not push.way.is_usable:
                    break
                self._submit(queue, push)

    def _submit(self, queue: Queue, push: Push) -> None:
        job = push.next_write()
        queue.in_window += job.nbytes
        push.under_way += 1
        push.way.submit(job)
        if push.is_all_sent:
            push.step(SenderStep.ALL_SENT)
        if push.is_all_sent or not push.is_due(self._group_bytes):
            self._rank(push)

    def _rank(self, push: Push) -> None:
        """Put a push where it belongs among those to its peer that have a write to make."""
        queue = self._queues.get(push.way.name)
        if queue is None:
            return  # over, and the last one
        if push.rank is not None:
            del queue.due[bisect.bisect_left(queue.due, push.rank)]
            push.rank = None
        if push.state is SenderState.STREAMING and push.is_due(self._group_bytes):
            push.rank = (push.unfilled_bytes, push.number)
            bisect.insort(queue.due, push.rank)
            self._may_write.add(push.way.name)

    def written(self, name: str, job: Job, error: ChannelError | None) -> None:
        """A write is over."""
        queue = self._queues[name]
        queue.in_window -= job.nbytes
        self._may_write.add(name)
        push = self._pushes.get(job.push)
        if push is not None:
            push.under_way -= 1
            self._note_end(push, job, error)
        self._forget_if_idle(name)

    def _note_end(self, push: Push, job: Job, error: ChannelError | None) -> None:
        if error is None:
            push.written(job)
            self._counters["sent_bytes"] += job.nbytes
        elif not push.is_given_up:  # else it was aborted
            log.warning("%r failed: %s", push, error)
            self._counters["writes_failed"] += 1
            if push.state is SenderState.STREAMING:
                self._give_up(push, SenderStep.CANCEL)
        if push.state is SenderState.DRAINING:
            self._drain(push)

    # ---- ending -----------------------------------------------------------------------------

    def _source_is_gone(self, push: Push) -> None:
        """Whoever filled a chunk of it has given up."""
        self._counters["pushes_without_source"] += 1
        self._give_up(push, SenderStep.CANCEL)

    def _give_up(self, push: Push, step: SenderStep) -> None:
        push.is_given_up = True
        push.step(step)
        self._rank(push)
        push.way.abort(push.number)
        self._drain(push)

    def _drain(self, push: Push) -> None:
        """End a draining push as soon as no write reads our memory any more."""
        if push.under_way:
            return
        push.step(SenderStep.DRAINED)
        if push.is_offered and not push.is_lost:
            push.way.send(LetGo(push.number, push.is_complete))
        self._remove(push)
        self._store.unhold(push.chunks)
        self._on_over(push, push.is_complete)

    def _remove(self, push: Push) -> None:
        del self._pushes[push.number]
        self._touched.pop(push, None)
        queue = self._queues[push.way.name]
        del queue.pushes[push.number]
        if push.offer.want:
            queue.wants -= 1
            queue.wanted_bytes -= push.held_bytes
        self._forget_if_idle(push.way.name)
        if push.transfer is not None:
            _take(self._of_transfer, push.transfer, push)
        for item in push.items:
            _take(self._items, item.chunk, item)

    def _forget_if_idle(self, name: str) -> None:
        queue = self._queues[name]
        if not queue.pushes and not queue.in_window:
            del self._queues[name]


def _take(lists: dict[Any, list[Any]], key: object, value: object) -> None:
    """Take one out of a list that is dropped with its last."""
    lists[key].remove(value)
    if not lists[key]:
        del lists[key]
