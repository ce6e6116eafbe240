"""The pushes from this node to its peers: which slices go next, and when a push is over. No sockets, no threads here.

Layers are grouped until a write is worth its cost (`group_bytes`), or nothing more is to be filled. The push that lacks
the fewest bytes of its prefill goes first: its decoder waits soonest. What a peer has not acknowledged is bounded by
`window_bytes`, so that the order still matters when there is more to send than the wire takes.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from pdx.channel import Piece
from pdx.errors import ChannelError, ProtocolError
from pdx.lifecycle import State
from pdx.messages import Slot
from pdx.node.job import Job
from pdx.peer_messages import Granted, LetGo, Offer, Slices
from pdx.push import SENDER, SenderState, SenderStep
from pdx.store.chunk import Chunk
from pdx.store.store import Store

log = logging.getLogger("pdx.node")

MAX_WRITE_BYTES = 8 << 20  # a write shall not keep the next one waiting for long
MAX_SLICES = 1024  # in one write: its notification has room for their digests


class Way(Protocol):
    """The way to one peer, as pushes need it."""

    name: str

    @property
    def is_usable(self) -> bool:
        """Whether the link is ready and a channel is chosen."""

    def send(self, body: Offer | LetGo) -> None:
        """A message over the link."""

    def submit(self, job: Job) -> None:
        """A write; `Outgoing.written` will be called once."""

    def abort(self, push: int) -> None:
        """End the writes of a push soon."""


class Item:
    """One chunk of one shard on its way to a peer's slot."""

    __slots__ = ("acked", "chunk", "sent", "slot")

    def __init__(self, chunk: Chunk, slot: Slot) -> None:
        self.chunk = chunk
        self.slot = slot
        self.sent = 0  # bit l: slice l was submitted
        self.acked = 0

    @property
    def is_dead(self) -> bool:
        """Whether it will never be whole: its writer gave up."""
        chunk = self.chunk
        return not chunk.is_complete and chunk.state is not State.FILLING

    @property
    def unfilled_bytes(self) -> int:
        """Bytes that its writer still has to fill."""
        missing = self.chunk.layers - self.chunk.filled.bit_count()
        return self.slot.nbytes * missing // self.chunk.layers

    def runs(self) -> Iterator[tuple[int, int]]:
        """Filled slices that were not submitted, as (first layer, layers)."""
        ready = self.chunk.filled & ~self.sent
        layer = 0
        while ready >> layer:
            if not (ready >> layer) & 1:
                layer += 1
                continue
            first = layer
            while (ready >> layer) & 1:
                layer += 1
            yield first, layer - first


