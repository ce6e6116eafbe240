"""The S3-FIFO policy: two queues, and the remembered keys of chunks that left the first.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1, with its shares and counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from pdx.store.policies.policy import E, EvictionPolicy, Rank
from pdx.store.policies.ranks import Ranks

SMALL_SHARE = 0.1  # of the arena, for new chunks
MAX_USES = 3
MAX_CHANCES = 1024  # used chunks that a search moves on; to bound its time, it then takes chunks as they come
USES_TO_STAY = 2  # uses in the small queue that move a chunk to the main queue
_SMALL, _MAIN = 0, 1  # the first element of a rank


class S3Fifo(EvictionPolicy[E]):
    """New chunks go through a small queue, from which only those hit twice move to the main queue.

    In the main queue each use spares a chunk once. A key that left the small queue recently returns directly to the
    main queue.
    """

    def __init__(self, total_bytes: int) -> None:
        """`total_bytes`: of the arena."""
        self._queues: tuple[Ranks[E], Ranks[E]] = Ranks(), Ranks()
        self._small_bytes = 0  # of chunks in the small queue, held ones included
        self._most_small_bytes = total_bytes * SMALL_SHARE
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # keys that left the small queue, and their bytes
        self._ghost_bytes = 0
        self._most_ghost_bytes = total_bytes - self._most_small_bytes

    def insert(self, chunk: E, before: E | None = None) -> None:
        if chunk.rank is None:
            ghost_bytes = self._ghosts.pop(chunk.key, 0)
            self._ghost_bytes -= ghost_bytes
            first = _MAIN if ghost_bytes else _SMALL
            chunk.rank = self._queues[first].new(before, first)
            if first == _SMALL:
                self._small_bytes += chunk.room_bytes
        self._queues[chunk.rank[0]].add(chunk)

    def hold(self, chunk: E) -> None:
        assert chunk.rank is not None
        self._queues[chunk.rank[0]].discard(chunk)

    def access(self, chunk: E) -> None:
        chunk.uses = min(MAX_USES, chunk.uses + 1)

    def remove(self, chunk: E) -> None:
        if chunk.rank is not None and chunk.rank[0] == _SMALL:
            self._small_bytes -= chunk.room_bytes
            self._ghost_bytes += chunk.room_bytes - self._ghosts.pop(chunk.key, 0)
            self._ghosts[chunk.key] = chunk.room_bytes
            while self._ghost_bytes > self._most_ghost_bytes:
                self._ghost_bytes -= self._ghosts.popitem(last=False)[1]
        super().remove(chunk)

    def victims(self, start: E | None) -> Iterator[E]:
        """See `EvictionPolicy.victims`. The search moves on used chunks as it meets them."""
        reached: list[Rank | None] = [None, None]  # in each queue
        if start is not None and start.rank is not None:
            first, number, depth = start.rank
            reached[first] = first, number, depth - 1
        small_bytes, chances = self._small_bytes, MAX_CHANCES
        while True:
            chunks = [queue.behind(rank) for queue, rank in zip(self._queues, reached, strict=True)]
            takes_small = chunks[_MAIN] is None or (
                chunks[_SMALL] is not None and small_bytes >= self._most_small_bytes
            )
            chunk = chunks[_SMALL] if takes_small else chunks[_MAIN]
            if chunk is None:
                return
            if takes_small:
                small_bytes -= chunk.room_bytes
            if chances and chunk.uses >= (USES_TO_STAY if takes_small else 1):
                chances -= 1
                self._move_on(chunk)
                continue
            reached[_SMALL if takes_small else _MAIN] = chunk.rank
            yield chunk

    def peek(self) -> Iterator[E]:
        """See `EvictionPolicy.peek`: the chunks that `victims` would not move on, the small queue's excess first."""
        over = self._small_bytes - self._most_small_bytes
        small = (chunk for chunk in self._queues[_SMALL].within(None) if chunk.uses < USES_TO_STAY)
        main = (chunk for chunk in self._queues[_MAIN].within(None) if not chunk.uses)
        for chunk in small:
            if over < 0:
                yield from main
            over -= chunk.room_bytes
            yield chunk
        yield from main

    def _move_on(self, chunk: E) -> None:
        """Make the chunk the newest of the main queue."""
        self.hold(chunk)
        assert chunk.rank is not None
        if chunk.rank[0] == _SMALL:
            self._small_bytes -= chunk.room_bytes
            chunk.uses = 0
        else:
            chunk.uses -= 1
        chunk.rank = self._queues[_MAIN].new(first=_MAIN)
        self._queues[_MAIN].add(chunk)
