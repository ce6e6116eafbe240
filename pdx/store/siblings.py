"""Sealed chunks by the chunk that leads up to them: which one begins as a prompt goes on.

A block's name is 16 bytes of the engine's chained hash, so that equal names mean equal tokens up to the end of the block.
The chunks that follow one parent are sorted by the names of their blocks: the one that has the most leading blocks in
common with a prompt stands next to where the prompt would stand.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

NAME_BYTES = 16
_Entry = tuple[bytes, bytes]  # names of the blocks, key


def common(one: bytes, other: bytes) -> int:
    """How many leading blocks are the same."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // NAME_BYTES
    for count in range(most // NAME_BYTES):
        at = count * NAME_BYTES
        if one[at : at + NAME_BYTES] != other[at : at + NAME_BYTES]:
            return count
    return most // NAME_BYTES


class Siblings:
    """All of them. Each call costs what it takes to find a place among the chunks of one parent."""

    def __init__(self) -> None:
        self._of: dict[bytes, list[_Entry]] = {}
        self._known: dict[bytes, tuple[bytes, bytes, int]] = {}  # by key: parent, blocks, in how many slots it is

    def __len__(self) -> int:
        return len(self._known)

    def add(self, parent: bytes, blocks: bytes, key: bytes) -> None:
        """A chunk of this key is sealed: of one shard, in one arena. What the first one said holds for all."""
        known = self._known.get(key)
        if known is None:
            bisect.insort(self._of.setdefault(parent, []), (blocks, key))
            self._known[key] = parent, blocks, 1
        else:
            self._known[key] = *known[:2], known[2] + 1

    def discard(self, key: bytes) -> None:
        """One is not any more."""
        parent, blocks, count = self._known.pop(key)
        if count > 1:
            self._known[key] = parent, blocks, count - 1
            return
        entries = self._of[parent]
        del entries[bisect.bisect_left(entries, (blocks, key))]
        if not entries:
            del self._of[parent]

    def like(self, parent: bytes, blocks: bytes) -> Iterator[tuple[bytes, int]]:
        """Keys that begin as `blocks` do, and in how many blocks: the best of both sides."""
        entries = self._of.get(parent, ())
        at = bisect.bisect_left(entries, (blocks, b""))
        found = [(common(entry[0], blocks), entry[1]) for entry in entries[max(0, at - 1) : at + 1]]
        for count, key in sorted(found, reverse=True):
            if count:
                yield key, count

    def beginnings(self, parent: bytes, blocks: bytes) -> list[bytes]:
        """Keys of those that have nothing but leading blocks of `blocks`, and fewer."""
        entries = self._of.get(parent, ())
        at = bisect.bisect_left(entries, (blocks, b""))
        found = []
        while at and blocks.startswith(entries[at - 1][0]):
            at -= 1
            found.append(entries[at][1])
        return found
