"""The remote tier: chunks in a store that several nodes share, through a `pdx.store.remote.backend`.

Each object has the format of `pdx.store.chunk_format`:

    <prefix>/v3/<key>-<shard>    encoded or not

A lookup never waits for the network: for keys that `Catalog` does not know, a thread asks the store while the request
waits, so that chunks stored by other nodes are found.

Deleted keys are removed from the store, whether or not this node knows that they are there; if the store does not
answer, later (`Catalog`).

Names are the chunks' keys, which cover model, precision, layout and cache salt, so that nodes that differ in one of
these never share objects. Chunks with clients' names are not stored here.

After some consecutive failures the store is not used for some seconds; then a probe finds out whether it is back. It is
not used before its first answer, either.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial

from pdx.errors import LayoutError, StaleSlot, TierError
from pdx.memory.arena import round_up
from pdx.memory.slot import Slot
from pdx.store import chunk_format
from pdx.store.chunk_format import (
    Over,
    aligned,
    end_if,
    header_bytes,
    packed,
    parsed,
    unpacked,
    whole_header,
)
from pdx.store.codecs.codec import NONE
from pdx.store.copy import Copy
from pdx.store.health import PAUSE_S
from pdx.store.remote.backend import Backend, Found
from pdx.store.remote.catalog import Asked, Catalog, name_of
from pdx.store.store_tier import OF_STORES, Pair, Recoding, StoreTier, Work, WorkQueue
from pdx.store.tier import Grant, Held, Job, Part, TierHost
from pdx.wire.base import MAX_LAYERS
from pdx.wire.status import TierStatus

log = logging.getLogger("pdx.node")

THREADS = 4  # each for questions, for loads and for stores
HEAD_BYTES = 1024  # the header of a chunk with up to about 100 slices
_FAULTS = ("unreachable", "timeout", "denied", "untrusted", "failed")  # the store is to blame
_OF_WRITES = (*OF_STORES, "failed")  # errors of writes and removals that say nothing about reads
_ENDS_CONNECTION = ("unreachable", "timeout")
_OF_CHUNKS = ("missing", "corrupt", "truncated", "outdated")  # the object is to blame


class RemoteTier(StoreTier):
    """See `StoreTier`. `close` waits for calls in flight."""

    kind = name = "remote"
    is_shared = True
    loads_at_once = THREADS

    def __init__(self, host: TierHost, backend: Backend, codec: str = NONE) -> None:
        """`backend` is closed with the tier."""
        self._backend = backend
        self._asks, self._loads, self._stores = queues = WorkQueue(THREADS), WorkQueue(THREADS), WorkQueue(THREADS)
        super().__init__(host, codec, 3 * THREADS, queues)
        self._health.doubt = "no answer yet"
        self._remove_from = 0.0  # no removals before this time
        self._catalog = Catalog(self, self._forgotten)
        self._answers()

    @property
    def is_idle(self) -> bool:
        return not (self._works or self._catalog.num_leaving)

    def status(self) -> TierStatus:
        health = self._health
        return TierStatus(self.name, self._backend.place, state=health.text or "ok", is_up=not health.doubt)

    # ---- health -----------------------------------------------------------------------------

    def _answers(self) -> bool:
        """Whether the store may be used now. After a pause this starts a probe."""
        if self._health.begins_probe():
            # Open connections, or the first loads would seem too slow to pay because they include connecting.
            self._call(self._asks, lambda work: self._backend.connect(THREADS), self._pinged)
        return not self._health.doubt

    def _pinged(self, work: Work) -> None:
        self._health.probed(works=work.error is None)
        if work.error is None:
            log.info("the remote store %s answers", self._backend.place)
        else:
            self._pause(work.error)

    def _pause(self, error: TierError) -> None:
        self._health.doubts(f"{error.kind}: {error}")
        self._count("paused")
        self._warn(error, f"nothing is asked of it for {PAUSE_S:g} s")

    def _went(self, error: TierError | None, *, is_write: bool = False) -> None:
        """Record the end of a call. `is_write`: some of its errors say nothing about reads."""
        if error is None:
            self._health.works()
        elif error.kind in _FAULTS and not (is_write and error.kind in _OF_WRITES):
            if self._health.failed():
                self._pause(error)
            elif not self._health.doubt and error.kind in _ENDS_CONNECTION:  # too slow to make for a question
                self._call(self._asks, self._connect)

    def _connect(self, work: Work) -> None:
        """On a thread: replace a connection that ended with a failed call."""
        self._end_if_paused()
        self._backend.connect(1)

    # ---- lookups ----------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        found: list[Held] = []
        for key in () if self._health.doubt else keys:
            known = self._catalog.of(key, shards)
            if known is None or known.held is None:
                break
            found.append(known.held)
        return found

    def holds(self, key: bytes, shards: int = 0) -> bool:
        return self._catalog.holds(key, shards)

    def keys(self) -> list[bytes]:
        return self._catalog.keys()

    def seeks(self, keys: Sequence[bytes], shards: int) -> bool:
        if self._catalog.seeks(keys[0]):
            return True
        if not self._answers() or self._catalog.is_leaving(keys[0]) or self._catalog.of(keys[0], shards) is not None:
            return False
        if not self._catalog.ask(keys, shards):
            self._count("not_asked")
            return False
        self._ask()
        return True

    def why_not(self, key: bytes) -> str:
        return f"does not answer: {self._health.doubt}" if self._health.doubt else self._catalog.why_not(key)

    def asked_s(self, key: bytes) -> float:
        return self._catalog.asked_s(key)

    def _ask(self) -> None:
        """Give waiting questions to free threads."""
        while self._catalog.waiting and self._threads.has_room(self._asks):
            asked = self._catalog.next_call(self._backend.batch, self._backend.most)
            names = [
                name_of(key, shard) for question, keys in asked for key in keys for shard in range(question.shards)
            ]
            self._call(self._asks, partial(self._look, names), partial(self._answered, asked))

    def _look(self, names: Sequence[str], work: Work) -> list[Held | None]:
        """Ask for the sizes; on a thread."""
        self._end_if_paused()
        return self._sizes(names)

    def _answered(self, asked: Asked, work: Work) -> None:
        error = work.error
        self._went(error)
        if error is not None and error.kind == "paused":
            self._count("not_asked", len(asked))
        elif error is not None and error.kind != "cancelled":
            self._warn(error, "what was asked for counts as missing")
        told = self._catalog.answered(asked, iter(work.result or ()), error)
        self._host.answered(told)

    def _sizes(self, names: Sequence[str]) -> list[Held | None]:
        """On a thread: the sizes of the chunks under these names; None if there is no good one."""
        heads = self._backend.heads(names, HEAD_BYTES)
        more = [at for at, found in enumerate(heads) if found is not None and whole_header(found.head) > HEAD_BYTES]
        if more:
            again = self._backend.heads([names[at] for at in more], header_bytes(MAX_LAYERS))
            for at, found in zip(more, again, strict=True):
                heads[at] = found
        return [_held_of(found, name) for found, name in zip(heads, names, strict=True)]

    # ---- copies -----------------------------------------------------------------------------

    @property
    def takes_stores(self) -> bool:
        return self._answers() and self._health.takes_stores

    def admit(self, copy: Copy) -> Grant:
        if not self.takes_stores:
            self._count("left_out", len(copy.keys))
            self.tally.dropped += len(copy.keys)
            self._not_stored(copy.keys, "it did not answer")
            return Grant([])
        self._admitted[copy.number] = self._forgotten.moment()
        leaving = dict.fromkeys(key for key in copy.keys if self._catalog.is_leaving(key))
        self._not_stored([*leaving], "it was being deleted there")
        keys = enumerate(copy.keys)
        return Grant([at for at, key in keys if key not in leaving and not self.find([key], copy.shards)])

    def store(self, job: Job) -> None:
        key = job.parts[0].key
        if self._catalog.left_since(key, self._admitted.get(job.number, 0)):
            self._end(job)
        else:
            self._catalog.writes(key, 1)
            self._give(Work(job), self._stores)

    def load(self, job: Job) -> None:
        self._give(Work(job, is_load=True), self._loads)

    def tick(self) -> None:
        if self._catalog.num_leaving and self._answers():
            self._remove_some()

    def evict(self, keys: Sequence[bytes], shards: int = 0) -> int:
        """See `Tier.evict`. All these keys are removed, but only those count that this node has stored or found there;
        none count while the store does not answer, because they are removed only when it does."""
        count = 0
        for key in dict.fromkeys(keys):
            known = self._catalog.forget(key)
            count += known > 0
            self._catalog.remove(key, max(shards, known, 1))
        self._remove_some()
        return 0 if self._health.doubt else count

    def recode_one(self, pair: Pair, recoding: Recoding) -> None:
        """See `StoreTier`. Other nodes may load the objects meanwhile."""
        for key in set(pair):
            self._catalog.writes(key, 1)
        most_bytes = max(arena.nbytes for arena in self._host.memory)
        is_over = lambda: recoding.is_cancelled or self._threads.is_closing  # noqa: E731
        call = partial(_recode, self._backend, pair, recoding.shards, recoding.codec, is_over, most_bytes)
        self._call(self._stores, call, partial(self._recoded, pair, recoding))

    def _recoded(self, pair: Pair, recoding: Recoding, work: Work) -> None:
        error = work.error
        self._went(error, is_write=True)
        if error is not None and error.kind != "cancelled":
            self._warn(error, "the chunk is as it was")
        old, new = pair
        for key in set(pair):
            self._catalog.writes(key, -1)
            self._catalog.forget(key, is_gone=error is None and key == old)
        if error is None:
            self._catalog.put(new, (1 << recoding.shards) - 1)
        recoding.ended(old, error)

    def _remove_some(self) -> None:
        if not self._health.doubt and self.env.clock() >= self._remove_from and (names := self._catalog.next_removed()):
            self._call(self._stores, partial(self._remove, names), self._removed)

    def _remove(self, names: Sequence[str], work: Work) -> None:
        """Remove objects; on a thread."""
        self._end_if_paused()
        self._backend.remove(names)

    def _removed(self, work: Work) -> None:
        error = work.error
        self._went(error, is_write=True)
        self._catalog.removed(is_done=error is None)
        if error is None:
            self._remove_some()
            return
        self._remove_from = self.env.clock() + PAUSE_S
        if error.kind not in ("cancelled", "paused"):
            self._warn(error, "what was deleted is there still, and is removed later")

    def _ended(self, work: Work) -> None:
        super()._ended(work)
        if work.job is None:
            self._ask()  # any of these calls may have had a thread that questions wait for

    def _over(self, work: Work, job: Job) -> None:
        error, key, is_load = work.error, work.part.key, work.is_load
        if not is_load:
            self._catalog.writes(key, -1)
        if error is None:
            self._went(None)
            self._count("loaded" if is_load else "stored")
            if not is_load:
                self._health.wrote()
        elif error.kind == "paused":
            self._count("not_asked" if is_load else "left_out")
        elif error.kind != "cancelled":
            self._warn(error, "the chunk counts as missing" if is_load else "the chunk is not there")
            if is_load or error.kind not in _OF_WRITES:
                self._went(error)
            elif error.kind in OF_STORES:  # loads still work
                self._health.pause_writes()
            else:  # loads may still work
                self._health.not_written(is_read_only=False)
            if not is_load:
                self._not_stored([key], str(error))
        if is_load and error is not None and error.kind in _OF_CHUNKS:
            self._catalog.lost(key)
        elif not is_load and self._catalog.is_leaving(key):
            self._remove_some()  # its removal has waited for this
        elif not is_load and error is None:
            self._catalog.put(key, 1 << work.part.shard)
        self._host.done(self, job, error)

    def close(self) -> None:
        for of_copy in self._works.values():
            for work in of_copy:
                work.is_cancelled = True
        left = self._catalog.num_leaving
        if left and not self._threads.is_closing:
            log.warning("%d chunks that were deleted may still be in %s", left, self._backend.place)
        self._threads.close()
        self._backend.close()

    # ---- on the threads ---------------------------------------------------------------------

    def _write(self, work: Work, job: Job) -> None:
        part, name = work.part, name_of(work.part.key, work.part.shard)
        self._end_if(work)
        if self._sizes([name]) == [_size_of(part)]:
            return  # another node has stored it
        arena = self._host.memory[part.slot.arena]
        start_ns = time.monotonic_ns()
        try:
            arena.check(part.slot)
            with arena.read(part.slot.offset, part.slot.nbytes) as data:
                found = packed(part, data, part.form or self._codec, lambda: work.is_cancelled)
                job.coded_bytes = found.coded
                arena.check(part.slot)
                self._end_if(work)
                self._backend.write(name, [found.head, found.data])
        except (StaleSlot, LayoutError) as error:
            raise TierError(f"{name} is not stored: {error}", "stale") from error
        job.start_ns, job.end_ns = start_ns, time.monotonic_ns()

    def _read(self, work: Work, job: Job) -> None:
        arena, name = self._host.memory[work.part.slot.arena], name_of(work.part.key, work.part.shard)
        self._end_if(work)
        try:
            chunk_format.load(job, arena, name, partial(self._backend.read, name), lambda: work.is_cancelled)
            return
        except TierError as error:
            why = TierError(str(error), error.kind)  # copied, because its traceback would keep the arena mapped
        if why.kind == "cancelled":  # no longer wanted, but its time still counts for the store's rate
            job.end_ns = time.monotonic_ns()
        elif why.kind in _OF_CHUNKS and why.kind != "missing":
            self._drop(name, why)
        raise why

    def _drop(self, name: str, error: TierError) -> None:
        """Remove a bad object.

        :raises TierError: the removal failed; with the kind of `error`, so that it does not count as a fault of the
            store.
        """
        try:
            self._backend.remove([name])
        except TierError as then:
            raise TierError(f"{error}, and is not removed: {then}", error.kind) from error

    def _end_if(self, work: Work) -> None:
        if work.is_cancelled or self._catalog.is_leaving(work.part.key):
            raise TierError("cancelled", "cancelled")
        self._end_if_paused()

    def _end_if_paused(self) -> None:
        """Fail work that was waiting when a pause began, so that it does not wait for the store's timeouts in turn."""
        if self._health.doubt:
            raise TierError(f"{self._backend.place} has not answered, and is not asked for a while", "paused")


