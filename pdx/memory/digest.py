"""Digests of slices: xxh3 of 64 bits, 8 bytes each. They find bytes that changed on a wire or a disk, not an attacker.

Hashing releases the GIL for all but the smallest slices.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from pdx.memory.arena import Arena


def digests(memory: Arena, spans: Iterable[tuple[int, int]]) -> bytes:
    """One digest after the other for these (offset, bytes) of `memory`."""
    return b"".join(xxhash.xxh3_64_digest(memory.read(offset, nbytes)) for offset, nbytes in spans)
