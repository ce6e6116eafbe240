"""Carries out controllers' verbs in the tiers of this node, from typed messages. No sockets here.

Work that the size of the message bounds is done at once; all else is a job (`pdx.node.control.jobs`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pdx.errors import ArenaFull, ChunkMissing, NodeError, PdxError, ProtocolError, TierError
from pdx.memory.keys import is_named
from pdx.node.control.jobs import Job, JobTable, Steps
from pdx.node.control.moves import Errand, Mover
from pdx.node.control.places import Place
from pdx.node.reports import engine_url
from pdx.store.chunk import Chunk, Wanted
from pdx.store.history import Cause
from pdx.store.store_tier import check_recoding
from pdx.telemetry.faults import printable
from pdx.wire.base import check_slots
from pdx.wire.messages import Outcome
from pdx.wire.verbs import (
    MAX_EVICTED,
    MAX_LISTED,
    MAX_MODELS,
    AnyVerb,
    CheckFinish,
    Clear,
    Drain,
    Drained,
    Effect,
    EndJob,
    Evict,
    Find,
    Found,
    JobList,
    Jobs,
    JobStatus,
    Kept,
    List,
    Listing,
    Model,
    ModelList,
    Models,
    Move,
    PinIn,
    Prefetch,
    Recode,
    Selection,
)

if TYPE_CHECKING:
    from pdx.node.service import Service

_T = TypeVar("_T")

_NAMED = 16  # engines listed in an error's text
STEP_KEYS = 256  # per step of a job that drops or recodes


class Controls:
    """The handlers of controllers' verbs. Owned by the control loop."""

    def __init__(self, service: Service) -> None:
        self._name = service.name
        self._store = service.store
        self._sessions = service.sessions
        self._admissions = service.admissions
        self._look_ahead = service.look_ahead
        self._hinting = service.hinting
        self._names = service.names
        self._pin_share = service.config.pin_share  # the share of all arenas that may be pinned
        self._counters = service.counters
        self._service = service
        self.places = service.places
        self.jobs = JobTable(service.name, service.epoch, service.env)
        self._mover = Mover(service, self.places)
        service.peers.on_settle = self._mover.settle
        self._handlers: dict[type[AnyVerb], Callable[[Any], Outcome]] = {
            Find: self._find,
            Move: self._move,
            Prefetch: self._prefetch,
            Clear: self._clear,
            PinIn: self._pin,
            Recode: self._recode,
            Evict: self._evict,
            List: self._list,
            Jobs: lambda _: JobList(self.jobs.all()[:MAX_LISTED]),
            CheckFinish: lambda ask: self.jobs.status(ask.job),
            EndJob: lambda ask: self.jobs.cancel(ask.job),
            Models: self._models,
            Drain: self._drain,
        }

    def handle(self, verb: AnyVerb) -> Outcome:
        """Carry out a verb; return its outcome, or the job that will do it.

        :raises NodeError: refused. :raises ProtocolError: the verb is invalid.
        """
        self._counters["verbs"] += 1
        return self._handlers[type(verb)](verb)

    def _selected(self, what: Selection) -> tuple[Sequence[bytes], int]:
        """The selected keys, each once, and their number of shards.

        :raises ChunkMissing: no request of that name is remembered. :raises ProtocolError: nothing was selected.
        """
        if what.keys:
            check_slots(len(what.keys), what.shards)
            return list(dict.fromkeys(what.keys)), what.shards
        if not what.request:
            raise ProtocolError("no chunks are selected: name tokens, a text or a request")
        keys, shards = self._admissions.explanations.keys_of(what.request) or ((), 1)
        if not keys:
            raise ChunkMissing(f"no request whose id contains {printable(what.request)!r} is remembered by this node")
        return list(dict.fromkeys(keys)), shards

    # ---- looking ----------------------------------------------------------------------------

    def _find(self, ask: Find) -> Found:
        keys, shards = self._selected(ask.what)
        tiers: dict[str, int] = {}
        pinned: dict[str, int] = {}
        asking: list[str] = []
        for place in self.places.all:
            tiers[place.name] = self.places.leading(place, keys, shards)
            if self.places.seeks(place, keys, shards):
                asking.append(place.name)
            is_pinned = functools.partial(self.places.is_pinned, place, shards=shards)
            pinned[place.name] = sum(1 for _ in itertools.takewhile(is_pinned, keys))
        hits = max(tiers.values(), default=0)
        while hits < len(keys) and any(self.places.found(place, [keys[hits]], shards) for place in self.places.all):
            hits += 1
        of_first = [held for place in self.places.all for held in self.places.found(place, keys[:1], shards).values()]
        return Found(
            len(keys),
            hits,
            tiers,
            {name: count for name, count in pinned.items() if count},
            asking,
            of_first[0].nbytes if of_first else 0,
            ask.what.chunk_tokens,
        )

    def _models(self, ask: Models) -> ModelList:
        models = [
            Model(hello.engine, hello.url, session.layout, hello.shape)
            for session in self._sessions
            if (hello := session.hello).kind == "scheduler" and hello.layout and hello.shape
        ]
        return ModelList(models[:MAX_MODELS])

    def _list(self, ask: List) -> Listing:
        named = {
            session.hello.layout: f"{session.hello.shape.get('model', '')} ({session.hello.engine})"
            for session in self._sessions
            if session.hello.layout
        }
        models = [
            Kept(_model(named.get(layout, ""), layout), *kept) for layout, kept in self._store.index.by_layout().items()
        ]
        kept, left_out = self._look_ahead.kept(ask.session)
        sessions = [Kept(printable(name), *of_session) for name, of_session in kept.items()]
        models = [each for each in models if ask.model in each.name]
        for rows in (models, sessions):
            rows.sort(key=lambda row: -row.nbytes)
        more = left_out + max(0, len(models) - MAX_LISTED) + max(0, len(sessions) - MAX_LISTED)
        return Listing(models[:MAX_LISTED], sessions[:MAX_LISTED], more)

    # ---- moving -----------------------------------------------------------------------------

    def _move(self, ask: Move) -> JobStatus:
        keys, shards = self._selected(ask.what)
        node = "" if ask.target_node == self._name else ask.target_node
        tier = ask.target or self.places.first.name
        target = tier if node else self.places.at(tier)
        sources = [self.places.at(ask.source)] if ask.source else self.places.all
        # A shared tier of the same name at another node is the same store: dropping chunks here would drop them there.
        same = [p for p in sources if p == target or (node and p.name == tier and p.is_shared)]
        if not ask.source:
            sources = [place for place in sources if place not in same]
        elif same:
            raise ProtocolError(f"{ask.source} is moved to itself: name another tier to move to")
        if isinstance(target, Place):
            self.places.check_homes(target, shards)
        places, nbytes = self._whence(sources, keys, shards, is_named=bool(ask.source))
        found = [(key, places[key]) for key in keys if key in places]
        whence, where = ask.source or "any tier", f"{node or self._name}/{tier}"
        if not found:
            there = [place.name for place in self.places.all if self.places.found(place, keys, shards)]
            others = f"; {', '.join(there)} has some" if there else "; no tier of this node has any"
            others += "".join(f"; {place.name} {why}" for place in sources if (why := place.why_not(keys[0])))
            raise ChunkMissing(f"none of {len(keys)} chunks is in {whence}{others}")
        if not ask.keeps:
            self._check_unpinned(found, shards, "or keep it there (--keep)")
        if not isinstance(target, Place) or target.is_shared:
            self.places.check_unnamed([key for key, _ in found])
        verb = "copy" if ask.keeps else "move"
        what = f"{verb} {len(found)} of {len(keys)} chunks from {whence} to {where}"
        job = Job("move", what, [key for key, _ in found], len(found) * shards, nbytes)
        return self._start(job, self._mover.steps(Errand(job, shards, target, node, ask.keeps), found), ask.dry_run)

    def _whence(
        self, sources: Sequence[Place], keys: Sequence[bytes], shards: int, *, is_named: bool
    ) -> tuple[dict[bytes, Place], int]:
        """For each key the first of these places that may have it, and the bytes known to be there. Unless the source
        `is_named`, no remote store is asked for keys that memory has."""
        places: dict[bytes, Place] = {}
        nbytes = 0
        for place in sources:
            left = [key for key in keys if key not in places]
            found = self.places.found(place, left, shards)
            places.update(dict.fromkeys(found, place))
            nbytes += sum(held.nbytes for held in found.values()) * shards
            if place.may_have_more:
                unknown = [key for key in left if key not in found and (is_named or not self._store.index.of(key))]
                places.update(dict.fromkeys(unknown, place))
        return places, nbytes

    def _check_unpinned(self, found: Sequence[tuple[bytes, Place]], shards: int, instead: str) -> None:
        for key, place in found:
            if self.places.is_pinned(place, key, shards):
                raise NodeError(f"chunk {key.hex()} is pinned in {place.name}: unpin it, {instead}")

    def _prefetch(self, ask: Prefetch) -> Effect:
        keys, shards = self._selected(ask.what)
        place = self._hinting.memory_at(ask.to)
        there = self.places.found(place, keys, shards)
        others = [each for each in self.places.all if each != place]
        places, nbytes = self._whence(others, [key for key in keys if key not in there], shards, is_named=False)
        if not (there or places):
            raise ChunkMissing(f"none of {len(keys)} chunks is in any tier of this node")
        if not ask.dry_run:
            name = f"prefetch of {keys[-1].hex()}"
            self._hinting.prefetch((b"", name), Wanted(keys, shards, is_named=is_named(keys[0])), place)
        return Effect([Kept(place.name, len(places) * shards, nbytes)], ask.dry_run)

    # ---- dropping ---------------------------------------------------------------------------

    def _clear(self, ask: Clear) -> Effect | JobStatus:
        places = [self.places.at(ask.tier)] if ask.tier else self.places.all
        if ask.everything:
            return self._clear_all(places, dry_run=ask.dry_run)
        keys, shards = self._selected(ask.what)
        self.jobs.check(keys)
        if ask.dry_run:
            return Effect([self.places.kept(place, keys, shards) for place in places], dry_run=True)
        self._names.forget(keys)
        done = [self.places.drop(place, keys, shards if place.tier is not None else 0) for place in places]
        for place in places:
            if place.is_shared and not place.may_have_more:
                others = ", ".join(f"{kept.chunks} chunks from {kept.name}" for kept in done if kept.name != place.name)
                why = f"{place.name} {place.why_not(keys[0])}: what it has of them is removed when it answers"
                raise NodeError(f"{others} are forgotten; {why}" if others else why)
        return Effect(done)

    def _clear_all(self, places: Sequence[Place], *, dry_run: bool) -> JobStatus:
        shared = next((place.name for place in places if place.is_shared), "")
        if shared and len(places) == 1:
            raise NodeError(f"{shared} is shared with other nodes: clear it by tokens, or where it runs")
        own = [place for place in places if place.name != shared]
        arenas = [(place, arena) for place in own for arena in sorted(place.arenas)]
        statuses = [status for place in own if place.tier is not None and (status := place.tier.status()) is not None]
        pools = [self._store.pools[arena] for _, arena in arenas]
        count = sum(len(self._store.index.slots[arena]) for _, arena in arenas)
        count += sum(len(place.tier.keys()) for place in own if place.tier is not None)
        nbytes = sum(pool.total_bytes - pool.free_bytes for pool in pools) + sum(each.used_bytes for each in statuses)
        if not dry_run:
            self._names.clear()
        what = f"clear {', '.join(place.name for place in own)}"
        job = Job("clear", what, (), count, nbytes)
        below = [place for place in own if place.tier is not None]
        return self._start(job, self._clearing(job, arenas, below), dry_run)

    def _clearing(self, job: Job, arenas: Sequence[tuple[Place, int]], below: Sequence[Place]) -> Steps:
        """Clear arena by arena and tier by tier; each one's chunks are listed when its turn comes."""
        for place, arena in arenas:
            for some in _steps(self._store.index.offsets(arena)):
                job.did(len(some), self.places.drop(place, self._store.index.sealed_at(arena, some)).nbytes)
                yield
        for place in below:
            for of_step in _steps(place.tier.keys() if place.tier is not None else ()):
                job.did(len(of_step), self.places.drop(place, of_step).nbytes)
                yield

    def _evict(self, ask: Evict) -> Effect:
        place = self.places.at(ask.tier)
        if place.tier is not None:
            raise NodeError(f"{place.name} has no priorities: evict from memory, or clear it by tokens")
        victims: list[Chunk] = []
        nbytes = 0
        for arena in sorted(place.arenas):
            for chunk in itertools.islice(self._store.pools[arena].order.peek(), 4 * MAX_EVICTED):
                if nbytes >= ask.nbytes or len(victims) >= MAX_EVICTED:
                    break
                if chunk.hints.priority < ask.below and chunk.is_evictable:
                    victims.append(chunk)
                    nbytes += chunk.slot.nbytes
        effect = Effect([Kept(place.name, len(victims), nbytes)], ask.dry_run)
        if not ask.dry_run:
            for chunk in victims:
                self._store.pools[chunk.slot.arena].drop(chunk, Cause.BY_CONTROLLER)
        return effect

    # ---- engines ----------------------------------------------------------------------------

    def _drain(self, ask: Drain) -> Drained:
        names = {
            each: (each.hello.engine, each.hello.url, engine_url(self._service, each))
            for each in self._sessions
            if each.hello.kind == "scheduler"
        }
        name = ask.engine.rstrip("/")
        urls = {of_it[2] for of_it in names.values() if name in of_it} - {""}
        # Drain all data parallel ranks of one server, as a request may go to any of them.
        found = [each for each, of_it in names.items() if name and (name in of_it or of_it[2] in urls)]
        if not found:
            there = ", ".join(of_it[2] or of_it[0] for of_it in itertools.islice(names.values(), _NAMED)) or "none"
            raise NodeError(f"no engine {printable(ask.engine)} is attached to node {self._name}; there are: {there}")
        for each in found:
            each.is_draining = ask.draining
        self._service.has_news = True  # reports to proxies at once
        return Drained(found[0].hello.engine, sum(each.running for each in found), ask.draining)

    # ---- pinning ----------------------------------------------------------------------------

    def _pin(self, ask: PinIn) -> Effect:
        keys, shards = self._selected(ask.what)
        places = [self.places.at(ask.tier)] if ask.tier else self.places.all
        each = ((place, self.places.found(place, keys, shards)) for place in places)
        having = next(((place, found) for place, found in each if len(found) == len(keys)), None)
        if having is None:
            place = self.places.at(ask.tier)
            lacking = len(keys) - len(self.places.found(place, keys, shards))
            raise ChunkMissing(f"{lacking} of {len(keys)} chunks are not in {place.name}: move them there first")
        place, found = having
        chunks = [chunk for key in keys for chunk in self.places.chunks(place, key, shards)]  # empty for tiers below
        if ask.pinned:
            self.check_pins(chunks)
        if not ask.dry_run and place.tier is not None:
            place.tier.pin(keys, pinned=ask.pinned, share=self._pin_share)
        elif not ask.dry_run:
            self._store.pin_chunks(chunks, pinned=ask.pinned)
        nbytes = sum(held.nbytes for held in found.values()) * shards
        return Effect([Kept(place.name, len(keys) * shards, nbytes)], ask.dry_run)

    def check_pins(self, chunks: Sequence[Chunk]) -> None:
        """:raises ArenaFull: with these chunks more would be pinned than may be (`pin_share`)."""
        more = sum(chunk.slot.nbytes for chunk in dict.fromkeys(chunks) if not chunk.is_kept)
        most = int(self._store.total_bytes * self._pin_share)
        if more and self._store.index.kept_bytes + more > most:
            self._counters["pins_refused"] += 1
            raise ArenaFull(
                f"{self._store.index.kept_bytes} bytes are pinned or leased by tenants, and {more} more would be above "
                f"the {most} that may be (pin_share); unpin some, or give the node a larger --arena"
            )

    # ---- jobs -------------------------------------------------------------------------------

    def _start(self, job: Job, steps: Steps, dry_run: bool) -> JobStatus:
        if not dry_run:
            return self.jobs.start(job, steps)
        self.jobs.check(job.keys)
        return JobStatus("", job.verb, "planned", job.chunks, 0, job.nbytes, what=printable(job.what, 1000))

    def _recode(self, ask: Recode) -> JobStatus:
        keys, shards = self._selected(ask.what)
        place = self.places.at(ask.tier)
        if place.tier is None or not place.tier.can_recode:
            raise NodeError(f"{place.name} holds chunks as engines read them: move them to a disk or store, and then")
        new_keys = ask.new_keys or keys
        if len(new_keys) != len(keys):
            raise ProtocolError(f"{len(new_keys)} new keys for {len(keys)} chunks")
        is_renamed = new_keys != keys
        if is_renamed and len({*keys, *new_keys}) < 2 * len(keys):
            raise ProtocolError("a new key is that of two chunks, or of one that it would replace")
        pairs = list(zip(keys, new_keys, strict=True))
        try:
            check_recoding(pairs, ask.codec)
        except PdxError as error:
            raise NodeError(f"codec {ask.codec!r}: {error}") from error
        if is_renamed:
            self._check_unpinned([(key, place) for key in keys], shards, "or store it by a codec without loss")
        found = self.places.found(place, keys, shards)
        if not self.places.seeks_any(place, keys, shards):
            pairs = [(old, new) for old, new in pairs if old in found]
        if not pairs:
            raise ChunkMissing(f"none of {len(keys)} chunks is in {place.name}")
        nbytes = sum(each.nbytes for each in found.values()) * shards
        what = f"store {len(pairs)} of {len(keys)} chunks in {place.name} by {ask.codec}"
        busy = list(dict.fromkeys([*(old for old, _ in pairs), *(new for _, new in pairs)]))
        job = Job("recode", what, busy, len(pairs) * shards, nbytes)
        return self._start(job, self._recoding(job, place, pairs, ask.codec, shards), ask.dry_run)

    def _recoding(self, job: Job, place: Place, pairs: Sequence[tuple[bytes, bytes]], codec: str, shards: int) -> Steps:
        errors: list[TierError] = []
        for some in _steps(pairs):
            errors += yield from self._recoding_some(job, place, some, codec, shards)
        if job.lacking == len(pairs):
            raise ChunkMissing(f"none of {len(pairs)} chunks is in {place.name}")
        if errors:
            done = f"{job.chunks_done} of {job.chunks} chunks are stored by {codec}, the others as they were"
            raise NodeError(f"{place.name}: {errors[0]} ({len(errors)} chunks); {done}")

    def _recoding_some(
        self, job: Job, place: Place, pairs: Sequence[tuple[bytes, bytes]], codec: str, shards: int
    ) -> Generator[None, None, list[TierError]]:
        """Recode some chunks; return the errors."""
        found = yield from self._mover.present(job, place, [old for old, _ in pairs], shards)
        if place.is_shared:
            pairs = [(old, new) for old, new in pairs if old in found]
        errors: list[TierError] = []

        def on_chunk(key: bytes, error: TierError | None) -> None:
            if error is None:
                job.did(shards, found[key].nbytes * shards if key in found else 0)
            else:
                errors.append(error)

        assert place.tier is not None
        recoding = place.tier.recode(pairs, codec, shards, on_chunk)
        try:
            while not recoding.is_over:
                yield
        finally:
            if not recoding.is_over:
                recoding.cancel()
        return errors


def _steps(things: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Split into pieces of STEP_KEYS."""
    return (things[at : at + STEP_KEYS] for at in range(0, len(things), STEP_KEYS))


def _model(name: str, layout: bytes) -> str:
    """The name shown for the model with this layout, as far as it is known."""
    if not layout:
        return "not known: from a tier below, a peer, or a client"
    return printable(name or f"layout {layout.hex()}", 255)
