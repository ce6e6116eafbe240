"""Channels by NIXL with its UCX backend: RDMA where there is some, else shared memory between processes or TCP.

region → one agent, with the memory registered once · remote region → the agent's metadata · channel → the other agent,
loaded · write → one transfer request with a descriptor per piece · notification → NIXL's own, sent when the request has
completed, and a completed request has been flushed: its bytes are in the remote memory.

Writes are one-sided: the receiver's processor sees none of them and cannot refuse any. Expelling a session closes its
mouth, not its hands. Memory comes free when its writers have said goodbye or were processes of this host that are gone.

UCX has no authentication: whoever reaches its port may write to this process (docs/adr/0014-ucx-and-nixl.md).
"""

from __future__ import annotations

import functools
import ipaddress
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from pdx.channel import (
    MAX_DETAIL_BYTES,
    Availability,
    Channel,
    Listener,
    Memory,
    Notification,
    Offset,
    Piece,
    Region,
    RemoteRegion,
    Transfer,
    check_write,
)
from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable, TransferAborted
from pdx.transports import nixl_agent
from pdx.transports.nixl_agent import NixlAgent
from pdx.transports.onesided import BYE, HELLO, WRITE, Ledger, compose, this_process
from pdx.transports.sealed import seal, unseal

_GREETING_POLL_S = 0.0003
_SETTINGS = {"KEEPALIVE_INTERVAL": "1s"}  # of UCX: a dead process of this host is noticed after two of them
_LOOPBACK_SETTINGS = {"NET_DEVICES": "lo"}


class NixlDetail(msgspec.Struct, array_like=True, frozen=True):
    """What a writer needs: who the agent is, its metadata, and where its memory begins."""

    agent: Annotated[str, Meta(pattern=r"^pdx-[0-9a-f]{32}\Z")]
    metadata: Annotated[bytes, Meta(min_length=1, max_length=MAX_DETAIL_BYTES)]
    address: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    nbytes: Offset


class _Peer:
    """Another agent as ours has loaded it: once, however many channels lead to it.

    It stays loaded until it breaks: NIXL's way of unloading one that is well leaves UCX's connection behind.
    """

    def __init__(self, detail: NixlDetail) -> None:
        self.name = detail.agent
        self.address = detail.address
        self.channels = 0  # guarded by the region's lock
        self.is_broken = False


class NixlTransfer(Transfer):
    """A request to NIXL. It holds the handle until NIXL is done with it, also when nobody waits for it any more."""

    def __init__(self, channel: NixlChannel, handle: int | None, message: bytes) -> None:
        self._channel = channel
        self._message = message
        self._lock = threading.Lock()  # guards all below, and each use of the handle
        self._handle = handle
        self._is_over = False
        self._is_aborted = False

    @property
    def is_free(self) -> bool:
        """Whether NIXL is done with the local bytes."""
        return self._handle is None

    def poll(self) -> bool:
        """See `Transfer.poll`. Polling is what sends the notification."""
        if not self._is_over:
            self.advance()
        return self._is_over

    def abort(self) -> None:
        """NIXL has begun at once and cannot stop; when it is done, nobody is notified."""
        self._is_aborted = True

    def advance(self) -> None:
        """Look whether NIXL is done."""
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
            self._end(error)
        finally:
            self._lock.release()
        self._channel.settle(self)

    def give_up(self, error: ChannelError) -> None:
        """It is over for whoever waits."""
        with self._lock:
            self._end(error)

    def drop(self) -> None:
        """The agent ends."""
        with self._lock:
            if self._handle is not None:
                self._channel.agent.release(self._handle)
                self._handle = None

    def _end(self, error: ChannelError | None) -> None:
        if not self._is_over:
            self.error = error
            self._is_over = True


