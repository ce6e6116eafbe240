"""Digests of slices: 64-bit xxh3. They detect bytes that changed on a wire or a disk, not an attacker's changes.

Hashing releases the GIL for all but the smallest slices.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from pdx.memory.arena import Arena


def digests(memory: Arena, spans: Iterable[tuple[int, int]]) -> bytes:
    """The concatenated digests, 8 bytes each, of these (offset, bytes) spans of `memory`."""
    return b"".join(xxhash.xxh3_64_digest(memory.read(offset, nbytes)) for offset, nbytes in spans)