def _size_of(part: Part) -> Held:
    """The size of the part's chunk."""
    return Held(part.slot.nbytes, part.layers)


def _held_of(found: Found | None, name: str) -> Held | None:
    """The size of the chunk under a name, from its header; None if it is not that chunk."""
    if found is None:
        return None
    try:
        header = parsed(found.head, found.nbytes, name)
    except TierError:
        return None
    return Held(header.nbytes, header.layers) if name_of(header.key, header.shard) == name else None


def _recode(backend: Backend, pair: Pair, shards: int, codec: str, is_over: Over, most_bytes: int, work: Work) -> None:
    """Store all shards of a chunk in another form. Each object is replaced atomically. If the key changes, the old
    objects are removed once all new ones are there; if one cannot be written, the new ones are removed. `most_bytes`:
    the largest chunk of one shard that this node could load.

    :raises TierError: the chunk is missing, bad, or cannot be stored in that form, or the store failed.
    """
    old, new = pair
    written: list[str] = []
    try:
        for shard in range(shards):
            end_if(is_over)
            whole = _anew(backend, name_of(old, shard), (new, shard), codec, is_over, most_bytes)
            if whole is not None:
                end_if(is_over)
                backend.write(name_of(new, shard), whole)
                written.append(name_of(new, shard))
    except TierError:
        if old != new and written:
            with contextlib.suppress(TierError):  # best effort: leftovers are whole chunks
                backend.remove(written)
        raise
    if old != new:
        backend.remove([name_of(old, shard) for shard in range(shards)])


def _anew(
    backend: Backend, name: str, to: tuple[bytes, int], codec: str, is_over: Over, most_bytes: int
) -> list[memoryview] | None:
    """The object in its new form; None if it has that form already."""
    [found] = backend.heads([name], header_bytes(MAX_LAYERS))
    if found is None:
        raise TierError(f"{name} is not there", "missing")
    header = parsed(found.head[: whole_header(found.head)], found.nbytes, name)
    if header.nbytes > most_bytes:
        raise TierError(f"{name} has {header.nbytes} bytes, more than any arena of this node", "too_large")
    if header.codec == codec and header.key == to[0]:
        return None
    head, data = aligned(header_bytes(header.layers)), aligned(round_up(header.stored))
    if backend.read(name, [head, data]) != found.nbytes or parsed(head, found.nbytes, name) != header:
        raise TierError(f"{name} was replaced meanwhile", "missing")
    part = Part(*to, header.layers, 0, header.layers, Slot(0, header.nbytes, 0))
    anew = packed(part, unpacked(header, data, name, is_over), codec, is_over)
    return [anew.head, anew.data]