class NixlChannel(Channel):
    """From our agent to one session of another one."""

    def __init__(self, region: NixlRegion, peer: _Peer, remote: RemoteRegion) -> None:
        self.agent = region.agent
        self.peer = peer
        self._region = region
        self._remote = remote
        self._name = secrets.token_bytes(8)  # the receiver tells the connections of one session apart by it
        self._lock = threading.Lock()  # guards all below
        self._transfers: set[NixlTransfer] = set()
        self._is_open = True
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<NixlChannel to {self.peer.name} {len(self._transfers)} transfers>"

    @property
    def is_idle(self) -> bool:
        """Whether NIXL is done with all its transfers, as far as is known."""
        for transfer in list(self._transfers):
            transfer.advance()
        return not self._transfers

    def greet(self, timeout_s: float) -> None:
        """Read a byte, which makes UCX connect, and say hello.

        :raises ChannelBroken: it does not answer.
        """
        deadline = time.monotonic() + timeout_s
        begin = functools.partial(self.agent.read_byte, self.peer.name, self.peer.address)
        greeting = self._begin(begin, self._message(HELLO, this_process()))
        while not greeting.poll():
            if time.monotonic() > deadline:
                raise ChannelBroken(f"{self.peer.name} does not answer within {timeout_s} s")
            time.sleep(_GREETING_POLL_S)
        if greeting.error is not None:
            raise greeting.error

    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """See `Channel.write`. Between processes of one host the copying is done here, at the speed of memory."""
        source, target = self._region.memory, self.peer.address
        check_write(pieces, notify, source.nbytes, self._remote.nbytes)
        local = [(source.address + piece.local, piece.nbytes, 0) for piece in pieces]
        remote = [(target + piece.remote, piece.nbytes, 0) for piece in pieces]
        begin = functools.partial(self.agent.write, self.peer.name, local, remote)
        transfer = self._begin(begin, self._message(WRITE, notify))
        transfer.poll()
        return transfer

    def close(self) -> None:
        """See `Channel.close`. What NIXL is writing it goes on to write, in silence: nobody is notified of it."""
        with self._lock:
            self._is_open = False
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.give_up(ChannelBroken("the channel was closed"))
        self._region.closing(self)
        self.sweep()

    def sweep(self) -> None:
        """Look after transfers that nobody else looks after."""
        for transfer in list(self._transfers):
            transfer.advance()
        self._end_if_idle()

    def settle(self, transfer: NixlTransfer) -> None:
        """NIXL is done with this one."""
        with self._lock:
            self._transfers.discard(transfer)
        self._end_if_idle()

    def drop(self) -> None:
        """The agent ends."""
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
        return transfer

    def _message(self, kind: int, payload: bytes) -> bytes:
        return compose(self._remote.token, kind, self._name, payload)

    def _end_if_idle(self) -> None:
        with self._lock:
            if self._is_open or self._transfers or self._has_ended:
                return
            self._has_ended = True
        self._region.ended(self, self._message(BYE, b""))


class NixlListener(Listener):
    """Hears notifications; what is written it does not see."""

    def __init__(self, region: NixlRegion) -> None:
        self._region = region
        self._ledger = Ledger(region.memory.nbytes)

    @property
    def dropped(self) -> int:
        """How many messages came from no session of ours."""
        return self._ledger.dropped

    def invite(self, token: bytes) -> RemoteRegion:
        """See `Listener.invite`."""
        agent, memory = self._region.agent, self._region.memory
        self._ledger.open(token)
        detail = NixlDetail(agent.name, agent.metadata, memory.address, memory.nbytes)
        return seal(NixlRegion.scheme, memory.nbytes, token, msgspec.msgpack.encode(detail))

    def grant(self, token: bytes, offset: int, nbytes: int) -> None:
        """See `Listener.grant`. It is remembered for `revoke`; the peer is trusted to stay inside."""
        self._ledger.grant(token, offset, nbytes)

    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        """See `Listener.revoke`. True only for a session that was expelled and whose writers stopped or are dead."""
        self._hear()
        return self._ledger.revoke(token, offset, nbytes)

    def take(self) -> list[Notification]:
        """See `Listener.take`."""
        self._hear()
        return self._ledger.take()

    def expel(self, token: bytes) -> None:
        """Nobody hears of its writes any more. They may still land: it is not stopped."""
        self._hear()
        self._ledger.expel(token)

    def close(self) -> None:
        """All sessions are expelled. Their writes may land until the region is closed."""
        self._ledger.expel_all()

    def _hear(self) -> None:
        for message in self._region.messages():
            self._ledger.hear(message)


