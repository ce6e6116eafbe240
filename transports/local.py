"""Channels between processes of one user on one host: the writer hands its memory over with the greeting of each
stream, the reader copies from it.

So the reader checks each write before a byte lands, no path from a peer is opened, nobody writes to anybody's memory
(files are mapped to be read; CUDA maps a GPU's memory for both), and containers need not agree on paths. Then the
writer sends the heads of writes, which say what is to be copied from where. Two streams are two copying threads in the
reader.

Sockets lie in the abstract namespace: nothing is left behind by a process that was killed. Anybody may connect, so both
ends look at the other's user before they say anything.
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
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol

import msgspec
from msgspec import Meta

from pdx.errors import ChannelUnavailable, ProtocolError
from pdx.security.unix_peer import Credentials, peer_of, receive_fds
from pdx.telemetry.host import host_id
from pdx.transports.channel import Availability, Memory, Piece, RemoteRegion
from pdx.transports.inbound import StreamListener
from pdx.transports.outbound import StreamChannel, StreamRegion, open_streams
from pdx.transports.streams import Buffer, fill

STREAMS = 2
MAX_LUGGAGE_BYTES = 512
_BACKLOG = 64
_NETWORK = "/proc/self/ns/net"
_LENGTH = struct.Struct("!H")


class Address(msgspec.Struct, array_like=True, frozen=True):
    """Where a listener is: the boot of a host, its network namespace, and a name in it that nobody can guess.

    `gpu`: the UUID of the GPU that its memory lies on, empty for host memory.
    """

    boot: Annotated[str, Meta(max_length=64)]
    network: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    gpu: Annotated[str, Meta(max_length=64)] = ""


def availability() -> Availability:
    """On Linux."""
    if sys.platform != "linux":
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
    head, fds, _ = receive_fds(stream, _LENGTH.size, 1)
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


def _rest(stream: socket.socket, nbytes: int, deadline: float) -> bytes:
    rest = bytearray(nbytes)
    if nbytes and not fill(stream, rest, deadline=deadline):
        raise ConnectionError("the stream ended before what belongs to its greeting")
    return bytes(rest)


@functools.cache  # no process of ours changes either, and a node without descriptors must go on inviting peers
def _here() -> tuple[str, str]:
    return host_id(), os.readlink(_NETWORK)


def _socket_name(scheme: str, name: str) -> str:
    return f"\0pdx-{scheme}-{name}"


class Source(Protocol):
    """A writer's memory as its reader has opened it."""

    nbytes: int

    def close(self) -> None:
        """Nobody reads it any more. Once."""


class LocalChannel(StreamChannel):
    """Sends heads only; `close` is final for the reader, too: it looks at the stream behind each copy."""

    def _payload(self, pieces: list[Piece]) -> Sequence[Buffer]:
        return ()


class LocalListener(StreamListener):
    """Copies from the writers' memory. A stream's luggage is the `Source` that was handed over through it."""

    def __init__(self, scheme: str, memory: Memory, wake: Callable[[], None]) -> None:
        """:raises ChannelUnavailable: it cannot listen."""
        self.scheme = scheme
        super().__init__(memory, wake, listen(scheme))

    @abstractmethod
    def _open(self, packed: bytes, fd: int, pid: int) -> Source:
        """Open what the process `pid` has handed over; `fd` is closed behind this call, -1 if there was none.

        :raises ProtocolError: it is nothing that a writer hands over.
        :raises ChannelUnavailable: it cannot be opened here.
        """

    @abstractmethod
    def _copy(self, source: Source, pieces: list[Piece]) -> None:
        """Copy these pieces, which lie inside both memories. No copy runs on when this has returned or raised.

        :raises ConnectionError: the writer is gone, and its bytes may have been others.
        :raises ChannelBroken: they cannot be copied.
        """

    def _detail(self) -> bytes:
        return address_of(self._server, self._memory.gpu)

    def _origin(self, stream: socket.socket, address: Any) -> Credentials:
        return peer_of(stream)

    def _vet(self, stream: socket.socket) -> None:
        if (uid := peer_of(stream).uid) != os.geteuid():
            raise ProtocolError(f"a connection of user {uid}")

    def _admit(self, stream: socket.socket) -> Source:
        # The stream still has the deadline of the greeting.
        packed, fd = take_over(stream)
        try:
            return self._open(packed, fd, peer_of(stream).pid)
        finally:
            if fd >= 0:
                os.close(fd)

    def _land(self, stream: socket.socket, luggage: Source, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.nbytes > luggage.nbytes - piece.local:
                raise ProtocolError(f"{piece} lies outside of the writer's {luggage.nbytes} bytes")
        self._copy(luggage, pieces)
        # A writer that closes its channel shuts the stream first and uses its memory again then: a copy behind which
        # the stream is still open was made of the right bytes. Any other must not be notified.
        if is_shut(stream):
            raise ConnectionError("the writer has closed the channel")

    def _drop(self, stream: socket.socket, nbytes: int) -> None:
        """There is no payload."""

    def _dismiss(self, luggage: Source | None) -> None:
        if luggage is not None:
            luggage.close()


class LocalRegion(StreamRegion):
    """Memory that can be handed to another process."""

    crosses_wire: ClassVar[bool] = False
    streams: ClassVar[int] = STREAMS

    @abstractmethod
    def _hand_over(self, stream: socket.socket) -> None:
        """Send this region's memory, to be read.

        :raises ChannelUnavailable: it cannot be handed over.
        :raises OSError: the stream broke.
        """

    def _check(self, address: Address) -> None:
        """:raises ChannelUnavailable: the memory behind this address is not for this region."""

    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: Callable[[], None]) -> LocalChannel:
        address = address_in(remote)
        self._check(address)
        dial = partial(connect, self.scheme, address)
        streams = open_streams(dial, remote.token, self.streams, timeout_s, self._hand_over)
        channel = LocalChannel(self._memory.nbytes, remote, wake)
        channel.start(streams)
        return channel
