"""What a disk tier finds out about the file system of its folder: whether it takes direct I/O, and its blocks.

What is written for that has no name, and is gone when it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from pdx.store.chunk_format import HEADER_BYTES, aligned
from pdx.store.disk.chunk_file import PARTIAL, some_file

_MOST_BLOCK_BYTES = 64 << 20  # larger ones are none


def block_bytes(root: Path) -> int:
    """In how many bytes files grow on the disk. Where nothing can be written, as the file system says it, which does
    not know of clusters.

    :raises OSError: there is no such folder.
    """
    block = os.statvfs(root).f_frsize or HEADER_BYTES
    takes = 0
    with contextlib.suppress(OSError):
        fd = _unnamed(root, 0)
        try:
            os.ftruncate(fd, HEADER_BYTES)  # so that file systems do not reserve more than that
            os.pwrite(fd, bytes(HEADER_BYTES), 0)
            os.fsync(fd)
            takes = os.fstat(fd).st_blocks * 512
        finally:
            os.close(fd)
    return takes if max(block, HEADER_BYTES) < takes <= _MOST_BLOCK_BYTES else block


def takes_direct(root: Path) -> bool:
    """Whether the file system of a folder reads and writes without its page cache; also where it is full or read-only,
    if it has a file.

    :raises OSError: nothing can be written there, and there is nothing to read.
    """
    try:
        fd = _unnamed(root, os.O_DIRECT)
        try:
            return os.pwritev(fd, [aligned(HEADER_BYTES)], 0) == HEADER_BYTES
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        some = some_file(root)
        if some is None:
            raise
        return reads_direct(some)


def _unnamed(root: Path, flags: int) -> int:
    """A new file, opened with `flags`, which is gone when it is closed; where the file system has no such files, one
    of a name that nobody else has."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(root, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    fd, name = tempfile.mkstemp(PARTIAL, "tier-", root)
    try:
        return os.open(name, flags | os.O_NOFOLLOW)
    finally:
        os.close(fd)
        os.unlink(name)


def reads_direct(path: Path) -> bool:
    """Whether this file is read without the page cache.

    :raises OSError: it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
        try:
            os.preadv(fd, [aligned(HEADER_BYTES)], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