class NixlRegion(Region):
    """Memory registered with an agent of its own, under a name that nobody can guess and that never comes again."""

    scheme: ClassVar[str] = "nixl"
    checks_writes: ClassVar[bool] = False
    is_polled: ClassVar[bool] = True
    settings: ClassVar[dict[str, str]] = {}  # more of UCX

    def __init__(self, memory: Memory, agent: NixlAgent) -> None:
        self.memory = memory
        self.agent = agent
        self._listener = NixlListener(self)
        self._lock = threading.Lock()  # guards all below, and loading and unloading of agents
        self._peers: dict[str, _Peer] = {}
        self._owed: dict[str, list[bytes]] = {}  # farewells that could not be said, by agent
        self._channels: set[NixlChannel] = set()
        self._closing: set[NixlChannel] = set()  # closed, with requests that NIXL is still at
        self._is_open = True

    def __repr__(self) -> str:
        return f"<NixlRegion {self.agent.name} {self.memory} {len(self._channels)} channels>"

    @classmethod
    def availability(cls) -> Availability:
        """See `Region.availability`."""
        return nixl_agent.availability()

    @classmethod
    def register(
        cls, memory: Memory, *, host: str = "127.0.0.1", wake: Callable[[], None] = lambda: None
    ) -> NixlRegion:
        """See `Region.register`. `wake` is never called.

        UCX listens on the loopback interface alone if `host` is a loopback address, else on every interface. The user's
        UCX_NET_DEVICES has precedence; UCX_TLS says by what means.
        """
        found = cls.availability()
        if not found.is_ok:
            raise ChannelUnavailable(f"{found.why}; {found.fix}")
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        settings = {**_SETTINGS, **(_LOOPBACK_SETTINGS if is_loopback else {}), **cls.settings}
        return cls(memory, NixlAgent(memory, settings))

    def listen(self) -> NixlListener:
        """See `Region.listen`. The agent is listening since it was made."""
        return self._listener

    def connect(self, remote: RemoteRegion, *, timeout_s: float = 5.0) -> NixlChannel:
        """See `Region.connect`."""
        try:
            detail = msgspec.msgpack.decode(unseal(self.scheme, remote), type=NixlDetail)
        except msgspec.DecodeError as error:
            raise ChannelBroken(f"not a detail of a NIXL region: {error}") from error
        with self._lock:
            if not self._is_open:
                raise ChannelBroken("the region is closed")
            channel = NixlChannel(self, self._join(detail), remote)
            self._channels.add(channel)
        try:
            channel.greet(timeout_s)
            self._say_farewells(channel.peer.name)
        except ChannelError:
            channel.close()
            raise
        return channel

    def messages(self) -> list[bytes]:
        """What other agents have said since the last call; looks after closed channels, too."""
        for channel in list(self._closing):
            channel.sweep()
        with self._lock:
            return self.agent.take() if self._is_open else []

    def closing(self, channel: NixlChannel) -> None:
        """It is closed, but not yet ended."""
        with self._lock:
            if channel in self._channels:
                self._channels.discard(channel)
                self._closing.add(channel)

    def ended(self, channel: NixlChannel, farewell: bytes) -> None:
        """NIXL is done with everything of it; its peer is told that."""
        with self._lock:
            if channel not in self._closing:
                return
            self._closing.discard(channel)
            peer = channel.peer
            try:
                self.agent.notify(peer.name, farewell)
            except self.agent.errors:
                self._owed.setdefault(peer.name, []).append(farewell)
            peer.channels -= 1
            if peer.is_broken and not peer.channels and self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
                self.agent.unload(peer.name)

    def close(self) -> None:
        """See `Region.close`. UCX ends with the agent; only another process of this host could still write here."""
        for channel in list(self._channels):
            channel.close()
        self._listener.close()
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            for channel in self._closing:
                channel.drop()
            self._closing.clear()
            self._peers.clear()
            self.agent.close()

    def _join(self, detail: NixlDetail) -> _Peer:
        peer = self._peers.get(detail.agent)
        if peer is not None and peer.is_broken:
            # What was under way to it must end first: it uses keys that go with the peer.
            if not all(channel.is_idle for channel in self._channels | self._closing if channel.peer is peer):
                raise ChannelBroken(f"writes to {peer.name} are still failing")
            self.agent.unload(peer.name)
            peer = None
        if peer is None:
            peer = self._load(detail)
        peer.channels += 1
        return peer

    def _load(self, detail: NixlDetail) -> _Peer:
        if detail.agent == self.agent.name:
            raise ChannelUnavailable("NIXL does not write from an agent to itself")
        try:
            name = self.agent.load(detail.metadata)
        except self.agent.errors as error:
            raise ChannelBroken(f"NIXL cannot load {detail.agent}: {error}") from error
        peer = _Peer(detail)
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
