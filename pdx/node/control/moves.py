"""`Move`: chunks go from one tier to another, of this node or of a peer, and then leave the first.

Chunks go through the node's first arena, because every copy reads or fills an arena, in batches of bounded size; those
that were not there before are dropped again. A chunk leaves its tier only after the target has confirmed it, so that no
chunk is lost, whatever dies meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import ChunkMissing, ConfigError, NodeError, PeerError
from pdx.node.control.jobs import Job, Steps
from pdx.node.control.places import Place, Places
from pdx.store.chunk import Wanted, from_node
from pdx.store.copy import Copy, CopyState, Priority
from pdx.store.history import Cause
from pdx.store.tier import Held, Tier
from pdx.telemetry.faults import printable
from pdx.wire.messages import Refused, Settle
from pdx.wire.verbs import Found

if TYPE_CHECKING:
    from pdx.node.service import Service

BATCH_BYTES = 64 << 20
BATCH_SHARE = 0.125  # of the first arena, that a batch may hold at most
BATCH_KEYS = 256
BATCHES = 3  # in flight per job, so that one is read while another is written; over all jobs, those that need room
ASK_S = 0.01  # between two questions to a peer
ANSWER_S = 5.0  # for a remote store, or a peer, to say what it has
PUSH_AGAIN_S = 1.0  # until chunks that a peer still lacks are pushed again
SETTLE_S = 30.0  # for a peer to make progress in storing a batch
MAX_SETTLING = 1 << 14  # chunks being stored for peers, or stored without a peer having asked since


class Errand(msgspec.Struct, frozen=True):
    """A job's move to a tier of this node, or to the tier of that name of the peer `node`."""

    job: Job
    shards: int
    target: Place | str
    node: str
    keeps: bool


