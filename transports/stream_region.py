"""What regions of the stream backends have in common: one listener, many channels, and an end of all of them."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable

from pdx.errors import ChannelBroken, ChannelUnavailable
from pdx.transports.channel import Memory, Region, RemoteRegion
from pdx.transports.inbound import StreamListener
from pdx.transports.outbound import StreamChannel


class StreamRegion(Region):
    """Keeps what it has opened. Any thread may use it."""

    def __init__(self, memory: Memory, host: str, wake: Callable[[], None]) -> None:
        self._memory = memory
        self._host = host
        self._wake = wake
        self._lock = threading.Lock()  # guards all below
        self._listener: StreamListener | None = None
        self._channels: list[StreamChannel] = []
        self._is_open = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._memory} {self._listener} {len(self._channels)} channels>"

    @abstractmethod
    def _listening(self) -> StreamListener:
        """A new listener, not started.

        :raises ChannelUnavailable: the address cannot be had.
        """

    @abstractmethod
    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: Callable[[], None]) -> StreamChannel:
        """A new channel, started. Raises as `Region.connect`."""

    def listen(self) -> StreamListener:
        """See `Region.listen`."""
        with self._lock:
            if not self._is_open:
                raise ChannelUnavailable("the region is closed")
            if self._listener is None:
                self._listener = self._listening()
                self._listener.start()
            return self._listener

    def connect(
        self, remote: RemoteRegion, *, timeout_s: float = 5.0, wake: Callable[[], None] | None = None
    ) -> StreamChannel:
        """See `Region.connect`."""
        if remote.scheme != self.scheme:
            raise ChannelUnavailable(f"a region of scheme {remote.scheme!r} cannot be reached over {self.scheme}")
        channel = self._connected(remote, timeout_s, wake or self._wake)
        with self._lock:
            self._channels = [each for each in self._channels if not each.is_closed] + [channel]
            is_open = self._is_open
        if not is_open:
            channel.close()
            raise ChannelBroken("the region is closed")
        return channel

    def close(self) -> None:
        """See `Region.close`."""
        with self._lock:
            self._is_open = False
            channels, self._channels = self._channels, []
            listener = self._listener
        for channel in channels:
            channel.close()
        if listener is not None:
            listener.close()
