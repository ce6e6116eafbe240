"""Sealed chunks by their predecessor: finds the one that shares the most leading blocks with a prompt.

A block's name is 16 bytes of the engine's chained hash, so that equal names mean equal tokens up to the end of the
block. All chunks are in one list, sorted by the predecessor's key, then by the names of their blocks. The chunk with
the most leading blocks in common with a prompt is next to the place where the prompt's own chunk would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedList

from pdx.memory.keys import KEY_BYTES

MAX_BEGINNINGS = 8  # dropped at once when a longer chunk is sealed; the rest go with the next one, or are evicted
_Entry = tuple[bytes, bytes, bytes]  # predecessor's key, names of the blocks, key


def common(one: bytes, other: bytes) -> int:
    """The number of leading blocks with equal names."""
    most = min(len(one), len(other)) // KEY_BYTES
    if one[: most * KEY_BYTES] == other[: most * KEY_BYTES]:
        return most
    pairs = range(0, most * KEY_BYTES, KEY_BYTES)
    return next(at for at in pairs if one[at : at + KEY_BYTES] != other[at : at + KEY_BYTES]) // KEY_BYTES


class Siblings:
    """The sorted list of chunks. Each call costs a search in it. Owned by the control loop."""

    def __init__(self) -> None:
        self._sorted: SortedList[_Entry] = SortedList()
        self._known: dict[bytes, tuple[_Entry, int]] = {}  # key -> (entry, number of sealed slots)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    @property
    def oldest(self) -> bytes:
        return next(iter(self._known))

    def names(self, key: bytes) -> tuple[bytes, bytes]:
        """The predecessor's key, and the names of this key's blocks."""
        parent, blocks, _ = self._known[key][0]
        return parent, blocks

    def add(self, parent: bytes, blocks: bytes, key: bytes) -> None:
        """A chunk of this key is sealed, one shard in one arena. `parent` and `blocks` of the first hold for all."""
        entry, count = self._known.get(key, ((parent, blocks, key), 0))
        if not count:
            self._sorted.add(entry)
        self._known[key] = entry, count + 1

    def discard(self, key: bytes) -> None:
        entry, count = self._known.pop(key)
        if count > 1:
            self._known[key] = entry, count - 1
        else:
            self._sorted.remove(entry)

    def like(self, parent: bytes, blocks: bytes) -> Iterator[tuple[bytes, int]]:
        """Keys that share leading blocks with `blocks`, and how many: the neighbors on both sides, the better first."""
        place = (parent, blocks, b"")
        before = islice(self._sorted.irange(maximum=place, reverse=True), 1)
        behind = islice(self._sorted.irange(minimum=place), 1)
        near = [(common(entry[1], blocks), entry[2]) for entry in (*before, *behind) if entry[0] == parent]
        for count, key in sorted(near, reverse=True):
            if count:
                yield key, count

    def beginnings(self, parent: bytes, blocks: bytes, key: bytes) -> list[bytes]:
        """Other keys, next to this one, whose blocks are all or the leading ones of `blocks`."""
        found: list[bytes] = []
        maximum = (parent, blocks, b"\xff" * (KEY_BYTES + 1))
        for entry in islice(self._sorted.irange(maximum=maximum, reverse=True), MAX_BEGINNINGS + 1):
            if entry[0] != parent or not blocks.startswith(entry[1]):
                break
            if entry[2] != key:
                found.append(entry[2])
        return found
