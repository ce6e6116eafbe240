"""Who may listen at a Unix socket's path: one process at a time. ZMQ would take the path away from its owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pdx.errors import PdxError


@contextlib.contextmanager
def owned(path: Path, taken: Callable[[str], PdxError]) -> Iterator[None]:
    """Own this path inside the block; the lock beside it (`….lock`) is also given back when the process dies.

    :raises PdxError: it has an owner; `taken` makes the error from that process's id.
    """
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise taken(os.pread(fd, 32, 0).decode(errors="replace").strip()) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)
