"""TCP with TLS 1.3 (`pdx.transports.streams.sealed`): for networks where others may listen. It is chosen only if it is
named, because `tcp` takes a quarter of its CPU time."""

from __future__ import annotations

import importlib.util
import socket
from typing import ClassVar

import msgspec

from pdx.errors import ChannelUnavailable
from pdx.extras import install
from pdx.transports.channel import Availability, RemoteRegion
from pdx.transports.streams import sealed
from pdx.transports.tcp import Address, TcpListener, TcpRegion, address_of, bind


class TlsRegion(TcpRegion):
    scheme: ClassVar[str] = "tls"
    seals: ClassVar[type[sealed.SealedBlocks] | None] = sealed.SealedBlocks

    @classmethod
    def availability(cls) -> Availability:
        if importlib.util.find_spec("cryptography") is None:
            return Availability(False, "cryptography is not installed", install("tls"))
        return Availability(True)

    def _listening(self) -> TcpListener:
        context, digest = sealed.reader_context()
        server = bind(self.host)
        host, port = server.getsockname()[:2]
        detail = msgspec.msgpack.encode(Address(host, port, True, digest))
        return TcpListener(self, sealed.SealedServer(server, context), detail)

    def _dial(self, remote: RemoteRegion, timeout_s: float) -> socket.socket:
        digest = address_of(remote.detail).digest
        if len(digest) != sealed.DIGEST_BYTES:
            raise ChannelUnavailable("not an address of a tls listener: it tells no certificate")
        return sealed.SealedSocket(super()._dial(remote, timeout_s), sealed.writer_context(), digest)
