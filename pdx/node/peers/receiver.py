"""The pushes from peers to this node: room for them, what has landed, and when their slots may be given away again.

Offers wait in one queue for room, first come, first served: all of an offer or, when its time is over or it can never
fit, its leading part. So requests that compete for little room get it one after the other, and none holds a part while
it waits for the rest. The keys of a waiting offer are looked at only when there may be room for them. No sockets, no
threads here.

    QUEUED ──grant──► LANDING
       │  │              │   │ let go
  stop │  │ let go, lost │   └──► OVER
       │  └──► OVER      │
       │                 │ stop, lost
       └──► CLOSING ◄────┘
               │ fenced, let go
               └──► OVER

A push in CLOSING may still be written to: its slots are in quarantine until the sender lets go, or the channel says
that nothing lands any more, or the sender is known dead.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable
from enum import StrEnum

from pdx.errors import ArenaTooSmall, ProtocolError
from pdx.memory.arena import round_up
from pdx.memory.slot import Slot
from pdx.node.peers.connection import PeerConnection, refusal
from pdx.node.peers.receive_thread import Verdict, WriteGrant
from pdx.node.peers.regions import Regions
from pdx.store.chunk import Chunk, Origin, from_node
from pdx.store.deadlines import Deadlines
from pdx.store.lifecycle import State
from pdx.store.store import Claim, Store
from pdx.store.transfers import Transfers
from pdx.telemetry.faults import counted
from pdx.wire.base import MAX_SLOTS
from pdx.wire.hints import Hints
from pdx.wire.messages import Admit, Admitted, Release, Slices

log = logging.getLogger("pdx.node")

MAX_QUEUED = 4096  # offers of all peers together
MAX_LANDINGS = 2048  # of one peer, those that wait for room included
MAX_KEYS_OF_A_PEER = 1 << 20  # in its pushes under way: some 100 MB are remembered for them
LOOK_S = 0.2  # room that is not enough by its bytes, or too scattered, is looked at again after so long
LANDING_S = 5.0  # a notification comes no later than this after its sender says that all is written


class ReceiverState(StrEnum):
    """Where a push is, for the node that receives."""

    QUEUED = "queued"
    LANDING = "landing"
    CLOSING = "closing"
    OVER = "over"


class ReceiverStep(StrEnum):
    """What can happen to it there."""

    GRANT = "grant"
    STOP = "stop"  # this side gives up: cancelled, too late, a digest does not match
    LET_GO = "let go"  # the sender says it writes no more
    LOST = "lost"
    FENCED = "fenced"  # nothing lands any more, whatever the sender does


RECEIVER: dict[tuple[ReceiverState, ReceiverStep], ReceiverState] = {
    (ReceiverState.QUEUED, ReceiverStep.GRANT): ReceiverState.LANDING,
    (ReceiverState.QUEUED, ReceiverStep.STOP): ReceiverState.CLOSING,
    (ReceiverState.QUEUED, ReceiverStep.LET_GO): ReceiverState.OVER,
    (ReceiverState.QUEUED, ReceiverStep.LOST): ReceiverState.OVER,
    (ReceiverState.LANDING, ReceiverStep.LET_GO): ReceiverState.OVER,
    (ReceiverState.LANDING, ReceiverStep.STOP): ReceiverState.CLOSING,
    (ReceiverState.LANDING, ReceiverStep.LOST): ReceiverState.CLOSING,
    (ReceiverState.CLOSING, ReceiverStep.LET_GO): ReceiverState.OVER,
    (ReceiverState.CLOSING, ReceiverStep.FENCED): ReceiverState.OVER,
}


class Landing:
    """What a peer asked room for, by its `Admit` of this number. `chunks` are those granted to it, by offset."""

    def __init__(self, session: PeerConnection, scheme: str, number: int, offer: Admit, now: float) -> None:
        self.session = session
        self.scheme = scheme
        self.number = number
        self.offer = offer
        self.state = ReceiverState.QUEUED
        self.deadline = now + offer.wait_s  # of waiting for room; then, of landing
        self.wanted_bytes = round_up(offer.nbytes) * offer.shards * len(offer.keys)
        self.chunks: dict[int, Chunk] = {}
        self.lacking = 0.0  # bytes that it found no room for; nobody looks for its room while fewer are available …
        self.look_at = 0.0  # … or before this
        self.opened_at = 0.0  # when it got its room
        self.landed_bytes = 0
        self.is_let_go = False  # its writer writes nothing more, or is dead; what it wrote may still be on its way in

    def __repr__(self) -> str:
        return f"<Landing {self.number} of {self.session.name} {self.state} {len(self.chunks)} chunks>"

    @property
    def place(self) -> tuple[int, int]:
        """What it is found by."""
        return self.session.number, self.number


class Receiver:
    """All pushes to this node. Owned by the control loop; the clock is a parameter."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        *,
        regions: Regions,
        peer_share: float,
        push_s: float,
        counters: Counter[str],
    ) -> None:
        self.grants: dict[int, WriteGrant] = {}  # by offset; receive threads read it
        self.changed: list[Chunk] = []  # slices of these landed, or never will; whoever tells of them empties it
        self.over: list[Landing] = []  # ended; whoever tells of them empties it
        self.landed_bytes: Counter[str] = Counter()  # in chunks that are whole, by peer
        self._store = store
        self._transfers = transfers
        self._regions = regions
        self._peer_bytes = int(store.pools[0].total_bytes * peer_share)
        self._push_s = push_s
        self._counters = counters
        self._landings: dict[tuple[int, int], Landing] = {}
        self._of_session: defaultdict[int, dict[int, Landing]] = defaultdict(dict)
        self._of_transfer: defaultdict[str, list[Landing]] = defaultdict(list)
        self._closing: dict[tuple[int, int], Landing] = {}
        self._deadlines: Deadlines[tuple[int, int]] = Deadlines()  # of those that land
        self._queue: dict[tuple[int, int], Landing] = {}  # those in state QUEUED, in the order of their offers
        self._count_of: Counter[str] = Counter()  # pushes, by peer
        self._keys_of: Counter[str] = Counter()  # offered in them
        self._bytes_of: Counter[str] = Counter()  # granted and not over, by peer: all its sessions share one share
        self._granted_by: Counter[str] = Counter()  # chunks that may be written now, by scheme
        self._session_of: dict[bytes, int] = {}  # token -> session number
        self._blocked: Landing | None = None  # the first in the queue that found no room; those behind it wait, too
        self._at_share: dict[str, int] = {}  # peers with offers that wait for their share, and what the least one wants
        self._is_news = False  # one of these may go on
        self._next_late = float("inf")  # no deadline in the queue is earlier

    def __len__(self) -> int:
        return len(self._landings)

    def of(self, session: PeerConnection) -> list[Landing]:
        """The pushes of a session."""
        return list(self._of_session.get(session.number, {}).values())

    def of_peer(self, name: str) -> int:
        """How many pushes of a peer are not over, whatever session they came in."""
        return self._count_of.get(name, 0)

    @property
    def sessions(self) -> list[PeerConnection]:
        """Those of which a push is not over, the sessions that are over included."""
        return [next(iter(landings.values())).session for landings in self._of_session.values()]

    @property
    def writable(self) -> set[str]:
        """Schemes by which something may land now."""
        return {scheme for scheme, count in self._granted_by.items() if count}

    # ---- offers and room --------------------------------------------------------------------

    def admit(self, session: PeerConnection, scheme: str, number: int, offer: Admit, now: float) -> None:
        """A peer offers chunks: they get room now, or wait for it.

        :raises ProtocolError: the offer makes no sense.
        """
        landing = Landing(session, scheme, number, offer, now)
        if landing.place in self._landings:
            raise ProtocolError(f"{session.name} asks twice for room of number {number}")
        _check(session, offer)
        count, keys = self._count_of[session.name], self._keys_of[session.name]
        is_too_much = count >= MAX_LANDINGS or keys + len(offer.keys) > MAX_KEYS_OF_A_PEER
        if len(self._queue) >= MAX_QUEUED or is_too_much:
            self._counters["offers_stopped"] += 1
            waiting = f"{len(self._queue)} offers wait for room, {count} of yours with {keys} keys are under way"
            session.send(refusal(f"{waiting} already"), number)
            return
        self._landings[landing.place] = self._of_session[session.number][number] = landing
        self._count_of[session.name] += 1
        self._keys_of[session.name] += len(offer.keys)
        self._session_of[session.token] = session.number
        self._counters["offers"] += 1
        if offer.transfer is not None:
            self._of_transfer[offer.transfer].append(landing)
            if self._transfers.is_given_up(offer.transfer):
                self._stop(landing, "the transfer was given up", now)
                return
            self._transfers.expect(offer.transfer, now + self._push_s, landing.session.source)
        self._queue[landing.place] = landing
        self._next_late = min(self._next_late, landing.deadline)
        if self._is_worth_a_look(now):
            self.pump(now)
        elif self._blocked is None and not self._look(landing, now):
            self._blocked = landing

    def pump(self, now: float) -> None:
        """Give room to the offers that wait, in their order; a peer at its share does not keep others waiting.

        Costs nothing as long as there cannot be room.
        """
        if not self._is_worth_a_look(now):
            return
        has_late = self._next_late <= now
        self._blocked, self._is_news = None, False
        self._at_share.clear()
        for landing in list(self._queue.values()):
            is_late = has_late and landing.deadline <= now
            if is_late:
                self._grant(landing, now, partial=True)
            elif self._blocked is None:
                self._blocked = None if self._look(landing, now) else landing
            elif not has_late:
                break
        if has_late:
            self._next_late = min((landing.deadline for landing in self._queue.values()), default=float("inf"))

    def _is_worth_a_look(self, now: float) -> bool:
        is_next = self._blocked is not None and self._may_have_room(self._blocked, now)
        return bool(self._queue) and (is_next or self._is_news or self._next_late <= now)

    def _may_have_room(self, landing: Landing, now: float) -> bool:
        return self._store.pools[0].available_bytes >= landing.lacking or landing.look_at <= now

    def _look(self, landing: Landing, now: float) -> bool:
        """Grant room for what was asked, unless its peer is at its share; False: there is too little room."""
        name, wanted = landing.session.name, landing.wanted_bytes
        if not self._has_share(name, wanted):
            self._at_share[name] = min(wanted, self._at_share.get(name, wanted))
            return True
        return self._may_have_room(landing, now) and self._grant(landing, now, partial=False)

    def _has_share(self, name: str, wanted: int) -> bool:
        held = self._bytes_of[name]
        return not held or held + wanted <= self._peer_bytes

    def _within_share(self, landing: Landing) -> tuple[list[bytes], int]:
        """The leading keys of an offer that its peer's share has room for, and the bytes they need. A peer that has
        nothing gets one chunk at least, or an arena of few chunks would never take any."""
        offer = landing.offer
        held, needed = self._bytes_of[landing.session.name], 0
        for index, key in enumerate(offer.keys):
            if self._store.known(key, offer.shards) is not None:
                continue
            is_tail = bool(offer.tail_nbytes) and index == len(offer.keys) - 1
            size = round_up(offer.tail_nbytes if is_tail else offer.nbytes) * offer.shards
            if held + needed and held + needed + size > self._peer_bytes:
                return list(offer.keys[:index]), needed
            needed += size
        return list(offer.keys), needed

    def _grant(self, landing: Landing, now: float, *, partial: bool) -> bool:
        """Grant room for what was asked; False: it waits on. With `partial` whatever fits is enough, even nothing."""
        offer, session = landing.offer, landing.session
        keys, needed = self._within_share(landing)
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
            origin=Origin(from_node(session.name)),
            who=f"chunks of node {session.name}",
        )
        try:
            granted, slots, full = self._store.reserve(claim) if keys else ([], [], True)
        except ArenaTooSmall:
            if not partial:
                return self._grant(landing, now, partial=True)  # waiting does not help
            granted, slots, full = [], [], True
        if full and not partial:
            # Bytes enough that lie too scattered: nothing tells when they do not any more.
            landing.lacking = needed if needed > self._store.pools[0].available_bytes else float("inf")
            landing.look_at = now + LOOK_S
            return False
        if full or is_cut:
            missing, text = len(offer.keys) - len(granted), "no room for %d of %d chunks from %s"
            counted(log, self._counters, "granted_in_part", text, missing, len(offer.keys), session.name)
        self._open(landing, granted, slots, now)
        return True

    def _open(self, landing: Landing, granted: list[int], slots: list[Slot], now: float) -> None:
        offer, session = landing.offer, landing.session
        listener = self._regions.listeners[landing.scheme]
        for slot in slots:
            landing.chunks[slot.offset] = self._store.at(slot)
            self.grants[slot.offset] = WriteGrant(session.token, slot.generation, slot.nbytes, offer.layers)
            listener.grant(session.token, slot.offset, slot.nbytes)
            self._bytes_of[session.name] += round_up(slot.nbytes)
        self._granted_by[landing.scheme] += len(slots)
        self._step(landing, ReceiverStep.GRANT)
        landing.opened_at, landing.deadline = now, now + self._push_s
        self._deadlines.add([landing.place], landing.deadline)
        if offer.transfer is not None:
            self._transfers.open(offer.transfer, slots, landing.deadline, landing.session.source)
        session.send(Admitted(granted=granted, granted_slots=slots), landing.number)

    # ---- landing ----------------------------------------------------------------------------

    def landed(self, scheme: str, verdict: Verdict, now: float) -> None:
        """A receive thread has seen slices of a push."""
        landing = self._landings.get((self._session_of.get(verdict.token, 0), verdict.admit))
        if landing is None or landing.state is not ReceiverState.LANDING or landing.scheme != scheme:
            return  # given up meanwhile
        if verdict.bad:
            self._counters["digest_mismatches"] += len(verdict.bad)
            log.warning("%d slices from %s are not what was sent: dropped", len(verdict.bad), landing.session.name)
            self._stop(landing, "a digest does not match", now)
            return
        landing.landed_bytes += verdict.nbytes
        self._counters["landed_bytes"] += verdict.nbytes
        filled = self._fill(landing, verdict.good)
        sealed = [chunk for chunk in filled if chunk.is_complete]
        if not self._is_quiet(landing, sealed) and self._regions.regions[landing.scheme].checks_writes:
            self._counters["written_twice"] += 1
            log.warning("%s writes to chunks that it has written already: dropped", landing.session.name)
            self._stop(landing, "slices were written twice", now)
            return
        if sealed:
            self._store.seal(sealed)
            self._release(landing, sealed)
            self._transfers.sealed(sealed, now)
            self.landed_bytes[landing.session.name] += sum(chunk.slot.nbytes for chunk in sealed)
        self.changed += filled
        if landing.is_let_go and not landing.chunks:
            self._end(landing, ReceiverStep.LET_GO, now)

    def _fill(self, landing: Landing, landed: Iterable[Slices]) -> dict[Chunk, None]:
        """Note what was filled; the chunks, as far as they are still being filled."""
        chunks: dict[Chunk, None] = {}
        slots: defaultdict[tuple[int, int], list[Slot]] = defaultdict(list)  # by layers: mostly the same of all
        for slices in landed:
            chunk = landing.chunks.get(slices.offset)
            if chunk is None or chunk.slot.generation != slices.generation or chunk.state is not State.FILLING:
                continue
            chunks[chunk] = None
            slots[slices.first_layer, slices.layers].append(chunk.slot)
        for (first_layer, layers), filled in slots.items():
            self._store.fill(filled, first_layer, layers, landing.session.number)
        return chunks

    # ---- ending -----------------------------------------------------------------------------

    def let_go(self, session: PeerConnection, message: Release, now: float) -> None:
        """The peer writes nothing more of this push."""
        landing = self._landings.get((session.number, message.lease))
        if landing is None:
            return
        if not landing.chunks:
            self._end(landing, ReceiverStep.LET_GO, now)
            return
        landing.is_let_go = True
        if landing.state is ReceiverState.CLOSING:
            self._fence(landing, now)
        elif message.complete:
            self._deadlines.discard(landing.place, landing.deadline)
            landing.deadline = now + LANDING_S  # all is written; the last of it is still being checked
            self._deadlines.add([landing.place], landing.deadline)
        else:
            self._step(landing, ReceiverStep.STOP)
            self._abort(landing, now)
            self._fence(landing, now)

    def cancel(self, transfer: str, now: float) -> None:
        """The transfer was given up: nobody here wants its chunks any more."""
        for landing in list(self._of_transfer.get(transfer, ())):
            if landing.state is not ReceiverState.CLOSING:
                self._stop(landing, "", now)

    def session_over(self, session: PeerConnection, now: float, *, is_dead: bool) -> None:
        """The peer is known dead (`is_dead`), or has gone: then what it was writing may still land."""
        for landing in self.of(session):
            landing.is_let_go |= is_dead
            if landing.state is not ReceiverState.CLOSING:
                self._step(landing, ReceiverStep.LOST)
                self._abort(landing, now)
            if landing.state is ReceiverState.CLOSING:
                self._fence(landing, now)
            else:
                self._forget(landing, now)
        self._session_of.pop(session.token, None)  # whatever is still being checked lands nowhere

    def tick(self, now: float) -> None:
        """Deadlines, and fences around what was given up."""
        for landing in list(self._closing.values()):
            self._fence(landing, now)
        for place in self._deadlines.take(now):
            landing = self._landings[place]
            counted(log, self._counters, "landings_late", "%r is given up: it was not over in time", landing)
            self._stop(landing, "not over in time", now)
        self.pump(now)

    def _step(self, landing: Landing, step: ReceiverStep) -> None:
        """Move on; whatever happens to it, it waits for room no more, and those behind it may be next."""
        self._deadlines.discard(landing.place, landing.deadline)
        self._closing.pop(landing.place, None)
        landing.state = RECEIVER[landing.state, step]
        if landing.state is ReceiverState.CLOSING:
            self._closing[landing.place] = landing
        self._queue.pop(landing.place, None)
        self._is_news |= landing is self._blocked

    def _stop(self, landing: Landing, text: str, now: float) -> None:
        self._step(landing, ReceiverStep.STOP)
        landing.session.send(refusal(text), landing.number)
        self._abort(landing, now)
        self._fence(landing, now)

    def _abort(self, landing: Landing, now: float) -> None:
        """Its chunks will not be whole; their room stays in quarantine."""
        unsealed = [chunk for chunk in landing.chunks.values() if chunk.state is State.FILLING]
        self._store.abort(unsealed)
        self.changed += unsealed
        if landing.offer.transfer is not None:
            self._transfers.give_up(landing.offer.transfer, now, landing.session.source)

    def _fence(self, landing: Landing, now: float) -> None:
        """End it, if nothing lands any more: the channel says so, or its writer does where the channel cannot."""
        is_quiet = self._is_quiet(landing, landing.chunks.values())
        if is_quiet or (landing.is_let_go and not self._regions.regions[landing.scheme].checks_writes):
            self._end(landing, ReceiverStep.FENCED, now)

    def _is_quiet(self, landing: Landing, chunks: Iterable[Chunk]) -> bool:
        """Nothing more is to land in these; whether the channel knows that nothing does."""
        listener, token = self._regions.listeners[landing.scheme], landing.session.token
        return all([listener.revoke(token, chunk.slot.offset, chunk.slot.nbytes) for chunk in chunks])

    def _end(self, landing: Landing, step: ReceiverStep, now: float) -> None:
        self._step(landing, step)
        self._forget(landing, now)

    def _forget(self, landing: Landing, now: float) -> None:
        left = list(landing.chunks.values())
        if left and landing.offer.transfer is not None:
            self._transfers.give_up(landing.offer.transfer, now, landing.session.source)
        elif landing.offer.transfer is not None:
            self._transfers.arrived(landing.offer.transfer, now)
        self._release(landing, left)
        self._store.let_go(left)
        del self._landings[landing.place], self._of_session[landing.session.number][landing.number]
        if not self._of_session[landing.session.number]:
            del self._of_session[landing.session.number]
        self._count_of[landing.session.name] -= 1
        self._keys_of[landing.session.name] -= len(landing.offer.keys)
        if not self._count_of[landing.session.name]:
            del self._count_of[landing.session.name], self._keys_of[landing.session.name]
        if landing.offer.transfer is not None:
            of_transfer = self._of_transfer[landing.offer.transfer]
            of_transfer.remove(landing)
            if not of_transfer:
                del self._of_transfer[landing.offer.transfer]
        self.over.append(landing)

    def _release(self, landing: Landing, chunks: Iterable[Chunk]) -> None:
        """These are sealed, or nobody writes them any more; their spans are revoked already."""
        name = landing.session.name
        for chunk in list(chunks):
            slot = chunk.slot
            landing.chunks.pop(slot.offset, None)
            self.grants.pop(slot.offset, None)
            self._bytes_of[name] -= round_up(slot.nbytes)
            self._granted_by[landing.scheme] -= 1
        least = self._at_share.get(name)
        self._is_news |= least is not None and self._has_share(name, least)
        if not self._bytes_of[name]:
            del self._bytes_of[name]


def _check(session: PeerConnection, offer: Admit) -> None:
    """:raises ProtocolError: the offer makes no sense."""
    if not offer.keys or len(offer.keys) * offer.shards > MAX_SLOTS or len(set(offer.keys)) != len(offer.keys):
        raise ProtocolError(f"{session.name} offers {len(offer.keys)} keys of {offer.shards} shards")
    least = offer.tail_nbytes or offer.nbytes
    if not offer.nbytes or offer.layers > least or least > offer.nbytes:
        raise ProtocolError(f"{session.name} offers {offer.nbytes}, {least} bytes in {offer.layers} layers")
