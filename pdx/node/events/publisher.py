"""Publishes changes in a node as events of blocks, in vLLM's form (`pdx.wire.kv_events`).

One thread owns the sockets and the record of blocks. The control loop hands it batches and never waits for it. A
subscriber that does not keep up loses events, as with ZMQ's PUB; it notices by the numbers and requests the missing
ones at the replay socket. If they are not kept any more, the answer is one batch that begins with `AllBlocksCleared`
and goes on with all that is there, under the number of the last event that it includes.

Without subscribers nothing is encoded or kept for replay.

A Unix socket is this user's alone; a port of the loopback is open to every user of this host. Beyond this host readers
need a key that the roster admits, unless the publisher is configured to be open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec
import zmq

from pdx.config import private_folder, socket_path
from pdx.errors import ConfigError
from pdx.node.events.blocks import Blocks
from pdx.node.events.log import Batch, Change, EventLog, Place
from pdx.security.address import address_host, check_address, is_loopback, tcp_endpoint
from pdx.security.curve_keys import KeyPair
from pdx.security.gate import Gate
from pdx.security.socket_lock import owned, remove_socket
from pdx.security.tcp_filter import TcpFilter
from pdx.wire.kv_events import (
    END_SEQ,
    SEQ_BYTES,
    AllBlocksCleared,
    EventBatch,
    encode_batch,
    encode_events,
    encode_whole,
)

log = logging.getLogger("pdx.node")

MAX_KEPT = 10_000  # batches kept for replay, as many as vLLM keeps …
MAX_KEPT_BYTES = 64 << 20  # … and their bytes
MAX_QUEUED = 4096  # batches that the thread has not taken; with more it begins anew from a snapshot
MAX_REPLAYS = 64  # in progress
REPLAY_S = 10.0  # after which a replay that its reader does not read ends
LARGE_BYTES = 64 << 10  # messages as large as this are sent without a copy, and one at a time per client
MAX_UNREAD_BYTES = 128 << 20  # of such messages, each counted once: beyond that no snapshot is made
_SNAPSHOT_SHARE = 0.2  # of the thread's time, for snapshots
_PIECES_AHEAD = 4
_BURST = 64  # incoming messages taken at a time
_SOON_MS, _LATER_MS = 5, 1000
_JOIN_S = 5.0
HIGH_WATER = 1000  # messages that a subscriber may leave unread: a minute's …
REPLAY_HIGH_WATER = 16  # … and in a replay; of large ones only one, see `LARGE_BYTES`
_MAX_BYTES = 1024  # of an incoming message, a topic or a number …
# … and of all that one connection sends: ZMQ keeps each topic, in thirty times its bytes and without a limit.
_MOST_BYTES, _REPLAY_MOST_BYTES = 8 << 10, 64 << 10


class _Replay(msgspec.Struct):
    """One reader's request for events from number `start` on. `frames` is None until the answer begins."""

    start: int
    since: float  # when a message was last sent
    frames: Iterator[list[bytes]] | None = None
    frame: list[bytes] = []  # to send next


# Marks around a snapshot's pieces in the queue: all earlier state is void; the snapshot is complete.
_Feed = Literal["begins", "whole"]


