"""Answers requests with leases on chunks that are here and room for the others, at once or after a wait for more.

No sockets here.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import ConfigError, NodeError, PeerError, ProtocolError
from pdx.memory.keys import KEY_BYTES
from pdx.memory.slot import Slot
from pdx.node.explanations import Explanations
from pdx.node.sessions import Session
from pdx.node.waiting import Patience, Waiter, Waiting
from pdx.store.cache_groups import Goal, goals, reserve, restorable
from pdx.store.chunk import Chunk, Claim, Origin, Wanted
from pdx.store.lifecycle import State
from pdx.store.paying import UNKNOWN, Computing
from pdx.telemetry.faults import counted
from pdx.wire.base import check_groups, check_slots
from pdx.wire.hints import Verdict
from pdx.wire.messages import Admit, Admitted, Answer, Group, Refused

if TYPE_CHECKING:
    from pdx.node.service import Service

log = logging.getLogger("pdx.node")

MAX_TRANSFER_S = 600.0
BACKLOG_LEFT = 0.5  # share of an engine's unfilled chunks that is taken to be still uncomputed


class Admissions:
    """Answers requests from the store, and decides whether missing chunks may still come. Owned by the control loop."""

    def __init__(self, service: Service) -> None:
        self._config = service.config
        self._name = service.name
        self._store = service.store
        self._sessions = service.sessions
        self._transfers = service.transfers
        self._tiers = service.tiers
        self._peers = service.peers
        self._hinting = service.hinting
        self._counters = service.counters
        self._news = service.env.news
        self._faults = service.env.faults
        self._clock = service.env.clock
        self._took = service.env.timings[("pdx_node_admit_seconds",)]
        self._waiting = Waiting()
        self.explanations = Explanations(service)

    def ask(self, session: Session, ask: Admit) -> Admitted | None:
        """Answer a request; None: the answer comes later.

        :raises NodeError, ProtocolError: refused; nothing is held.
        """
        began = self._clock()
        check_slots(len(ask.keys), ask.shards)
        if ask.groups:
            check_groups(len(ask.keys), len(ask.groups))
            self._check_groups(ask)
        sizes: Sequence[Admit | Group] = ask.groups or [ask]
        for size in sizes:
            least = min(size.nbytes, size.tail_nbytes or size.nbytes)
            if size.nbytes and size.layers > least:
                raise ProtocolError(f"{size.layers} slices do not fit into {least} bytes")
        if ask.blocks:
            self._check_blocks(ask)
        answer = self._look(session, ask, 0.0)
        if isinstance(answer, Admitted):
            self._took.observe(self._clock() - began)
            return answer
        if not ask.wait_s or not self._waiting.has_room(session):
            return Admitted(answer.hits, waiting=True)
        now = self._clock()
        deadline = now + min(ask.wait_s, answer.seconds)
        load_s = self._load_s(session, ask)
        self._waiting.add(Waiter(session, session.last_seq, ask, answer.goal, answer.key, now, deadline, load_s))
        return None

    @staticmethod
    def _check_groups(ask: Admit) -> None:
        if ask.blocks:
            raise ProtocolError(f"{len(ask.blocks)} bytes of block names, and {len(ask.groups)} cache groups")
        tails = [group.tail_nbytes for group in ask.groups]
        if any(tails) and not (all(tails) and ask.keys):
            raise ProtocolError(f"tails of {tails} bytes and {len(ask.keys)} keys: all groups have one, or none")

    @staticmethod
    def _check_blocks(ask: Admit) -> None:
        count, over = divmod(len(ask.blocks), KEY_BYTES)
        if over or not ask.chunk_blocks or ask.nbytes % ask.chunk_blocks:
            text = f"{len(ask.blocks)} bytes of block names, {ask.chunk_blocks} blocks to a chunk of {ask.nbytes} bytes"
            raise ProtocolError(text)
        if ask.writes_tail and ask.nbytes:
            most = (len(ask.keys) - 1) * ask.chunk_blocks + ask.tail_nbytes * ask.chunk_blocks // ask.nbytes
            if count > most:
                raise ProtocolError(f"names of {count} blocks, where the keys and the tail have {most}")

    def late_answers(self) -> Iterator[tuple[Session, int, Answer]]:
        """After each turn of the control loop: answers to waiting requests, with the numbers of their messages."""
        self._waiting.changed(self._news)
        self._news.clear()
        now = self._clock()
        for waiter in self._waiting.take(now):
            answer: Answer | None = Admitted()  # if what follows fails: nothing is here
            with self._faults.contain("a late answer"):
                try:
                    answer = self._late(waiter, now)
                except (NodeError, ProtocolError) as error:
                    self._counters["refused"] += 1
                    answer = Refused.of(error)
            if answer is not None:
                self._took.observe(now - waiter.since)
                yield waiter.session, waiter.seq, answer

    def due_in(self, now: float) -> float:
        """Seconds until the next late answer is due, even if nothing happens before."""
        return self._waiting.due_in(now)

    def changed(self, chunks: Iterable[Chunk], transfers: Iterable[str] = ()) -> None:
        """Slices of these chunks, of these transfers, were filled, or the chunks are whole, or never will be."""
        self._waiting.changed([chunk.key for chunk in chunks if chunk.state is not State.FILLING])
        for name in transfers:
            self._waiting.filled(name, self._transfers.left_s)

    def end_session(self, session: Session) -> None:
        self._waiting.end_session(session)

    def _late(self, waiter: Waiter, now: float) -> Admitted | None:
        """The answer to a waiter; None: it waits on."""
        ask = waiter.ask
        arenas = self._sessions.arenas(waiter.session, ask.shards)
        goal, until = waiter.goal, waiter.deadline
        left = itertools.islice(goal.keys, goal.hits, None)
        goal = msgspec.structs.replace(goal, hits=goal.hits + len(self._store.find(left, ask.shards, arenas)))
        more = self._more_of(waiter.session, ask, goal, arenas, goal.hits) if now < until else None
        if more is None or self._early(waiter.session, ask, arenas):
            answer = self._look(waiter.session, ask, now - waiter.since)
            if isinstance(answer, Admitted):
                return answer
            until = waiter.since + ask.wait_s
            if not ask.groups or now >= until:
                return Admitted(answer.hits, waiting=True)
            more = answer  # the goal will not be reached, but a shorter length of the prompt may be
        deadline = min(until, now + more.seconds)
        self._waiting.add(msgspec.structs.replace(waiter, goal=more.goal, key=more.key, deadline=deadline))
        return None

    def _look(self, session: Session, ask: Admit, waited_s: float) -> Admitted | Patience:
        arenas = self._sessions.arenas(session, ask.shards)
        hits, found = self._find(session, ask, arenas)
        chunks = [chunk for shards in found for chunk in shards]
        early: list[tuple[Chunk, ...]] = []
        if (more := self._more(session, ask, hits, arenas)) is not None:
            early = self._early(session, ask, arenas)
            if not early:
                self._store.refresh(chunks)
                if ask.groups:  # chunks of the goal, which are no hits until the others have come
                    here = self._store.find(more.goal.keys[: more.goal.hits], ask.shards, arenas)
                    self._store.refresh([chunk for shards in here for chunk in shards])
                return more
            hits, found, chunks = ask.chunks, early, [chunk for shards in early for chunk in shards]
            self._counters["early_answers"] += 1
        if ask.blocks:
            self._tell_names(ask, found, session.block_tokens)
        part, part_blocks = self._part(ask, hits, arenas)
        now = self._clock()
        reasons = self.explanations.reasons(session, ask, hits, found, (part, part_blocks), now)
        chunks += part
        if ask.hints.salt or ask.hints.form:
            for chunk in chunks:
                if not chunk.hints.salt:  # it came from a peer or a tier, which do not know its salt
                    chunk.hints = ask.hints
        new = self._tiers.storing.found_by_request(chunks) if chunks else {}
        sources = self.explanations.sources(ask, hits, [*found, part], new)
        lease, lease_s = 0, 0.0
        if chunks and ask.lease_s:
            lease_s = min(ask.lease_s, self._config.max_lease_s)
            lease = self._store.lease(chunks, session.number, lease_s)
        else:
            self._store.touch(chunks)
        if lease and ask.moved:
            self._counters["moved_tokens"] += sum([part.count for part in ask.moved[:hits] if part.shift])
        try:
            granted, room, full = self._reserve(session, ask, hits, part_blocks, arenas)
        except (NodeError, ProtocolError):
            self._end_lease(lease, session)
            raise
        if full and not ask.partial:
            self._end_lease(lease, session)
            answer = Admitted(hits, full=True, sources=sources)
            self.explanations.note(session, ask, reasons, answer, waited_s=waited_s, now=now)
            return answer
        if ask.lease_s or not ask.asks_room:
            self._counters["lookups"] += 1
            self._counters["looked_up_chunks"] += ask.sought
            self._counters["hit_chunks"] += min(hits, ask.sought)
            self._counters["part_hit_blocks"] += part_blocks
            if hits < ask.sought and self._tiers.below:
                missing = self._first_missing(ask, hits, arenas)
                self._tiers.missed(missing, self._tiers.below, is_named=session.is_client)
        slots = [chunk.slot for chunk in chunks]
        by_layer = self._push(session, ask, arenas) or ask.writes is not None
        verdicts: list[Verdict] = []
        with self._faults.contain("the hints of a request"):  # a failure here costs the request nothing
            verdicts = self._hinting.request(ask, granted, arenas, is_named=session.is_client)
        answer = Admitted(
            hits, slots, lease, False, granted, room, full, by_layer, part_blocks, verdicts, lease_s, sources
        )
        self.explanations.note(session, ask, reasons, answer, waited_s=waited_s, now=now)
        return answer

    def _find(self, session: Session, ask: Admit, arenas: Sequence[int]) -> tuple[int, list[tuple[Chunk, ...]]]:
        """How many leading chunks of the prompt are here, and the chunks that hold them, a tuple of shards each."""
        if ask.groups:
            return restorable(self._store, self._wanted(session, ask, arenas))
        found = self._store.find(ask.keys, ask.shards, arenas)
        return len(found), found

    def _wanted(self, session: Session, ask: Admit, arenas: Sequence[int]) -> Wanted:
        who = _who(session, ask)
        return Wanted(ask.keys, ask.shards, arenas, session.is_client, who, ask.groups, ask.has_tail)

    def _first_missing(self, ask: Admit, hits: int, arenas: Sequence[int]) -> bytes:
        """The first sought key that is not here."""
        if not ask.groups:
            return ask.keys[hits]
        keys = ask.needed_keys(ask.sought)
        return next((key for key in keys if not self._store.index.is_whole(key, ask.shards, arenas)), ask.last_sought)

    def _load_s(self, session: Session, ask: Admit) -> float:
        """How long this request takes to copy all it asks for; 0: unknown, or it copies only whole chunks."""
        if not ask.early or ask.awaits is None or not ask.lease_s:
            return 0.0
        end, has_tail = ask.chunks, ask.has_tail
        count = sum([end - rule.first(end, has_tail=has_tail) for rule in ask.groups]) if ask.groups else end
        return count * self._sessions.load_s(session, ask.shards)

    def _early(self, session: Session, ask: Admit, arenas: Sequence[int]) -> list[tuple[Chunk, ...]]:
        """All chunks asked for, sealed or being filled by the transfer, if filling takes no longer than copying; else
        none, so that the engine's blocks are taken no sooner than needed."""
        load_s = self._load_s(session, ask)
        if ask.awaits is None or not load_s or self._transfers.left_s(ask.awaits) > load_s:
            return []
        found: list[tuple[Chunk, ...]] = []
        for key in reversed(ask.needed_keys(ask.chunks)):  # without room for all, the last ones are missing
            chunks = self._store.index.known(key, ask.shards, arenas)
            if chunks is None or not _is_of(ask.awaits, chunks):
                return []
            found.append(tuple(chunks))
        return found[::-1]

    def _part(self, ask: Admit, hits: int, arenas: Sequence[int]) -> tuple[Sequence[Chunk], int]:
        """The chunk after the hits with the most of the prompt's next blocks, in every shard, and how many it has."""
        names = ask.names(hits)
        if not (names and ask.lease_s):
            return (), 0
        found = self._store.part(ask.before(hits), names, ask.shards, arenas)
        return found if found is not None else ((), 0)

    def _tell_names(self, ask: Admit, hits: Sequence[tuple[Chunk, ...]], block_tokens: int) -> None:
        """Name the blocks of hits that came from elsewhere, which does not name them. A decode leg names more blocks
        than a tail has, because its prompt goes on after the tail."""
        whole = len(ask.blocks) // (ask.chunk_blocks * KEY_BYTES)
        for at, chunks in enumerate(hits[:whole]):
            if not (chunks[0].blocks or chunks[0].tail):
                self._store.name(chunks, ask.before(at), ask.names(at), block_tokens)
                if chunks[0].is_stored:
                    self._tiers.name(chunks[0])

    def _end_lease(self, lease: int, session: Session) -> None:
        if lease:
            self._store.release(lease, session.number)

    def _reserve(
        self, session: Session, ask: Admit, hits: int, part_blocks: int, arenas: Sequence[int]
    ) -> tuple[list[int], list[Slot], bool]:
        """Reserve room for the chunks missing after the hits: (granted indices, their slots, whether room ran out)."""
        if ask.writes is not None and self._transfers.is_given_up(ask.writes):
            return [], [], False
        granted: list[int] = []
        slots: list[Slot] = []
        full = False
        # Only one part of a request writes the tail; "keeps" writes it only if no chunk here has all of its blocks.
        end = ask.chunks - (ask.has_tail and not ask.writes_tail)
        width = ask.chunk_blocks * KEY_BYTES
        if (
            ask.blocks
            and ask.part == "keeps"
            and hits == end - 1
            and part_blocks * KEY_BYTES == len(ask.blocks) - hits * width
        ):
            end = hits  # another chunk has all of the tail
        if ask.groups and not ask.lease_s:
            hits = 0  # it reads nothing, so all of its chunks need room
        if ask.asks_room and hits < end:
            claims = [*self._claims(session, ask, hits, end, arenas)]
            if ask.groups:
                found, room, full = reserve(self._store, [claim for _, claim in claims])
                slots = [slot for of_claim in room for slot in of_claim]
            else:
                of_one, slots, full = self._store.reserve(claims[0][1])
                found = [of_one]
            for (first, claim), indices in zip(claims, found, strict=True):
                granted += [first + index for index in indices]
                if claim.is_named:  # names are not content: the chunks of these names in tiers below are outdated
                    self._tiers.forget([claim.keys[index] for index in indices], is_named=True)
        if ask.writes is not None and ask.asks_room and (ask.partial or not full):
            deadline = self._clock() + MAX_TRANSFER_S
            needed = self._needed_slots(session, ask, slots, arenas)
            self._transfers.open(ask.writes, needed, deadline, session.source)
        return granted, slots, full

    def _needed_slots(
        self, session: Session, ask: Admit, slots: Sequence[Slot], arenas: Sequence[int]
    ) -> Sequence[Slot]:
        """The transfer's slots that its prompt needs, or the part of the prompt for which there was room. Some of the
        others may never be filled, such as states that no step of the prefill leaves."""
        if not ask.groups:
            return slots
        found = restorable(self._store, self._wanted(session, ask, arenas), also_filling=True)[1]
        needed = {chunk.slot for chunks in found for chunk in chunks}
        return [slot for slot in slots if slot in needed]

    def _claims(
        self, session: Session, ask: Admit, hits: int, end: int, arenas: Sequence[int]
    ) -> Iterator[tuple[int, Claim]]:
        """For each cache group, the index of its first key and the claim on room for chunks [hits, end)."""
        width = ask.chunk_blocks * KEY_BYTES
        deadline, origin, who = self._clock() + self._config.reserve_s, Origin(session.title), _who(session, ask)
        sizes: Sequence[Admit | Group] = ask.groups or [ask]
        for at, size in enumerate(sizes):
            if not size.nbytes:
                continue
            first = at * ask.chunks + hits
            shard = size.shard if isinstance(size, Group) else 0
            writers = [writer.number for writer in self._writers(session, ask.shards, shard)]
            yield (
                first,
                Claim(
                    keys=ask.keys[first : first - hits + end],
                    nbytes=size.nbytes,
                    layers=size.layers,
                    owner=session.number,
                    writers=writers,
                    arenas=arenas,
                    tail_nbytes=size.tail_nbytes if end == ask.chunks else 0,
                    blocks=ask.blocks[hits * width :],
                    chunk_blocks=ask.chunk_blocks,
                    parent=b"" if ask.groups else ask.before(hits),
                    block_tokens=session.block_tokens,
                    partial=ask.partial,
                    is_named=session.is_client,
                    transfer=ask.writes,
                    deadline=deadline,
                    hints=ask.hints,
                    origin=origin,
                    layout=session.hello.layout,
                    who=who,
                    rule=size if isinstance(size, Group) and ask.lease_s else None,
                    chunks_before=hits,
                ),
            )

    def _writers(self, session: Session, shards: int, first: int) -> Sequence[Session]:
        if session.is_client:
            if shards != 1:
                raise ProtocolError(f"a client writes one shard itself, not {shards}")
            return [session]
        workers = self._sessions.workers(session.hello.engine, shards, first)
        if workers is None:
            raise ProtocolError(f"engine {session.hello.engine!r} does not have {shards} attached workers")
        return workers

    def _push(self, session: Session, ask: Admit, arenas: Sequence[int]) -> bool:
        """Push all chunks to the peer they are for; return whether that peer is another node that gets them."""
        if not ask.push_to or (ask.writes is not None and self._transfers.is_given_up(ask.writes)):
            return False
        if ask.push_to == self._name:
            return False
        keys: Sequence[bytes] = ask.keys
        if ask.groups:  # the whole prompt, or the longest part for which there was room
            found = restorable(self._store, self._wanted(session, ask, arenas), also_filling=True)[1]
            keys = [chunks[0].key for chunks in found]
        self._tiers.storing.bring(keys, ask.shards, arenas, ask.writes)
        try:
            self._peers.push(ask.push_to, keys, ask.shards, ask.writes, session.hello.layout)
        except (PeerError, ConfigError) as error:
            counted(log, self._counters, "push_impossible", "%s", error)  # a wrong name comes with every request
            return False
        return True

    def _more(self, session: Session, ask: Admit, hits: int, arenas: Sequence[int]) -> Patience | None:
        """What may still come after these hits."""
        if not ask.groups:
            return self._more_of(session, ask, Goal(ask.keys, hits), arenas, hits)
        if hits >= ask.sought:
            return None
        wanted = self._wanted(session, ask, arenas)
        if ask.writes_tail:
            wanted = msgspec.structs.replace(wanted, keys=ask.sought_keys, has_tail=False)
        every = goals(self._store, wanted, hits, functools.partial(self._tiers.is_near, wanted))
        found = (self._more_of(session, ask, goal, arenas, hits) for goal in every)
        return next((more for more in found if more is not None), None)

    def _more_of(self, session: Session, ask: Admit, goal: Goal, arenas: Sequence[int], hits: int) -> Patience | None:
        """What may still come of this goal, after these hits of the request: whole chunks first."""
        end = len(goal.keys) if ask.groups else ask.sought
        if goal.hits < end and (seconds := self._may_come(session, ask, goal, arenas)):
            key = goal.keys[goal.hits]
            if ask.groups and not self._store.index.of(key):  # no load has begun: a tier is being asked
                near = functools.partial(self._tiers.is_near, self._wanted(session, ask, arenas))
                key = next(itertools.filterfalse(near, goal.keys[goal.hits :]), key)
            return Patience(hits, goal, key, seconds)
        return self._part_may_come(session, ask, goal.hits, arenas)

    def _part_may_come(self, session: Session, ask: Admit, hits: int, arenas: Sequence[int]) -> Patience | None:
        """The wait for a chunk in a tier that begins with more of the prompt's next blocks than any chunk here."""
        names = ask.names(hits)
        if not (names and ask.lease_s and ask.wait_s):
            return None
        if not self._tiers.below:
            return None
        computing = self._computing(session, ask)
        for key, count in self._tiers.parts(ask.before(hits), names, ask.shards):
            more = count - self._part(ask, hits, arenas)[1]
            if more <= 0 or key in ask.keys[hits : hits + 1]:  # the latter is not worth loading whole, or is gone
                continue
            part = computing._replace(chunk_s=computing.chunk_s * more / ask.chunk_blocks)
            wanted = Wanted([*ask.keys[:hits], key], ask.shards, arenas, who=_who(session, ask))
            seconds = self._tiers.may_come(wanted, hits, computing=part)
            if seconds:
                return Patience(hits, Goal(ask.keys, hits), key, seconds)
        return None

    def _may_come(self, session: Session, ask: Admit, goal: Goal, arenas: Sequence[int]) -> float:
        """How many seconds to wait for missing chunks; 0: none will come."""
        if ask.asks_room and not ask.lease_s:
            return 0.0  # it writes the missing chunks and reads nothing
        awaited, hits, missing = ask.awaits, goal.hits, goal.keys[goal.hits]
        who, is_whole = _who(session, ask), bool(ask.groups)
        wanted = Wanted(goal.keys, ask.shards, arenas, session.is_client, who, is_whole=is_whole)
        if awaited is not None:
            if self._transfers.is_given_up(awaited):
                return 0.0
            if arenas and self._tiers.may_come(wanted, hits, transfer=awaited):
                return math.inf
            if self._transfers.is_under_way(awaited) or self._store.index.is_filling(missing, ask.shards):
                return math.inf
            if ask.part == "expects" and ask.wait_s and not self._transfers.is_known(awaited):
                return math.inf
        computing = self._computing(session, ask)
        computing = computing._replace(chunk_s=computing.chunk_s * goal.worth)
        has_more = self._tiers.below or arenas or missing in self._store.index.partial
        if has_more and (patience_s := self._tiers.may_come(wanted, hits, computing=computing)):
            return patience_s
        if not ask.source and (session.is_client or not self._peers.lookups.is_on):
            return 0.0  # a peer may have other bytes under the same name
        try:
            return math.inf if self._peers.may_come(ask, goal, arenas, computing) else 0.0
        except (PeerError, ConfigError) as error:
            counted(log, self._counters, "fetch_impossible", "%s", error)
            return 0.0

    def _computing(self, session: Session, ask: Admit) -> Computing:
        """How long a session's engine takes to compute, after the chunks it has room for and has not filled yet."""
        chunk_s = self._sessions.chunk_s(session, ask.shards)
        if chunk_s == math.inf:
            return UNKNOWN
        workers = self._sessions.workers(session.hello.engine, ask.shards)
        of_first = sum(not group.shard for group in ask.groups) or 1  # cache groups that the first worker writes
        unfilled = self._store.index.writers.count(workers[0].number) / of_first if workers else 0
        return Computing(chunk_s, BACKLOG_LEFT * unfilled * chunk_s)


def _is_of(transfer: str, chunks: Sequence[Chunk]) -> bool:
    """Whether all of these chunks that are not sealed belong to the transfer."""
    return all(chunk.state is State.SEALED or chunk.reservation.transfer == transfer for chunk in chunks)


def _who(session: Session, ask: Admit) -> str:
    return f"request {ask.request}" if ask.request else session.title
