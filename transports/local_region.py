"""What the channels between processes of one host have in common: the writer hands its memory over with its greeting,
the reader copies from it.

So the reader checks each write before a byte lands, no path from a peer is opened, nobody writes to anybody's memory
(files are mapped to be read; CUDA maps a GPU's memory for both), and containers need not agree on paths. Then the
writer sends the heads of writes, which say what is to be copied from where. Two streams are two copying threads in the
reader.
"""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from pdx.errors import ProtocolError
from pdx.transports import local_socket
from pdx.transports.channel import Memory, Piece, RemoteRegion
from pdx.transports.inbound import Group, StreamListener
from pdx.transports.local_socket import Address
from pdx.transports.outbound import StreamChannel, open_streams
from pdx.transports.stream_region import StreamRegion
from pdx.transports.streams import Buffer

STREAMS = 2


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
    """Copies from the writers' memory. A group's luggage is the `Source` that its first stream has handed over."""

    def __init__(self, scheme: str, memory: Memory, wake: Callable[[], None]) -> None:
        """:raises ChannelUnavailable: it cannot listen."""
        self.scheme = scheme
        super().__init__(memory, wake, local_socket.listen(scheme))

    @abstractmethod
    def _open(self, packed: bytes, fd: int, pid: int) -> Source:
        """Open what the process `pid` has handed over; `fd` is closed behind this call, -1 if there was none.

        :raises ProtocolError: it is nothing that a writer hands over.
        :raises ChannelUnavailable: it cannot be opened here.
        """

    @abstractmethod
    def _copy(self, stream: socket.socket, source: Source, pieces: list[Piece]) -> None:
        """Copy these pieces, which lie inside both memories. No copy runs on when this has returned or raised.

        :raises ConnectionError: the writer is gone, and its bytes may have been others.
        :raises ChannelBroken: they cannot be copied.
        """

    def _detail(self) -> bytes:
        return local_socket.address_of(self._server, self._memory.gpu)

    def _origin(self, stream: socket.socket, address: Any) -> local_socket.Credentials:
        return local_socket.peer_of(stream)

    def _vet(self, stream: socket.socket) -> None:
        if (uid := local_socket.peer_of(stream).uid) != os.geteuid():
            raise ProtocolError(f"a connection of user {uid}")

    def _admit(self, stream: socket.socket, group: Group, *, is_first: bool) -> None:
        if not is_first:
            return
        # The stream still has the deadline of the greeting.
        packed, fd = local_socket.take_over(stream)
        try:
            group.luggage = self._open(packed, fd, local_socket.peer_of(stream).pid)
        finally:
            if fd >= 0:
                os.close(fd)

    def _land(self, stream: socket.socket, group: Group, pieces: list[Piece]) -> None:
        source: Source | None = group.luggage
        if source is None:
            raise ProtocolError("a write before its memory was handed over")
        for piece in pieces:
            if piece.nbytes > source.nbytes - piece.local:
                raise ProtocolError(f"{piece} lies outside of the writer's {source.nbytes} bytes")
        self._copy(stream, source, pieces)
        # A writer that closes its channel shuts the stream first and uses its memory again then: a copy behind which
        # the stream is still open was made of the right bytes. Any other must not be notified.
        if local_socket.is_shut(stream):
            raise ConnectionError("the writer has closed the channel")

    def _drop(self, stream: socket.socket, nbytes: int) -> None:
        """There is no payload."""

    def _dismiss(self, group: Group) -> None:
        if group.luggage is not None:
            group.luggage.close()
            group.luggage = None


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
        address = local_socket.address_in(remote)
        self._check(address)

        def hand_over(stream: socket.socket, index: int) -> None:
            if index == 0:
                self._hand_over(stream)

        dial = partial(local_socket.connect, self.scheme, address)
        streams = open_streams(dial, remote.token, self.streams, timeout_s, hand_over)
        channel = LocalChannel(self._memory.nbytes, remote, wake)
        channel.start(streams)
        return channel
