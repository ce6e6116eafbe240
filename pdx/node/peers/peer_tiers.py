"""Peers as tiers: to each that this node writes to, the thread that writes, the channel it chose, the pushes."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import ChannelBroken, ChannelError, ConfigError, PeerError
from pdx.node.peers.connection import ConnectionState, PeerConnection
from pdx.node.peers.send_thread import SendThread
from pdx.store.copy import Copy, Priority
from pdx.store.tier import Job, Tier
from pdx.telemetry.host import host_id
from pdx.telemetry.recent import remember
from pdx.telemetry.timeline import Event
from pdx.transports.registry import FOR_GPUS
from pdx.wire.hints import Hints
from pdx.wire.messages import Admit, Cancel, Chosen, Mark, PeerBody, Release, Welcome

if TYPE_CHECKING:
    from pdx.node.peers.peers import Peers

log = logging.getLogger("pdx.node")

MAX_FLOWS = 4096  # transfers of which it is known, also behind their push, how much was across
MAX_UNTOLD = 1024  # transfers that one peer will be told of when it is connected
JOIN_S = 5.0


class PeerTier(Tier):
    """A peer that this node writes to. What is loaded from a peer the peer writes, when it is asked to
    (`pdx.node.peers.fetches`)."""

    kind = "peer"

    def __init__(self, name: str, tiers: PeerTiers) -> None:
        self.name = name
        self.max_inflight_bytes = tiers.config.window_bytes
        self._tiers = tiers
        self.sender: SendThread | None = None
        self.scheme = ""  # chosen
        self.measured = ""  # the one that was chosen last, also over earlier connections: not measured again
        self.rates: dict[str, float] = {}
        self.expected = ""  # the scheme that ought to work there
        self.start: Callable[[], None] | None = None  # connects a channel, as long as the peer is there
        self.sent_bytes = 0
        self.why = ""
        self.untold: dict[str, None] = {}  # transfers given up before the peer was asked for room, or connected

    @property
    def is_ready(self) -> bool:
        """Whether the peer is there and a channel is chosen."""
        return bool(self.scheme)

    def send(self, body: PeerBody, about: int = 0) -> None:
        """A message over the connection; lost with it."""
        peer = self._tiers.connections.of(self.name)
        if peer is not None:
            peer.send(body, about)

    def admit(self, copy: Copy) -> None:
        """Ask for room; the peer answers `Admitted` or `Refused`."""
        self.send(admit(copy, self._tiers.config.grant_s), copy.number)

    def store(self, job: Job) -> None:
        assert self.sender is not None
        self.sender.submit(job)

    def cancel(self, copy: Copy) -> None:
        if self.sender is not None:
            self.sender.abort(copy.number)

    def over(self, copy: Copy) -> None:
        """Tell the peer that nothing more is written for this copy."""
        if copy.is_asked and not copy.is_lost:
            self.send(Release(copy.number, copy.is_complete))
        elif copy.transfer is not None and not copy.is_lost:
            self._cancel(copy.transfer)
        if self.sender is not None:
            self.sender.forget(copy.number)
        self._tiers.copy_over(copy)

    def _cancel(self, transfer: str) -> None:
        """The peer never heard of this transfer, and a decoder there may wait for it: say that nothing comes."""
        self.untold[transfer] = None
        if len(self.untold) > MAX_UNTOLD:
            del self.untold[next(iter(self.untold))]
        self.tell()

    def tell(self) -> None:
        """Tell the peer of transfers that were given up, as soon as it is connected."""
        peer = self._tiers.connections.of(self.name)
        if peer is not None and peer.state is ConnectionState.READY:
            for transfer in self.untold:
                peer.send(Cancel(transfer))
            self.untold.clear()

    def close(self) -> None:
        """End the writing, without waiting for it."""
        self._tiers.drop_sender(self)


def admit(copy: Copy, wait_s: float) -> Admit:
    """What a peer is asked to have room for."""
    first, last = copy.chunks[0], copy.chunks[-1]
    return Admit(
        list(copy.keys),
        first.slot.nbytes,
        first.reservation.layers,
        copy.shards,
        tail_nbytes=last.slot.nbytes if last.tail else 0,
        partial=True,
        transfer=copy.transfer,
        part="writes",
        layout=copy.layout,
        wait_s=wait_s,
        want=copy.want,
        hints=Hints("", form=first.hints.form),
    )


class Flow(msgspec.Struct):
    """What a peer has acknowledged of a transfer."""

    acked: int = 0
    across: int = 0  # already told as ACROSS
    ended_ns: int = 0  # when prefill was over; 0: it is not
    is_pushed: bool = False  # a push was over before that


class PeerTiers:
    """The tiers of all peers, by the peer's name. Owned by the control loop."""

    def __init__(self, node: Peers) -> None:
        self.config, self.env = node.config, node.env
        self.copies, self.regions, self.connections = node.copies, node.regions, node.connections
        self._fetches, self._inbound, self._marks = node.fetches, node.inbound, node.marks
        self._handoffs = node.env.timings[("pdx_node_handoff_seconds",)]
        self._tiers: dict[str, PeerTier] = {}
        self._flows: OrderedDict[str, Flow] = OrderedDict()
        self._left: list[SendThread] = []  # senders that were told to end

    def tier(self, name: str) -> PeerTier:
        """The tier to this peer, open or not."""
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers[name] = PeerTier(name, self)
        return tier

    def look(self, name: str) -> PeerTier:
        """The tier to this peer as it is now; one that nobody has tried stays unknown."""
        return self._tiers.get(name) or PeerTier(name, self)

    @property
    def names(self) -> set[str]:
        """Peers that were ever written to, or tried."""
        return set(self._tiers)

    @property
    def reached(self) -> list[str]:
        """Peers to which a channel is chosen: a probe has gone through it."""
        return [name for name, tier in self._tiers.items() if tier.is_ready]

    # ---- pushes -----------------------------------------------------------------------------

    def push(
        self, name: str, keys: Sequence[bytes], shards: int, *, transfer: str | None, layout: bytes, want: int = 0
    ) -> list[Copy]:
        """Push what is here of these keys, or being filled; by which copies. Idempotent by transfer.

        :raises PeerUnknown, ConfigError: that peer cannot be dialled.
        """
        if transfer is not None and self.is_pushing(transfer, name):
            return []
        self.connections.dial(name)
        self.start(name)
        if transfer is not None:
            remember(self._flows, transfer, self._flows.get(transfer) or Flow(), MAX_FLOWS)
        return self.copies.store(
            self.tier(name),
            list(dict.fromkeys(keys)),  # a peer grants each key its room once
            shards,
            priority=Priority.AWAITED if want else Priority.HANDOFF,
            deadline=self.env.clock() + self.config.push_s,
            transfer=transfer,
            layout=layout,
            want=want,
        )

    def is_pushing(self, transfer: str, name: str) -> bool:
        """Whether a push of this transfer to that peer is under way."""
        return self.copies.of_transfer(transfer, self.look(name)) is not None

    def prefill_ended(self, transfer: str, at_ns: int) -> None:
        """A worker's prefill is over: note what peers had of it by now."""
        flow = self._flows.get(transfer)
        if flow is not None:
            so_far = flow.acked + self.copies.copied_bytes(transfer, PeerTier.kind)
            self._marks.append(Mark(transfer, Event.ACROSS, at_ns, so_far - flow.across))
            flow.across = so_far
            if flow.is_pushed:
                self._handoffs.observe(0.0)
            flow.ended_ns, flow.is_pushed = at_ns, False

    def copy_over(self, copy: Copy) -> None:
        """A copy to a peer has ended."""
        if copy.transfer is None:
            return
        flow = self._flows.get(copy.transfer)
        if flow is not None:
            flow.acked += copy.copied_bytes
        if copy.is_complete:
            now_ns = time.monotonic_ns()
            self._marks.append(Mark(copy.transfer, Event.PUSHED, now_ns, copy.copied_bytes))
            if flow is not None and flow.ended_ns:
                self._handoffs.observe((now_ns - flow.ended_ns) / 1e9)
            elif flow is not None:
                flow.is_pushed = True

    # ---- channels ---------------------------------------------------------------------------

    def ready(self, peer: PeerConnection, welcome: Welcome, schemes: Sequence[str], *, at_once: bool) -> None:
        """A peer may be written to: choose a channel, on a thread of its own, at once or when there is something to
        write; the arena's regions are open."""
        if peer.state is not ConnectionState.READY:
            return
        tier = self.tier(peer.name)
        tier.tell()
        self.drop_sender(tier)
        tier.start = partial(self._choose, tier, peer, welcome, schemes)
        if at_once or self.copies.of(tier):
            self.start(peer.name)

    def start(self, name: str) -> None:
        """Choose a channel to this peer, if it is there and none is chosen or being chosen."""
        tier = self._tiers.get(name)
        if tier is not None and tier.start is not None and tier.sender is None:
            tier.start()

    def _choose(self, tier: PeerTier, peer: PeerConnection, welcome: Welcome, schemes: Sequence[str]) -> None:
        order = [scheme for scheme in schemes if scheme in self.regions.regions]
        is_known = tier.measured in order
        order.sort(key=lambda scheme: scheme != tier.measured)
        preferred = FOR_GPUS if self.regions.arena.gpu else ""
        tier.expected = preferred if preferred in order and welcome.host == host_id() else ""
        measure = not self.config.channels and not is_known
        tier.sender = SendThread(self, tier, peer, welcome, order, measure=measure, preferred=preferred)

    # ---- what a sender's thread tells, on the loop -------------------------------------------

    def channel_chosen(self, sender: SendThread, scheme: str, rates: dict[str, float]) -> None:
        """It writes by this scheme; `rates` in GB/s, where some were measured."""
        tier = sender.tier
        if tier.sender is not sender:
            return
        tier.scheme, tier.why = scheme, self._step_down(sender)
        tier.rates = rates or tier.rates
        tier.measured = scheme
        tier.send(Chosen(scheme))
        measured = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
        log.info("writing to %s by %s%s", tier.name, scheme, f" ({measured})" if measured else "")
        self.copies.ready(tier)

    def _step_down(self, sender: SendThread) -> str:
        """What is to be said if another channel must do for the one that this peer ought to be reached by."""
        tier = sender.tier
        why = sender.missing.get(tier.expected)
        if why is None:
            return ""
        self.env.counters["channels_stepped_down"] += 1
        log.warning("no %s to %s, which is slower without: %s", tier.expected, tier.name, why)
        return f"no {tier.expected}: {why}"

    def written(self, sender: SendThread, job: Job, error: ChannelError | None) -> None:
        """A job is over."""
        if error is None:
            sender.tier.sent_bytes += job.nbytes
        self.copies.done(sender.tier, job, error)
        if isinstance(error, ChannelBroken):
            self.channel_broken(sender, str(error))

    def channel_broken(self, sender: SendThread, why: str) -> None:
        """No channel leads there, or it leads there no more."""
        tier = sender.tier
        if tier.sender is not sender:
            return
        self.env.counters["channels_broken"] += 1
        tier.measured = ""
        # A peer that cannot be reached is tried again and again: said once.
        level = logging.WARNING if tier.is_ready or why != tier.why else logging.DEBUG
        log.log(level, "the channel to %s is broken: %s", tier.name, why)
        if tier.is_ready:
            self.gone(tier.name, why)
        else:  # no chunk was written: the connection stays, for what the peer writes here
            self._lose(tier, why)

    def _lose(self, tier: PeerTier, why: str) -> None:
        tier.scheme, tier.why = "", why
        self.drop_sender(tier)
        self.copies.lost(tier)

    def gone(self, name: str, why: str) -> None:
        """Nothing more can be written to this peer, until it is connected anew."""
        tier = self._tiers.get(name)
        if tier is not None:
            tier.start = None
            self._lose(tier, why)
            if not self.connections.roster.address_of(name):  # nobody can ask for it by name, until it comes again
                del self._tiers[name]
        self._fetches.lost(name, self.env.clock())

    def drop_sender(self, tier: PeerTier) -> None:
        """End a peer's writing, without waiting for it. Idempotent."""
        if tier.sender is not None:
            tier.sender.close()
            self._left.append(tier.sender)
            tier.sender = None

    def sender_ended(self, sender: SendThread) -> None:
        """Its thread writes nothing more: only now the peer may be told so, and a new channel be had."""
        self._left.remove(sender)
        peer = sender.peer
        if peer.state is ConnectionState.CLOSED or sender.tier.start is not None:
            return
        self._fetches.lost(peer.name, self.env.clock())  # asked since the channel broke
        self.connections.leave(peer)
        self._inbound.session_over(peer, is_dead=False)
        if self.copies.of(self.look(peer.name)):
            try:
                self.connections.dial(peer.name)
            except (PeerError, ConfigError) as error:
                self.gone(peer.name, str(error))

    def forget_strangers(self) -> None:
        """Peers that are not connected, that the roster names no longer and that nothing goes to, are not kept."""
        for name in self._tiers.keys() - set(self.connections.roster.names):
            if self.connections.of(name) is None and not self.copies.of(self.look(name)):
                del self._tiers[name]

    def close(self) -> None:
        """End all writing, and wait until it has ended. Idempotent."""
        for tier in self._tiers.values():
            self.drop_sender(tier)
        for sender in self._left:
            sender.join(JOIN_S)
