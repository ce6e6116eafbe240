"""Which blocks are in which tiers of a node, or of a vLLM engine, according to the events that it publishes.

    with Subscriber("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558") as blocks:
        while True:
            blocks.poll(1.0)
            blocks.leading(hashes)  # {"CPU": 12, "STORAGE": 40}

A slow or disconnected subscriber misses events, which shows in the numbers of their batches. It requests missing ones
at the publisher's replay address: a PDX node that has not kept them answers with all that is there
(`pdx.node.events.publisher`), vLLM with what it has kept. Without that address they stay lost: `is_complete` says so.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import zmq

from pdx.closing import Closing
from pdx.errors import ProtocolError
from pdx.security.address import needs_ipv6
from pdx.security.curve_keys import KeyPair, secure_client
from pdx.wire import kv_events

log = logging.getLogger("pdx.client")

MAX_PENDING = 10_000  # batches that wait for earlier ones
HOLES = 3  # after so many answers that begin with the same hole, the publisher is taken not to have kept more
_WHOLE = ("full_attention", "mla_attention", "sink_full_attention")  # kinds of groups that need all of a prompt
_BURST = 1000  # messages taken in at a time
_END = int.from_bytes(kv_events.END_SEQ, "big")  # no batch has this number: none after it could be requested


class BlockIndex:
    """Which tiers have a block, by the names of their media; tiers of other hosts are `STORAGE remote`. Unknown blocks
    are in no tier. If blocks of several cache groups share a name, only groups that need all of a prompt count."""

    def __init__(self) -> None:
        self._tiers: dict[kv_events.Hash, frozenset[str]] = {}
        self._others: set[int | None] = set()  # cache groups of windows and states
        self._sets: dict[frozenset[str], frozenset[str]] = {}  # so that equal sets are one object

    def __len__(self) -> int:
        return len(self._tiers)

    def tiers(self, block: kv_events.Hash) -> frozenset[str]:
        return self._tiers.get(block, frozenset())

    def leading(self, blocks: Iterable[kv_events.Hash]) -> dict[str, int]:
        """How many leading blocks each tier has, for those that have the first."""
        counts: dict[str, int] = {}
        alive: frozenset[str] | None = None
        for block in blocks:
            here = self.tiers(block)
            alive = here if alive is None else alive & here
            if not alive:
                break
            for tier in alive:
                counts[tier] = counts.get(tier, 0) + 1
        return counts

    def as_dict(self) -> Mapping[kv_events.Hash, frozenset[str]]:
        """The whole index, read-only."""
        return self._tiers

    def apply(self, events: Iterable[kv_events.KvEvent]) -> None:
        """Apply these events in order."""
        for event in events:
            if isinstance(event, kv_events.AllBlocksCleared):
                self._tiers.clear()
                continue
            if isinstance(event, kv_events.BlockStored) and event.kv_cache_spec_kind is not None:
                (self._others.discard if event.kv_cache_spec_kind in _WHOLE else self._others.add)(event.group_idx)
            if event.group_idx in self._others:
                continue
            tier = frozenset(((event.medium or "") + (" remote" if event.locality == "REMOTE" else ""),))
            for block in event.block_hashes:
                here = self._tiers.get(block, frozenset())
                if isinstance(event, kv_events.BlockStored):
                    here |= tier
                elif isinstance(event, kv_events.BlockRemoved):
                    here -= tier
                if here:
                    self._tiers[block] = self._sets.setdefault(here, here)
                else:
                    self._tiers.pop(block, None)


class Tracker:
    """Puts batches in order: which are applied, which wait, and which are to be requested. No sockets, no clock."""

    def __init__(self, *, can_ask: bool) -> None:
        """`can_ask`: whether missing batches can be requested."""
        self.index = BlockIndex()
        self.counters: Counter[str] = Counter()  # batches; gaps, lost, replayed, repeated, restarts, malformed
        self.asking: int | None = 0 if can_ask else None  # first number of the batches to request; None: no request
        self.last: int | None = None  # number of the last batch in the index
        self._can_ask = can_ask
        self._is_complete = False
        self._last_ts = 0.0
        self._pending: dict[int, kv_events.EventBatch] = {}
        self._waited = -1  # highest number among the pending batches at the time of the request
        self._answered: int | None = None  # last number in the answer so far
        self._is_spoilt = False  # the answer has a hole
        self._hole: tuple[int, int] | None = None  # (requested number, later one that the answer began with) …
        self._holes = 0  # … and how often in a row

    @property
    def is_complete(self) -> bool:
        """Whether the index has all events up to the last batch, and what was there before the first."""
        return self._is_complete and self.asking is None

    def leading(self, blocks: Sequence[kv_events.Hash]) -> dict[str, int]:
        return self.index.leading(blocks)

    def ask(self) -> None:
        """Have all batches after the last one requested, or requested again."""
        if self._can_ask:
            self.asking = 0 if self.last is None else self.last + 1
            self._waited = max(self._pending, default=-1)
            self._answered, self._is_spoilt = None, False

    def live(self, seq: int, payload: bytes) -> bool:
        """Take in a published batch; False: it is a repetition, or has an impossible number."""
        if seq == _END:
            self._malformed(f"a batch has the number {seq}")
            return False
        batch = self._decode(payload)
        if self.last is not None and seq <= self.last:
            if batch.ts <= self._last_ts:
                self.counters["repeated"] += 1
                return False
            self.counters["restarts"] += 1  # a lower number, but a later time
            self._forget()
        if self.last is None and not self._can_ask:
            self.last = seq - 1
        if self.last is not None and seq == self.last + 1 and self.asking is None:
            self._apply(seq, batch)
        elif not self._can_ask:
            assert self.last is not None
            self.counters["lost"] += seq - self.last - 1
            self._is_complete = False
            self._apply(seq, batch)
        else:
            self._pending[seq] = batch
            if len(self._pending) > MAX_PENDING:
                del self._pending[min(self._pending)]
            if self.asking is None:
                self.counters["gaps"] += 1
                self.ask()
        return True

    def _forget(self) -> None:
        self.index.apply([kv_events.AllBlocksCleared()])
        self._pending.clear()
        self.last, self._last_ts, self._is_complete = None, 0.0, False
        self.ask()

    def replayed(self, seq: int, payload: bytes) -> None:
        """Take in a batch of the answer."""
        if self.asking is None or self._is_spoilt:
            return
        batch = self._decode(payload)
        is_all = bool(batch.events) and isinstance(batch.events[0], kv_events.AllBlocksCleared)
        if self._answered is None and seq > self.asking and not is_all:
            self._holes = self._holes + 1 if self._hole == (self.asking, seq) else 1
            self._hole = (self.asking, seq)
            if self._holes < HOLES:  # its beginning may have got lost on the way: ask again
                self._is_spoilt = True
                return
            if self.asking:
                self._forget()  # an index that lacks blocks is better than one with blocks that are gone; asks from 0
                return
            self.counters["lost"] += seq
            self._is_complete = False
        elif self._answered is not None and seq != self._answered + 1 and not is_all:
            self._is_spoilt = True
            return
        elif self._answered is None and (is_all or self.last is None):
            self._is_complete = True
        self._answered = seq
        self.counters["replayed"] += 1
        is_lower = self.last is not None and seq < self.last
        if is_all and is_lower:
            self.counters["restarts"] += 1  # the publisher was restarted and numbers its batches anew
            self._pending.clear()
        if is_all or self.last is None or seq > self.last:
            self._apply(seq, batch)

    def answered(self) -> None:
        """Note the end of the answer."""
        if self.asking is None:
            return
        if self._is_spoilt:
            self.ask()
            return
        if self.last is None:  # nothing was ever published
            self.last, self._is_complete = self.asking - 1, True
        self.asking = None
        for seq in sorted(self._pending):
            if seq == self.last + 1:
                self._apply(seq, self._pending.pop(seq))
            elif seq <= self.last or (self._answered is None and seq <= self._waited):
                del self._pending[
                    seq
                ]  # in the index already, or from before a restart: nothing can fill the gap before it
            else:
                self.ask()
                return

    def _apply(self, seq: int, batch: kv_events.EventBatch) -> None:
        self.last, self._last_ts = seq, batch.ts
        self.index.apply(batch.events)
        self.counters["batches"] += 1

    def _decode(self, payload: bytes) -> kv_events.EventBatch:
        try:
            return kv_events.decode_batch(payload)
        except ProtocolError as error:
            self._malformed(str(error))
            self._is_complete = False
            return kv_events.EventBatch(self._last_ts, [])

    def _malformed(self, what: str) -> None:
        if not self.counters["malformed"]:
            log.warning("%s; further ones are counted as malformed", what)
        self.counters["malformed"] += 1


class Subscriber(Tracker, Closing):
    """A `Tracker` that listens from construction to `close`. Not thread-safe; only `poll` takes in events."""

    def __init__(
        self,
        address: str,
        replay: str = "",
        *,
        topic: str = "",
        keys: str = "",
        server_key: str = "",
        check_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys`: this subscriber's secret key file; `server_key`: the node's public key, if it has keys. After
        `check_s` without news the subscriber asks for missed events, and after `check_s` without an answer again.

        :raises ConfigError: the keys are wrong.
        """
        super().__init__(can_ask=bool(replay))
        self._own = KeyPair.load(keys) if keys else None
        self._server_key = server_key or None
        self._replay_address = replay
        self._check_s = check_s
        self._clock = clock
        with contextlib.ExitStack() as undo:
            self._context: zmq.Context[zmq.Socket[bytes]] = undo.enter_context(zmq.Context())
            self._sub = self._connected(zmq.SUB, address)
            undo.callback(lambda: self._sub.close())
            self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._dealer: zmq.Socket[bytes] | None = None
            undo.callback(self._close_dealer)
            self._undo = undo.pop_all()
        self._asked: int | None = None  # the number last requested, until its answer is over
        self._heard_at = self._asked_at = clock()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Take in what has come, waiting up to `timeout_s` or `check_s` for it; return whether anything came."""
        self._ask()
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        if self._dealer is not None:
            poller.register(self._dealer, zmq.POLLIN)
        wait_s = min(timeout_s, self._check_s)
        if not poller.poll(max(0, round(wait_s * 1000))):
            return False
        for _ in range(_BURST):
            heard = self._take_live()
            if not (self._take_replayed() or heard):
                break
        self._ask()
        return True

    def _take_live(self) -> bool:
        frames = _received(self._sub)
        if frames is None:
            return False
        if (
            len(frames) == 3
            and len(frames[1]) == kv_events.SEQ_BYTES
            and self.live(int.from_bytes(frames[1], "big"), frames[2])
        ):
            self._heard_at = self._clock()
        return True

    def _take_replayed(self) -> bool:
        frames = _received(self._dealer) if self._dealer is not None else None
        if frames is None:
            return False
        self._asked_at = self._clock()
        # Frames: an empty one, the topic (in new releases), number, batch.
        if len(frames) >= 3 and len(frames[-2]) == kv_events.SEQ_BYTES:
            self._replayed(frames[-2], frames[-1])
        return True

    def _replayed(self, seq: bytes, payload: bytes) -> None:
        if seq == kv_events.END_SEQ:
            self._asked = None
            self.answered()
        else:
            self.replayed(int.from_bytes(seq, "big"), payload)

    def _ask(self) -> None:
        """Request missing batches, if a request is due."""
        if not self._replay_address:
            return
        now = self._clock()
        if self.asking is None and now - max(self._heard_at, self._asked_at) > self._check_s:
            self.ask()
        is_late = self._asked is not None and now - self._asked_at > self._check_s
        if is_late:
            self.ask()
        if self.asking is None or (self._asked == self.asking and not is_late):
            return
        if self._asked is not None:
            self._close_dealer()  # drops the rest of the previous answer
        if self._dealer is None:
            self._dealer = self._connected(zmq.DEALER, self._replay_address)
        self._asked, self._asked_at = self.asking, now
        with contextlib.suppress(zmq.Again):
            self._dealer.send_multipart([b"", self._asked.to_bytes(kv_events.SEQ_BYTES, "big")], zmq.NOBLOCK)

    def _connected(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, 100_000),
            (zmq.MAXMSGSIZE, kv_events.MAX_BATCH_BYTES),
            (zmq.IPV6, int(needs_ipv6(address))),
        ):
            socket.setsockopt(option, value)
        secure_client(socket, own=self._own, server_key=self._server_key)
        socket.connect(address)
        return socket

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def close(self) -> None:
        """Idempotent."""
        self._undo.close()


def _received(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
