"""A write by NIXL, and the channel it goes over. Regions and listeners are in `pdx.transports.nixl.region`."""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from pdx.errors import ChannelBroken, ChannelError, TransferAborted
from pdx.transports.channel import MAX_DETAIL_BYTES, Channel, Offset, Piece, RemoteRegion, Transfer, check_write
from pdx.transports.nixl.agent import Place
from pdx.transports.nixl.onesided import BYE, HELLO, WRITE, compose, this_process

if TYPE_CHECKING:
    from pdx.transports.nixl.region import NixlRegion


LOOK_S = 0.0002  # between two polls of transfers, while there are some


class NixlDetail(msgspec.Struct, array_like=True, frozen=True):
    """What a writer needs: who the agent is, its metadata, and where its memory begins."""

    agent: Annotated[str, Meta(pattern=r"^pdx-[0-9a-f]{32}\Z")]
    metadata: Annotated[bytes, Meta(min_length=1, max_length=MAX_DETAIL_BYTES)]
    address: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    nbytes: Offset
    place: Place


class NixlPeer:
    """A remote agent, which the local one loads once, however many channels lead to it.

    It stays loaded until it breaks: unloading a healthy one leaves UCX's connection behind in NIXL.
    """

    def __init__(self, detail: NixlDetail) -> None:
        self.name = detail.agent
        self.address = detail.address
        self.place = detail.place
        self.channels = 0  # guarded by the region's lock
        self.is_broken = False


class NixlTransfer(Transfer):
    """A request to NIXL. It holds the handle until NIXL is done with it, even if nothing waits for it any more."""

    def __init__(self, channel: NixlChannel, handle: int | None, message: bytes) -> None:
        super().__init__(channel.wake)
        self._channel = channel
        self._message = message
        self._lock = threading.Lock()  # guards all below, and each use of the handle
        self._handle = handle
        self._is_aborted = False

    def poll(self) -> bool:
        """If it is not polled, the region advances it."""
        if not self._is_over:
            self.advance()
        return self._is_over

    def abort(self) -> None:
        """NIXL has begun at once and cannot stop; the write will not be notified."""
        self._is_aborted = True

    def advance(self) -> None:
        """Check whether NIXL is done."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is looking
        try:
            if self._handle is None:
                return
            agent = self._channel.agent
            error: ChannelError | None = None
            try:
                if not agent.is_done(self._handle):
                    return
                if self._is_aborted:
                    error = TransferAborted("it was aborted when it was on its way")
                elif not self._is_over:
                    agent.notify(self._channel.peer.name, self._message)
            except agent.errors as broken:
                error = ChannelBroken(f"NIXL: {broken}")
                self._channel.peer.is_broken = True
            agent.release(self._handle)
            self._handle = None
            self.finish(error)
        finally:
            self._lock.release()
        self._channel.settle(self)

    def give_up(self, error: ChannelError) -> None:
        """End the transfer for its waiters."""
        with self._lock:
            self.finish(error)

    def drop(self) -> None:
        """Release the handle: the agent ends."""
        with self._lock:
            if self._handle is not None:
                self._channel.agent.release(self._handle)
                self._handle = None


class NixlChannel(Channel):
    """From the local agent to one session of a remote one."""

    def __init__(self, region: NixlRegion, peer: NixlPeer, remote: RemoteRegion, wake: threading.Event) -> None:
        self.wake = wake
        self.agent = region.agent
        self.peer = peer
        self.region = region
        self._remote = remote
        self._name = secrets.token_bytes(8)  # the receiver tells the connections of one session apart by it
        self._lock = threading.Lock()  # guards all below
        self._transfers: set[NixlTransfer] = set()
        self._is_open = True
        self._has_ended = False

    @property
    def has_transfers(self) -> bool:
        """Whether NIXL has requests in flight."""
        return bool(self._transfers)

    def greet(self, timeout_s: float) -> None:
        """Read a byte, which makes UCX connect, and say hello. :raises ChannelBroken: it does not answer."""
        begin = functools.partial(self.agent.read_byte, self.peer.name, self.peer.address, self.peer.place)
        greeting = self._begin(begin, self._message(HELLO, this_process()))
        deadline = time.monotonic() + timeout_s
        while not greeting.poll():
            if time.monotonic() > deadline:
                raise ChannelBroken(f"{self.peer.name} does not answer within {timeout_s} s")
            time.sleep(LOOK_S)
        if greeting.error is not None:
            raise greeting.error

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """Between processes of one host the copying is done here, at the speed of memory."""
        source, target = self.region.memory, self.peer.address
        check_write(pieces, notify, source.nbytes, self._remote.nbytes)
        local = [(source.address + piece.local, piece.nbytes) for piece in pieces]
        remote = [(target + piece.remote, piece.nbytes) for piece in pieces]
        begin = functools.partial(self.agent.write, self.peer.name, local, remote, self.peer.place)
        return self._begin(begin, self._message(WRITE, notify))

    def close(self) -> None:
        """NIXL goes on with writes in flight, which are not notified."""
        with self._lock:
            self._is_open = False
            self.is_closed = True
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.give_up(ChannelBroken("the channel was closed"))
        if self.sweep():
            self.region.look_after()

    def sweep(self) -> bool:
        """Advance its transfers. Returns whether some are still in flight."""
        for transfer in list(self._transfers):
            transfer.advance()
        self._end_if_idle()
        return bool(self._transfers)

    def settle(self, transfer: NixlTransfer) -> None:
        """NIXL is done with this transfer."""
        with self._lock:
            self._transfers.discard(transfer)
        self._end_if_idle()

    def drop(self) -> None:
        """Drop all transfers: the agent ends."""
        for transfer in list(self._transfers):
            transfer.drop()
        with self._lock:
            self._transfers.clear()

    def _begin(self, begin: Callable[[], int], message: bytes) -> NixlTransfer:
        with self._lock:
            error = None if self._is_open else ChannelBroken("the channel is closed")
            if self._is_open and self.peer.is_broken:
                error = ChannelBroken(f"{self.peer.name} is gone")
            handle = None
            if error is None:
                try:
                    handle = begin()
                except self.agent.errors as broken:
                    error = ChannelBroken(f"NIXL: {broken}")
                    self.peer.is_broken = True
            transfer = NixlTransfer(self, handle, message)
            if error is None:
                self._transfers.add(transfer)
            else:
                transfer.give_up(error)
        if not transfer.poll():
            self.region.look_after()
        return transfer

    def _message(self, kind: int, payload: bytes) -> bytes:
        return compose(self._remote.token, kind, self._name, payload)

    def _end_if_idle(self) -> None:
        with self._lock:
            if self._is_open or self._transfers or self._has_ended:
                return
            self._has_ended = True
        self.region.ended(self, self._message(BYE, b""))
