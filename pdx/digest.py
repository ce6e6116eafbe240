"""Digests of slices: xxh3 of 64 bits, 8 bytes each. They find bytes that changed on a wire or a disk, not an attacker.

Hashing releases the GIL for all but the smallest slices.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def digests(memory: memoryview, spans: Iterable[tuple[int, int]]) -> bytes:
    """One digest after the other for these (offset, bytes) of `memory`."""
    return b"".join(xxhash.xxh3_64_digest(memory[offset : offset + nbytes]) for offset, nbytes in spans)