class Push:
    """One push. `chunks` are held from its start to its end; `items` are those that the peer granted room for."""

    def __init__(self, way: Way, offer: Offer, chunks: list[Chunk], deadline: float) -> None:
        self.way = way
        self.offer = offer
        self.chunks = chunks  # key-major, `offer.shards` each
        self.items: list[Item] = []
        self.state = SenderState.OFFERED
        self.is_offered = False  # the offer has left
        self.deadline = deadline
        self.under_way = 0  # writes submitted and not over
        self.acked_bytes = 0
        self.is_granted = False
        self.is_given_up = False
        self.is_lost = False  # the link is gone: there is nobody to tell

    def __repr__(self) -> str:
        return f"<Push {self.number} to {self.way.name} {self.state} {self.acked_bytes} bytes>"

    @property
    def number(self) -> int:
        """What it is found by, here and at the peer."""
        return self.offer.push

    @property
    def transfer(self) -> str | None:
        """The transfer it is part of."""
        return self.offer.transfer

    @property
    def unfilled_bytes(self) -> int:
        """Bytes that are still to be computed; the push with the fewest goes first."""
        return sum(item.unfilled_bytes for item in self.items)

    @property
    def is_all_sent(self) -> bool:
        """Whether nothing is left to submit, now or later."""
        return all(item.sent == (1 << item.chunk.layers) - 1 for item in self.items)

    def step(self, step: SenderStep) -> None:
        """Move on; see `pdx.push`."""
        self.state = SENDER[self.state, step]


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
        self._of_chunk: defaultdict[int, set[int]] = defaultdict(set)  # slot offset -> pushes that wait for its slices
        self._in_window: Counter[str] = Counter()  # bytes by peer

    def __len__(self) -> int:
        return len(self._pushes)

    def to(self, name: str) -> list[Push]:
        """The pushes to a peer."""
        return [push for push in self._pushes.values() if push.way.name == name]

    def of_transfer(self, transfer: str, name: str) -> Push | None:
        """The push of a transfer to a peer, if one is under way."""
        return next((push for push in self.to(name) if push.transfer == transfer), None)

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
        for run in _alike(found):
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
            push = self._pushes[offer.push] = Push(way, offer, held, now + push_s)
            self._counters["pushes"] += 1
            self._offer(push)
        return len(found)

    def _offer(self, push: Push) -> None:
        if push.way.is_usable and not push.is_offered and push.state is SenderState.OFFERED:
            push.is_offered = True
            push.way.send(push.offer)

    def usable(self, name: str) -> None:
        """The way to this peer is open: offer what waited for it."""
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
        try:
            push.items = _items(push, granted)
        except ProtocolError:
            self._give_up(push, SenderStep.CANCEL)  # the peer keeps room for it until it is told
            raise
        push.step(SenderStep.GRANT)
        push.is_granted = True
        wanted = {id(item.chunk) for item in push.items}
        self._store.unhold([chunk for chunk in push.chunks if id(chunk) not in wanted])
        push.chunks = [item.chunk for item in push.items]
        for item in push.items:
            self._of_chunk[item.chunk.slot.offset].add(push.number)
        self._counters["offered_chunks"] += len(push.offer.keys) * push.offer.shards
        self._counters["granted_chunks"] += len(push.items)
        self._give_up_if_dead(push)
        self.pump(name)

    def stopped(self, name: str, number: int, text: str) -> None:
        """The peer does not want this push any more."""
        push = self._pushes.get(number)
        if push is not None and push.way.name == name and push.state is not SenderState.DRAINING:
            if text:
                log.warning("%s stopped a push: %s", name, text)
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
        numbers = {number for chunk in chunks for number in self._of_chunk.get(chunk.slot.offset, ())}
        names = set()
        for number in numbers:
            push = self._pushes[number]
            self._give_up_if_dead(push)
            names.add(push.way.name)
        for name in names:
            self.pump(name)

    def cancel(self, transfer: str) -> None:
        """The transfer was given up."""
        for push in [push for push in self._pushes.values() if push.transfer == transfer]:
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
        return sum(push.acked_bytes for push in self._pushes.values() if push.transfer == transfer)

    # ---- writing ----------------------------------------------------------------------------

    def pump(self, name: str) -> None:
        """Submit writes to this peer, the most urgent first, as long as its window has room."""
        pushes = [push for push in self.to(name) if push.state is SenderState.STREAMING]
        pushes.sort(key=lambda push: (push.unfilled_bytes, push.number))
        for push in pushes:
            if not push.way.is_usable:
                return
            while self._in_window[name] < self._window_bytes:
                job = self._next_write(push)
                if job is None:
                    break
                self._in_window[name] += job.nbytes
                push.under_way += 1
                push.way.submit(job)
            if push.is_all_sent:
                push.step(SenderStep.ALL_SENT)
                self._drain(push)

    def _next_write(self, push: Push) -> Job | None:
        """The slices that go next; None: none, or too few as long as more are to come."""
        pieces: list[Piece] = []
        slices: list[Slices] = []
        spans: list[list[tuple[int, int]]] = []
        taken: list[tuple[Item, int]] = []
        nbytes = count = 0
        is_full = False
        for item, first, layers in self._ready(push):
            fitting = self._fitting(item, first, layers, MAX_WRITE_BYTES - nbytes, MAX_SLICES - count)
            is_full |= fitting < layers
            if not fitting:
                break
            start, size = item.chunk.span(first, fitting)
            local, remote = item.chunk.slot.offset, item.slot
            pieces.append(Piece(local + start, remote.offset + start, size))
            slices.append(Slices(remote.offset, remote.generation, first, fitting))
            parts = [item.chunk.span(layer, 1) for layer in range(first, first + fitting)]
            spans.append([(local + begin, length) for begin, length in parts])
            taken.append((item, ((1 << fitting) - 1) << first))
            nbytes, count = nbytes + size, count + fitting
        is_last = not push.unfilled_bytes
        if not pieces or (nbytes < self._group_bytes and not is_last and not is_full):
            return None
        for item, bits in taken:
            item.sent |= bits
        return Job(push.number, pieces, slices, spans, nbytes, taken, push.transfer)

    @staticmethod
    def _ready(push: Push) -> Iterator[tuple[Item, int, int]]:
        for item in push.items:
            for first, layers in item.runs():
                yield item, first, layers

    @staticmethod
    def _fitting(item: Item, first: int, layers: int, room_bytes: int, room_slices: int) -> int:
        """How many of these layers go into a write that has so much room left; one at least goes into an empty one."""
        per_layer = max(1, item.slot.nbytes // item.chunk.layers)
        fitting = min(layers, room_slices, room_bytes // per_layer)
        return max(fitting, 1) if room_bytes == MAX_WRITE_BYTES else max(fitting, 0)

    def written(self, name: str, job: Job, error: ChannelError | None) -> None:
        """A write is over."""
        self._in_window[name] -= job.nbytes
        push = self._pushes.get(job.push)
        if push is None:
            return
        push.under_way -= 1
        if error is None:
            push.acked_bytes += job.nbytes
            self._counters["sent_bytes"] += job.nbytes
            for item, bits in job.tag if isinstance(job.tag, list) else ():
                item.acked |= bits
        elif not push.is_given_up:  # else it was aborted
            log.warning("%r failed: %s", push, error)
            self._counters["writes_failed"] += 1
            if push.state is SenderState.STREAMING:
                self._give_up(push, SenderStep.CANCEL)
        if push.state is SenderState.DRAINING:
            self._drain(push)
        self.pump(name)

    # ---- ending -----------------------------------------------------------------------------

    def _give_up_if_dead(self, push: Push) -> None:
        """Whoever filled a chunk of it has given up."""
        if push.state is SenderState.STREAMING and any(item.is_dead for item in push.items):
            self._counters["pushes_without_source"] += 1
            self._give_up(push, SenderStep.CANCEL)

    def _give_up(self, push: Push, step: SenderStep) -> None:
        push.is_given_up = True
        push.step(step)
        push.way.abort(push.number)
        self._drain(push)

    def _drain(self, push: Push) -> None:
        """End a draining push as soon as no write reads our memory any more."""
        if push.under_way:
            return
        push.step(SenderStep.DRAINED)
        is_complete = push.is_granted and all(item.acked == (1 << item.chunk.layers) - 1 for item in push.items)
        if push.is_offered and not push.is_lost:
            push.way.send(LetGo(push.number, is_complete))
        del self._pushes[push.number]
        for item in push.items:
            waiting = self._of_chunk[item.chunk.slot.offset]
            waiting.discard(push.number)
            if not waiting:
                del self._of_chunk[item.chunk.slot.offset]
        self._store.unhold(push.chunks)
        self._on_over(push, is_complete)


def _items(push: Push, granted: Granted) -> list[Item]:
    """What a grant stands for.

    :raises ProtocolError: it is not an answer to the push's offer.
    """
    shards, keys = push.offer.shards, len(push.offer.keys)
    if len(granted.slots) != len(granted.granted) * shards or len(set(granted.granted)) != len(granted.granted):
        raise ProtocolError(f"{len(granted.slots)} slots for {len(granted.granted)} chunks of {shards} shards")
    items = []
    for number, index in enumerate(granted.granted):
        if index >= keys:
            raise ProtocolError(f"chunk {index} of {keys} granted")
        slots = granted.slots[number * shards : (number + 1) * shards]
        for chunk, slot in zip(push.chunks[index * shards : (index + 1) * shards], slots, strict=True):
            if slot.nbytes != chunk.slot.nbytes:
                raise ProtocolError(f"{slot} granted for a chunk of {chunk.slot.nbytes} bytes")
            items.append(Item(chunk, slot))
    return items


def _alike(found: Sequence[tuple[bytes, list[Chunk]]]) -> Iterator[list[tuple[bytes, list[Chunk]]]]:
    """Runs of chunks that one offer can name: of one size and layer count, but for a tail at the end."""
    run: list[tuple[bytes, list[Chunk]]] = []
    for key, chunks in found:
        chunk = chunks[0]
        same = run and (chunk.slot.nbytes, chunk.layers) == (run[0][1][0].slot.nbytes, run[0][1][0].layers)
        ends = run and run[-1][1][0].tail
        if run and (ends or not (same or (chunk.tail and chunk.layers == run[0][1][0].layers))):
            yield run
            run = []
        run.append((key, chunks))
    if run:
        yield run
