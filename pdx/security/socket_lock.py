"""Locks for the paths of Unix sockets, one process at a time: a bind alone would take the path from its owner."""

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
_PID = re.compile(rb"[0-9]{0,20}")  # the contents of a lock


class Lock:
    """A held lock beside a path.

    If nothing can be written and ownership is taken all the same: `is_written` says whether the file names this
    process, `is_held` whether there is a file at all, so that no other process has the lock.
    """

    def __init__(self, fd: int | None, *, is_written: bool = True) -> None:
        self._fd = fd
        self.is_held = fd is not None
        self.is_written = is_written

    def touch(self) -> None:
        """Mark the file as in use, so that programs that clean up old files leave it alone."""
        assert self._fd is not None
        os.utime(self._fd)


@contextlib.contextmanager
def owned(path: Path, taken: Callable[[str], PdxError], *, may_be_read_only: bool = False) -> Iterator[Lock]:
    """Own this path inside the block; the lock beside it (`….lock`) is also released when the process dies.

    A process that listens there, although the lock was removed, is its owner, too. `may_be_read_only`: see `Lock`.

    :raises PdxError: the path has an owner; `taken` makes the error from that process's id.
    :raises ConfigError: the lock cannot be made, or another file is in its place.
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
    """Whether a lock file is there; one that cannot be read does not count."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _is_lock(fd)
    finally:
        os.close(fd)


def _is_lock(fd: int) -> bool:
    """Whether the file has nothing but an owner's id: anything else is a user's file."""
    return stat.S_ISREG(os.fstat(fd).st_mode) and _PID.fullmatch(os.pread(fd, 32, 0)) is not None


def remove_socket(path: Path) -> None:
    """Remove the socket that a killed owner left at a path that this process owns now.

    :raises ConfigError: there is something else than a socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is there and is no socket; remove it, or name another address")
    path.unlink(missing_ok=True)


def _locked(path: Path, taken: Callable[[str], PdxError], may_be_read_only: bool) -> tuple[int | None, bool]:
    """The descriptor of the locked file that is at the path now, and whether it can be written."""
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
        except OSError as error:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise taken(owner) from error
            if not is_written:  # NFS locks only what can be written
                return None, False
            what = "use a file system that has locks (Lustre: mount it with -o flock)"
            raise ConfigError(f"{name} cannot be locked: {error.strerror}; {what}") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(name, follow_symlinks=False)):
                return fd, is_written
        os.close(fd)  # it was removed between the two calls, and another process may have the new one


def _listener(path: Path) -> str | None:
    """The pid that listens at this path; None: there is none."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full
            return "unknown"
        except OSError:
            return None
        return str(peer_of(probe).pid)
