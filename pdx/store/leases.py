"""Who reads which chunks: processes by leases, which have a deadline, and pushes by holds, which have none."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from pdx.errors import ChunkMissing
from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.lifecycle import WRITABLE, State, Step
from pdx.store.slot_pool import SlotPool


class Lease(msgspec.Struct):
    """Chunks that stay as long as this lasts."""

    session: int
    chunks: list[Chunk]
    deadline: float


class Leases:
    """All leases and holds. It alone counts a chunk's readers, and frees what only they kept."""

    def __init__(self, pools: Sequence[SlotPool], counters: Counter[str]) -> None:
        self._pools = pools
        self._counters = counters
        self._leases: dict[int, Lease] = {}
        self._of_session: dict[int, dict[int, None]] = {}  # session -> numbers of its leases
        self._deadlines: Deadlines[int] = Deadlines()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._leases)

    def start(self, chunks: Iterable[Chunk], session: int, deadline: float) -> int:
        """Keep these sealed chunks until `deadline`; returns the lease's number."""
        lease = Lease(session, list(chunks), deadline)
        self.hold(lease.chunks)
        number = next(self._numbers)
        self._leases[number] = lease
        self._of_session.setdefault(session, {})[number] = None
        self._deadlines.add((number,), deadline)
        return number

    def renew(self, number: int, session: int, deadline: float) -> None:
        """:raises ChunkMissing: the lease has ended."""
        lease = self._lease_of(number, session)
        self._deadlines.discard(number, lease.deadline)
        lease.deadline = deadline
        self._deadlines.add((number,), deadline)

    def end(self, number: int, session: int) -> None:
        """:raises ChunkMissing: it has ended already."""
        self._deadlines.discard(number, self._lease_of(number, session).deadline)
        self._end(number)

    def expire(self, now: float) -> None:
        """End leases whose deadline is over."""
        for number in self._deadlines.take(now):
            self._counters["leases_expired"] += 1
            self._end(number)

    def end_session(self, session: int) -> None:
        """End the leases of a process that is gone."""
        for number in list(self._of_session.get(session, ())):
            self.end(number, session)

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """Count one more reader of each of these, filled or still being filled."""
        for chunk in chunks:
            self._pools[chunk.slot.arena].policy.remove(chunk)
            chunk.leases += 1

    def unhold(self, chunks: Sequence[Chunk]) -> None:
        """One reader of each of these is done."""
        retired: list[Chunk] = []
        tails: list[Chunk] = []
        for chunk in reversed(chunks):  # the end of the prompt becomes the older one
            chunk.leases -= 1
            if chunk.leases or chunk.state in WRITABLE:
                continue
            if chunk.state is State.RETIRED:
                retired.append(chunk)
            elif chunk.tail:  # it was for this one reader
                tails.append(chunk)
            elif not chunk.pins:
                self._pools[chunk.slot.arena].policy.insert(chunk)
        for number, pool in enumerate(self._pools):
            for chunks_left, step in ((retired, Step.UNLEASED), (tails, Step.EVICT)):
                pool.free([chunk for chunk in chunks_left if chunk.slot.arena == number], step)

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number)
        numbers = self._of_session[lease.session]
        del numbers[number]
        if not numbers:
            del self._of_session[lease.session]
        self.unhold(lease.chunks)

    def _lease_of(self, number: int, session: int) -> Lease:
        lease = self._leases.get(number)
        if lease is None or lease.session != session:
            raise ChunkMissing(f"lease {number} has ended")
        return lease
