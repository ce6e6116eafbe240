"""What is read from a file or written to it, in calls of the system that are not too long."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pdx.store.chunk_format import Over, end_if

_CALL_BYTES = 8 << 20  # read or written by one system call, whole blocks; a job can end between two


def calls(head: memoryview, data: memoryview, is_over: Over) -> Iterator[tuple[list[memoryview], int]]:
    """What each system call reads or writes: (memory, offset in the file)."""
    for first in range(0, len(data), _CALL_BYTES):
        end_if(is_over)
        piece = data[first : first + _CALL_BYTES]
        yield ([piece], len(head) + first) if first else ([head, piece], 0)


def write_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Write all of it."""
    while buffers:
        written = os.pwritev(fd, buffers, offset)
        buffers, offset = _behind(buffers, written), offset + written


def _behind(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the memory of a system call that has done so much."""
    left = []
    for buffer in buffers:
        if nbytes < len(buffer):
            left.append(buffer[nbytes:])
        nbytes = max(0, nbytes - len(buffer))
    return left


def read_all(fd: int, buffers: list[memoryview], offset: int) -> int:
    """Read until the memory is full, or the file ends; the bytes read."""
    count, left = 0, buffers
    while left and (done := os.preadv(fd, left, offset + count)):
        count += done
        left = _behind(left, done)
    return count
