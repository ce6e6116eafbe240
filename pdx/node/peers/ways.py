"""The ways to peers that this node writes to: a link, the thread that writes, the channel it chose, the pushes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from pdx.config import NodeConfig, node_name
from pdx.errors import ChannelBroken, ChannelError, ConfigError, PeerError
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.node.peers.handshake import LinkState
from pdx.node.peers.job import Job
from pdx.node.peers.links import Link, Links
from pdx.node.peers.mailbox import Mailbox
from pdx.node.peers.outgoing import Outgoing
from pdx.node.peers.push import Push
from pdx.node.peers.regions import Regions
from pdx.node.peers.sender import Route, Sender
from pdx.store.chunk import Chunk
from pdx.store.store import Store
from pdx.telemetry.host import host_id
from pdx.telemetry.timeline import Event
from pdx.telemetry.trace import tracer_for
from pdx.transports.registry import FOR_GPUS
from pdx.wire.peer_messages import Chosen, LetGo, Offer, PeerWelcome

log = logging.getLogger("pdx.node")

MAX_FLOWS = 16_384
FLOW_S = 60.0  # how long it is known, after a push, how much of its transfer was across
JOIN_S = 5.0


class Way:
    """The way to one peer; what `pdx.node.peers.push.Way` asks for."""

    def __init__(self, name: str, links: Links) -> None:
        self.name = name
        self._links = links
        self.sender: Sender | None = None
        self.scheme = ""  # chosen
        self.rates: dict[str, float] = {}
        self.expected = ""  # the scheme that ought to work there
        self.sent_bytes = 0
        self.why = ""

    @property
    def link(self) -> Link | None:
        """The link, if it was ever dialled."""
        return self._links.link(self.name)

    @property
    def is_ready(self) -> bool:
        """Whether the peer has said welcome and is there."""
        return self.link is not None and self.link.state is LinkState.READY

    @property
    def is_usable(self) -> bool:
        """Whether it is ready and a channel is chosen."""
        return bool(self.scheme) and self.is_ready

    def send(self, body: Offer | LetGo | Chosen) -> None:
        """A message over the link; lost with it."""
        if self.link is not None:
            self.link.send(body)

    def submit(self, job: Job) -> None:
        """A write; only while it is usable."""
        assert self.sender is not None
        self.sender.submit(job)

    def abort(self, push: int) -> None:
        """End the writes of a push soon."""
        if self.sender is not None:
            self.sender.abort(push)


class Flow(msgspec.Struct):
    """What a peer has acknowledged of a transfer, kept a while beyond its push."""

    acked: int
    across: int  # already told as ACROSS
    deadline: float


class Ways:
    """All ways, by the peer's name. Owned by the control loop."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        arena: Arena,
        probe: Slot,
        store: Store,
        regions: Regions,
        links: Links,
        mailbox: Mailbox,
        counters: Counter[str],
        mark: Callable[[str, Event, int, int], None],
        on_gone: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._arena = arena
        self._probe = probe
        self._regions = regions
        self._links = links
        self._mailbox = mailbox
        self._counters = counters
        self._mark = mark
        self._on_gone = on_gone
        self._clock = clock
        self._ways: dict[str, Way] = {}
        self._chosen: dict[str, str] = {}  # by peer, also of earlier links: what was measured once
        self._flows: dict[str, Flow] = {}
        self._left: list[Sender] = []  # senders that were told to end
        self._tracer = tracer_for(config.trace, node_name(config))
        self.outgoing = Outgoing(
            store,
            group_bytes=config.group_bytes,
            window_bytes=config.window_bytes,
            counters=counters,
            on_over=self._push_over,
        )

    def way(self, name: str) -> Way:
        """The way to this peer, open or not."""
        way = self._ways.get(name)
        if way is None:
            way = self._ways[name] = Way(name, self._links)
        return way

    def look(self, name: str) -> Way:
        """The way to this peer as it is now; one that nobody has tried stays unknown."""
        return self._ways.get(name) or Way(name, self._links)

    @property
    def names(self) -> set[str]:
        """Peers that were ever written to, or tried."""
        return set(self._ways)

    # ---- pushes -----------------------------------------------------------------------------

    def push(
        self, name: str, keys: Sequence[bytes], shards: int, *, transfer: str | None, layout: bytes, want: int = 0
    ) -> int:
        """Push what is here of these keys, or being filled; how many chunks that are. Idempotent by transfer.

        :raises PeerUnknown, ConfigError: that peer cannot be dialled.
        """
        if transfer is not None and self.is_pushing(transfer, name):
            return 0
        self._links.dial(name)
        now = self._clock()
        if transfer is not None:
            self._flows.setdefault(transfer, Flow(0, 0, 0.0)).deadline = now + FLOW_S + self._config.push_s
            if len(self._flows) > MAX_FLOWS:
                del self._flows[next(iter(self._flows))]
        return self.outgoing.start(
            self.way(name),
            keys,
            shards,
            transfer=transfer,
            layout=layout,
            wait_s=self._config.grant_s,
            now=now,
            push_s=self._config.push_s,
            want=want,
        )

    def is_pushing(self, transfer: str, name: str) -> bool:
        """Whether a push of this transfer to that peer is under way."""
        return self.outgoing.of_transfer(transfer, name) is not None

    def changed(self, chunks: Sequence[Chunk]) -> None:
        """Slices of these chunks were filled, or their writers gave up."""
        self.outgoing.changed(chunks)

    def prefill_ended(self, transfer: str, at_ns: int) -> None:
        """A worker's prefill is over: note what peers had of it by now."""
        flow = self._flows.get(transfer)
        if flow is not None:
            so_far = flow.acked + self.outgoing.acked_bytes(transfer)
            self._mark(transfer, Event.ACROSS, so_far - flow.across, at_ns)
            flow.across = so_far

    def _push_over(self, push: Push, is_complete: bool) -> None:
        way = self._ways[push.way.name]
        if way.sender is not None:
            way.sender.forget(push.number)
        if push.transfer is None:
            return
        flow = self._flows.get(push.transfer)
        if flow is not None:
            flow.acked += push.acked_bytes
        if is_complete:
            self._mark(push.transfer, Event.PUSHED, push.acked_bytes, time.monotonic_ns())

    # ---- links and channels -----------------------------------------------------------------

    def ready(self, link: Link, welcome: PeerWelcome, schemes: Sequence[str]) -> None:
        """A peer has said welcome: choose a channel, on a thread of its own; the arena's regions are open."""
        way = self.way(link.name)
        if not way.is_ready:
            return
        self._drop_sender(way)
        order = [scheme for scheme in schemes if scheme in self._regions.regions]
        cached = self._chosen.get(way.name)
        if cached in order:
            order = [cached, *(scheme for scheme in order if scheme != cached)]
        route = Route(
            remotes={region.scheme: region for region in welcome.regions},
            order=order,
            measure=not self._config.channels and cached not in order,
            probe=welcome.probe,
            probe_from=self._probe.offset,
            preferred=FOR_GPUS if self._arena.gpu else "",
        )
        way.expected = FOR_GPUS if self._arena.gpu and FOR_GPUS in order and welcome.host == host_id() else ""
        way.sender = self._sender(way, route)

    def _sender(self, way: Way, route: Route) -> Sender:
        sender = Sender(
            way.name,
            memory=self._arena,
            regions=self._regions.regions,
            route=route,
            digests=self._config.digests,
            mailbox=self._mailbox,
            on_chosen=lambda scheme, rates: self._channel_chosen(way, sender, scheme, rates),
            on_done=lambda job, error: self._written(way, sender, job, error),
            on_broken=lambda why: self._channel_broken(way, sender, why),
            on_ended=lambda: self._sender_ended(way, sender),
            tracer=self._tracer,
        )
        return sender

    def _channel_chosen(self, way: Way, sender: Sender, scheme: str, rates: dict[str, float]) -> None:
        if way.sender is not sender or not way.is_ready:
            return
        way.scheme, way.why = scheme, self._step_down(way, sender)
        way.rates = rates or way.rates
        self._chosen[way.name] = scheme
        way.send(Chosen(scheme))
        measured = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
        log.info("writing to %s by %s%s", way.name, scheme, f" ({measured})" if measured else "")
        self.outgoing.usable(way.name)

    def _step_down(self, way: Way, sender: Sender) -> str:
        """What is to be said if another channel must do for the one that this peer ought to be reached by."""
        why = sender.missing.get(way.expected)
        if why is None:
            return ""
        self._counters["channels_stepped_down"] += 1
        log.warning("no %s to %s, which is slower without: %s", way.expected, way.name, why)
        return f"no {way.expected}: {why}"

    def _written(self, way: Way, sender: Sender, job: Job, error: ChannelError | None) -> None:
        if error is None:
            way.sent_bytes += job.nbytes
        self.outgoing.written(way.name, job, error)
        if isinstance(error, ChannelBroken):
            self._channel_broken(way, sender, str(error))

    def _channel_broken(self, way: Way, sender: Sender, why: str) -> None:
        if way.sender is sender:
            self._counters["channels_broken"] += 1
            self._chosen.pop(way.name, None)
            log.warning("the channel to %s is broken: %s", way.name, why)
            self.gone(way.name, why)

    def gone(self, name: str, why: str) -> None:
        """Nothing more can be written to this peer by its present channel."""
        way = self.way(name)
        way.scheme, way.why = "", why
        self._drop_sender(way)
        self.outgoing.lost(name)
        self._on_gone(name)

    def _drop_sender(self, way: Way) -> None:
        if way.sender is not None:
            way.sender.close()
            self._left.append(way.sender)
            way.sender = None

    def _sender_ended(self, way: Way, sender: Sender) -> None:
        """Its thread writes nothing more: only now the peer may be told so, and a new channel be had."""
        self._left = [each for each in self._left if each is not sender]
        still_writes = way.sender is not None or any(each.name == way.name for each in self._left)
        if still_writes or not way.is_ready or way.link is None:
            return
        way.link.leave()
        if self.outgoing.to(way.name):
            try:
                self._links.dial(way.name)
            except (PeerError, ConfigError) as error:
                self.gone(way.name, str(error))

    # ---- time and the end -------------------------------------------------------------------

    def turn(self) -> None:
        """After each turn of the control loop."""
        self.outgoing.pump()

    def tick(self, now: float) -> None:
        """A few times a second."""
        self.outgoing.tick(now)
        if self._tracer is not None:
            self._tracer.flush()
        for transfer in [name for name, flow in self._flows.items() if flow.deadline <= now]:
            del self._flows[transfer]

    def close(self) -> None:
        """End all writing, and wait until it has ended. Idempotent."""
        for way in self._ways.values():
            self._drop_sender(way)
        for sender in self._left:
            sender.join(JOIN_S)
        if self._tracer is not None:
            self._tracer.close()
