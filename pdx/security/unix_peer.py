"""Unix sockets between processes of one host: the process at the other end, and descriptors sent with a message."""

from __future__ import annotations

import array
import socket
import struct
import sys
from typing import NamedTuple

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_SO_PEERPIDFD = 77  # asm-generic/socket.h, since Linux 6.5
_INT_BYTES = array.array("i").itemsize


class Credentials(NamedTuple):
    """The process at the other end, as the kernel reports it. `pid` is 0 if it is not visible from here."""

    pid: int
    uid: int


def peer_of(stream: socket.socket) -> Credentials:
    """The credentials of the process that connected or listened."""
    pid, uid, _ = _CREDENTIALS.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Credentials(pid, uid)


def pidfd_of_peer(stream: socket.socket) -> int:
    """A pidfd of the process that connected or listened, in whatever PID namespace; the caller closes it.

    :raises OSError: the kernel is older than Linux 6.5, or the process has ended.
    """
    return int.from_bytes(stream.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _INT_BYTES), sys.byteorder)


def receive_fds(stream: socket.socket, nbytes: int, max_fds: int) -> tuple[bytes, list[int], int]:
    """A message, its descriptors, which the caller closes and no child inherits, and the system's flags.

    :raises OSError: the stream broke, or its timeout is over.
    """
    # Not `socket.recv_fds`, which does not pass on its flags: children would inherit the descriptors.
    room = socket.CMSG_SPACE(max_fds * _INT_BYTES)
    message, notes, flags, _ = stream.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in notes:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // _INT_BYTES * _INT_BYTES])
    return message, list(fds), flags
