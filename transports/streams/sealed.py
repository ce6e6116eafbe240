"""TLS 1.3 around a stream socket: its traffic is sealed, everything else is as ever.

A reader makes its own certificate, and tells its digest over the nodes' authenticated connection; the dialing side
checks that digest and nothing else: no names, no authority, no dates. It shows the session's token once the reader has
proved its certificate. So both sides are known, and nobody between them can read or change anything.

Records go through memory, many of them per system call: a call for each would cost as much as the cipher. A stream that
is cut off has ended: what is not acknowledged counts as lost anyway.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pdx.transports.channel import Buffer
from pdx.transports.streams.coded import Blocks

DIGEST_BYTES = 32
_RECORD_BYTES = 16 << 10
_AT_ONCE_BYTES = 256 << 10  # sealed in one piece, or received: more would not stay in a core's cache


def reader_context() -> tuple[ssl.SSLContext, bytes]:
    """The context of the listening side, with a new certificate, and the certificate's digest. The key is in no file.

    :raises ImportError: `cryptography` is not installed.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    made = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number()).not_valid_before(made)
    cert = builder.not_valid_after(made.replace(year=9999)).sign(key, hashes.SHA256())
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + cert.public_bytes(serialization.Encoding.PEM)
    context = _only_13(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a session is never resumed
    with open(os.memfd_create("pdx-tls", os.MFD_CLOEXEC), "w+b") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, hashlib.sha256(cert.public_bytes(serialization.Encoding.DER)).digest()


def writer_context() -> ssl.SSLContext:
    """The context of the dialing side, which checks the certificate itself (`SealedSocket`)."""
    context = _only_13(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _only_13(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class SealedSocket(socket.socket):
    """A connected stream, which this takes over. One thread, except for `shutdown`. The handshake comes with the first
    byte. `settimeout` sets one deadline for everything until its next call."""

    def __init__(self, stream: socket.socket, context: ssl.SSLContext, digest: bytes = b"") -> None:
        """`digest`: of the certificate of the side that was dialed; empty: this is that side."""
        timeout_s = stream.gettimeout()
        super().__init__(stream.family, stream.type, stream.proto, fileno=stream.detach())
        self._digest = digest
        self._come, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._come, self._going, server_side=not digest)
        self._is_open = False
        self._scratch = memoryview(bytearray(_AT_ONCE_BYTES))
        self.settimeout(timeout_s)

    def settimeout(self, value: float | None) -> None:
        self._until = None if value is None else time.monotonic() + value
        super().settimeout(value)

    def seal(self, buffers: Iterable[Buffer]) -> bytes:
        """The bytes to send for these, behind all that was sealed before."""
        for buffer in buffers:
            left = memoryview(buffer)
            while left.nbytes:
                left = left[self._tls.write(left) :]
        return self._going.read()

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._open()
        super().sendall(self.seal([data]), flags)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """`MSG_WAITALL` fills all of the buffer."""
        self._open()
        view, done = memoryview(buffer), 0
        while done < view.nbytes:
            try:
                got: Any = self._tls.read(view.nbytes - done, view[done:])
            except ssl.SSLWantReadError:
                if (done and not flags & socket.MSG_WAITALL) or not self._pull():
                    break
                continue
            if not got:  # the peer has said that this is the end
                break
            done += got
        return done

    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        total = 0
        for buffer in buffers:
            got = self.recv_into(buffer, 0, flags)
            total += got
            if got < memoryview(buffer).nbytes:
                break
        return total, [], 0, None

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """All that has come, perhaps more than `bufsize`: nothing may be left that `poll` would not see."""
        self._open()
        found = b""
        while True:
            try:
                more = self._tls.read(_RECORD_BYTES)
            except ssl.SSLWantReadError:
                if found or not self._pull():
                    return found
                continue
            if not more:
                return found
            found += more

    def _open(self) -> None:
        while not self._is_open:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                if not self._pull():
                    raise ConnectionError("the stream ended in the middle of the handshake") from None
                continue
            cert = self._tls.getpeercert(binary_form=True) if self._digest else None
            if self._digest and not hmac.compare_digest(hashlib.sha256(cert or b"").digest(), self._digest):
                raise ConnectionError("another one answers there: its certificate is not the one that was told")
            self._is_open = True
            super().sendall(self._going.read())

    def _pull(self) -> bool:
        """Wait for bytes and take them. False: the stream has ended."""
        if self._going.pending:
            super().sendall(self._going.read())
        if self._until is not None:
            super().settimeout(max(self._until - time.monotonic(), 1e-6))
        got = super().recv_into(self._scratch)
        self._come.write(self._scratch[:got])
        return bool(got)


class SealedServer(socket.socket):
    """A listening socket whose accepted streams are `SealedSocket`s."""

    def __init__(self, server: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(server.family, server.type, server.proto, fileno=server.detach())
        self._context = context

    def accept(self) -> tuple[SealedSocket, Any]:
        stream, address = super().accept()
        return SealedSocket(stream, self._context), address


class SealedBlocks:
    """What to send for some bytes, and for the encoded blocks that may follow. False when all of it was taken."""

    def __init__(self, stream: socket.socket, buffers: Sequence[Buffer], coded: Blocks | None) -> None:
        assert isinstance(stream, SealedSocket)
        self._stream, self._coded = stream, coded
        self._left = deque(memoryview(buffer) for buffer in buffers)

    def __bool__(self) -> bool:
        return bool(self._left or self._coded)

    def take(self) -> list[bytes]:
        """Seal the next part."""
        if not self._left and self._coded:
            return [self._stream.seal(self._coded.take())]
        return [self._stream.seal(self._next())]

    def _next(self) -> Iterator[memoryview]:
        room = _AT_ONCE_BYTES
        while self._left and room:
            buffer = self._left.popleft()
            yield buffer[:room]
            if buffer.nbytes > room:
                self._left.appendleft(buffer[room:])
            room -= min(room, buffer.nbytes)
