"""The transfers that a node knows: their pending slots, the pace of filling, and whether they were given up.

A transfer is one prefill-to-decode handoff. While it is under way, a decoder that asks for its chunks before they are
sealed is told to ask again.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from pdx.memory.slot import Slot
from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.telemetry.env import Env
from pdx.telemetry.faults import counted
from pdx.telemetry.recent import remember

log = logging.getLogger("pdx.node")

KEPT_S = 60.0  # how long a finished transfer's tail and record are kept for a late decoder
# How long before a transfer's end its decode engine should know of it, for HTTP, tokenizer, a turn and copying …
NEAR_S = 0.5
NEAR_CHUNKS = 2.0  # … or at once if no more chunks than this are left, because there may be no pace yet
EPSILON = 1e-6  # of a chunk: less than a slice
MAX_TRANSFERS = 10_000  # per source
MAX_ENDED = 16_384  # names of forgotten transfers that are remembered, so that no request waits for them


class Progress(StrEnum):
    UNDER_WAY = "under way"
    SEALED = "sealed"
    GIVEN_UP = "given up"


class Transfer(msgspec.Struct):
    """One transfer: its prompt's slots that are not sealed yet, each with its number of filled slices, and the number
    of pending offers from peers.

    `source` made it known: a process, a peer, or the proxy.
    """

    source: str
    pending: dict[Slot, int]
    progress: Progress
    deadline: float
    offers: int = 0
    left: float = 0.0  # chunks still to be filled; slices count as fractions
    filled: float = 0.0  # chunks filled since the first slices came …
    first_at: float = -1.0  # … at this time; negative: none came …
    last_at: float = 0.0  # … until this time
    is_near: bool = False


class Transfers:
    """All transfers that a node knows. Owned by its control loop; a call's cost depends on what it changes or returns.

    If one source makes more than `MAX_TRANSFERS` known, its oldest is forgotten; a request that waits for that one
    computes its chunks.
    """

    def __init__(self, env: Env) -> None:
        self._counters = env.counters
        self._transfers: dict[str, Transfer] = {}
        self._of_source: dict[str, dict[str, None]] = {}  # names, in the order in which they became known
        self._deadlines: Deadlines[str] = Deadlines()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._under_way = 0
        self._crowded_out: list[str] = []  # since the last `expire`
        self._news = env.news

    def __len__(self) -> int:
        return self._under_way

    def open(self, name: str, slots: Iterable[Slot], deadline: float, source: str) -> None:
        """The transfer's chunks are reserved; `slots` are those that its prompt needs. Further calls add slots. A
        transfer that was given up stays so."""
        transfer = self._transfers.get(name)
        if transfer is None:
            transfer = self._add(name, source, Progress.UNDER_WAY, deadline)
        if transfer.progress is Progress.GIVEN_UP:
            return
        for slot in slots:
            transfer.left += slot not in transfer.pending
            transfer.pending.setdefault(slot, 0)
        is_complete = not transfer.pending and not transfer.offers
        self._turn(transfer, Progress.SEALED if is_complete else Progress.UNDER_WAY)
        self._end_at(name, transfer, max(transfer.deadline, deadline))
        if is_complete:
            self._news.append(name)

    def expect(self, name: str, deadline: float, source: str) -> None:
        """A peer offers chunks of the transfer: requests for it wait, whether or not there is room for them."""
        self.open(name, (), deadline, source)
        transfer = self._transfers[name]
        if transfer.progress is not Progress.GIVEN_UP:
            transfer.offers += 1
            self._turn(transfer, Progress.UNDER_WAY)

    def arrived(self, name: str, now: float) -> None:
        """The chunks that a peer offered are here, as far as they were granted."""
        transfer = self._transfers.get(name)
        if transfer is not None and transfer.offers:
            transfer.offers -= 1
            self._settle(name, transfer, now)

    def is_under_way(self, name: str) -> bool:
        transfer = self._transfers.get(name)
        return transfer is not None and transfer.progress is Progress.UNDER_WAY

    def is_known(self, name: str) -> bool:
        """Whether the transfer was ever made known; it may be over, with only its name remembered."""
        return name in self._transfers or name in self._ended

    def is_given_up(self, name: str) -> bool:
        transfer = self._transfers.get(name)
        return transfer is not None and transfer.progress is Progress.GIVEN_UP

    def prefilled(self, name: str, now: float, source: str) -> None:
        """`source` reports that the prefill is over. If the transfer is not known, requests stop waiting for it."""
        if not self.is_known(name):
            self._add(name, source, Progress.SEALED, now + KEPT_S)
            self._news.append(name)

    def filled(self, chunks: Iterable[Chunk], now: float) -> set[str]:
        """Slices of these chunks were filled; return the names of their transfers."""
        names = set()
        for chunk in chunks:
            transfer = self._transfers.get(chunk.reservation.transfer or "")
            if transfer is None or (before := transfer.pending.get(chunk.slot)) is None:
                continue
            count = chunk.filled.bit_count()
            transfer.pending[chunk.slot] = count
            part = (count - before) / chunk.reservation.layers
            transfer.left -= part
            if transfer.first_at < 0:
                transfer.first_at = now
            elif now > transfer.first_at:
                transfer.filled += part
            transfer.last_at = now
            names.add(chunk.reservation.transfer or "")
        return names

    def left_s(self, name: str) -> float:
        """Seconds until all pending slots will be filled, at the pace so far; infinity if not known."""
        transfer = self._transfers.get(name)
        if transfer is None or transfer.progress is Progress.GIVEN_UP:
            return math.inf
        if not transfer.pending:
            return math.inf
        if transfer.left < EPSILON:
            return 0.0
        took_s = transfer.last_at - transfer.first_at
        return transfer.left / transfer.filled * took_s if transfer.filled > EPSILON and took_s > 0 else math.inf

    def comes_near(self, name: str) -> bool:
        """Whether the transfer is near its end; true only once."""
        transfer = self._transfers.get(name)
        if transfer is None or transfer.is_near or transfer.progress is Progress.GIVEN_UP:
            return False
        transfer.is_near = transfer.left <= NEAR_CHUNKS or self.left_s(name) <= NEAR_S
        return transfer.is_near

    def sealed(self, chunks: Iterable[Chunk], now: float) -> None:
        chunks = list(chunks)
        self.filled(chunks, now)
        for chunk in chunks:
            transfer = self._transfers.get(chunk.reservation.transfer or "")
            if transfer is not None:
                transfer.pending.pop(chunk.slot, None)
                self._settle(chunk.reservation.transfer or "", transfer, now)

    def aborted(self, chunks: Iterable[Chunk], now: float) -> None:
        """These chunks will not come: give up the transfers that wait for one of them."""
        for chunk in chunks:
            name = chunk.reservation.transfer or ""
            transfer = self._transfers.get(name)
            if transfer is not None and chunk.slot in transfer.pending:
                self.give_up(name, now, "")

    def give_up(self, name: str, now: float, source: str) -> bool:
        """Give up a transfer, of which nothing more will come; return whether that is news. An unknown name is recorded
        for `source`, because a decoder may ask for a transfer whose prefill never reached this node."""
        transfer = self._transfers.get(name)
        if transfer is None:
            self._add(name, source, Progress.GIVEN_UP, now + KEPT_S)
            self._news.append(name)
            return True
        if transfer.progress is Progress.GIVEN_UP:
            return False
        transfer.pending = {}
        transfer.offers = 0
        self._turn(transfer, Progress.GIVEN_UP)
        self._end_at(name, transfer, now + KEPT_S)
        self._news.append(name)
        return True

    def expire(self, now: float) -> list[str]:
        """Forget transfers past their deadline; return their names, and those crowded out since the last call."""
        late = self._deadlines.take(now)
        for name in late:
            self._forget(name)
        late += self._crowded_out
        self._crowded_out = []
        self._news += late
        return late

    def _add(self, name: str, source: str, progress: Progress, deadline: float) -> Transfer:
        names = self._of_source.setdefault(source, {})
        if len(names) >= MAX_TRANSFERS:
            self._crowd_out(next(iter(names)), source)
            names = self._of_source.setdefault(source, {})
        names[name] = None
        transfer = self._transfers[name] = Transfer(source, {}, progress, deadline)
        self._under_way += progress is Progress.UNDER_WAY
        self._deadlines.add((name,), deadline)
        return transfer

    def _crowd_out(self, name: str, source: str) -> None:
        self._deadlines.discard(name, self._transfers[name].deadline)
        self._forget(name)
        self._crowded_out.append(name)
        text = "%s has made more than %d transfers known: the oldest is forgotten, whoever waits for it computes"
        counted(log, self._counters, "transfers_crowded_out", text, source, MAX_TRANSFERS)

    def _forget(self, name: str) -> None:
        transfer = self._transfers.pop(name)
        remember(self._ended, name, None, MAX_ENDED)
        self._under_way -= transfer.progress is Progress.UNDER_WAY
        names = self._of_source[transfer.source]
        del names[name]
        if not names:
            del self._of_source[transfer.source]

    def _turn(self, transfer: Transfer, progress: Progress) -> None:
        self._under_way += (progress is Progress.UNDER_WAY) - (transfer.progress is Progress.UNDER_WAY)
        transfer.progress = progress

    def _end_at(self, name: str, transfer: Transfer, deadline: float) -> None:
        self._deadlines.discard(name, transfer.deadline)
        transfer.deadline = deadline
        self._deadlines.add((name,), deadline)

    def _settle(self, name: str, transfer: Transfer, now: float) -> None:
        """Complete the transfer if nothing more is expected."""
        if not transfer.pending and not transfer.offers and transfer.progress is Progress.UNDER_WAY:
            transfer.pending = {}  # a new one, because an emptied dict keeps its table
            self._turn(transfer, Progress.SEALED)
            self._end_at(name, transfer, now + KEPT_S)
            self._news.append(name)
