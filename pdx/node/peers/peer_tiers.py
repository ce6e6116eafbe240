"""Peers as tiers: for each peer that this node writes to, the thread that writes, its channel, and the pushes."""

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

MAX_FLOWS = 4096  # transfers of which it is remembered how much peers have acknowledged
MAX_UNTOLD = 1024  # cancelled transfers per peer, to tell it when it is connected
JOIN_S = 5.0


class PeerTier(Tier):
    """A peer that this node writes to. To load from it, this node asks it to write (`pdx.node.peers.fetches`)."""

    kind = "peer"

    def __init__(self, name: str, tiers: PeerTiers) -> None:
        self.name = name
        self.max_inflight_bytes = tiers.config.window_bytes
        self._tiers = tiers
        self.sender: SendThread | None = None
        self.scheme = ""  # of the chosen channel
        self.measured = ""  # the scheme chosen last, also over an earlier connection: not measured again
        self.rates: dict[str, float] = {}
        self.expected = ""  # the scheme that should work there
        self.start: Callable[[], None] | None = None  # connects a channel; None while the peer is not connected
        self.sent_bytes = 0
        self.why = ""
        self.untold: dict[str, None] = {}  # transfers given up before the peer was asked for room, or connected

    @property
    def is_ready(self) -> bool:
        """Whether the peer is connected and a channel chosen."""
        return bool(self.scheme)

    def send(self, body: PeerBody, about: int = 0) -> None:
        """Send a message over the connection; it is lost if the connection is."""
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

    def copy_ended(self, copy: Copy) -> None:
        """Tell the peer that nothing more is written for this copy."""
        if copy.is_asked and not copy.is_lost:
            self.send(Release(copy.number, copy.is_complete))
        elif copy.transfer is not None and not copy.is_lost:
            self._cancel(copy.transfer)
        if self.sender is not None:
            self.sender.forget(copy.number)
        self._tiers.copy_over(copy)

    def _cancel(self, transfer: str) -> None:
        """Tell the peer that nothing of this transfer comes: it never heard of it, and a decoder there may wait."""
        self.untold[transfer] = None
        if len(self.untold) > MAX_UNTOLD:
            del self.untold[next(iter(self.untold))]
        self.tell()

    def tell(self) -> None:
        """If the peer is connected, tell it of transfers that were given up."""
        peer = self._tiers.connections.of(self.name)
        if peer is not None and peer.state is ConnectionState.READY:
            for transfer in self.untold:
                peer.send(Cancel(transfer))
            self.untold.clear()

    def close(self) -> None:
        """End the writing without waiting for it."""
        self._tiers.drop_sender(self)


def admit(copy: Copy, wait_s: float) -> Admit:
    """The request to a peer for room for this copy."""
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
    """The bytes of a transfer that peers have acknowledged."""

    acked: int = 0
    across: int = 0  # already marked as ACROSS
    ended_ns: int = 0  # when prefill ended; 0: it has not
    is_pushed: bool = False  # a push was over before prefill ended


