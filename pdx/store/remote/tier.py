"""The remote tier: chunks in a store that several nodes share, by whatever `pdx.store.remote.backend` reaches.

Under a name each has the form of `pdx.store.chunk_format`:

    <prefix>/v3/<key>-<shard>    encoded or not

The control loop knows for some seconds which keys are there and which are not; for others a thread asks, while the
question of the request waits. So a look-up never waits for the network, and what another node has stored is found. A
thread that is free asks all that waits by then in one call: of a store that is far away many learn as much as one.

What is deleted is removed there, whether or not this node knows that it is there; where the store does not answer, when
it does (`pdx.store.remote.removals`).

Names are the chunks' keys, which cover model, precision, layout and cache salt, so that nodes that differ in one of
these never meet. What clients name themselves does not come here.

A store that does not answer is left alone: after some failures in a row nothing is asked of it for some seconds, and
then one call tells whether it is back. Until it has answered for the first time nothing is asked of it either.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from pdx.errors import LayoutError, StaleSlot, TierError
from pdx.memory.arena import Arena
from pdx.store.chunk_format import EncodedHeader, header_bytes, packed, whole_header
from pdx.store.codecs.codec import LOSSLESS, NONE
from pdx.store.copy import Copy
from pdx.store.history import Cause
from pdx.store.recoding import OnChunk, Pair, Recoding, check
from pdx.store.remote.backend import Backend
from pdx.store.remote.objects import held_in_all, held_of, name_of, placed, size_of
from pdx.store.remote.recoder import recode
from pdx.store.remote.removals import Removals
from pdx.store.tier import Grant, Held, Job, Part, Tier
from pdx.telemetry.faults import Faults
from pdx.wire.base import MAX_LAYERS
from pdx.wire.status import TierStatus

log = logging.getLogger("pdx.node")

THREADS = 4  # for questions, as many for loads, and as many for stores
MAX_FAILURES = 3  # one after the other before there is a pause
PAUSE_S = 10.0
THERE_S = 30.0  # what was found is taken to be there so long …
NOT_THERE_S = 1.0  # … and what was not, not to be
MAX_KNOWN = 1 << 17  # keys
MAX_SOUGHT = 1024  # questions that threads have, or that wait for one
HEAD_BYTES = 1024  # the header of a chunk with up to about 100 slices
_FAULTS = ("unreachable", "timeout", "denied", "untrusted", "failed")  # of the store …
_ENDS_CONNECTION = ("unreachable", "timeout")
_OF_STORES = ("full", "read_only", "denied")  # … of what is to be stored there …
_OF_CHUNKS = ("missing", "corrupt", "truncated", "outdated")  # … and of what is there


class _Work(msgspec.Struct, eq=False):
    """A job that a thread has."""

    job: Job
    is_cancelled: bool = False

    @property
    def part(self) -> Part:
        return self.job.parts[0]


class _Question(msgspec.Struct, eq=False):
    """Whether these keys are there, up to the first that is not; the first `at` are."""

    moment: int  # see `Removals`
    since: float
    keys: Sequence[bytes]
    shards: int
    at: int = 0


class _Known(msgspec.Struct, frozen=True, gc=False):
    """What was found under a key when so many shards were asked for; None: not all of them."""

    until: float
    shards: int
    held: Held | None
    why: str = ""  # nothing was found out, because the question failed


class RemoteTier(Tier):
    """See `Tier`; all methods are for the control loop. `close` alone waits, for calls that are under way."""

    kind = name = "remote"
    is_shared = True
    can_recode = True
    is_whole = True
    max_inflight_bytes = 256 << 20
    loads_at_once = THREADS

    def __init__(
        self,
        backend: Backend,
        *,
        arenas: Sequence[Arena],
        post: Callable[[Callable[[], None]], None],
        on_done: Callable[[Tier, Job, TierError | None], None],
        on_found: Callable[[Sequence[bytes]], None],
        counters: Counter[str],
        codec: str = NONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`codec`: by which chunks are encoded whose requests ask for none of their own. `post` has the control loop
        call something; `on_done` is `Copies.done`, `on_found` is told of keys that it was asked for."""
        self._backend = backend
        self._arenas = arenas
        self._post = post
        self._on_done = on_done
        self._on_found = on_found
        self._counters = counters
        self._codec = codec
        self._faults = Faults(counters, clock, log=log)
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._put: OrderedDict[bytes, int] = OrderedDict()  # what this node has stored there: a bit for each shard
        self._removals = Removals(counters)
        self._remove_from = 0.0  # nothing is removed before that
        self._admitted: dict[int, int] = {}  # copies, and at which moment
        self._sought: dict[bytes, _Question] = {}  # what is asked for
        self._questions: deque[_Question] = deque()  # that no thread has
        self._seeking = 0  # questions
        self._asking = 0  # threads
        self._under_way: dict[int, dict[_Work, None]] = {}  # by copy
        self._failures = 0  # one after the other
        self._closed_until = 0.0  # nothing is asked before …
        self._is_open = False  # … nor until it has answered
        self._is_pinging = False
        self._failed = 0.0, ""  # what there is to say until then of keys that a question was about which failed
        self._stores_from = 0.0  # nothing is stored before that
        self._is_over = False
        self._why = "no answer yet"
        self._askers = ThreadPoolExecutor(THREADS, "pdx-remote-ask")
        self._readers = ThreadPoolExecutor(THREADS, "pdx-remote-load")
        self._writers = ThreadPoolExecutor(THREADS, "pdx-remote-store")
        self._ping()

    def status(self) -> TierStatus:
        """For `pdx node --status`."""
        state = "ok" if self._is_open else self._why
        return TierStatus(self.name, self._backend.place, state=state, is_up=self._is_open)

    # ---- whether it answers -----------------------------------------------------------------

    def _answers(self) -> bool:
        """Whether something may be asked of it now. After a pause one call finds out whether it is back."""
        if not self._is_open and not self._is_pinging and self._clock() >= self._closed_until:
            self._ping()
        return self._is_open

    def _ping(self) -> None:
        self._is_pinging = True
        # What a new connection takes would count as what the store takes for the first loads, and loads would not pay.
        self._submit(self._askers, partial(self._backend.connect, THREADS), self._pinged)

    def _pinged(self, future: Future[None]) -> None:
        self._is_pinging = False
        error = _error(future)
        if error is None:
            self._is_open, self._failures = True, 0
            log.info("the remote store %s answers", self._backend.place)
            return
        self._pause(error)

    def _pause(self, error: TierError) -> None:
        self._is_open, self._why = False, f"{error.kind}: {error}"
        self._closed_until = self._clock() + PAUSE_S
        self._counters["remote_paused"] += 1
        self._warn(error, f"nothing is asked of it for {PAUSE_S:g} s")

    def _went(self, error: TierError | None) -> None:
        """A call has ended so."""
        if error is None:
            self._failures = 0
        elif error.kind in _FAULTS:
            self._failures += 1
            if self._failures >= MAX_FAILURES and self._is_open:
                self._pause(error)
            elif self._is_open and error.kind in _ENDS_CONNECTION:  # a new one may take longer than a question has
                self._submit(self._askers, self._connect, lambda done: None)

    def _connect(self) -> None:
        """On a thread: in place of a connection that ended with a call."""
        self._end_if_paused("paused")
        self._backend.connect(1)

    def _warn(self, error: TierError, then: str) -> None:
        self._counters[f"remote_{error.kind}"] += 1
        self.tally.errors += 1
        text = f"the remote store: {error}; {then}; further ones count as remote_{error.kind}"
        self._faults.warn(f"remote {error.kind}", text)

    def _submit(
        self, pool: ThreadPoolExecutor, call: Callable[[], object], then: Callable[[Future[Any]], None]
    ) -> None:
        """Call it on a thread, and then the other on the control loop."""
        if self._is_over:
            future: Future[Any] = Future()
            future.set_exception(TierError("the remote tier is closed", "cancelled"))
            self._post(partial(then, future))
            return
        pool.submit(call).add_done_callback(lambda done: self._post(partial(then, done)))

    # ---- what is there ----------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        """See `Tier.find`."""
        found: list[Held] = []
        for key in keys if self._is_open else ():
            known = self._of(key, shards)
            if known is None or known.held is None:
                break
            found.append(known.held)
        return found

    def holds(self, key: bytes, shards: int = 0) -> bool:
        """See `Tier.holds`: what this node has stored or found there, until it hears otherwise. What others remove, or
        the store by itself, it hears of when it asks the next time."""
        known = self._known.get(key)
        if known is not None and known.held is not None and shards in (0, known.shards):
            return True
        bits = self._put.get(key, 0)
        return bits > 0 and bits == (1 << (shards or bits.bit_length())) - 1

    def keys(self) -> list[bytes]:
        """See `Tier.keys`."""
        return list(dict.fromkeys((*self._known, *self._put)))

    def _of(self, key: bytes, shards: int) -> _Known | None:
        known = self._known.get(key)
        return known if known is not None and known.shards == shards and known.until >= self._clock() else None

    def seeks(self, keys: Sequence[bytes], shards: int) -> bool:
        """See `Tier.seeks`."""
        if keys[0] in self._sought:
            return True
        if not self._answers() or keys[0] in self._removals or self._of(keys[0], shards) is not None:
            return False
        if self._seeking >= MAX_SOUGHT or len(self._sought) >= MAX_KNOWN:
            self._counters["remote_not_asked"] += 1
            return False
        self._seeking += 1
        question = _Question(self._removals.moment(), self._clock(), list(keys), shards)
        self._sought.update(dict.fromkeys(keys, question))
        self._questions.append(question)
        self._ask()
        return True

    def why_not(self, key: bytes) -> str:
        """See `Tier.why_not`."""
        known = self._known.get(key)
        if not self._is_open:
            return f"does not answer: {self._why}"
        if key in self._sought:
            return "was asked, and had not answered yet"
        if known is not None and known.until >= self._clock():
            return known.why
        until, why = self._failed
        if until >= self._clock():
            return why
        return "was not asked, because too many questions wait for it" if self._seeking >= MAX_SOUGHT else ""

    def asked_s(self, key: bytes) -> float:
        """See `Tier.asked_s`."""
        question = self._sought.get(key)
        return self._clock() - question.since if question is not None else 0.0

    def _ask(self) -> None:
        """Give a thread that is free all questions that wait, as far as one call goes."""
        while self._questions and self._asking < THREADS:
            each = min(self._backend.batch, self._backend.most // len(self._questions))  # names of one question
            parts: list[tuple[_Question, Sequence[bytes]]] = []
            names: list[str] = []
            while self._questions and len(names) < self._backend.most:
                question = self._questions.popleft()
                keys = question.keys[question.at : question.at + max(1, each // question.shards)]
                parts.append((question, keys))
                names += [name_of(key, shard) for key in keys for shard in range(question.shards)]
            self._asking += 1
            self._submit(self._askers, partial(self._look, names), partial(self._answered, parts))

    def _look(self, names: Sequence[str]) -> list[Held | None]:
        """On a thread."""
        self._end_if_paused("paused")
        return self._sizes(names)

    def _answered(self, parts: Sequence[tuple[_Question, Sequence[bytes]]], future: Future[list[Held | None]]) -> None:
        self._asking -= 1
        error = _error(future)
        self._went(error)
        sizes = iter(future.result() if error is None else ())
        if error is not None and error.kind == "paused":
            self._counters["remote_not_asked"] += len(parts)
        elif error is not None and error.kind != "cancelled":
            self._warn(error, "what was asked for counts as missing")
        again: list[_Question] = []
        for question, keys in parts:
            if error is not None:
                self._end_question(question, error)
                continue
            found = [held_in_all(list(itertools.islice(sizes, question.shards))) for _ in keys]
            self._learn(question, keys, found)
            question.at += len(keys)
            if None in found or question.at >= len(question.keys):
                self._end_question(question)
            else:
                again.append(question)
        self._questions.extendleft(reversed(again))
        self._ask()

    def _sizes(self, names: Sequence[str]) -> list[Held | None]:
        """On a thread: of what chunks these are; None: of none."""
        heads = self._backend.heads(names, HEAD_BYTES)
        more = [at for at, found in enumerate(heads) if found is not None and whole_header(found.head) > HEAD_BYTES]
        if more:
            again = self._backend.heads([names[at] for at in more], header_bytes(MAX_LAYERS, is_encoded=True))
            for at, found in zip(more, again, strict=True):
                heads[at] = found
        return [held_of(found, name) for found, name in zip(heads, names, strict=True)]

    def _learn(self, question: _Question, keys: Sequence[bytes], found: Sequence[Held | None]) -> None:
        """These are there, up to the first that is not."""
        for key, held in zip(keys, found, strict=True):
            if held is None and key in self._put and self._sought.get(key) is not question:
                break  # it was stored, or asked for anew, since
            if held is not None and self._removals.since(key, question.moment):
                break  # it is deleted
            self._counters["remote_misses" if held is None else "remote_hits"] += 1
            self._know(key, question.shards, held)
            if held is None:
                break
        self._on_found(keys)

    def _know(self, key: bytes, shards: int, held: Held | None, why: str = "") -> None:
        self._sought.pop(key, None)
        until = self._clock() + (NOT_THERE_S if held is None else THERE_S)
        if held is None and not why:  # a question that failed says nothing
            self._put.pop(key, None)
        self.note([key])
        self._known[key] = _Known(until, shards, held, why)
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self.note([self._known.popitem(last=False)[0]])

    def _end_question(self, question: _Question, error: TierError | None = None) -> None:
        self._seeking -= 1
        self.answer_s += (self._clock() - question.since - self.answer_s) / 4  # the last ones count more
        if error is not None and error.kind not in ("paused", "cancelled"):
            first = next((key for key in question.keys if key in self._sought), None)
            if first is not None:  # who waits for it would have it asked for at once again
                self._failed = self._clock() + NOT_THERE_S, f"did not say whether it has it: {error.kind}: {error}"
                self._know(first, question.shards, None, self._failed[1])
        for key in question.keys:
            if self._sought.get(key) is question:
                del self._sought[key]
        self._on_found(question.keys)

    # ---- copies -----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """See `Tier.is_idle`."""
        return not (self._under_way or self._seeking or len(self._removals))

    @property
    def takes_stores(self) -> bool:
        """See `Tier.takes_stores`."""
        return self._clock() >= self._stores_from and self._answers()

    def admit(self, copy: Copy) -> Grant:
        """See `Tier.admit`."""
        if not self.takes_stores:
            self._counters["remote_left_out"] += len(copy.keys)
            self.tally.dropped += len(copy.keys)
            self.history.note(copy.keys, Cause.NOT_STORED, self._clock(), detail="it did not answer")
            return Grant([])
        self._admitted[copy.number] = self._removals.moment()
        leaving = [key for key in copy.keys if key in self._removals]
        self.history.note(leaving, Cause.NOT_STORED, self._clock(), detail="it was being deleted there")
        return Grant(
            [at for at, key in enumerate(copy.keys) if key not in self._removals and not self.find([key], copy.shards)]
        )

    def store(self, job: Job) -> None:
        """See `Tier.store`."""
        key = job.parts[0].key
        if self._removals.since(key, self._admitted.get(job.number, 0)):  # deleted since its copy was admitted
            return self._post(partial(self._on_done, self, job, None))
        self._removals.writes(key, 1)
        return self._give(job, self._writers, self._store)

    def load(self, job: Job) -> None:
        """See `Tier.load`."""
        self._give(job, self._readers, self._load)

    def _give(self, job: Job, pool: ThreadPoolExecutor, verb: Callable[[_Work], None]) -> None:
        work = _Work(job)
        self._under_way.setdefault(job.number, {})[work] = None
        self._submit(pool, partial(verb, work), partial(self._over, work, is_load=pool is self._readers))

    def cancel(self, copy: Copy) -> None:
        """See `Tier.cancel`."""
        for work in self._under_way.get(copy.number, ()):
            work.is_cancelled = True

    def over(self, copy: Copy) -> None:
        """See `Tier.over`."""
        self._admitted.pop(copy.number, None)

    def tick(self) -> None:
        """See `Tier.tick`."""
        if len(self._removals) and self._answers():
            self._remove_some()

    def evict(self, keys: Sequence[bytes], shards: int = 0) -> int:
        """See `Tier.evict`. All that is named is removed; those count that this node has stored or found there, and
        none while the store does not answer: they are removed when it does."""
        count = 0
        for key in dict.fromkeys(keys):
            known, bits = self._known.pop(key, None), self._put.pop(key, 0)
            is_known = known is not None and known.held is not None
            count += is_known or bits > 0
            found = known.shards if known is not None and is_known else 0
            self._removals.add(key, max(shards, found, bits.bit_length(), 1))
        self.note(keys)
        self._remove_some()
        return count if self._is_open else 0

    def recode(self, pairs: Sequence[Pair], codec: str, shards: int, on_chunk: OnChunk) -> Recoding:
        """See `Tier.recode`. Other nodes may load them meanwhile."""
        check(pairs, codec)
        stopped: set[Recoding] = set()
        most_bytes = max(arena.nbytes for arena in self._arenas)

        def begin(pair: Pair, own: Recoding) -> None:
            for key in set(pair):
                self._removals.writes(key, 1)
            is_over = lambda: own in stopped or self._is_over  # noqa: E731
            call = partial(recode, self._backend, pair, shards, codec, name_of, is_over, most_bytes=most_bytes)
            self._submit(self._writers, call, partial(self._recoded, pair, shards, own))

        recoding = Recoding(pairs, begin, stopped.add, on_chunk)
        recoding.go_on()
        return recoding

    def _recoded(self, pair: Pair, shards: int, recoding: Recoding, future: Future[None]) -> None:
        error = _error(future)
        self._went(error)
        if error is not None and error.kind != "cancelled":
            self._warn(error, "the chunk is as it was")
        for key in set(pair):
            self._removals.writes(key, -1)
            self._known.pop(key, None)
        old, new = pair
        if error is None:
            self._put.pop(old, None)
            self._have_put(new, (1 << shards) - 1)
            self.note([old])
        recoding.ended(old, error)

    def _remove_some(self) -> None:
        if self._is_open and self._clock() >= self._remove_from and (names := self._removals.take(name_of)):
            self._submit(self._writers, partial(self._remove, names), self._removed)

    def _remove(self, names: Sequence[str]) -> None:
        """On a thread."""
        self._end_if_paused("paused")
        self._backend.remove(names)

    def _removed(self, future: Future[None]) -> None:
        error = _error(future)
        self._went(error)
        self._removals.over(is_done=error is None)
        if error is None:
            self._remove_some()
            return
        self._remove_from = self._clock() + PAUSE_S
        if error.kind not in ("cancelled", "paused"):
            self._warn(error, "what was deleted is there still, and is removed later")

    def _have_put(self, key: bytes, bits: int) -> None:
        """This node has stored these shards there."""
        self._put[key] = self._put.get(key, 0) | bits
        self._put.move_to_end(key)
        self.note([key])
        if len(self._put) > MAX_KNOWN:
            self.note([self._put.popitem(last=False)[0]])

    def _over(self, work: _Work, future: Future[None], *, is_load: bool) -> None:
        of_copy = self._under_way[work.job.number]
        del of_copy[work]
        if not of_copy:
            del self._under_way[work.job.number]
        error, key = _error(future), work.part.key
        if not is_load:
            self._removals.writes(key, -1)
        if error is None:
            self._went(None)
            self._counters["remote_loaded" if is_load else "remote_stored"] += 1
        elif error.kind == "paused":
            self._counters["remote_not_asked" if is_load else "remote_left_out"] += 1
        elif error.kind != "cancelled":
            self._warn(error, "the chunk counts as missing" if is_load else "the chunk is not there")
            if is_load or error.kind not in _OF_STORES:
                self._went(error)
            else:  # what is there can be loaded
                self._stores_from = self._clock() + PAUSE_S
            if not is_load:
                self.history.note([key], Cause.NOT_STORED, self._clock(), detail=str(error))
        if is_load and error is not None and error.kind in _OF_CHUNKS and key in self._known:
            self._know(key, self._known[key].shards, None)
        elif not is_load and key in self._removals:
            self._remove_some()  # which has waited for it
        elif not is_load and error is None:  # of which other shards are there nobody knows
            self._known.pop(key, None)
            self._sought.pop(key, None)
            self._have_put(key, 1 << work.part.shard)
        self._on_done(self, work.job, error)

    def close(self) -> None:
        """See `Tier.close`."""
        self._is_over = True
        for of_copy in self._under_way.values():
            for work in of_copy:
                work.is_cancelled = True
        if len(self._removals):
            log.warning("%d chunks that were deleted may still be in %s", len(self._removals), self._backend.place)
        for pool in (self._askers, self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._backend.close()

    # ---- on the threads ---------------------------------------------------------------------

    def _store(self, work: _Work) -> None:
        part, name = work.part, name_of(work.part.key, work.part.shard)
        self._end_if(work)
        if self._sizes([name]) == [size_of(part)]:
            return  # another node has stored it
        work.job.start_ns = time.monotonic_ns()
        whole = self._whole(work, name)
        self._end_if(work)
        self._backend.write(name, whole)
        work.job.end_ns = time.monotonic_ns()

    def _whole(self, work: _Work, name: str) -> bytes:
        """The chunk in the form in which it is kept."""
        part, arena = work.part, self._arenas[work.part.slot.arena]
        codec = part.form or self._codec
        try:
            arena.check(part.slot)
            with arena.read(part.slot.offset, part.slot.nbytes) as data:  # ends here, whatever keeps an error
                whole, work.job.coded_bytes = packed(part, data, codec, lambda: work.is_cancelled)
            arena.check(part.slot)
        except (StaleSlot, LayoutError) as error:
            raise TierError(f"{name} is not stored: {error}", "stale") from error
        return whole

    def _load(self, work: _Work) -> None:
        part, arena, name = work.part, self._arenas[work.part.slot.arena], name_of(work.part.key, work.part.shard)
        self._end_if(work)
        work.job.start_ns = time.monotonic_ns()
        whole = self._backend.read(name)
        if whole is None:
            raise TierError(f"{name} is not there any more", "missing")
        why: TierError | None = None
        try:
            header = placed(whole, arena, part, name, lambda: work.is_cancelled)
        except (StaleSlot, LayoutError) as error:
            raise TierError(f"{name} is not loaded: {error}", "stale") from error
        except TierError as error:
            why = TierError(str(error), error.kind)  # a traceback would keep the arena's memory mapped
        if why is not None:
            if why.kind != "cancelled":
                self._drop(name, why)
            else:  # nobody waits for it any more, and it tells how fast the store is
                work.job.end_ns = time.monotonic_ns()
            raise why
        if isinstance(header, EncodedHeader):
            work.job.coded_bytes = header.stored
            work.job.form = "" if header.codec == LOSSLESS else header.codec
        work.job.end_ns = time.monotonic_ns()

    def _drop(self, name: str, error: TierError) -> None:
        """Remove what is no whole chunk.

        :raises TierError: `error`, with why it is there still: who may not remove it is not to blame for it.
        """
        try:
            self._backend.remove([name])
        except TierError as then:
            raise TierError(f"{error}, and is not removed: {then}", error.kind) from error

    def _end_if(self, work: _Work) -> None:
        if work.is_cancelled or work.part.key in self._removals:
            raise TierError("cancelled", "cancelled")
        self._end_if_paused("paused")

    def _end_if_paused(self, kind: str) -> None:
        """What waits for a thread when a pause begins does not try the store, each with a deadline of its own."""
        if not self._is_open:
            raise TierError(f"{self._backend.place} has not answered, and is not asked for a while", kind)


def _error(future: Future[Any]) -> TierError | None:
    """How a call ended."""
    if future.cancelled():
        return TierError("the remote tier is closed", "cancelled")
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, TierError):  # a traceback would keep the arena's memory mapped
        return TierError(str(error), error.kind)
    log.error("the remote tier failed", exc_info=error)
    return TierError(f"{type(error).__name__}: {error}", "failed")
