"""Channels between processes of one user on one host: the writer hands over its memory with the greeting of each
stream, and the reader copies from it.

So the reader checks each write before a byte lands and opens no path from a peer, neither process writes to the other's
memory (files are mapped read-only; CUDA maps a GPU's memory for reads and writes), and containers need not agree on
paths. Afterwards the writer sends the heads of writes, which say what to copy from where. Two streams mean two copying
threads.

Sockets are in the abstract namespace: a killed process leaves nothing behind. Anyone may connect, so both ends check
the other's user before they send anything.
"""

from __future__ import annotations

import functools
import os
import secrets
import select
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from pdx.errors import ChannelUnavailable, ProtocolError
from pdx.security.unix_peer import Credentials, peer_of, receive_fds
from pdx.telemetry.host import host_id
from pdx.transports.channel import Availability, Piece, Region, RemoteRegion, decoded
from pdx.transports.streams.inbound import StreamListener
from pdx.transports.streams.outbound import StreamRegion
from pdx.transports.streams.sockets import take

MAX_EXPORT_BYTES = 512
_BACKLOG = 64
_NETWORK = "/proc/self/ns/net"
_LENGTH = struct.Struct("!H")


class Address(msgspec.Struct, array_like=True, frozen=True):
    """Where a listener is: the boot of a host, its network namespace, and an unguessable name in it.

    `gpu`: the UUID of the GPU that its memory lies on, empty for host memory.
    """

    boot: Annotated[str, Meta(max_length=64)]
    network: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    gpu: Annotated[str, Meta(max_length=64)] = ""


_addresses = msgspec.msgpack.Decoder(Address)


def address_in(remote: RemoteRegion) -> Address:
    """The address in a peer's detail. :raises ChannelUnavailable: it is none, or leads to another host."""
    address = decoded(_addresses, remote.detail, ChannelUnavailable, f"an address of a {remote.scheme} listener")
    if (address.boot, address.network) != _here():
        raise ChannelUnavailable("the peer runs on another host, or in another network namespace")
    return address


def hand_over(stream: socket.socket, packed: bytes, fd: int) -> None:
    """Send at most MAX_EXPORT_BYTES bytes and a descriptor, if `fd` is one. :raises OSError: the stream broke."""
    assert len(packed) <= MAX_EXPORT_BYTES, len(packed)
    frame = _LENGTH.pack(len(packed)) + packed
    sent = socket.send_fds(stream, [frame], [fd] if fd >= 0 else [])
    # Do not send an empty rest: the reader may have answered and closed by then, and an error would hide its answer.
    if sent < len(frame):
        stream.sendall(frame[sent:])


def take_over(stream: socket.socket) -> tuple[bytes, int]:
    """Receive what `hand_over` sent, within the stream's timeout. The caller closes the descriptor (-1: none).

    :raises ProtocolError: it is too long.
    :raises OSError: the stream broke, or timed out.
    """
    left_s = stream.gettimeout()
    deadline = time.monotonic() + (5.0 if left_s is None else left_s)
    head, fds, _ = receive_fds(stream, _LENGTH.size, 1)
    try:
        head += _rest(stream, _LENGTH.size - len(head), deadline)
        nbytes = int(_LENGTH.unpack(head)[0])
        if nbytes > MAX_EXPORT_BYTES:
            raise ProtocolError(f"{nbytes} bytes were handed over; at most {MAX_EXPORT_BYTES} are possible")
        return _rest(stream, nbytes, deadline), fds.pop() if fds else -1
    finally:
        for fd in fds:
            os.close(fd)


def _rest(stream: socket.socket, nbytes: int, deadline: float) -> bytes:
    rest = bytearray(nbytes)
    if nbytes:
        take(stream, rest, deadline=deadline)
    return bytes(rest)


@functools.cache  # neither changes in a process, and a node without free descriptors must go on inviting peers
def _here() -> tuple[str, str]:
    return host_id(), os.readlink(_NETWORK)


def _socket_name(scheme: str, name: str) -> str:
    return f"\0pdx-{scheme}-{name}"