class PeerTiers:
    """The tiers of all peers, by the peer's name. Owned by the control loop."""

    def __init__(self, node: Peers) -> None:
        self.config, self.env = node.config, node.env
        self.copies, self.regions, self.connections = node.copies, node.regions, node.connections
        self._fetches, self._inbound, self._marks = node.fetches, node.inbound, node.marks
        self._handoffs = node.env.timings[("pdx_node_handoff_seconds",)]
        self._tiers: dict[str, PeerTier] = {}
        self._flows: OrderedDict[str, Flow] = OrderedDict()
        self._left: list[SendThread] = []  # senders that are ending

    def tier(self, name: str) -> PeerTier:
        """The tier of this peer, created if there is none."""
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers[name] = PeerTier(name, self)
        return tier

    def look(self, name: str) -> PeerTier:
        """The tier of this peer, without keeping a new one."""
        return self._tiers.get(name) or PeerTier(name, self)

    @property
    def names(self) -> set[str]:
        """Peers that this node has written to or tried to."""
        return set(self._tiers)

    @property
    def reached(self) -> list[str]:
        """Peers to which a channel is chosen, that is, one that a probe has passed."""
        return [name for name, tier in self._tiers.items() if tier.is_ready]

    # ---- pushes -----------------------------------------------------------------------------

    def push(
        self, name: str, keys: Sequence[bytes], shards: int, *, transfer: str | None, layout: bytes, want: int = 0
    ) -> list[Copy]:
        """Push the chunks of these keys that are here or being filled; return the copies. Idempotent by transfer.

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
            list(dict.fromkeys(keys)),  # a peer grants room once per key
            shards,
            priority=Priority.AWAITED if want else Priority.HANDOFF,
            deadline=self.env.clock() + self.config.push_s,
            transfer=transfer,
            layout=layout,
            want=want,
        )

    def is_pushing(self, transfer: str, name: str) -> bool:
        """Whether a push of this transfer to that peer is in progress."""
        return self.copies.of_transfer(transfer, self.look(name)) is not None

    def prefill_ended(self, transfer: str, at_ns: int) -> None:
        """Note how much of a transfer peers have when a worker's prefill ends."""
        flow = self._flows.get(transfer)
        if flow is not None:
            so_far = flow.acked + self.copies.copied_bytes(transfer, PeerTier.kind)
            self._marks.append(Mark(transfer, Event.ACROSS, at_ns, so_far - flow.across))
            flow.across = so_far
            if flow.is_pushed:
                self._handoffs.observe(0.0)
            flow.ended_ns, flow.is_pushed = at_ns, False

    def copy_over(self, copy: Copy) -> None:
        """Account for a copy to a peer that has ended."""
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
        """Have a channel to a peer chosen, `at_once` or when there is something to write; the regions must be open."""
        if peer.state is not ConnectionState.READY:
            return
        tier = self.tier(peer.name)
        tier.tell()
        self.drop_sender(tier)
        tier.start = partial(self._choose, tier, peer, welcome, schemes)
        if at_once or self.copies.of(tier):
            self.start(peer.name)

    def start(self, name: str) -> None:
        """Choose a channel to this peer if it is connected and none is chosen or being chosen."""
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

    # ---- reports of a sender's thread, on the control loop -----------------------------------

    def channel_chosen(self, sender: SendThread, scheme: str, rates: dict[str, float]) -> None:
        """The sender writes by this scheme; `rates`: in GB/s, of the schemes that were measured."""
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
        """Why the expected scheme does not reach this peer; empty if it does. Counts and logs it."""
        tier = sender.tier
        why = sender.missing.get(tier.expected)
        if why is None:
            return ""
        self.env.counters["channels_stepped_down"] += 1
        log.warning("no %s to %s, which is slower without: %s", tier.expected, tier.name, why)
        return f"no {tier.expected}: {why}"

    def written(self, sender: SendThread, job: Job, error: ChannelError | None) -> None:
        """A job has ended."""
        if error is None:
            sender.tier.sent_bytes += job.nbytes
        self.copies.done(sender.tier, job, error)
        if isinstance(error, ChannelBroken):
            self.channel_broken(sender, str(error))

    def channel_broken(self, sender: SendThread, why: str) -> None:
        """No channel works to the peer, or the chosen one works no more."""
        tier = sender.tier
        if tier.sender is not sender:
            return
        self.env.counters["channels_broken"] += 1
        tier.measured = ""
        # An unreachable peer is tried again and again: log it once.
        level = logging.WARNING if tier.is_ready or why != tier.why else logging.DEBUG
        log.log(level, "the channel to %s is broken: %s", tier.name, why)
        if tier.is_ready:
            self.gone(tier.name, why)
        else:  # no chunk was written: keep the connection for the peer's own writes
            self._lose(tier, why)

    def _lose(self, tier: PeerTier, why: str) -> None:
        tier.scheme, tier.why = "", why
        self.drop_sender(tier)
        self.copies.lost(tier)

    def gone(self, name: str, why: str) -> None:
        """Nothing more can be written to this peer until it connects again."""
        tier = self._tiers.get(name)
        if tier is not None:
            tier.start = None
            self._lose(tier, why)
            if not self.connections.roster.address_of(name):  # it cannot be dialled, so it is not kept
                del self._tiers[name]
        self._fetches.lost(name, self.env.clock())

    def drop_sender(self, tier: PeerTier) -> None:
        """End writing to a peer, without waiting for it. Idempotent."""
        if tier.sender is not None:
            tier.sender.close()
            self._left.append(tier.sender)
            tier.sender = None

    def sender_ended(self, sender: SendThread) -> None:
        """A sender's thread writes no more: only now may the peer be told so, and a new channel be opened."""
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
        """Forget peers that are not connected or in the roster any more, and to which there are no copies."""
        for name in self._tiers.keys() - set(self.connections.roster.names):
            if self.connections.of(name) is None and not self.copies.of(self.look(name)):
                del self._tiers[name]

    def close(self) -> None:
        """End all writing; wait up to JOIN_S for each sender. Idempotent."""
        for tier in self._tiers.values():
            self.drop_sender(tier)
        for sender in self._left:
            sender.join(JOIN_S)
