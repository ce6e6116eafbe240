"""A best-fit allocator of slots in an arena. It computes offsets only and never touches the memory.

Best fit with coalescing of neighbors: Knuth, The Art of Computer Programming, volume 1, section 2.5.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection

ALIGNMENT = 4096
_SPARE = 16  # stale entries that a heap may hold, beyond one per live entry, before it is rebuilt


class Allocator:
    """Allocates slots within [0, total), each aligned to 4 KB. Not thread-safe: owned by the node's control loop.

    Its state is the slots, and the holes between them by offset and by size; adjacent holes are always joined. Finding
    a hole takes a binary search among the sizes of holes, of which there are few, and the top of a heap.
    """

    def __init__(self, total: int) -> None:
        """:raises ValueError: `total` is not a positive multiple of 4 KB."""
        if total <= 0 or total % ALIGNMENT:
            raise ValueError(f"total {total} is not a positive multiple of {ALIGNMENT}")
        self.total_bytes = total
        self._free_bytes = 0
        self._slots: dict[int, int] = {}  # offset -> bytes
        self._hole_at: dict[int, int] = {}  # offset -> bytes
        self._sizes: list[int] = []  # of all holes, each once, sorted
        self._of_size: dict[int, list[int]] = {}  # size -> a heap of its holes' offsets, with some stale ones
        self._count_of: dict[int, int] = {}  # size -> number of holes
        self._ends: dict[int, int] = {}  # end of a slot or hole -> its offset
        self._add_hole(0, total)

    def __repr__(self) -> str:
        used = self.total_bytes - self._free_bytes
        slots, holes = len(self._slots), len(self._hole_at)
        return f"<Allocator {used} of {self.total_bytes} bytes, {slots} slots, {holes} holes>"

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        """Allocate up to `count` slots of `nbytes` each, as many as fit; return their offsets. Each is freed alone.

        If one hole holds them all, they are contiguous in the smallest such hole, of equal ones that with the lowest
        offset. Otherwise the smallest hole that fits is used up before the next. Sizes are rounded up to 4 KB.

        :raises ValueError: `nbytes` is not positive or `count` is negative.
        """
        if nbytes <= 0 or count < 0:
            raise ValueError(f"cannot allocate {count} slots of {nbytes} bytes")
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        at = bisect_left(self._sizes, size * count)
        if at == len(self._sizes):
            at = bisect_left(self._sizes, size)
        offsets: list[int] = []
        rests: list[tuple[int, int]] = []  # (offset, bytes)
        while at < len(self._sizes) and len(offsets) < count:  # a size without holes is removed: `at` is then the next
            start = self._lowest(self._sizes[at])
            hole_bytes = self._remove_hole(start)
            taken = min(hole_bytes // size, count - len(offsets)) * size
            offsets.extend(range(start, start + taken, size))
            if taken < hole_bytes:
                rests.append((start + taken, hole_bytes - taken))
        for rest, rest_bytes in rests:
            self._add_hole(rest, rest_bytes)
        self._slots.update(dict.fromkeys(offsets, size))
        self._ends.update((offset + size, offset) for offset in offsets)
        return offsets

    def free_many(self, offsets: Collection[int]) -> None:
        """Free these slots. Their room is joined with adjacent holes, adjacent slots in one step.

        :raises ValueError: no slot starts at one of the offsets (never allocated, or already freed), or an offset is
            given twice; nothing has changed.
        """
        once = set(offsets)
        for offset in once:
            if offset not in self._slots:
                raise ValueError(f"no slot at offset {offset}")
        if len(once) != len(offsets):
            raise ValueError("an offset is named twice")
        start = end = -1
        for offset in sorted(once):
            if offset != end:
                self._join_hole(start, end)
                start = offset
            end = offset + self._slots.pop(offset)
            del self._ends[end]
        self._join_hole(start, end)

    def before(self, offset: int) -> int | None:
        """The offset of the slot or hole that ends at `offset`; None if none does."""
        return self._ends.get(offset)

    def hole_bytes(self, offset: int) -> int:
        """The size of the hole that begins at `offset`; 0 if none does."""
        return self._hole_at.get(offset, 0)

    def _join_hole(self, start: int, end: int) -> None:
        """Make [start, end) one hole together with adjacent holes. No-op if the range is empty."""
        if start == end:
            return
        before = self._ends.get(start, start)
        if before in self._hole_at:
            self._remove_hole(before)
            start = before
        if end in self._hole_at:
            end += self._remove_hole(end)
        self._add_hole(start, end - start)

    def _add_hole(self, offset: int, nbytes: int) -> None:
        heap = self._of_size.get(nbytes)
        if heap is None:
            heap = self._of_size[nbytes] = []
            self._count_of[nbytes] = 0
            insort(self._sizes, nbytes)
        heapq.heappush(heap, offset)
        self._count_of[nbytes] += 1
        self._hole_at[offset] = nbytes
        self._ends[offset + nbytes] = offset
        self._free_bytes += nbytes

    def _lowest(self, nbytes: int) -> int:
        """The lowest offset among the holes of this size."""
        heap = self._of_size[nbytes]
        while self._hole_at.get(heap[0]) != nbytes:
            heapq.heappop(heap)
        return heap[0]

    def _remove_hole(self, offset: int) -> int:
        nbytes = self._hole_at.pop(offset)
        del self._ends[offset + nbytes]
        self._free_bytes -= nbytes
        self._count_of[nbytes] -= 1
        count, heap = self._count_of[nbytes], self._of_size[nbytes]
        if not count:
            del self._count_of[nbytes], self._of_size[nbytes]
            del self._sizes[bisect_left(self._sizes, nbytes)]
        elif len(heap) > 2 * count + _SPARE:
            heap[:] = {each for each in heap if self._hole_at.get(each) == nbytes}
            heapq.heapify(heap)
        return nbytes