class Source(ABC):
    """A writer's memory as its reader has opened it. The thread of one stream copies and closes."""

    address: int
    nbytes: int

    @abstractmethod
    def copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Make these copies (to address, from address, bytes), all together; none runs on after this returns or raises.

        :raises ConnectionError: the writer is gone, and the bytes may not have been its own.
        :raises ChannelBroken: they cannot be copied.
        """

    @abstractmethod
    def close(self) -> None:
        """Release it: nothing reads it any more. Call once."""


class LocalListener(StreamListener):
    """Copies from the writers' memory. What a stream admits is the `Source` that was handed over through it."""

    def __init__(self, region: Region) -> None:
        """:raises ChannelUnavailable: it cannot listen."""
        name = secrets.token_hex(16)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(_socket_name(region.scheme, name))
            server.listen(_BACKLOG)
        except OSError as error:
            server.close()
            raise ChannelUnavailable(f"cannot listen: {error}") from error
        super().__init__(region, server, msgspec.msgpack.encode(Address(*_here(), name, region.memory.gpu)))

    @abstractmethod
    def _open(self, packed: bytes, fd: int, pid: int) -> Source:
        """Open what the process `pid` has handed over; `fd` is closed after this call, -1 if there was none.

        :raises ProtocolError: it is not what a writer hands over.
        :raises ChannelUnavailable: it cannot be opened here.
        """

    def _meet(self, stream: socket.socket, address: Any) -> Credentials:
        peer = peer_of(stream)
        if peer.uid != os.geteuid():
            raise ProtocolError(f"a connection of user {peer.uid}")
        return peer

    def _admit(self, stream: socket.socket) -> Source:
        # The stream still has the deadline of the greeting.
        packed, fd = take_over(stream)
        try:
            return self._open(packed, fd, peer_of(stream).pid)
        finally:
            if fd >= 0:
                os.close(fd)

    def _land(self, stream: socket.socket, source: Source, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.nbytes > source.nbytes - piece.local:
                raise ProtocolError(f"{piece} lies outside of the writer's {source.nbytes} bytes")
        to, of = self.memory.address, source.address
        source.copy([(to + piece.remote, of + piece.local, piece.nbytes) for piece in pieces])
        # A writer that closes its channel first shuts the stream, and then reuses its memory: if the stream is still
        # open after a copy, the right bytes were copied. Otherwise the write must not be notified. A stream that is
        # shut may still have frames to be read.
        poller = select.poll()
        poller.register(stream, select.POLLRDHUP)
        if poller.poll(0):
            raise ConnectionError("the writer has closed the channel")


class LocalRegion(StreamRegion):
    """Memory that can be handed to another process; `host` does not matter. Only heads are sent."""

    crosses_wire: ClassVar[bool] = False
    sends_bytes: ClassVar[bool] = False
    fd = -1  # of the memory's file, opened read-only for peers; -1: none

    @classmethod
    def availability(cls) -> Availability:
        if sys.platform != "linux":
            return Availability(is_ok=False, why="this is not Linux", fix="use tcp")
        return Availability(is_ok=True)

    def close(self) -> None:
        super().close()
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_file(self) -> None:
        """Open the memory's file. :raises ChannelUnavailable: it has none, or not all of it."""
        memory = self.memory
        if memory.path is None:
            raise ChannelUnavailable("anonymous memory cannot be handed to another process; it must map a file")
        try:
            fd = os.open(memory.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ChannelUnavailable(f"cannot open {memory.path}: {error}") from error
        if os.fstat(fd).st_size < memory.nbytes:
            os.close(fd)
            raise ChannelUnavailable(f"{memory.path} is smaller than {memory}")
        self.fd = fd

    def _check(self, address: Address) -> None:
        """:raises ChannelUnavailable: the memory behind this address is not for this region."""

    def _dial(self, remote: RemoteRegion, timeout_s: float) -> socket.socket:
        address = address_in(remote)
        self._check(address)
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(timeout_s)
            stream.connect(_socket_name(self.scheme, address.name))
            if (uid := peer_of(stream).uid) != os.geteuid():  # another user must not learn the token
                raise ConnectionError(f"user {uid} listens there")
        except OSError:
            stream.close()
            raise
        return stream
