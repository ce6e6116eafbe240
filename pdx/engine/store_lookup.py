"""The scheduler half's dialog with the node about one request, from its one question to the last release.

A request is *decided* when its hits are leased and its misses have slots, or when that is known to be impossible. Until
then the engine is told to ask again in the next step. The engine's scheduler waits for answers, between two forward
passes: all waits of one step together take at most `ASK_S` and a tenth of a step's time, or `IDLE_S` if they delay no
other request, and every wait has a deadline. The node waits for what may still arrive, and answers when there is more.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from pdx.client.connection import Connection
from pdx.config import ConnectorConfig
from pdx.engine import spans
from pdx.engine.request import NO_WAIT, Asked, Awaited, ChunkSlots, Hits, SlotGrant, Step, TrackedRequest
from pdx.engine.request_keys import sizes, with_tail, without_tail
from pdx.engine.step import BlockHasher
from pdx.errors import ArenaTooSmall, NodeError, ProtocolError
from pdx.memory.layout import CacheGroups
from pdx.memory.slot import Slot
from pdx.telemetry.timeline import Event
from pdx.wire.base import MAX_KEYS, MAX_NAME, MAX_SLOTS
from pdx.wire.messages import Admit, Admitted, Cancel, Expect, FindMoved, Mark, Moved, Release

if TYPE_CHECKING:
    from pdx.engine.forms import Forms

_A = TypeVar("_A", Admitted, Moved)
_Question = Callable[[TrackedRequest, Connection], None]

ASK_S = 0.002
BUSY_SHARE = 0.1  # of a step's time
IDLE_S = 0.01  # asking more often would slow other engines' prefill on shared cores or caches
PATIENT = 5  # times `lookup_s`, for decode legs: computing would repeat their prefill, and delay others
MISS_S = 1.0  # misses are asked for again after this; hits, after half of their lease


class StoreLookup:
    """Asks the node on behalf of requests; answers are kept in the request. One thread: the scheduler's."""

    def __init__(
        self,
        config: ConnectorConfig,
        groups: CacheGroups,
        hasher: BlockHasher,
        clock: Callable[[], float] = time.monotonic,
        *,
        forms: Forms | None = None,
    ) -> None:
        """`forms`: decides which tokens the node is told; None: none."""
        self._config = config
        self._forms = forms
        self._groups = groups
        self._layout = groups[0]
        self._hasher = hasher
        self._clock = clock
        self._step = 0
        self._left_s = IDLE_S  # how long this step may still wait
        self._is_busy = False
        self._ahead: deque[tuple[TrackedRequest, Asked]] = deque()  # questions for room, ahead of a turn
        # As many as one message may name and its answer hold.
        self._max_chunks = min(MAX_KEYS, MAX_SLOTS // groups.num_shards) // len(groups) - 1

    def new_step(self, *, is_busy: bool, is_loading: bool = False, step_s: float = 0.0) -> None:
        """Start a scheduling step, which may wait again, but only briefly if a load may end meanwhile.

        If requests are running, they wait, too, so the step waits for a small share of a step's time (`step_s`; 0: not
        known). It waits at all because a request without its answer loses a whole step.
        """
        self._step += 1
        self._is_busy = is_busy
        self._left_s = min(ASK_S, step_s * BUSY_SHARE) if is_busy else ASK_S if is_loading else IDLE_S

    def begin(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Ask about a new request what the engine will want to know at its turn. Never waits."""
        if self.is_silent(tracked, connection):
            return  # the node may answer again by then
        self._try(tracked, connection, self._ask)
        # Not withdrawn: questions that wait for what may arrive, and a prefill leg's, which would end its transfer.
        if tracked.node.asked is not None and not tracked.is_prefill and not self._may_come(tracked):
            self._ahead.append((tracked, tracked.node.asked))

    def expect(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Tell the node what a new request will want whose turn will not come soon. Never waits."""
        keys = self._keys(tracked, tracked.request.num_prompt_tokens)
        if keys:
            tracked.adopt_epoch(connection.epoch)
            tracked.node.is_expecting = True
            groups = sizes(self._groups, 0, has_room=False).get("groups", [])
            name = tracked.request.request_id[:MAX_NAME]
            connection.tell(Expect(name, keys, self._groups.num_shards, groups=groups))

    def expect_no_more(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Withdraw `expect`: the request ended before its turn."""
        if tracked.node.is_expecting and tracked.node.epoch == connection.epoch:
            connection.tell(Expect(tracked.request.request_id[:MAX_NAME]))

    def take_back(self, connection: Connection | None) -> None:
        """Withdraw questions whose turn has not come soon: others can fill that room, and decoders wait for it."""
        while self._ahead and self._clock() - self._ahead[0][1].at > MISS_S:
            tracked, asked = self._ahead.popleft()
            if tracked.node.asked is asked and connection is not None and tracked.node.epoch == connection.epoch:
                connection.forget(asked.seq)
                tracked.node.asked, tracked.node.asked_since = None, 0.0

    def advance(self, tracked: TrackedRequest, connection: Connection, *, may_ask: bool = True) -> bool:
        """Ask the node, as far as needed. Returns whether the request is decided now. `may_ask`: its turn is near."""
        if not (tracked.is_decided and self._is_fresh(tracked)):
            if not may_ask and (tracked.node.asked is None or tracked.node.epoch != connection.epoch):
                return False
            self._try(tracked, connection, self._decide)
        if not tracked.is_decided:
            return False
        self._left_s = min(self._left_s, ASK_S)  # it can be scheduled now, and waits for the others
        return True

    def _try(self, tracked: TrackedRequest, connection: Connection, step: _Question) -> None:
        tracked.adopt_epoch(connection.epoch)
        try:
            if self.is_silent(tracked, connection):
                raise NodeError(f"the node has said nothing for {connection.silent_s():.1f} s")
            step(tracked, connection)
        except (NodeError, ProtocolError) as error:
            text = "request %s runs without PDX: %s"
            connection.count("request_without_pdx", text, tracked.request.request_id, error)
            self.forget_asked(tracked, connection)
            self.give_up_transfer(tracked, connection)
            self.release(tracked, connection)
            tracked.node.found = None  # there is no answer that could be too old
            tracked.node.reserved = True
            tracked.step(Step.DECIDE)

    def is_silent(self, tracked: TrackedRequest, connection: Connection) -> bool:
        """Whether the node has been silent so long that the request need not wait for its own timeout."""
        return connection.silent_s() >= _patience(tracked) * self._config.lookup_s

    def _decide(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Ask, or take the answer. Called again in the next step if the request is not decided then."""
        tracked.step(Step.ASK_AGAIN)
        if tracked.wait_until is None and self._may_come(tracked):
            tracked.wait_until = self._clock() + self._config.transfer_wait_s
        if tracked.node.asked is None:
            self._ask(tracked, connection)
        asked = tracked.node.asked
        if asked is None:  # no chunk is full, and no tail is to be written
            tracked.node.reserved = True
            tracked.step(Step.DECIDE)
            return
        try:
            answer = self.collect(connection, asked, Admitted, times=_patience(tracked))
        except ArenaTooSmall:
            tracked.node.asked = None
            tracked.node.fits = not tracked.accepts_partial_room
            if not tracked.accepts_partial_room:
                tracked.room_until = self._clock()  # waiting does not help
                self._wait_for_room(tracked, connection)
            return
        if answer is None:
            return
        tracked.node.asked = None
        if answer.sources:  # what was brought for this request keeps its source, however often it asks
            both = itertools.zip_longest(tracked.node.sources, answer.sources, fillvalue=0)
            tracked.node.sources = bytes(map(max, both))
        if answer.waiting and tracked.node.awaited:
            if not self._waits_on(tracked, connection):
                self._decide(tracked, connection)
            return
        tracked.node.awaited = min(tracked.node.awaited, Awaited.TRANSFER)  # the source was asked
        if answer.full and not tracked.accepts_partial_room:
            self._wait_for_room(tracked, connection)
            return
        self._take(tracked, connection, answer, asked)
        if tracked.node.reserved:
            tracked.node.awaited = Awaited.NOTHING  # chunks being filled may be this request's own from now on
        # An answer that could not have been taken sooner is taken at any age: steps may be that far apart.
        if self._step - asked.step > 1 and not self._is_fresh(tracked):
            self._ask(tracked, connection)
        elif tracked.node.reserved:
            tracked.step(Step.DECIDE)

    def _is_fresh(self, tracked: TrackedRequest) -> bool:
        """Whether the last answer is recent enough to rely on."""
        found = tracked.node.found
        hits = tracked.node.hits
        limit_s = hits.lease_s / 2 if hits.slots or hits.moved else MISS_S
        return found is None or self._clock() - found.at <= limit_s

    # ---- room that is not waited for --------------------------------------------------------

    def reserve_late(self, tracked: TrackedRequest, connection: Connection, end: int) -> None:
        """Ask for room for chunks that generated tokens or later inputs fill up to `end`; take the answer, also to
        `reserve_again`.

        Does not wait: the answer arrives in one of the next steps, when the request still has its blocks. Only models
        with states wait: a state is gone after the step that follows.
        """
        try:
            if tracked.node.late is None:
                first = tracked.decoded_end
                last = min(end // self._layout.chunk_tokens, first + self._max_chunks)
                is_tail = tracked.is_prefill and end <= tracked.request.num_prompt_tokens  # the transfer carries it
                if self._saves_decoded and first < last and not is_tail:
                    tracked.decoded_end = last
                    self._ask_late(tracked, connection, first, last)
                return
            answer = self.collect(connection, tracked.node.late, Admitted, wait=self._groups.has_state)
            if answer is not None:
                tracked.take_verdicts(answer.verdicts)
                self._take_grants(tracked, answer, tracked.node.late)
                tracked.node.late = None
        except (NodeError, ProtocolError) as error:
            text = "chunks of request %s are not saved: %s"
            connection.count("save_skipped", text, tracked.request.request_id, error)
            self.forget_asked(tracked, connection)  # the answer may still come

    @property
    def _saves_decoded(self) -> bool:
        return self._config.save and self._config.save_decode

    def reserve_again(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Ask for room again: chunks were evicted before they were loaded, so they are computed again and saved."""
        if tracked.node.late is not None or not (tracked.saves and self._config.save):
            return
        num_chunks = max(tracked.request.num_prompt_tokens // self._layout.chunk_tokens, tracked.decoded_end)
        if num_chunks:
            self._ask_late(tracked, connection, 0, min(num_chunks, self._max_chunks))

    def is_due(self, tracked: TrackedRequest) -> bool:
        """Whether the next step of this request may have something to save, to ask or to tell."""
        if not tracked.saves:
            return False
        if tracked.node.grants or tracked.node.late is not None or tracked.is_prefilling:
            return True
        next_end = (tracked.decoded_end + 1) * self._groups.chunk_tokens
        return self._saves_decoded and len(tracked.block_ids) * self._layout.block_tokens >= next_end

    def _ask_late(self, tracked: TrackedRequest, connection: Connection, first: int, end: int) -> None:
        """Ask for room only, for chunks [first, end). They come late and are not pushed."""
        ask = Admit(
            tracked.keys.leading(end, first),
            **sizes(self._groups, 0, has_room=True),
            shards=self._groups.num_shards,
            partial=tracked.accepts_partial_room,
            transfer=tracked.transfer if tracked.is_prefilling else None,  # which carries only the prompt
            part="writes",
            hints=tracked.hints,
            **tracked.keys.block_fields(first, end * self._layout.blocks_per_chunk),
            tokens=self._forms.prompt_tokens(tracked, first, end - first) if self._forms else None,
        )
        tracked.node.late = self.ask(connection, ask, first, end - first, end * self._groups.chunk_tokens)

    # ---- the request's one question ---------------------------------------------------------

    def _ask(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Ask what is there, and for room for what is not, unless the request has that already.

        A prefill leg wants all or nothing as long as it may wait; any other request takes what room there is.
        """
        wants_room = self._takes_room(tracked) and not tracked.node.reserved
        keys, tail_tokens = self._prompt_keys(tracked)
        if tracked.part in ("writes", "keeps") and tail_tokens and not wants_room:
            keys, tail_tokens = without_tail(keys, len(self._groups)), 0
        if not keys:
            return
        whole = len(keys) // len(self._groups) - (tail_tokens > 0)
        may_be_elsewhere = tracked.is_decode or whole > 0
        source = tracked.source if tracked.node.awaited is Awaited.SOURCE else connection.node_name  # peers were asked
        ask = Admit(
            keys,
            **sizes(self._groups, tail_tokens, has_room=wants_room),
            shards=self._groups.num_shards,
            lease_s=self._config.lease_s,
            partial=tracked.accepts_partial_room,
            transfer=tracked.transfer if tracked.is_prefill or tracked.node.awaited else None,
            part=tracked.part,
            push_to=tracked.push_to if wants_room else "",
            source=source if may_be_elsewhere else "",
            **tracked.keys.block_fields(0, self._end_block(tracked, tail_tokens)),
            wait_s=self._wait_s(tracked) if may_be_elsewhere else 0.0,
            request=tracked.request.request_id[:MAX_NAME],
            hints=tracked.hints,
            early=tracked.is_decode and bool(tracked.node.awaited) and not tracked.request.num_preemptions,
            tokens=self._forms.prompt_tokens(tracked, 0, whole) if self._forms and wants_room else None,
        )
        end_tokens = whole * self._groups.chunk_tokens + tail_tokens
        tracked.node.asked = self.ask(connection, ask, 0, whole + (tail_tokens > 0), end_tokens)
        tracked.node.is_expecting = False  # the question tells the node
        tracked.node.asked_since = tracked.node.asked_since or tracked.node.asked.at
        if wants_room and not tracked.is_prefill:
            tracked.decoded_end = max(tracked.decoded_end, whole)

    def _takes_room(self, tracked: TrackedRequest) -> bool:
        return self._config.save and tracked.node.fits

    def _wait_s(self, tracked: TrackedRequest) -> float:
        """How long the node may hold back its answer: so much less than `lookup_s` that silence is still noticed."""
        until = tracked.wait_until
        left_s = self._config.transfer_wait_s if until is None else max(0.0, until - self._clock())
        return min(self._config.lookup_s / 2, left_s)

    def _may_come(self, tracked: TrackedRequest) -> bool:
        return bool(tracked.source) or (tracked.is_decode and tracked.node.awaited > Awaited.NOTHING)

    def _waits_on(self, tracked: TrackedRequest, connection: Connection) -> bool:
        """Whether to ask again in the next step, because more may arrive. False: ask at once, for what is here."""
        now, limit_s = self._clock(), self._config.transfer_wait_s
        if tracked.wait_until is None:
            tracked.wait_until = now + limit_s
        if now < tracked.wait_until:
            return True
        source = tracked.source
        tracked.node.awaited = Awaited.NOTHING
        if tracked.is_decode:
            text = "transfer %s did not arrive within %s s"
            connection.count("transfer_late", text, tracked.transfer, limit_s)
            return False
        # The node ends these waits by its own deadlines (`fetch_s`, a tier that is too slow). If it does not, the next
        # question is about this node alone, and its answer leases what is here.
        text = "request %s goes on without chunks of %s"
        connection.count("source_late", text, tracked.request.request_id, source or "a lower tier")
        return bool(source)

    def _prompt_keys(self, tracked: TrackedRequest) -> tuple[list[bytes], int]:
        """The prompt's keys, and the tokens of the tail that the last ones are for; 0: all are for whole chunks."""
        request, groups = tracked.request, self._groups
        if request.num_preemptions and not tracked.is_prefill:
            # What was generated may be there, too; the tail was for one reader.
            return self._keys(tracked, request.num_tokens if self._saves_decoded else request.num_prompt_tokens), 0
        tokens = tracked.transfer_tokens
        whole = groups.whole_chunks(tokens)
        # If a message cannot name all of a long prompt, the tail would not follow the other keys.
        if tracked.transfer is not None and tokens > 0 and whole <= self._max_chunks:
            tail = tracked.keys.tail(self._hasher, tokens, tracked.transfer)
            if tail is not None:
                return with_tail(self._keys(tracked, tokens), tail), tokens - whole * groups.chunk_tokens
        keys = self._keys(tracked, request.num_prompt_tokens)
        has_room = groups.is_single and self._takes_room(tracked) and len(keys) < self._max_chunks
        if tracked.part == "keeps" and has_room:
            end = tracked.keys.end(request.num_prompt_tokens)
            if end is not None:
                return [*keys, end[0]], end[1] * self._layout.block_tokens
        return keys, 0

    def _end_block(self, tracked: TrackedRequest, tail_tokens: int) -> int:
        """The end of the full blocks that a question is about; with a tail, generated blocks are left out."""
        request = tracked.request
        tokens = request.num_prompt_tokens if tail_tokens else request.num_tokens
        return min(tokens // self._layout.block_tokens, self._max_chunks * self._layout.blocks_per_chunk)

    def _keys(self, tracked: TrackedRequest, num_tokens: int) -> list[bytes]:
        return tracked.keys.leading(min(self._groups.whole_chunks(num_tokens), self._max_chunks))

    # ---- its answer -------------------------------------------------------------------------

    def _take(self, tracked: TrackedRequest, connection: Connection, answer: Admitted, asked: Asked) -> None:
        """Replace the request's hits by the answer's, and take the room that it grants for what is missing."""
        self.release(tracked, connection)
        tracked.take_verdicts(answer.verdicts)
        is_first, tracked.node.found = tracked.node.found is None, asked
        tracked.node.hits = self._hits(tracked, answer, asked)
        took_s, tracked.node.asked_since = self._clock() - tracked.node.asked_since, 0.0
        spans.tell(tracked.request, "pdx.lookup", took_s, tokens=tracked.node.hits.tokens, transfer=tracked.transfer)
        self._take_grants(tracked, answer, asked)
        if tracked.is_decode and is_first:
            self.mark(tracked, connection, Event.FOUND, tokens=tracked.node.hits.tokens)
        if tracked.node.reserved:  # not if hits have gone: each chunk of the prompt must be a hit or have room
            granted = {grant.first_token // self._groups.chunk_tokens for grant in tracked.node.grants}
            is_covered = granted.issuperset(range(tracked.node.hits.num_whole, tracked.num_prompt_chunks))
            tracked.node.reserved = not self._takes_room(tracked) or is_covered
            return
        tracked.node.reserved = True
        if tracked.is_prefill:
            self.mark(tracked, connection, Event.ADMITTED, tokens=tracked.node.hits.tokens)

    def _hits(self, tracked: TrackedRequest, answer: Admitted, asked: Asked) -> Hits:
        """What can be loaded according to the answer; of a tail, as much as this request may use."""
        if answer.waiting:  # for nothing that this request awaits: the node leases nothing to it
            return Hits()
        keys, tail_tokens = self._prompt_keys(tracked)
        whole, part_blocks = answer.hits, answer.part_blocks
        has_tail = tail_tokens > 0 and whole == len(keys) // len(self._groups)
        if has_tail and not tracked.is_decode:  # its own, of which only full blocks are of use
            if not self._groups.is_single:
                return Hits(lease=answer.lease, lease_s=answer.lease_s)
            own_tail = tail_tokens // self._layout.block_tokens
            whole, part_blocks = whole - 1, own_tail if tracked.part == "keeps" else part_blocks
        tokens = whole * self._groups.chunk_tokens + part_blocks * self._layout.block_tokens
        if has_tail and tracked.is_decode:
            tokens = tracked.transfer_tokens
        end = whole + (part_blocks > 0)
        firsts = [layout.rule(tail_tokens).first(end, has_tail=has_tail) for layout in self._groups]
        chunks = [
            (group, self._groups[group].blocks_of(chunk, asked.end_tokens)[0])
            for group, first in enumerate(firsts)
            for chunk in range(first, end)
        ]
        slots = self._by_chunk(answer.slots)
        if len(slots) < len(chunks):
            raise ProtocolError(f"the node answers with slots of {len(slots)} chunks, where {len(chunks)} are needed")
        found = [ChunkSlots(*each, at) for each, at in zip(chunks, slots, strict=False)]
        return Hits(found, whole, tokens, answer.lease, answer.lease_s)

    def _by_chunk(self, slots: list[Slot]) -> list[list[Slot]]:
        """The slots of an answer: for each chunk one per shard."""
        shards = self._groups.num_shards
        return [slots[start : start + shards] for start in range(0, len(slots), shards)]

    def _wait_for_room(self, tracked: TrackedRequest, connection: Connection) -> None:
        """There is no room for all of its prompt: ask again until a deadline, and then take a part."""
        now = self._clock()
        if tracked.room_until is None:
            tracked.room_until = now + self._config.reserve_wait_s
        if now < tracked.room_until:
            return
        tracked.room_until = NO_WAIT
        text = "no room in the arena for request %s within %s s: the rest of its prompt is not transferred"
        connection.count("no_room", text, tracked.request.request_id, self._config.reserve_wait_s)

    def _take_grants(self, tracked: TrackedRequest, answer: Admitted, asked: Asked) -> None:
        """Keep the slots of the chunks that the question was about; the last one of each group may be a tail."""
        for index, slots in zip(answer.granted, self._by_chunk(answer.granted_slots), strict=True):
            group, number = divmod(index, asked.num_chunks)
            layout, chunk = self._groups[group], asked.first_chunk + number
            first, end = layout.blocks_of(chunk, asked.end_tokens)
            end_token = min((chunk + 1) * layout.chunk_tokens, asked.end_tokens)
            first_token = first * layout.block_tokens
            grant = SlotGrant(group, slots, first, end, first_token, end_token, by_layer=answer.by_layer)
            tracked.node.grants.append(grant)
            tracked.saved_blocks[group] = min(tracked.saved_blocks[group], first)
        tracked.node.grants.sort(key=lambda grant: (grant.first_token, grant.end_token))

    # ---- answers, leases, the end -----------------------------------------------------------

    def ask(self, connection: Connection, body: Admit | FindMoved, *chunks: int) -> Asked:
        """Send a question, whose answer is to be `collect`ed. `chunks`: those that it is about, as in `Asked`."""
        return Asked(connection.ask(body), self._clock(), self._step, *chunks)

    def collect(
        self, connection: Connection, asked: Asked, kind: type[_A], *, wait: bool = True, times: int = 1
    ) -> _A | None:
        """The answer, if it is there. Raises NodeError if the node refused, or was silent for `times` `lookup_s`."""
        start = self._clock()
        answer = connection.collect(asked.seq, self._left_s if wait else 0.0, or_another=not self._is_busy)
        took_s = self._clock() - start
        # If another answer has come, stop waiting: its request runs now, and this one in the next step.
        has_others = answer is None and wait and took_s < self._left_s
        self._left_s = 0.0 if has_others else max(0.0, self._left_s - took_s)
        if answer is None and wait and self._clock() - asked.at >= (limit_s := times * self._config.lookup_s):
            raise NodeError(f"the node did not answer within {limit_s} s")
        if answer is not None and not isinstance(answer, kind):
            raise ProtocolError(f"the node answers {type(answer).__name__}, where {kind.__name__} is expected")
        return answer

    def release(self, tracked: TrackedRequest, connection: Connection | None) -> None:
        """Release the request's hits, which are loaded or not needed."""
        node = tracked.node
        lease, node.hits = node.hits.lease, Hits()
        if lease and connection is not None and connection.epoch == node.epoch:
            told = Release(lease)
            if tracked.load is not None and tracked.load.failed_block is not None:
                failed_chunk = tracked.load.failed_block * self._layout.block_tokens // self._groups.chunk_tokens
                told = Release(lease, request=tracked.request.request_id[:MAX_NAME], failed_chunk=failed_chunk)
            connection.tell(told)

    def forget_asked(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Drop the request's pending questions."""
        for asked in filter(None, (tracked.node.asked, tracked.node.late)):
            connection.forget(asked.seq)
        tracked.node.asked = tracked.node.late = None

    def give_up_transfer(self, tracked: TrackedRequest, connection: Connection) -> None:
        """Cancel a prefill leg's transfer, so that its decoder stops waiting."""
        if tracked.is_prefill and tracked.transfer is not None:
            connection.tell(Cancel(tracked.transfer))

    def mark(self, tracked: TrackedRequest, connection: Connection, event: Event, *, tokens: int = 0) -> None:
        """Add a moment to the timeline of the request's transfer."""
        if tracked.transfer is not None:
            connection.tell(Mark(tracked.transfer, event, time.monotonic_ns(), tokens=tokens))


def _patience(tracked: TrackedRequest) -> int:
    return PATIENT if tracked.is_decode and tracked.node.awaited else 1
