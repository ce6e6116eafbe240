"""Channels by NIXL with its UCX backend: RDMA if there is any, else shared memory between processes or TCP.

region → one agent, with the memory registered once · remote region → the agent's metadata · channel → the other agent,
loaded · write → one transfer request with a descriptor per piece · notification → NIXL's own, sent when the request has
completed, and a completed request has been flushed: its bytes are in the remote memory.

Memory of a GPU is registered as such, if NIXL's UCX is one with CUDA; either side of a write may be a GPU's.

Writes are one-sided: the receiver's processor sees none of them and cannot refuse any. Messages of an expelled session
are ignored, but its writes may still land. Memory becomes free when its writers have said goodbye or were processes of
this host that are gone.

UCX has no authentication: anyone who reaches its port may write to this process (docs/adr/0018-nixl-and-ucx.md).
"""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import msgspec

from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable
from pdx.transports.channel import Availability, Memory, Notification, Region, RemoteRegion, decoded
from pdx.transports.nixl import agent as nixl_agent
from pdx.transports.nixl.agent import NixlAgent
from pdx.transports.nixl.channel import LOOK_S, NixlChannel, NixlDetail, NixlPeer
from pdx.transports.nixl.onesided import Ledger
from pdx.transports.over_ucx import sealed, settings_for, unsealed

_MAX_OWED = 1024  # agents
_details = msgspec.msgpack.Decoder(NixlDetail)


class NixlListener(Ledger):
    """Receives notifications, and does not see writes. Those of expelled sessions may land until the region closes."""

    def __init__(self, region: NixlRegion) -> None:
        agent, memory = region.agent, region.memory
        detail = NixlDetail(agent.name, agent.metadata, memory.address, memory.nbytes, agent.place)
        super().__init__(region.scheme, memory.nbytes, region.wake, msgspec.msgpack.encode(detail))
        self._region = region

    def invite(self, token: bytes) -> RemoteRegion:
        return sealed(super().invite(token))

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        """True only for a session that was expelled and whose writers stopped or are dead."""
        self._hear()
        return super().revoke(token, offset, nbytes)

    def take(self) -> list[Notification]:
        self._hear()
        return super().take()

    def expel(self, token: bytes) -> None:
        self._hear()
        super().expel(token)

    def _hear(self) -> None:
        for message in self._region.messages():
            self.hear(message)


class NixlRegion(Region):
    """Memory registered with an agent of its own, under an unguessable name that is never used again."""

    scheme: ClassVar[str] = "nixl"
    checks_writes: ClassVar[bool] = False
    is_polled: ClassVar[bool] = True
    is_authenticated: ClassVar[bool] = False
    takes_gpus: ClassVar[bool] = True
    settings: ClassVar[dict[str, str]] = {}  # more of UCX

    def __init__(self, memory: Memory, host: str, wake: threading.Event) -> None:
        """`wake` is set for transfers, not for notifications. The user's UCX_NET_DEVICES takes precedence; UCX_TLS
        selects UCX's transports."""
        super().__init__(memory, host, wake)
        self.agent = NixlAgent(memory, settings_for(host, **self.settings))  # it is listening from here on
        # The region's lock guards all below, too, and loading and unloading of agents.
        self._peers: dict[str, NixlPeer] = {}
        self._owed: dict[str, list[bytes]] = {}  # farewells that could not be sent, by agent
        self._unended: set[NixlChannel] = set()  # also closed ones with requests in flight
        self._has_ended = False
        # NIXL does not tell when a transfer is over, and sends notifications only when it is asked.
        self._has_transfers = threading.Event()
        self._thread = threading.Thread(target=self._look, name="pdx-nixl", daemon=True)
        self._thread.start()

    @classmethod
    def availability(cls) -> Availability:
        return nixl_agent.availability()

    def _listening(self) -> NixlListener:
        return NixlListener(self)

    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: threading.Event) -> NixlChannel:
        detail = decoded(_details, unsealed(remote), ChannelBroken, "a detail of a NIXL region")
        with self._lock:
            if not self._is_open:
                raise ChannelBroken("the region is closed")
            channel = NixlChannel(self, self._join(detail), remote, wake)
            self._unended.add(channel)
        try:
            channel.greet(timeout_s)
            self._say_farewells(channel.peer.name)
        except ChannelError:
            channel.close()
            raise
        return channel

    def messages(self) -> list[bytes]:
        """The messages of other agents since the last call."""
        with self._lock:
            return self.agent.take() if self._is_open else []

    def look_after(self) -> None:
        """A transfer is in flight: have the region's thread advance it."""
        self._has_transfers.set()

    def ended(self, channel: NixlChannel, farewell: bytes) -> None:
        """NIXL is done with everything of this channel: tell its peer."""
        with self._lock:
            if channel not in self._unended:
                return
            self._unended.discard(channel)
            peer = channel.peer
            try:
                self.agent.notify(peer.name, farewell)
            except self.agent.errors:
                if len(self._owed) < _MAX_OWED:
                    self._owed.setdefault(peer.name, []).append(farewell)
            peer.channels -= 1
            if peer.is_broken and not peer.channels and self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
                self.agent.unload(peer.name)

    def close(self) -> None:
        """UCX ends with the agent; after that only another process of this host could write here."""
        super().close()
        for channel in list(self._unended):
            if not channel.is_closed:  # one that is connecting
                channel.close()
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            for channel in self._unended:
                channel.drop()
            self._unended.clear()
            self._peers.clear()
        self._has_transfers.set()
        self._thread.join()
        self.agent.close()

    def _look(self) -> None:
        while self._is_open:
            self._has_transfers.wait()
            self._has_transfers.clear()
            with self._lock:
                channels = list(self._unended)
            if sum(channel.sweep() for channel in channels):
                self._has_transfers.set()
                time.sleep(LOOK_S)

    def _join(self, detail: NixlDetail) -> NixlPeer:
        peer = self._peers.get(detail.agent)
        if peer is not None and peer.is_broken:
            # Requests in flight to it must end first: they use keys that end with the peer.
            if any(channel.has_transfers for channel in self._unended if channel.peer is peer):
                raise ChannelBroken(f"writes to {peer.name} are still failing")
            self.agent.unload(peer.name)
            peer = None
        if peer is None:
            peer = self._load(detail)
        peer.channels += 1
        return peer

    def _load(self, detail: NixlDetail) -> NixlPeer:
        if detail.agent == self.agent.name:
            raise ChannelUnavailable("NIXL does not write from an agent to itself")
        try:
            name = self.agent.load(detail.metadata)
        except self.agent.errors as error:
            raise ChannelBroken(f"NIXL cannot load {detail.agent}: {error}") from error
        peer = NixlPeer(detail)
        if name != peer.name:
            raise ChannelBroken(f"the metadata of {peer.name} are those of {name!r}")
        self._peers[name] = peer
        return peer

    def _say_farewells(self, name: str) -> None:
        with self._lock:
            for farewell in self._owed.pop(name, []):
                try:
                    self.agent.notify(name, farewell)
                except self.agent.errors as error:
                    raise ChannelBroken(f"NIXL: {error}") from error
