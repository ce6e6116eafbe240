"""Shared memory: between nodes of one user on one host. The reader copies, so it checks each write before a byte lands.

The writer hands its memory's file over with its greeting, opened to be read: no path from a peer is opened, nobody maps
anybody's memory writable, and containers need not agree on paths. Then it sends the heads of writes, which say what is
to be copied from where. Two streams are two copying threads in the reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from pdx.channel import Availability, Memory, Piece, RemoteRegion
from pdx.errors import ChannelUnavailable, ProtocolError
from pdx.transports.inbound import Group, StreamListener
from pdx.transports.mapping import Mapping
from pdx.transports.outbound import StreamChannel, open_streams
from pdx.transports.stream_region import StreamRegion
from pdx.transports.streams import Buffer

STREAMS = 2
_BACKLOG = 64
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


class Address(msgspec.Struct, array_like=True, frozen=True):
    """Where a listener is: the boot of a host, its network namespace, and a name in it that nobody can guess."""

    boot: Annotated[str, Meta(max_length=64)]
    network: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class ShmChannel(StreamChannel):
    """Sends heads only; `close` is final for the reader, too: it looks at the stream behind each copy."""

    def _payload(self, pieces: list[Piece]) -> Sequence[Buffer]:
        return ()


class ShmListener(StreamListener):
    """Copies from the writers' memory. A group's luggage is the mapping of its writer's file."""

    scheme = "shm"

    def _detail(self) -> bytes:
        name = str(self._server.getsockname(), "ascii").rpartition("-")[2]
        return msgspec.msgpack.encode(Address(*_here(), name))

    def _vet(self, stream: socket.socket) -> None:
        if (uid := _uid_of_peer(stream)) != os.geteuid():
            raise ProtocolError(f"a connection of user {uid}")

    def _admit(self, stream: socket.socket, group: Group, *, is_first: bool) -> None:
        if not is_first:
            return
        # The stream still has the deadline of the greeting.
        data, fds, _, _ = socket.recv_fds(stream, 1, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(fds) != 1 or not data:
                raise ProtocolError("a greeting without a file")
            group.luggage = Mapping.open(fds[0])
        finally:
            for fd in fds:
                os.close(fd)

    def _land(self, stream: socket.socket, group: Group, pieces: list[Piece]) -> None:
        source: Mapping | None = group.luggage
        if source is None:
            raise ProtocolError("a write before its memory was handed over")
        for piece in pieces:
            if piece.nbytes > source.nbytes - piece.local:
                raise ProtocolError(f"{piece} lies outside of the writer's {source.nbytes} bytes")
            ctypes.memmove(self._memory.address + piece.remote, source.address + piece.local, piece.nbytes)
        # A writer that closes its channel shuts the stream first and uses its memory again then: a copy behind which
        # the stream is still open was made of the right bytes. Any other must not be notified.
        if _is_shut(stream):
            raise ConnectionError("the writer has closed the channel")

    def _drop(self, stream: socket.socket, nbytes: int) -> None:
        """There is no payload."""

    def _dismiss(self, group: Group) -> None:
        if group.luggage is not None:
            group.luggage.close()
            group.luggage = None


class ShmRegion(StreamRegion):
    """Memory that maps a file."""

    scheme: ClassVar[str] = "shm"
    crosses_wire: ClassVar[bool] = False
    streams: ClassVar[int] = STREAMS

    def __init__(self, memory: Memory, host: str, wake: Callable[[], None], fd: int) -> None:
        super().__init__(memory, host, wake)
        self._fd = fd

    @classmethod
    def availability(cls) -> Availability:
        """On Linux."""
        if not _BOOT.exists() or not hasattr(socket, "SO_PEERCRED"):
            return Availability(is_ok=False, why="this is not Linux", fix="use tcp")
        return Availability(is_ok=True)

    @classmethod
    def register(cls, memory: Memory, *, host: str = "127.0.0.1", wake: Callable[[], None] = lambda: None) -> ShmRegion:
        """See `Region.register`; `host` does not matter. Opens the memory's file, to be read by peers."""
        if memory.path is None:
            raise ChannelUnavailable("anonymous memory cannot be handed to another process; it must map a file")
        try:
            fd = os.open(memory.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ChannelUnavailable(f"cannot open {memory.path}: {error}") from error
        if os.fstat(fd).st_size < memory.nbytes:
            os.close(fd)
            raise ChannelUnavailable(f"{memory.path} is smaller than {memory}")
        return cls(memory, host, wake, fd)

    def close(self) -> None:
        """See `Region.close`."""
        super().close()
        with self._lock, contextlib.suppress(OSError):
            os.close(self._fd)
            self._fd = -1

    def _listening(self) -> ShmListener:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(_socket_name(secrets.token_hex(16)))
            server.listen(_BACKLOG)
        except OSError as error:
            server.close()
            raise ChannelUnavailable(f"cannot listen: {error}") from error
        return ShmListener(self._memory, self._wake, server)

    def _connected(self, remote: RemoteRegion, timeout_s: float) -> ShmChannel:
        name = _target(remote.detail)

        def connect(left_s: float) -> socket.socket:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                stream.settimeout(left_s)
                stream.connect(name)
                if (uid := _uid_of_peer(stream)) != os.geteuid():  # else somebody else would learn the token
                    raise ConnectionError(f"user {uid} listens there")
            except OSError:
                stream.close()
                raise
            return stream

        def hand_over(stream: socket.socket, index: int) -> None:
            if index == 0:
                socket.send_fds(stream, [b"m"], [self._fd])

        streams = open_streams(connect, remote.token, self.streams, timeout_s, hand_over)
        channel = ShmChannel(self._memory.nbytes, remote, self._wake)
        channel.start(streams)
        return channel


def _here() -> tuple[str, str]:
    return _BOOT.read_text().strip(), os.readlink(_NETWORK)


def _socket_name(name: str) -> str:
    """In the abstract namespace: nothing is left behind by a process that was killed. Anybody may connect, so both ends
    look at the other's user."""
    return f"\0pdx-shm-{name}"


def _target(detail: bytes) -> str:
    """The socket to connect to, from what a peer has told."""
    try:
        address = msgspec.msgpack.decode(detail, type=Address)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ChannelUnavailable(f"not an address of a shm listener: {error}") from error
    if (address.boot, address.network) != _here():
        raise ChannelUnavailable("the peer runs on another host, or in another network namespace")
    return _socket_name(address.name)


def _uid_of_peer(stream: socket.socket) -> int:
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _is_shut(stream: socket.socket) -> bool:
    """Whether the other end has shut it, though there may be frames to be read."""
    poller = select.poll()
    poller.register(stream, select.POLLRDHUP)
    return bool(poller.poll(0))
