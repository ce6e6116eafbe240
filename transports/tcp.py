"""TCP: works between any two hosts. Bytes go from memory to the socket and from the socket to memory, without a copy;
or encoded, if the writer is asked to and the reader says that it decodes them.

A channel is two streams, and each write goes over one of them. Unlike by `pdx.transports.tls`, nothing is encrypted:
the session's token, which came over the nodes' authenticated connection, opens a stream, but anyone who can read the
network can read it. Streams may be idle forever; `_prepare` says how dead peers are noticed.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from pdx.errors import ChannelUnavailable
from pdx.transports.channel import Piece, RemoteRegion, decoded
from pdx.transports.streams.inbound import StreamListener
from pdx.transports.streams.outbound import StreamRegion
from pdx.transports.streams.sockets import fill_all, take

KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
UNANSWERED_S = 30
_BACKLOG = 64
_SCRATCH_BYTES = 256 << 10


class Address(msgspec.Struct, array_like=True, frozen=True):
    """Where a listener is: a numeric address, never a name, so that nothing a peer says is looked up; and whether it
    decodes payloads. `digest`: see `pdx.transports.tls`."""

    host: Annotated[str, Meta(min_length=2, max_length=64)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    decodes: bool = False
    digest: Annotated[bytes, Meta(max_length=32)] = b""


_addresses = msgspec.msgpack.Decoder(Address)


class TcpListener(StreamListener):
    """Receives straight into a region's memory."""

    takes_coded: ClassVar[bool] = True

    def _meet(self, stream: socket.socket, address: Any) -> str:
        _prepare(stream)
        return str(address[0])

    def _land(self, stream: socket.socket, source: None, pieces: list[Piece]) -> None:
        view = self.memory.view
        fill_all(stream, [view[piece.remote : piece.remote + piece.nbytes] for piece in pieces])

    def _drop(self, stream: socket.socket, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
        while nbytes:
            part = scratch[:nbytes]
            take(stream, part)
            nbytes -= part.nbytes


class TcpRegion(StreamRegion):
    """Any host memory; nothing is registered anywhere. It listens on `host` and no other address, at a free port."""

    scheme: ClassVar[str] = "tcp"
    sends_bytes: ClassVar[bool] = True
    takes_codec: ClassVar[bool] = True

    def _listening(self) -> TcpListener:
        server = bind(self.host)
        host, port = server.getsockname()[:2]
        return TcpListener(self, server, msgspec.msgpack.encode(Address(host, port, decodes=True)))

    def _decodes(self, remote: RemoteRegion) -> bool:
        return address_of(remote.detail).decodes

    def _dial(self, remote: RemoteRegion, timeout_s: float) -> socket.socket:
        family, address = _target(remote.detail)
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            _prepare(stream)
            stream.settimeout(timeout_s)
            stream.connect(address)
        except OSError:
            stream.close()
            raise
        return stream


def address_of(detail: bytes) -> Address:
    """:raises ChannelUnavailable: it is no address."""
    return decoded(_addresses, detail, ChannelUnavailable, "an address of a tcp listener")


def _prepare(stream: socket.socket) -> None:
    """Set options of either end of a stream."""
    # Heads and acknowledgements are small and urgent.
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # An idle stream has no deadline, so the kernel asks now and then whether the other host still is there; that also
    # keeps firewalls and address translators from forgetting an idle stream.
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    # With bytes in flight there are no probes: retransmission alone would take a quarter of an hour to give up.
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_S * 1000)


def bind(host: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise ChannelUnavailable(f"{host} is no address to be reached at; name one of this host's")
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ChannelUnavailable(f"cannot listen on {host}: {error}") from error


def _target(detail: bytes) -> tuple[socket.AddressFamily, Any]:
    """Where to connect, according to a peer's detail."""
    address = address_of(detail)
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (ValueError, OSError) as error:
        raise ChannelUnavailable(f"not an address of a tcp listener: {error}") from error
    family, _, _, _, target = found[0]
    return family, target