class Publisher:
    """The publisher, open from construction to `close`. `put`, `turn` and `close` are for the control loop."""

    def __init__(
        self,
        events: EventLog,
        *,
        address: str,
        replay: str = "",
        topic: str = "",
        as_bytes: bool = False,
        places: Mapping[str, Place] = MappingProxyType({}),
        readers: Readers | None = None,
        max_kept: int = MAX_KEPT,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """`replay`: the address where missed events are requested; empty: none. `as_bytes`, `places`: see `Blocks`.
        `readers`: who may read from other hosts; None: nobody.

        :raises ConfigError: an address is invalid, cannot be bound, or is beyond this host without keys.
        """
        # Only the thread changes: events_seq, events_published, events_replayed (batches), events_snapshots (answers).
        self.counts = events.env.counters
        self._events = events
        self._blocks = Blocks(places, as_bytes=as_bytes)
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=max_kept)
        self._kept_bytes = 0
        self._subscribed: set[bytes] = set()
        self._replays: dict[bytes, _Replay] = {}  # by connection
        self._unread: dict[bytes, tuple[zmq.MessageTracker, bytes]] = {}  # by client, the large message being sent
        self._whole: tuple[int, bytes] = (-1, b"")  # the last snapshot, with its number …
        self._whole_from = 0.0  # … when the next one may be made …
        self._whole_until = 0.0  # … and until when it is kept for other readers
        self._max_queued = max_queued
        self._queue: deque[Batch | list[Change] | _Feed] = deque()
        self._is_asleep = False  # the thread does not look at the queue until it is woken
        self._is_whole = False
        self._feed: Iterator[list[Change]] | None = None
        self._is_closing = False
        with contextlib.ExitStack() as undo:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self.sockets = EventSockets(address, replay, readers or Readers(), events.env.counters)
            undo.callback(self.sockets.close)
            self._undo = undo.pop_all()
        events.follow(self, names=True)
        self.counts["events_seq"] = events.seq
        self._begin_anew()
        self._thread = threading.Thread(target=self._run, name="pdx-events", daemon=True)
        self._thread.start()

    # ---- the control loop -------------------------------------------------------------------

    def put(self, batch: Batch) -> None:
        """Have a batch published. Returns at once."""
        if len(self._queue) >= self._max_queued:
            self._begin_anew()
        self._queue.append(batch)
        self._wake_up()

    def turn(self) -> None:
        """After each turn of the control loop: hand over the next piece of the snapshot, if there is one."""
        if self._feed is not None and len(self._queue) < _PIECES_AHEAD:
            piece = next(self._feed, None)
            if piece is None:
                self._feed = None
            self._queue.append("whole" if piece is None else piece)
            self._wake_up()

    def _begin_anew(self) -> None:
        self._queue.clear()
        self._queue.append("begins")
        self._feed = self._events.snapshot()

    def _wake_up(self) -> None:
        """Wake the thread, only if it sleeps: a system call would give it the GIL, for which the loop then waits."""
        if self._is_asleep:
            self._is_asleep = False
            os.eventfd_write(self._wake, 1)

    @property
    def seq(self) -> int:
        """The number of the last batch taken in."""
        return self.counts["events_seq"]

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._events.leave(self)
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_S)
        self._undo.close()

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for socket in self.sockets.all:
            poller.register(socket, zmq.POLLIN)
        is_busy = False
        while not self._is_closing:
            try:
                self._is_asleep = not is_busy  # after a batch more come soon: poll for them, no wake-up needed
                poller.poll(_SOON_MS if is_busy or self._queue or self._replays else _LATER_MS)
                self._is_asleep = False
                is_busy = self._once()
            except Exception:
                log.exception("events: the publisher failed; it goes on")
                time.sleep(0.1)

    def _once(self) -> bool:
        """One round of the thread; returns whether there was a batch."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self.sockets.admit_waiting()
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                self._note_subscription(self.sockets.pub.recv(zmq.NOBLOCK))
        is_busy = bool(self._queue)
        while self._queue:
            self._take(self._queue.popleft())
        self._hear_replays()
        for client in list(self._replays):
            self._go_on(client)
        if self._whole[1] and time.monotonic() > self._whole_until:
            self._whole = (-1, b"")
        return is_busy

    def _note_subscription(self, frame: bytes) -> None:
        topic = frame[1:]
        if not self._topic.startswith(topic):
            return
        if frame[:1] == b"\x01":
            self._subscribed.add(topic)
        else:
            self._subscribed.discard(topic)

    def _take(self, item: Batch | list[Change] | _Feed) -> None:
        if isinstance(item, str):
            self._is_whole = item == "whole"
            self._whole = (-1, b"")
            if item == "begins":
                self._blocks.begin()
            else:
                self._blocks.end()
            self._forget_kept()  # the snapshot has changes that are not in these batches
        elif isinstance(item, Batch):
            events = self._blocks.apply(item.changes)
            self._publish(item.seq, item.ts, events)
        else:
            self._blocks.apply(item)

    def _publish(self, seq: int, ts: float, events: Sequence[object]) -> None:
        self.counts["events_seq"] = seq
        if not self._subscribed:
            self._forget_kept()
            return
        payload = encode_batch(EventBatch(ts, events))  # type: ignore[arg-type]
        self.sockets.pub.send_multipart((self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload), zmq.NOBLOCK)
        self.counts["events_published"] += 1
        if len(self._kept) == self._kept.maxlen:
            self._kept_bytes -= len(self._kept[0][1])
        self._kept.append((seq, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _forget_kept(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    # ---- replay -----------------------------------------------------------------------------

    def _hear_replays(self) -> None:
        router = self.sockets.router
        if router is None or not self._is_whole:
            return  # an answer would be incomplete now
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                client, *rest = router.recv_multipart(zmq.NOBLOCK)
                if len(rest) == 2 and not rest[0] and len(rest[1]) == SEQ_BYTES:
                    self._replays.pop(client, None)  # replaces the client's previous request
                    if len(self._replays) < MAX_REPLAYS:
                        self._replays[client] = _Replay(int.from_bytes(rest[1], "big"), time.monotonic())

    def _answer(self, start: int) -> Iterator[list[bytes]] | None:
        """All messages from number `start` on, or a snapshot if they are not kept, or if the reader has heard higher
        numbers, from a life before this one. None: not possible yet."""
        if start != self.seq + 1 and not (self._kept and self._kept[0][0] <= start <= self.seq):
            payload = self._snapshot()
            if payload is None:
                return None
            self.counts["events_snapshots"] += 1
            return iter([[self._topic, self.seq.to_bytes(SEQ_BYTES, "big"), payload], [b"", END_SEQ, b""]])
        return self._missed(start)

    def _missed(self, start: int) -> Iterator[list[bytes]]:
        for seq, payload in list(self._kept) if start <= self.seq else ():
            if seq >= start:
                yield [self._topic, seq.to_bytes(SEQ_BYTES, "big"), payload]
                self.counts["events_replayed"] += 1
        yield [b"", END_SEQ, b""]

    def _snapshot(self) -> bytes | None:
        """A snapshot, made once for all readers that ask before it changes. None: not now, because earlier ones are
        still unread, or they take too much of the thread's time."""
        began = time.monotonic()
        if self._whole[0] != self.seq:
            unread = {id(payload): len(payload) for _, payload in self._unread.values()}
            if began < self._whole_from or sum(unread.values()) >= MAX_UNREAD_BYTES:
                return None
            self._whole = self.seq, self._encoded()
            ended = time.monotonic()
            self._whole_until = ended + REPLAY_S
            self._whole_from = ended + (ended - began) * (1.0 / _SNAPSHOT_SHARE - 1.0)
        return self._whole[1]

    def _encoded(self) -> bytes:
        """All that is there as one batch, encoded piece by piece so that the control loop gets the GIL in between."""
        pieces, count = [encode_events([AllBlocksCleared()])], 1
        for events in self._blocks.everything():
            pieces.append(encode_events(events))
            count += len(events)
            time.sleep(0)
            if self._is_closing:  # it will not be sent
                break
        return encode_whole(time.time(), pieces, count)

    def _go_on(self, client: bytes) -> None:
        """Send as much of a replay as its reader accepts now."""
        replay = self._replays[client]
        try:
            while not self._is_behind(client):
                if replay.frames is None:
                    replay.frames = self._answer(replay.start)
                    if replay.frames is None:
                        return
                    replay.frame = next(replay.frames)
                self._send(client, replay.frame)
                replay.since = time.monotonic()
                replay.frame = next(replay.frames)
        except zmq.Again:
            pass
        except (StopIteration, zmq.ZMQError):  # the replay is over, or its reader is gone
            del self._replays[client]
            return
        if time.monotonic() - replay.since > REPLAY_S:
            del self._replays[client]

    def _is_behind(self, client: bytes) -> bool:
        if client in self._unread and self._unread[client][0].done:
            del self._unread[client]
        return client in self._unread

    def _send(self, client: bytes, frame: list[bytes]) -> None:
        """:raises zmq.ZMQError: the reader accepts no more now (`Again`), or is gone."""
        router = self.sockets.router
        assert router is not None
        parts = [client, b"", *frame]
        if len(frame[-1]) < LARGE_BYTES:
            router.send_multipart(parts, zmq.NOBLOCK)
            return
        tracker = router.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        self._unread[client] = tracker, frame[-1]


