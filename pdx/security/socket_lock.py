"""Who may listen at a Unix socket's path: one process at a time. A bind would take the path away from its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from pdx.errors import ConfigError, PdxError
from pdx.security.unix_peer import peer_of

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)  # why nothing can be written
_PID = re.compile(rb"[0-9]{0,20}")  # all that a lock says


class Lock:
    """The lock beside a path, held.

    Where nothing can be written, and somebody may own it all the same: `is_written`, whether the file names this
    process; `is_held`, whether there is a file at all, so that no other process has the lock.
    """

    def __init__(self, fd: int | None, *, is_written: bool = True) -> None:
        self._fd = fd
        self.is_held = fd is not None
        self.is_written = is_written

    def touch(self) -> None:
        """The file is in use: programs that clean up old files leave it alone."""
        assert self._fd is not None
        os.utime(self._fd)


@contextlib.contextmanager
def owned(path: Path, taken: Callable[[str], PdxError], *, may_be_read_only: bool = False) -> Iterator[Lock]:
    """Own this path inside the block; the lock beside it (`….lock`) is also given back when the process dies.

    Who listens there although the lock was removed is its owner, too. `may_be_read_only`: see `Lock`.

    :raises PdxError: it has an owner; `taken` makes the error from that process's id.
    :raises ConfigError: there is no room for the lock, or another file is there.
    """
    fd, is_written = _locked(path, taken, may_be_read_only)
    try:
        owner = _listener(path)
        if owner is not None:
            raise taken(owner)
        if fd is not None and is_written:
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield Lock(fd, is_written=is_written)
    finally:
        if fd is not None:
            os.close(fd)


def is_lock(path: Path) -> bool:
    """Whether a lock file is there; where that cannot be read it is taken for none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _is_lock(fd)
    finally:
        os.close(fd)


def _is_lock(fd: int) -> bool:
    """Whether nothing but an owner's id was ever written there: anything else is somebody's file."""
    return stat.S_ISREG(os.fstat(fd).st_mode) and _PID.fullmatch(os.pread(fd, 32, 0)) is not None


def remove_socket(path: Path) -> None:
    """Remove what a killed owner left at a path that this process owns now.

    :raises ConfigError: what is there is no socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is there and is no socket; remove it, or name another address")
    path.unlink(missing_ok=True)


def _locked(path: Path, taken: Callable[[str], PdxError], may_be_read_only: bool) -> tuple[int | None, bool]:
    """The descriptor of the lock file that lies at the path and nowhere else, and whether it can be written."""
    name = f"{path}.lock"
    flags, is_written = os.O_RDWR | os.O_CREAT, True
    while True:
        try:
            fd = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if may_be_read_only and is_written and error.errno in READ_ONLY:
                flags, is_written = os.O_RDONLY, False
                continue
            if not is_written and error.errno == errno.ENOENT:
                return None, False
            raise ConfigError(f"the lock {name} cannot be had: {error.strerror}; see what is there") from error
        if not _is_lock(fd):
            os.close(fd)
            raise ConfigError(f"{name} is there and is no lock of PDX; remove it, or name another place than {path}")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise taken(owner) from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(name, follow_symlinks=False)):
                return fd, is_written
        os.close(fd)  # it was removed between the two calls, and somebody else may have the new one


def _listener(path: Path) -> str | None:
    """The process that listens at this path, None if nobody does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # more than it takes at a time wait there
            return "unknown"
        except OSError:
            return None
        return str(peer_of(probe).pid)
