"""Sealed chunks by the chunk that leads up to them: which one begins as a prompt goes on.

A block's name is 16 bytes of the engine's chained hash, so that equal names mean equal tokens up to the end of the
block. All chunks are in one sorted list: by the key that leads up to them, then by the names of their blocks. The one
that has the most leading blocks in common with a prompt stands next to the place where the prompt's own would stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sortedcontainers import SortedList

from pdx.memory.keys import KEY_BYTES

MAX_BEGINNINGS = 8  # that one chunk makes useless at once: what is behind them goes with the next one, or by its age
_Entry = tuple[bytes, bytes, bytes]  # what leads up to it, names of its blocks, key


def common(one: bytes, other: bytes) -> int:
    """How many leading blocks are the same, by their names."""
    most = min(len(one), len(other)) // KEY_BYTES
    if one[: most * KEY_BYTES] == other[: most * KEY_BYTES]:
        return most
    pairs = range(0, most * KEY_BYTES, KEY_BYTES)
    return next(at for at in pairs if one[at : at + KEY_BYTES] != other[at : at + KEY_BYTES]) // KEY_BYTES


class Siblings:
    """All of them. Each call costs a search in the sorted list. Owned by the control loop."""

    def __init__(self) -> None:
        self._sorted: SortedList[_Entry] = SortedList()
        self._known: dict[bytes, tuple[_Entry, int]] = {}  # by key, and how many slots are sealed

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    @property
    def oldest(self) -> bytes:
        return next(iter(self._known))

    def names(self, key: bytes) -> tuple[bytes, bytes]:
        """The key that leads up to this one, and the names of its blocks."""
        parent, blocks, _ = self._known[key][0]
        return parent, blocks

    def add(self, parent: bytes, blocks: bytes, key: bytes) -> None:
        """A chunk of this key is sealed: one shard, in one arena. What the first one said holds for all."""
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
        """Keys that begin as `blocks` do and in how many blocks: the neighbours of both sides, the better one first."""
        place = (parent, blocks, b"")
        before = islice(self._sorted.irange(maximum=place, reverse=True), 1)
        behind = islice(self._sorted.irange(minimum=place), 1)
        near = [(common(entry[1], blocks), entry[2]) for entry in (*before, *behind) if entry[0] == parent]
        for count, key in sorted(near, reverse=True):
            if count:
                yield key, count

    def beginnings(self, parent: bytes, blocks: bytes, key: bytes) -> list[bytes]:
        """Keys of others next to this one that have nothing but its blocks, or the leading ones of them."""
        found: list[bytes] = []
        maximum = (parent, blocks, b"\xff" * (KEY_BYTES + 1))
        for entry in islice(self._sorted.irange(maximum=maximum, reverse=True), MAX_BEGINNINGS + 1):
            if entry[0] != parent or not blocks.startswith(entry[1]):
                break
            if entry[2] != key:
                found.append(entry[2])
        return found