class Readers(msgspec.Struct, frozen=True):
    """Who may read from other hosts: readers with a public key in `listeners`, which is called on the publisher's
    thread, while the node proves its `own` key; or all, if `is_open`. A handshake may take `handshake_s`."""

    own: KeyPair | None = None
    listeners: Callable[[], frozenset[str]] = frozenset
    is_open: bool = False
    handshake_s: float = 5.0

    def __contains__(self, key: object) -> bool:
        return key in self.listeners()


class EventSockets:
    """The publisher's sockets, open from construction to `close`. Made on one thread, used on another."""

    def __init__(self, address: str, replay: str, readers: Readers, counters: Counter[str]) -> None:
        """`replay`: see `Publisher`; empty: there is no such socket.

        :raises ConfigError: an address is invalid, cannot be bound, or is beyond this host without keys.
        """
        self._readers = readers
        self._counters = counters
        self._let_in = readers.listeners()
        self._filters: list[TcpFilter] = []  # of sockets behind keys
        with contextlib.ExitStack() as undo:
            context: zmq.Context[zmq.Socket[bytes]] = undo.enter_context(zmq.Context())
            self._gate: Gate | None = None
            if readers.own is not None and not readers.is_open:
                self._gate = Gate(context, readers.own, admits=readers, counters=counters, filters=self._filters)
                undo.callback(self._gate.close)
            self.pub = undo.enter_context(context.socket(zmq.XPUB))
            self.pub.setsockopt(zmq.SNDHWM, HIGH_WATER)
            self.address = self._bind(self.pub, address, "--events", _MOST_BYTES, undo)
            self.router: zmq.Socket[bytes] | None = None
            self.replay = ""
            if replay:
                self.router = undo.enter_context(context.socket(zmq.ROUTER))
                self.router.setsockopt(zmq.SNDHWM, REPLAY_HIGH_WATER)
                self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay = self._bind(self.router, replay, "--events-replay", _REPLAY_MOST_BYTES, undo)
            self._undo = undo.pop_all()

    @property
    def all(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll."""
        both = (self.router, self._gate.socket if self._gate is not None else None)
        return [self.pub, *(each for each in both if each is not None)]

    def admit_waiting(self) -> None:
        """Admit readers. If a key is revoked, drop all connections: admitted readers dial again and catch up."""
        if self._gate is None:
            return
        self._gate.answer()
        listeners = self._readers.listeners()
        if listeners is not self._let_in:
            if self._let_in - listeners:
                for each in self._filters:
                    each.drop()
            self._let_in = listeners

    def close(self) -> None:
        """Idempotent."""
        self._undo.close()

    def _bind(
        self, socket: zmq.Socket[bytes], address: str, option: str, most_bytes: int, undo: contextlib.ExitStack
    ) -> str:
        """Bind a socket; return its address. `most_bytes`: what one connection to a port may send in all."""
        for number, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, _MAX_BYTES),
            (zmq.HANDSHAKE_IVL, max(1, round(self._readers.handshake_s * 1000))),
        ):
            socket.setsockopt(number, value)
        try:
            check_address(address, has_keys=True, listens=True)
        except ConfigError as error:
            raise ConfigError(f"{option} {error}") from error
        is_beyond = not is_loopback(address_host(address))
        if is_beyond and self._gate is None and not self._readers.is_open:
            raise ConfigError(
                f"{option} {address!r} is beyond this host, where readers need keys: give the node --keys and --roster "
                "(see `pdx keygen`), or let whoever gets there read (--events-open)"
            )
        try:
            if address.startswith("ipc://"):
                return self._bind_path(socket, address, option, undo)
            return self._bind_port(socket, address, most_bytes, undo, is_beyond=is_beyond)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"{option} {address}: {error}") from error

    def _bind_path(self, socket: zmq.Socket[bytes], address: str, option: str, undo: contextlib.ExitStack) -> str:
        path = socket_path(address)
        private_folder(path.parent)
        undo.enter_context(owned(path, lambda owner: ConfigError(f"{option} {address}: process {owner} listens there")))
        remove_socket(path)
        undo.callback(path.unlink, missing_ok=True)
        mask = os.umask(0o177)
        try:
            socket.bind(address)
        finally:
            os.umask(mask)
        return address

    def _bind_port(
        self, socket: zmq.Socket[bytes], address: str, most_bytes: int, undo: contextlib.ExitStack, *, is_beyond: bool
    ) -> str:
        in_front = TcpFilter(
            *tcp_endpoint(address),
            young_s=self._readers.handshake_s,
            counters=self._counters,
            most_bytes=most_bytes,
        )
        undo.callback(in_front.close)
        if self._gate is not None and is_beyond:
            self._gate.guard(socket)
            self._filters.append(in_front)
        in_front.bind(socket)
        return in_front.address
