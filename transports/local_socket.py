"""Stream sockets between processes of one user on one host, and memory that is handed over through them.

In the abstract namespace: nothing is left behind by a process that was killed. Anybody may connect, so both ends look
at the other's user before they say anything.
"""

from __future__ import annotations

import array
import functools
import os
import secrets
import select
import socket
import struct
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from pdx.errors import ChannelUnavailable, ProtocolError
from pdx.transports.channel import Availability, RemoteRegion
from pdx.transports.streams import fill

MAX_LUGGAGE_BYTES = 512
_BACKLOG = 64
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_LENGTH = struct.Struct("!H")
_INT_BYTES = array.array("i").itemsize
_PF_EXITING = 0x4  # of the kernel's flags of a process


class Address(msgspec.Struct, array_like=True, frozen=True):
    """Where a listener is: the boot of a host, its network namespace, and a name in it that nobody can guess.

    `gpu`: the UUID of the GPU that its memory lies on, empty for host memory.
    """

    boot: Annotated[str, Meta(max_length=64)]
    network: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    gpu: Annotated[str, Meta(max_length=64)] = ""


class Credentials(NamedTuple):
    """Who is at the other end, as the kernel says. `pid` is 0 where it is not to be seen from here."""

    pid: int
    uid: int


def availability() -> Availability:
    """On Linux."""
    if not _BOOT.exists() or not hasattr(socket, "SO_PEERCRED"):
        return Availability(is_ok=False, why="this is not Linux", fix="use tcp")
    return Availability(is_ok=True)


def listen(scheme: str) -> socket.socket:
    """Under a fresh name.

    :raises ChannelUnavailable: it cannot.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(_socket_name(scheme, secrets.token_hex(16)))
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        raise ChannelUnavailable(f"cannot listen: {error}") from error
    return server


def address_of(server: socket.socket, gpu: str = "") -> bytes:
    """What a peer needs to connect."""
    name = str(server.getsockname(), "ascii").rpartition("-")[2]
    return msgspec.msgpack.encode(Address(*_here(), name, gpu))


def address_in(remote: RemoteRegion) -> Address:
    """The address that a peer has told.

    :raises ChannelUnavailable: it is none, or leads to another host.
    """
    try:
        address = msgspec.msgpack.decode(remote.detail, type=Address)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ChannelUnavailable(f"not an address of a {remote.scheme} listener: {error}") from error
    if (address.boot, address.network) != _here():
        raise ChannelUnavailable("the peer runs on another host, or in another network namespace")
    return address


def connect(scheme: str, address: Address, timeout_s: float) -> socket.socket:
    """A stream to this listener.

    :raises OSError: nobody listens there, or another user does.
    """
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(timeout_s)
        stream.connect(_socket_name(scheme, address.name))
        if (uid := peer_of(stream).uid) != os.geteuid():  # else somebody else would learn the token
            raise ConnectionError(f"user {uid} listens there")
    except OSError:
        stream.close()
        raise
    return stream


def peer_of(stream: socket.socket) -> Credentials:
    """Who connected, or listened."""
    pid, uid, _ = _CREDENTIALS.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Credentials(pid, uid)


def hand_over(stream: socket.socket, packed: bytes, fd: int) -> None:
    """Send at most MAX_LUGGAGE_BYTES bytes and a descriptor, if `fd` is one.

    :raises OSError: the stream broke.
    """
    assert len(packed) <= MAX_LUGGAGE_BYTES, len(packed)
    luggage = _LENGTH.pack(len(packed)) + packed
    sent = socket.send_fds(stream, [luggage], [fd] if fd >= 0 else [])
    # Not even an empty rest: the reader may have answered and closed by then, which would hide its answer.
    if sent < len(luggage):
        stream.sendall(luggage[sent:])


def take_over(stream: socket.socket) -> tuple[bytes, int]:
    """What was sent by `hand_over`: the descriptor is the caller's to close, or -1. Within the stream's timeout.

    :raises ProtocolError: it is too long.
    :raises OSError: the stream broke, or the time is over.
    """
    left_s = stream.gettimeout()
    deadline = time.monotonic() + (5.0 if left_s is None else left_s)
    # Not `socket.recv_fds`, which does not pass on its flags: children would inherit the descriptor.
    head, notes, _, _ = stream.recvmsg(_LENGTH.size, socket.CMSG_LEN(_INT_BYTES), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in notes:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // _INT_BYTES * _INT_BYTES])
    try:
        head += _rest(stream, _LENGTH.size - len(head), deadline)
        nbytes = int(_LENGTH.unpack(head)[0])
        if nbytes > MAX_LUGGAGE_BYTES:
            raise ProtocolError(f"luggage of {nbytes} bytes; at most {MAX_LUGGAGE_BYTES} are possible")
        return _rest(stream, nbytes, deadline), fds.pop() if fds else -1
    finally:
        for fd in fds:
            os.close(fd)


def is_shut(stream: socket.socket) -> bool:
    """Whether the other end has shut it, though there may be frames to be read."""
    poller = select.poll()
    poller.register(stream, select.POLLRDHUP)
    return bool(poller.poll(0))


def has_begun_to_exit(pid: int) -> bool:
    """Whether this process is gone or on its way: the kernel says so before it takes away anything of it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(stat.rpartition(")")[2].split()[6]) & _PF_EXITING)


def _rest(stream: socket.socket, nbytes: int, deadline: float) -> bytes:
    rest = bytearray(nbytes)
    if nbytes and not fill(stream, rest, deadline=deadline):
        raise ConnectionError("the stream ended before what belongs to its greeting")
    return bytes(rest)


@functools.cache  # no process of ours changes either, and a node without descriptors must go on inviting peers
def _here() -> tuple[str, str]:
    return _BOOT.read_text().strip(), os.readlink(_NETWORK)


def _socket_name(scheme: str, name: str) -> str:
    return f"\0pdx-{scheme}-{name}"
