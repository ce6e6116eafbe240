"""The pushes from peers to this node: room for them, slices that have landed, and when their slots may be reused.

Offers wait in one queue for room, first come, first served. Each gets room for all of its chunks or, once its deadline
has passed or if it can never fit, for its leading ones. So requests that compete for little room get it one after the
other, and none holds a part while it waits for the rest. The keys of a waiting offer are looked up only when there may
be room for them.

`InboundPush.chunks` alone defines who may write where; `grants` finds it by offset, and the channel's listener has a
copy, which a channel that sees writes checks before they land.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence

from pdx.config import NodeConfig
from pdx.errors import ArenaTooSmall, ProtocolError
from pdx.memory.arena import round_up
from pdx.memory.keys import is_named
from pdx.memory.slot import Slot
from pdx.node.peers.connection import PeerConnection, refusal
from pdx.node.peers.inbound_push import PUSH, Account, InboundPush, PushState, PushStep, Writer, check
from pdx.node.peers.receive_thread import ReceiveThread
from pdx.node.peers.regions import Regions
from pdx.store.chunk import Chunk, Claim, from_node
from pdx.store.deadlines import Deadlines
from pdx.store.index import Groups
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.tiers import Tiers
from pdx.store.transfers import Transfers
from pdx.telemetry.env import Env
from pdx.telemetry.faults import counted, printable
from pdx.transports.channel import RemoteRegion
from pdx.wire.hints import Hints
from pdx.wire.messages import Admit, Admitted, Release, Slices

log = logging.getLogger("pdx.node")

MAX_QUEUED = 4096  # offers of all peers together
MAX_PUSHES = 2048  # of one peer, including those that wait for room
MAX_KEYS_OF_A_PEER = 1 << 20  # in its pushes that are not over, which take some 100 MB of memory
LOOK_S = 0.2  # until an offer that found too little or too scattered room is tried again
LANDING_S = 5.0  # for the last notifications to come after the sender says that all is written


class InboundPushes:
    """All pushes to this node. Owned by the control loop."""

    def __init__(
        self, config: NodeConfig, env: Env, *, store: Store, tiers: Tiers, transfers: Transfers, regions: Regions
    ) -> None:
        self.grants: dict[int, InboundPush] = {}  # by the offset of each writable slot; receive threads read it
        self.changed: list[Chunk] = []  # slices of these have landed, or never will; `Peers.turn` takes them
        self.over: list[InboundPush] = []  # ended; `Peers.turn` takes them
        self.env = env
        self.regions = regions
        self._config = config
        self._store = store
        self._tiers = tiers
        self._transfers = transfers
        self._threads: dict[str, ReceiveThread] = {}
        self._writers: dict[bytes, Writer] = {}  # by token; kept as long as the session or a push of it lasts
        self._accounts: defaultdict[str, Account] = defaultdict(Account)  # by peer
        self._of_transfer: Groups[str, InboundPush] = Groups()
        self._closing: dict[InboundPush, None] = {}
        self._deadlines: Deadlines[InboundPush] = Deadlines()
        self._queue: dict[InboundPush, None] = {}  # in state QUEUED, in the order of their offers
        self._granted_by: Counter[str] = Counter()  # chunks that may be written now, by scheme
        self._blocked: InboundPush | None = None  # the first in the queue that found no room; later ones wait, too
        self._at_share: dict[str, int] = {}  # by peer whose offers wait for its share, the bytes of the smallest offer
        self._is_news = False  # one of these may get room now

    def __len__(self) -> int:
        return sum(account.pushes for account in self._accounts.values())

    def of(self, session: PeerConnection) -> list[InboundPush]:
        writer = self._writers.get(session.token)
        return list(writer.pushes.values()) if writer is not None else []

    def account(self, name: str) -> Account:
        return self._accounts.get(name) or Account()

    @property
    def sessions(self) -> list[PeerConnection]:
        """Sessions that write here, and ended ones with a push that is not over."""
        return [writer.session for writer in self._writers.values()]

    # ---- channels ---------------------------------------------------------------------------

    def start_threads(self) -> None:
        """Start one receive thread per listener; the regions must be open. Idempotent."""
        for scheme, listener in self.regions.listeners.items():
            if scheme not in self._threads:
                region = self.regions.regions[scheme]
                self._threads[scheme] = ReceiveThread(self, region, listener, digests=self._config.digests)

    def invite(self, session: PeerConnection, schemes: Iterable[str]) -> list[RemoteRegion]:
        """The regions of these schemes that a session may connect to; until it chooses, it may only write the probe."""
        self.start_threads()
        found, probe = [], self.regions.probe
        for scheme in schemes:
            listener = self.regions.listeners.get(scheme)
            if listener is not None:
                found.append(listener.invite(session.token))
                listener.grant(session.token, probe.offset, probe.nbytes)
        return found

    def choose(self, session: PeerConnection, chosen: str) -> None:
        """Note that the peer will write by this scheme; close the others to it.

        :raises ProtocolError: the scheme was not offered to it, or it has chosen before.
        """
        if chosen not in self.regions.listeners or session.token in self._writers:
            raise ProtocolError(f"{session.name} chooses {chosen!r}")
        self._writers[session.token] = Writer(session, chosen)
        probe = self.regions.probe
        for scheme, listener in self.regions.listeners.items():
            if scheme == chosen:
                listener.revoke(session.token, probe.offset, probe.nbytes)
            else:
                listener.expel(session.token)

    # ---- offers and room --------------------------------------------------------------------

    def admit(self, session: PeerConnection, number: int, offer: Admit) -> None:
        """Take in a peer's offer of chunks, which get room now or wait for it.

        :raises ProtocolError: the offer is invalid, or comes before a channel was chosen.
        """
        writer, now = self._writers.get(session.token), self.env.clock()
        if writer is None:
            raise ProtocolError(f"{session.name} asks for room before it has chosen a channel")
        if number in writer.pushes:
            raise ProtocolError(f"{session.name} asks twice for room of number {number}")
        check(session, offer)
        account = self._accounts[session.name]
        is_too_much = account.pushes >= MAX_PUSHES or account.keys + len(offer.keys) > MAX_KEYS_OF_A_PEER
        if len(self._queue) >= MAX_QUEUED or is_too_much:
            self.env.counters["offers_stopped"] += 1
            under_way = f"{account.pushes} of yours with {account.keys} keys are under way already"
            session.send(refusal(f"{len(self._queue)} offers wait for room, {under_way}"), number)
            return
        push = writer.pushes[number] = InboundPush(writer, number, offer, now)
        writer.wants[offer.want] += 1
        account.pushes += 1
        account.keys += len(offer.keys)
        self.env.counters["offers"] += 1
        if offer.transfer is not None:
            self._of_transfer.add(offer.transfer, [push])
            if self._transfers.is_given_up(offer.transfer):
                self._stop(push, "the transfer was given up", now)
                return
            self._transfers.expect(offer.transfer, now + self._config.push_s, session.source)
        self._queue[push] = None
        self._deadlines.add([push], push.deadline)
        if self._is_worth_a_look(now) or push.deadline <= now:
            self._turn(now)
        elif self._blocked is None and not self._look(push, now):
            self._blocked = push

    def turn(self) -> None:
        """After each turn of the control loop: grant room, enforce deadlines. Costs nothing while neither is due."""
        self._turn(self.env.clock())

    def _turn(self, now: float) -> None:
        self._give_room(now)
        for push in self._deadlines.take(now):
            if push.state is PushState.QUEUED:
                self._grant(push, now, partial=True)
                continue
            text = "%r is given up: it was not over in time"
            counted(log, self.env.counters, "landings_late", text, push)
            self._stop(push, "not over in time", now)
        self._give_room(now)

    def _give_room(self, now: float) -> None:
        """Grant room to waiting offers in order; a peer at its share does not keep others waiting."""
        if not self._is_worth_a_look(now):
            return
        self._blocked, self._is_news = None, False
        self._at_share.clear()
        self._blocked = next((push for push in list(self._queue) if not self._look(push, now)), None)

    def _is_worth_a_look(self, now: float) -> bool:
        return self._is_news or (self._blocked is not None and self._may_have_room(self._blocked, now))

    def _may_have_room(self, push: InboundPush, now: float) -> bool:
        return self._store.pools[0].available_bytes >= push.lacking or push.look_at <= now

    def _look(self, push: InboundPush, now: float) -> bool:
        """Grant room for an offer, unless its peer is at its share. False: there is too little room."""
        name, wanted = push.session.name, push.wanted_bytes
        if not self._has_share(name, wanted):
            self._at_share[name] = min(wanted, self._at_share.get(name, wanted))
            return True
        return self._may_have_room(push, now) and self._grant(push, now, partial=False)

    @property
    def _peer_bytes(self) -> int:
        return int(self._store.pools[0].total_bytes * self._config.peer_share)

    def _has_share(self, name: str, wanted: int) -> bool:
        held = self._accounts[name].nbytes
        return not held or held + wanted <= self._peer_bytes

    def _within_share(self, push: InboundPush) -> tuple[list[bytes], int]:
        """The leading keys of an offer that fit into its peer's share, and the bytes they need. A peer that holds
        nothing gets at least one chunk, or an arena of few chunks would never accept any."""
        offer = push.offer
        held, needed = self._accounts[push.session.name].nbytes, 0
        for index, key in enumerate(offer.keys):
            if self._store.index.known(key, offer.shards) is not None:
                continue
            is_tail = bool(offer.tail_nbytes) and index == len(offer.keys) - 1
            size = round_up(offer.tail_nbytes if is_tail else offer.nbytes) * offer.shards
            if held + needed and held + needed + size > self._peer_bytes:
                return list(offer.keys[:index]), needed
            needed += size
        return list(offer.keys), needed

    def _grant(self, push: InboundPush, now: float, *, partial: bool) -> bool:
        """Grant room for an offer; False: it waits on. With `partial` whatever fits is enough, even nothing."""
        offer, session = push.offer, push.session
        keys, needed = self._within_share(push)
        is_cut = len(keys) < len(offer.keys)
        claim = Claim(
            keys=keys,
            nbytes=offer.nbytes,
            layers=offer.layers,
            owner=session.number,
            writers=[session.number] * offer.shards,
            tail_nbytes=0 if is_cut else offer.tail_nbytes,
            partial=partial,
            transfer=offer.transfer,
            hints=Hints("", form=offer.hints.form),
            origin=from_node(session.name),
            who=f"chunks of node {session.name}",
        )
        try:
            granted, slots, full = self._store.reserve(claim) if keys else ([], [], True)
        except ArenaTooSmall:
            if not partial:
                return self._grant(push, now, partial=True)  # waiting does not help
            granted, slots, full = [], [], True
        if full and not partial:
            # If there are bytes enough but too scattered, no event tells when that changes.
            push.lacking = needed if needed > self._store.pools[0].available_bytes else float("inf")
            push.look_at = now + LOOK_S
            return False
        self._tiers.forget([keys[index] for index in granted if is_named(keys[index])], is_named=True)  # older bytes
        if full or is_cut:
            missing, text = len(offer.keys) - len(granted), "no room for %d of %d chunks from %s"
            counted(log, self.env.counters, "granted_in_part", text, missing, len(offer.keys), session.name)
        self._open(push, slots, now)
        session.send(Admitted(granted=granted, granted_slots=slots), push.number)
        return True

    def _open(self, push: InboundPush, slots: Sequence[Slot], now: float) -> None:
        session, scheme = push.session, push.writer.scheme
        for slot in slots:
            push.chunks[slot.offset] = self._store.at(slot)
            self.grants[slot.offset] = push
            self.regions.listeners[scheme].grant(session.token, slot.offset, slot.nbytes)
        self._accounts[session.name].nbytes += sum(round_up(slot.nbytes) for slot in slots)
        self._expect(scheme, len(slots))
        self._step(push, PushStep.GRANT)
        push.opened_at = now
        self._end_at(push, now + self._config.push_s)
        if push.offer.transfer is not None:
            self._transfers.open(push.offer.transfer, slots, push.deadline, session.source)

    def _end_at(self, push: InboundPush, deadline: float) -> None:
        self._deadlines.discard(push, push.deadline)
        push.deadline = deadline
        self._deadlines.add([push], deadline)

    def _expect(self, scheme: str, more: int) -> None:
        self._granted_by[scheme] += more
        if scheme in self._threads:
            self._threads[scheme].expect(self._granted_by[scheme] > 0)

    # ---- landing ----------------------------------------------------------------------------

    def malformed(self, scheme: str, text: str) -> None:
        """Count an invalid notification that a receive thread has seen."""
        about = "dropped a notification by %s: %s"
        counted(log, self.env.counters, "notifications_dropped", about, scheme, printable(text))

    def landed(
        self, scheme: str, token: bytes, number: int, good: Sequence[Slices], bad: Sequence[Slices], nbytes: int
    ) -> None:
        """Take in slices of a push that a receive thread has checked; the `good` ones, of `nbytes`, are whole."""
        writer, now = self._writers.get(token), self.env.clock()
        push = writer.pushes.get(number) if writer is not None and writer.scheme == scheme else None
        if push is None or push.state is not PushState.LANDING:
            return  # given up meanwhile
        if bad:
            self.env.counters["digest_mismatches"] += len(bad)
            log.warning("%d slices from %s are not what was sent: dropped", len(bad), push.session.name)
            self._stop(push, "a digest does not match", now)
            return
        push.landed_bytes += nbytes
        self.env.counters["landed_bytes"] += nbytes
        filled = self._fill(push, good)
        sealed = [chunk for chunk in filled if chunk.is_complete]
        if not self._is_quiet(push, sealed) and self.regions.regions[scheme].checks_writes:
            self.env.counters["written_twice"] += 1
            log.warning("%s writes to chunks that it has written already: dropped", push.session.name)
            self._stop(push, "slices were written twice", now)
            return
        if sealed:
            self._store.seal(sealed)
            self._release(push, sealed)
            self._transfers.sealed(sealed, now)
            self._accounts[push.session.name].landed_bytes += sum(chunk.slot.nbytes for chunk in sealed)
        self.changed += filled
        if push.is_let_go and not push.chunks:
            self._end(push, PushStep.LET_GO, now)

    def _fill(self, push: InboundPush, landed: Iterable[Slices]) -> dict[Chunk, None]:
        """Note filled slices; return their chunks, except those that are not being filled any more."""
        chunks: dict[Chunk, None] = {}
        slots: defaultdict[tuple[int, int], list[Slot]] = defaultdict(list)  # by layers, mostly the same for all
        for slices in landed:
            chunk = push.chunks.get(slices.offset)
            if chunk is None or chunk.slot.generation != slices.generation or chunk.state is not State.FILLING:
                continue
            chunks[chunk] = None
            slots[slices.first_layer, slices.layers].append(chunk.slot)
        for (first_layer, layers), filled in slots.items():
            self._store.fill(filled, first_layer, layers, push.session.number)
        return chunks

    # ---- ending -----------------------------------------------------------------------------

    def let_go(self, session: PeerConnection, message: Release) -> None:
        """Handle the peer's word that it writes no more for a push."""
        writer, now = self._writers.get(session.token), self.env.clock()
        push = writer.pushes.get(message.lease) if writer is not None else None
        if push is None:
            return
        if not push.chunks:
            self._end(push, PushStep.LET_GO, now)
            return
        push.is_let_go = True
        if push.state is PushState.CLOSING:
            self._fence(push, now)
        elif message.complete:
            self._end_at(push, now + LANDING_S)  # all is written; the last slices are still being checked
        else:
            self._step(push, PushStep.STOP)
            self._abort(push, now)
            self._fence(push, now)

    def cancel(self, transfer: str) -> None:
        """Stop the pushes of a transfer that was given up."""
        now = self.env.clock()
        for push in self._of_transfer.of(transfer):
            if push.state is not PushState.CLOSING:
                self._stop(push, "", now)

    def session_over(self, session: PeerConnection, *, is_dead: bool) -> None:
        """End the pushes of a peer that is known dead (`is_dead`) or has gone. In the latter case writes in flight may
        still land until its channel is closed to it."""
        for listener in self.regions.listeners.values():
            listener.expel(session.token)
        now = self.env.clock()
        for push in self.of(session):
            push.is_let_go |= is_dead
            if push.state is not PushState.CLOSING:
                self._step(push, PushStep.LOST)
                self._abort(push, now)
            if push.state is PushState.CLOSING:
                self._fence(push, now)
            else:
                self._forget(push, now)
        writer = self._writers.get(session.token)
        if writer is not None:
            writer.is_over = True
            self._forget_writer(writer)

    def _forget_writer(self, writer: Writer) -> None:
        if writer.is_over and not writer.pushes:
            self._writers.pop(writer.session.token, None)

    def tick(self) -> None:
        """A few times a second: fence pushes that were given up."""
        now = self.env.clock()
        for push in list(self._closing):
            self._fence(push, now)
        self._turn(now)

    def forget(self, known: Container[str]) -> None:
        """Forget peers whose names are not in `known` and that have no pushes."""
        for name in [name for name, account in self._accounts.items() if name not in known and not account.pushes]:
            del self._accounts[name]

    def close(self) -> None:
        """Stop the receive threads. Idempotent."""
        for thread in self._threads.values():
            thread.close()

    def _step(self, push: InboundPush, step: PushStep) -> None:
        """Apply a transition and take the push out of the queue for room; the next one may get room then."""
        self._deadlines.discard(push, push.deadline)
        self._closing.pop(push, None)
        push.state = PUSH[push.state, step]
        if push.state is PushState.CLOSING:
            self._closing[push] = None
        self._queue.pop(push, None)
        self._is_news |= push is self._blocked

    def _stop(self, push: InboundPush, text: str, now: float) -> None:
        self._step(push, PushStep.STOP)
        push.session.send(refusal(text), push.number)
        self._abort(push, now)
        self._fence(push, now)

    def _abort(self, push: InboundPush, now: float) -> None:
        """Abort a push's unsealed chunks; their room stays in quarantine."""
        unsealed = [chunk for chunk in push.chunks.values() if chunk.state is State.FILLING]
        self._store.abort(unsealed)
        self.changed += unsealed
        if push.offer.transfer is not None:
            self._transfers.give_up(push.offer.transfer, now, push.session.source)

    def _fence(self, push: InboundPush, now: float) -> None:
        """End a push if nothing can land any more: its channel says so, or its writer if the channel cannot tell."""
        is_quiet = self._is_quiet(push, push.chunks.values())
        if is_quiet or (push.is_let_go and not self.regions.regions[push.writer.scheme].checks_writes):
            self._end(push, PushStep.FENCED, now)

    def _is_quiet(self, push: InboundPush, chunks: Iterable[Chunk]) -> bool:
        """Forbid further writes to these chunks; return whether the channel guarantees that none lands."""
        listener, token = self.regions.listeners[push.writer.scheme], push.session.token
        return all([listener.revoke(token, chunk.slot.offset, chunk.slot.nbytes) for chunk in chunks])

    def _end(self, push: InboundPush, step: PushStep, now: float) -> None:
        self._step(push, step)
        self._forget(push, now)

    def _forget(self, push: InboundPush, now: float) -> None:
        left, transfer = list(push.chunks.values()), push.offer.transfer
        if transfer is not None:
            if left:
                self._transfers.give_up(transfer, now, push.session.source)
            else:
                self._transfers.arrived(transfer, now)
            self._of_transfer.discard(transfer, push)
        self._release(push, left)
        self._store.let_go(left)
        del push.writer.pushes[push.number]
        push.writer.wants[push.offer.want] -= 1
        if not push.writer.wants[push.offer.want]:
            del push.writer.wants[push.offer.want]
        self._forget_writer(push.writer)
        account = self._accounts[push.session.name]
        account.pushes -= 1
        account.keys -= len(push.offer.keys)
        self.over.append(push)

    def _release(self, push: InboundPush, chunks: Sequence[Chunk]) -> None:
        """Release chunks that are sealed or that their writer has let go; their spans are revoked already."""
        name = push.session.name
        for chunk in chunks:
            del push.chunks[chunk.slot.offset], self.grants[chunk.slot.offset]
        self._accounts[name].nbytes -= sum(round_up(chunk.slot.nbytes) for chunk in chunks)
        self._expect(push.writer.scheme, -len(chunks))
        least = self._at_share.get(name)
        self._is_news |= least is not None and self._has_share(name, least)