class Mover:
    """Makes the steps of a move. Owned by the control loop."""

    def __init__(self, service: Service, places: Places) -> None:
        self._store = service.store
        self._tiers = service.tiers
        self._copies = service.copies
        self._places = places
        self._peers = service.peers
        self._copy_s = service.config.push_s  # time limit of a copy
        self._counters = service.counters
        self._clock = service.env.clock
        self._settling: dict[tuple[str, bytes], Copy] = {}  # of chunks that peers have pushed here, by tier and key
        self._crossing = 0  # batches that take room in the first arena

    def steps(self, errand: Errand, keys: Sequence[tuple[bytes, Place]]) -> Steps:
        job = errand.job
        left = self._batches(keys, errand.shards)
        under_way: list[Steps] = []
        try:
            while True:
                while len(under_way) < BATCHES and (batch := next(left, None)) is not None:
                    under_way.append(self._batch(errand, *batch))
                if not under_way:
                    if job.lacking == len(keys):
                        raise ChunkMissing(f"none of {len(keys)} chunks is in {keys[0][1].name}")
                    return
                for steps in list(under_way):
                    if next(steps, steps) is steps:  # it has ended
                        under_way.remove(steps)
                yield
        finally:
            for steps in under_way:
                steps.close()

    def _batches(self, keys: Sequence[tuple[bytes, Place]], shards: int) -> Iterator[tuple[Place, list[bytes]]]:
        """Split keys into runs of one place, none of them too large."""
        most = min(BATCH_BYTES, int(self._store.pools[0].total_bytes * BATCH_SHARE))
        for place, run in itertools.groupby(keys, key=lambda each: each[1]):
            batch: list[bytes] = []
            nbytes = 0
            for key, _ in run:
                size = self._places.kept(place, [key], shards).nbytes
                if batch and (nbytes + size > most or len(batch) == BATCH_KEYS):
                    yield place, batch
                    batch, nbytes = [], 0
                batch.append(key)
                nbytes += size
            if batch:
                yield place, batch

    def _batch(self, errand: Errand, source: Place, keys: Sequence[bytes]) -> Steps:
        there = self._there(errand.target, keys, errand.shards)
        present = yield from self.present(errand.job, source, keys, errand.shards, but=there)
        if not source.is_shared:
            yield from self._run(errand, source, keys)
            return
        left = [(key, source) for key in keys if key in there or key in present]
        for _, some in self._batches(left, errand.shards):  # split anew, as their sizes are known now
            yield from self._run(errand, source, some)

    def _run(self, errand: Errand, source: Place, keys: Sequence[bytes]) -> Steps:
        job, shards, target = errand.job, errand.shards, errand.target
        first = self._places.first
        copies: list[Copy] = []
        passing: list[bytes] = []  # through the first arena
        crosses = source != first
        while crosses and self._crossing >= BATCHES:
            job.moved_at = self._clock()  # waiting for other jobs is not a stall
            yield
        self._crossing += crosses
        try:
            yield from self._until_known(source, keys, shards)
            there = self._there(target, keys, shards)
            wanted = [key for key in self._places.found(source, keys, shards) if key not in there]
            if first not in (source, target):
                passing += [key for key in wanted if not self._places.chunks(first, key, shards)]
            if crosses:
                copies += self._bring(source, wanted, shards)
                yield from self._until_over(job, copies)
                wanted = list(self._places.found(first, wanted, shards))
            if wanted and isinstance(target, Place) and target != first:
                copies += self._take_away(target, wanted, shards)
                yield from self._until_over(job, copies)
            confirmed: Sequence[bytes]
            if isinstance(target, Place):
                yield from self._until_known(target, keys, shards)
                confirmed = list(self._places.found(target, keys, shards))
            else:
                try:
                    confirmed = yield from self._settled(errand, target, wanted, copies)
                except (PeerError, ConfigError) as error:
                    raise NodeError(f"node {errand.node!r:.80} cannot be reached: {error}") from error
            self._leave(errand, source, confirmed)
            if len(confirmed) < len(keys):
                self._fail(errand, source, [key for key in keys if key not in set(confirmed)])
        finally:
            self._crossing -= crosses
            self._copies.give_up([copy for copy in copies if copy.state is not CopyState.OVER])
            self._mark_passed(passing, shards)

    def _there(self, target: Place | str, keys: Sequence[bytes], shards: int) -> set[bytes]:
        """The keys that the target has already, as far as is known without asking."""
        return set(self._places.found(target, keys, shards)) if isinstance(target, Place) else set()

    def _until_known(self, place: Place, keys: Sequence[bytes], shards: int) -> Steps:
        """Wait up to ANSWER_S until a tier that must be asked has said which of these it has."""
        until = self._clock() + ANSWER_S
        while self._places.seeks_any(place, keys, shards) and self._clock() < until:
            yield

    def present(
        self, job: Job, place: Place, keys: Sequence[bytes], shards: int, *, but: Container[bytes] = ()
    ) -> Generator[None, None, dict[bytes, Held]]:
        """The keys that a tier has. If it had to be asked, the others, except those in `but`, are left out of the job.

        :raises NodeError: the tier has not said what it has.
        """
        yield from self._until_known(place, keys, shards)
        found = self._places.found(place, keys, shards)
        if place.is_shared:
            lacking = [key for key in keys if key not in found and key not in but]
            why = next((why for key in lacking if (why := place.why_not(key))), "")
            if why:
                raise NodeError(f"{place.name} {why}")
            if lacking:
                job.lacking += len(lacking)
                job.chunks -= len(lacking) * shards
                job.why = f"{job.lacking} chunks were not in {place.name}"
        return found

    def _until_over(self, job: Job, copies: Sequence[Copy]) -> Steps:
        copied = -1
        while any(copy.state is not CopyState.OVER for copy in copies):
            if copied != (copied := sum(copy.copied_bytes for copy in copies)):
                job.moved_at = self._clock()
            yield

    def _bring(self, source: Place, keys: Sequence[bytes], shards: int) -> list[Copy]:
        absent = [key for key in keys if self._store.index.known(key, shards) is None]
        deadline = self._clock() + self._copy_s
        tier = source.tier
        if tier is None:
            return self._between(absent, source, (), shards)
        held = [(key, tier, held) for key, held in self._places.found(source, absent, shards).items()]
        return self._copies.load(
            held, Wanted(absent, shards, who="a move"), priority=Priority.REBALANCE, deadline=deadline
        )

    def _take_away(self, target: Place, keys: Sequence[bytes], shards: int) -> list[Copy]:
        """Copy these chunks from the first arena to another tier of this node."""
        if target.tier is None:
            return self._between(keys, self._places.first, self._places.homes(shards), shards)
        return self._stored(target.tier, keys, shards)

    def _between(self, keys: Sequence[bytes], source: Place, to: Sequence[int], shards: int) -> list[Copy]:
        """Copy these chunks from the arenas of `source` to those in `to`, to the first one if it is empty."""
        copies: list[Copy] = []
        tier = self._tiers.arenas
        if tier is None or not keys:
            return copies
        lying = [(key, self._places.chunks(source, key, shards)) for key in keys]
        alike = itertools.groupby(lying, key=lambda each: tuple(chunk.slot.arena for chunk in each[1]))
        for arenas, run in alike:
            some = [key for key, chunks in run if chunks]
            copies += self._stored(tier, some, shards, arenas=arenas, to=to or (0,) * shards)
        return copies

    def _stored(
        self, tier: Tier, keys: Sequence[bytes], shards: int, *, arenas: Sequence[int] = (), to: Sequence[int] = ()
    ) -> list[Copy]:
        deadline = self._clock() + self._copy_s
        return self._copies.store(
            tier, keys, shards, arenas=arenas, to=to, priority=Priority.REBALANCE, deadline=deadline
        )

    def _settled(
        self, errand: Errand, tier: str, keys: Sequence[bytes], copies: list[Copy]
    ) -> Generator[None, None, Sequence[bytes]]:
        """Push these chunks to a peer and have it store them; return the leading keys that it confirms.

        :raises PeerError, ConfigError: the peer cannot be reached. :raises NodeError: it refuses.
        """
        job, node, question = errand.job, errand.node, Settle(list(keys), errand.shards, tier)
        count = yield from self._asked(node, question)
        pushed, again_at = -1, 0.0  # how many it had when the rest was last pushed
        until = self._clock() + SETTLE_S
        while count < len(keys) and self._clock() < until:
            if count > pushed or self._clock() >= again_at:  # again: it had no room for all, or has evicted some
                pushed = count
                copies += self._peers.push(node, keys[count:], errand.shards, None, b"")
                yield from self._until_over(job, copies)
                again_at = self._clock() + PUSH_AGAIN_S
            before, asked_at = count, self._clock()
            count = yield from self._asked(node, question)
            job.moved_at = self._clock()  # an answer counts as progress; `until` limits how long
            until = job.moved_at + SETTLE_S if count > before else until
            while count < len(keys) and self._clock() - asked_at < ASK_S:
                yield
        return keys[:count]

    def _asked(self, node: str, question: Settle) -> Generator[None, None, int]:
        """Ask a peer how many leading ones of these chunks its tier has now.

        :raises PeerError, ConfigError: it cannot be reached. :raises NodeError: it refuses, or does not answer.
        """
        until = self._clock() + ANSWER_S
        number = self._peers.ask(node, question)
        while not number or (answer := self._peers.answer(number)) is None:
            if self._clock() >= until:
                raise NodeError(f"node {node!r:.80} has not answered within {ANSWER_S:g} s")
            yield
            number = number or self._peers.ask(node, question)
        if isinstance(answer, Refused):
            raise NodeError(f"node {node!r:.80} says: {printable(answer.text)}")
        return answer.hits

    def _leave(self, errand: Errand, source: Place, keys: Sequence[bytes]) -> None:
        """Drop chunks that the target has from the source."""
        shards = errand.shards
        sizes = [held.nbytes for held in self._places.found(source, keys, shards).values()]
        if not errand.keeps:
            free = [key for key in keys if not self._places.is_pinned(source, key, shards)]  # pinned meanwhile
            self._places.drop(source, free, shards, why=Cause.MOVED)
        errand.job.did(len(keys) * shards, sum(sizes) * shards)

    def _mark_passed(self, keys: Sequence[bytes], shards: int) -> None:
        """Drop chunks that were in the first arena only on their way."""
        first = self._places.first
        for key in keys:
            chunks = self._places.chunks(first, key, shards)
            if chunks and not any(chunk.is_found or chunk.is_kept for chunk in chunks):
                self._places.drop(first, [key], shards, why=Cause.MOVED)

    def _fail(self, errand: Errand, source: Place, keys: Sequence[bytes]) -> None:
        """:raises ChunkMissing: the chunks are gone. :raises NodeError: they could not be stored."""
        job, target = errand.job, errand.target
        self._counters["moves_failed"] += 1
        where = f"{errand.node}/{target}" if isinstance(target, str) else target.name
        done = f"{job.chunks_done} of {job.chunks} chunks were moved, the others are where they were"
        if not self._places.found(source, keys, errand.shards):
            if why_not := source.why_not(keys[0]):
                raise NodeError(f"{source.name} {why_not}; {done}")
            raise ChunkMissing(f"{len(keys)} chunks have left {source.name} meanwhile; {done}")
        state = ""
        if isinstance(target, Place) and target.tier is not None:
            status = target.tier.status()
            now = target.why_not(keys[0]) or (status.state if status is not None else "")
            why = target.tier.history.why(keys[0])
            state = f" ({now}{'; ' + why.text if why is not None else ''})"
        raise NodeError(f"{where} did not take {len(keys)} chunks{state}; {done}")

    # ---- for peers ---------------------------------------------------------------------------

    def settle(self, peer: str, ask: Settle) -> Found:
        """Store chunks that a peer has pushed here in a tier; drop them from memory unless others use or brought them.

        :raises NodeError: refused.
        """
        if len(ask.keys) > BATCH_KEYS:
            raise NodeError(f"a peer may ask for {BATCH_KEYS} chunks to be stored at a time, not {len(ask.keys)}")
        place, first = self._places.at(ask.tier), self._places.first
        self._places.check_homes(place, ask.shards)
        count = self._places.leading(place, ask.keys, ask.shards)
        if place.is_shared:
            self._places.check_unnamed(ask.keys)
        if self._places.seeks(place, ask.keys, ask.shards):  # other nodes may have stored them there
            return Found(len(ask.keys), count, {place.name: count})
        if place != first:
            self._settle_in(place, ask)
            for key in self._places.found(place, ask.keys, ask.shards):
                chunks = self._places.chunks(first, key, ask.shards)
                is_used = any(chunk.is_found or chunk.is_kept or chunk.leases for chunk in chunks)
                by_peer = from_node(peer).name
                if chunks and not is_used and all(chunk.reservation.origin.name == by_peer for chunk in chunks):
                    self._places.drop(first, [key], ask.shards, why=Cause.MOVED)
        return Found(len(ask.keys), count, {place.name: count})

    def _settle_in(self, place: Place, ask: Settle) -> None:
        """Copy the chunks that are here into the tier, each once, however many peers ask and how often.

        :raises NodeError: the tier does not take some, or too many are being stored.
        """
        there = self._places.found(place, ask.keys, ask.shards)
        failed, wanted = 0, []
        for key in ask.keys:
            copy = self._settling.get((place.name, key))
            if copy is not None and copy.state is not CopyState.OVER:
                continue
            self._settling.pop((place.name, key), None)
            if key in there or not self._places.chunks(self._places.first, key, ask.shards):
                continue
            failed += copy is not None and not copy.is_complete
            wanted.append(key)
        if failed:
            raise NodeError(f"{place.name} did not take {failed} of {len(ask.keys)} chunks")
        if not wanted:
            return
        if len(self._settling) + len(wanted) > MAX_SETTLING:  # forget those no peer has asked about
            self._settling = {name: copy for name, copy in self._settling.items() if copy.state is not CopyState.OVER}
        if len(self._settling) + len(wanted) > MAX_SETTLING:
            raise NodeError(f"{len(self._settling)} chunks are being stored for peers already")
        for copy in self._take_away(place, wanted, ask.shards):
            self._settling.update(((place.name, key), copy) for key in copy.keys)
