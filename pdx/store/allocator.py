"""Where in an arena a slot lies: a best-fit allocator of offsets. Arithmetic only; it never touches the memory.

Best fit with coalescing of neighbours: Knuth, The Art of Computer Programming, volume 1, section 2.5.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection

ALIGNMENT = 4096
_SPARE = 16  # holes that have gone stay in a heap, up to so many and as many again as are there


class Allocator:
    """Slots within [0, total), each aligned to 4 KB. For one thread: the node's control loop.

    All state: the slots, and the holes between them by place and by size; touching holes are always one hole. Finding a
    hole is a binary search among the sizes that there are, of which there are few, and the top of a heap.
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
        self._of_size: dict[int, list[int]] = {}  # size -> a heap: offsets of its holes, and of some that have gone
        self._count_of: dict[int, int] = {}  # size -> how many holes have it
        self._ends: dict[int, int] = {}  # where a slot or a hole ends -> its offset
        self._add_hole(0, total)

    def __repr__(self) -> str:
        used = self.total_bytes - self._free_bytes
        slots, holes = len(self._slots), len(self._hole_at)
        return f"<Allocator {used} of {self.total_bytes} bytes, {slots} slots, {holes} holes>"

    @property
    def free_bytes(self) -> int:
        """Bytes in holes, all together."""
        return self._free_bytes

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        """Offsets of up to `count` new slots of `nbytes` each, as many as fit; each is freed on its own.

        They lie one behind the other where one hole holds them all (the smallest such, the one of lowest offset among
        equals), otherwise the smallest hole that fits is used up before the next. Sizes are rounded up to 4 KB.

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
        while at < len(self._sizes) and len(offsets) < count:  # a size of which no hole is left goes: `at` is the next
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
        """Give these slots back; their room joins the holes beside it, neighbours among them at once.

        :raises ValueError: no slot starts at one of them (never allocated, or freed already), or one is named twice;
            nothing changed.
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
        """The offset of the slot or hole that ends at `offset`; None where none does."""
        return self._ends.get(offset)

    def hole_bytes(self, offset: int) -> int:
        """The bytes of the hole that begins at `offset`; 0 where none does."""
        return self._hole_at.get(offset, 0)

    def _join_hole(self, start: int, end: int) -> None:
        """[start, end) is nobody's any more: one hole with those beside it. Nothing where it is empty."""
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
        """The offset of the first of the holes that have this size."""
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
