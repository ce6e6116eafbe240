"""The common base of tiers that keep chunks outside memory: disks and remote stores.

It has the jobs and their threads, deletions during jobs, the store's health, warnings and counters.
`pdx.store.disk.tier` adds an index, a cap and files; `pdx.store.remote.tier` asks a store that several nodes share.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from pdx.errors import TierError
from pdx.store.codecs.codec import LOSSLESS, NONE, codec_of
from pdx.store.copy import Copy
from pdx.store.health import Health
from pdx.store.history import Cause
from pdx.store.tier import Job, Part, Tier, TierHost
from pdx.telemetry.faults import Faults

log = logging.getLogger("pdx.node")

MAX_FORGOTTEN = 1 << 16  # deleted keys that are remembered
RECODED_AT_ONCE = 4  # chunks, so that stores and loads get threads, too
OF_STORES = ("full", "read_only", "denied")  # errors of stores that say nothing about loads
Pair = tuple[bytes, bytes]  # a chunk's key before and after recoding
OnChunk = Callable[[bytes, TierError | None], None]


class Work(msgspec.Struct, eq=False):
    """Work for a thread: a job, or a call of the tier's own and its continuation on the control loop. The thread sets
    `error`, `result` and `seen_at`."""

    job: Job | None = None
    is_load: bool = False
    call: Callable[[Any], Any] = lambda work: None
    then: Callable[[Any], None] = lambda work: None
    result: Any = None
    is_cancelled: bool = False
    error: TierError | None = None
    seen_at: float = 0.0  # when its last system call returned, by the tier's clock
    is_silent: bool = False  # the control loop has noticed that this was long ago

    @property
    def part(self) -> Part:
        """The job's first part."""
        assert self.job is not None
        return self.job.parts[0]


class WorkQueue(msgspec.Struct, eq=False):
    """Work that waits for a thread; at most `limit` threads do it at once. `first` goes before `rest`, and is done even
    while the tier closes."""

    limit: int
    first: deque[Work] = msgspec.field(default_factory=deque)
    rest: deque[Work] = msgspec.field(default_factory=deque)
    running: int = 0


class Threads:
    """A tier's threads. Owned by the control loop; no method waits except `close`."""

    def __init__(self, name: str, count: int, owner: StoreTier, queues: Sequence[WorkQueue]) -> None:
        """Start `count` threads for these queues; earlier queues go first."""
        self._owner = owner
        self._queues = queues
        self._condition = threading.Condition()  # guards the queues
        self._at_work: list[tuple[WorkQueue, Work] | None] = [None] * count
        self.is_closing = False
        self.has_silent = False  # whether there may be silent work
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"pdx-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, work: Work, queue: WorkQueue, *, is_first: bool = False) -> None:
        """Enqueue work; if the tier is closed, the work ends at once with an error."""
        if self.is_closing:
            self._drop([work])
            return
        with self._condition:
            (queue.first if is_first else queue.rest).append(work)
            self._condition.notify()

    def take_back(self, *queues: WorkQueue) -> list[Work]:
        """Remove and return the work in these queues that no thread has begun, except what goes first."""
        with self._condition:
            works = [work for queue in queues for work in queue.rest]
            for queue in queues:
                queue.rest.clear()
        return works

    def silent(self, before: float) -> list[Work]:
        """Running work whose last system call has not returned since `before`; each is returned once."""
        found = [at[1] for at in self._at_work if at is not None and at[1].seen_at < before and not at[1].is_silent]
        for work in found:
            work.is_silent = self.has_silent = True
        return found

    def takes(self, queue: WorkQueue) -> bool:
        """Whether a thread can get to new work in this queue: not all its threads wait for silent calls."""
        silent = [at[0] for at in self._at_work if at is not None and at[1].is_silent]
        self.has_silent = bool(silent)
        return silent.count(queue) < queue.limit

    def has_room(self, queue: WorkQueue) -> bool:
        """Whether a thread would begin new work in this queue at once."""
        return queue.running + len(queue.rest) < queue.limit

    def close(self, timeout_s: float | None = None) -> bool:
        """Drop all work but what goes first, and wait for the threads; return whether all have ended."""
        with self._condition:
            self.is_closing = True
            left = self.take_back(*self._queues)  # before a thread can begin any of it
            self._condition.notify_all()
        self._drop(left)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        for queue in self._queues:
            with self._condition:
                left = list(queue.first)
                queue.first.clear()
            self._drop(left)
        return not any(thread.is_alive() for thread in self._threads)

    def _drop(self, works: Sequence[Work]) -> None:
        for work in works:
            work.error = TierError("the tier is closed", "cancelled")
            self._owner.env.mailbox.post(partial(self._owner.performed, work))

    # ---- on the threads ---------------------------------------------------------------------

    def _work(self, number: int) -> None:
        while (at := self._next()) is not None:
            queue, work = at
            work.seen_at = self._owner.env.clock()
            self._at_work[number] = at
            try:
                self._owner.perform(work)
            except TierError as error:  # copied, because its traceback would keep the arena's memory mapped
                work.error = TierError(str(error), error.kind, is_left=error.is_left)
            except Exception as error:  # the thread's root: the job must end, but not the thread
                log.exception("a thread of a tier failed")
                work.error = TierError(f"{type(error).__name__}: {error}", "failed")
            self._at_work[number] = None
            with self._condition:
                queue.running -= 1
                self._condition.notify()
            self._owner.env.mailbox.post(partial(self._owner.performed, work))
            del at, work  # so that a waiting thread keeps nothing alive

    def _next(self) -> tuple[WorkQueue, Work] | None:
        with self._condition:
            while True:
                for queue in self._queues:
                    if queue.running < queue.limit or self.is_closing:
                        for works in (queue.first, queue.rest):
                            if works:
                                queue.running += 1
                                return queue, works.popleft()
                if self.is_closing:
                    return None
                self._condition.wait()


class Forgotten:
    """Which keys were deleted, and when: work begun before that must not bring them back."""

    def __init__(self) -> None:
        self._moments = itertools.count(1)
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._before = 0  # up to this moment any key may have been deleted
        self.last = 0  # when a key was last deleted

    def moment(self) -> int:
        """A new, unique moment."""
        return next(self._moments)

    def note(self, key: bytes) -> None:
        """Record that a key is deleted."""
        self._keys[key] = self.last = self.moment()
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_FORGOTTEN:
            _, self._before = self._keys.popitem(last=False)

    def since(self, key: bytes, moment: int) -> bool:
        """Whether the key was, or may have been, deleted after that moment."""
        return max(self._keys.get(key, 0), self._before) > moment


def check_recoding(pairs: Sequence[Pair], codec: str) -> None:
    """Check that a lossy codec changes each key, and that a lossless one or none keeps it.

    :raises CodecError: there is no such codec.
    :raises TierError: the keys do not fit the codec.
    """
    if codec != NONE:
        codec_of(codec)
    is_lossy = codec not in (NONE, LOSSLESS)
    if any((old == new) is is_lossy for old, new in pairs):
        what = "another key than the exact one" if is_lossy else "the key that it has"
        raise TierError(f"a chunk that is stored by {codec} has {what}", "not_encoded")


class Recoding:
    """The recoding of some chunks. Owned by the control loop. Of `total` chunks, `done` and `failed` are over. Threads
    poll `is_cancelled`, and then end soon; they leave a chunk either as it was or fully recoded."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        codec: str,
        shards: int,
        tier: StoreTier,
        on_chunk: OnChunk,
    ) -> None:
        """`on_chunk` is called for each chunk that is over, with its old key."""
        self.codec = codec
        self.shards = shards
        self.total = len(pairs)
        self.done = 0
        self.failed: Counter[str] = Counter()  # by kind of error
        self.is_cancelled = False
        self._left = deque(pairs)
        self._tier = tier
        self._on_chunk = on_chunk
        self._under_way = 0
        self._is_filling = False

    @property
    def is_over(self) -> bool:
        """Whether all chunks are over."""
        return not self._left and not self._under_way

    def go_on(self) -> None:
        """Begin as many chunks as may be in flight."""
        if self._is_filling:
            return
        self._is_filling = True
        while self._left and self._under_way < RECODED_AT_ONCE:
            self._under_way += 1
            self._tier.recode_one(self._left.popleft(), self)
        self._is_filling = False

    def ended(self, key: bytes, error: TierError | None) -> None:
        """The chunk with this old key is over: recoded, or with an error and as before."""
        self._under_way -= 1
        self.done += error is None
        if error is not None:
            self.failed[error.kind] += 1
        self._on_chunk(key, error)
        self.go_on()

    def cancel(self) -> None:
        """Begin no more chunks, and end those in flight soon."""
        self.is_cancelled = True
        left, self._left = self._left, deque()
        for key, _ in left:
            self.failed["cancelled"] += 1
            self._on_chunk(key, TierError("cancelled", "cancelled"))


class StoreTier(Tier):
    """See `Tier`. Methods are for the control loop, and none waits except `close`; `perform` is for threads."""

    is_whole = True
    can_recode = True
    max_inflight_bytes = 256 << 20

    def __init__(self, host: TierHost, codec: str, threads: int, queues: Sequence[WorkQueue]) -> None:
        """`codec`: encodes chunks whose requests ask for none of their own. `threads`, `queues`: see `Threads`."""
        self.env = host.env
        self._host = host
        self._codec = codec
        self._health = Health(host.env)
        self._faults = Faults(host.env.counters, host.env.clock, log=log)  # of this tier: others do not suppress them
        self._forgotten = Forgotten()
        self._admitted: dict[int, int] = {}  # copy number -> moment of admission
        self._works: dict[int, dict[Work, None]] = {}  # in flight, by copy number; 0: the tier's own
        self._threads = Threads(self.kind, threads, self, queues)

    @property
    def is_idle(self) -> bool:
        return not self._works

    # ---- jobs -------------------------------------------------------------------------------

    def cancel(self, copy: Copy) -> None:
        for work in self._works.get(copy.number, ()):
            work.is_cancelled = True

    def copy_ended(self, copy: Copy) -> None:
        self._admitted.pop(copy.number, None)

    def _give(self, work: Work, queue: WorkQueue, *, is_first: bool = False) -> None:
        self._works.setdefault(work.job.number if work.job is not None else 0, {})[work] = None
        self._threads.give(work, queue, is_first=is_first)

    def _call(
        self,
        queue: WorkQueue,
        call: Callable[[Work], Any],
        then: Callable[[Work], None] = lambda work: None,
        *,
        is_first: bool = False,
    ) -> None:
        self._give(Work(call=call, then=then), queue, is_first=is_first)

    def perform(self, work: Any) -> None:
        """Do the work; on a thread.

        :raises TierError: it failed.
        """
        if work.job is None:
            work.result = work.call(work)
        elif work.is_load:
            self._read(work, work.job)
        else:
            self._write(work, work.job)

    @abstractmethod
    def _read(self, work: Any, job: Job) -> None:
        """Do a load; on a thread."""

    @abstractmethod
    def _write(self, work: Any, job: Job) -> None:
        """Do a store; on a thread."""

    def performed(self, work: Any) -> None:
        """A thread is done with the work; on the control loop."""
        number = work.job.number if work.job is not None else 0
        of_copy = self._works[number]
        del of_copy[work]
        if not of_copy:
            del self._works[number]
        self._ended(work)

    def _ended(self, work: Any) -> None:
        if work.job is None:
            work.then(work)
        else:
            self._over(work, work.job)

    @abstractmethod
    def _over(self, work: Any, job: Job) -> None:
        """Handle the end of a job."""

    def recode(self, pairs: Sequence[Pair], codec: str, shards: int, on_chunk: OnChunk) -> Recoding:
        check_recoding(pairs, codec)
        recoding = Recoding(pairs, codec, shards, self, on_chunk)
        recoding.go_on()
        return recoding

    @abstractmethod
    def recode_one(self, pair: Pair, recoding: Recoding) -> None:
        """Begin one chunk; call `recoding.ended` when it is over, or at once."""

    def _end(self, job: Job, error: TierError | None = None) -> None:
        """End a job, soon, that was not given to a thread."""
        self.env.mailbox.post(partial(self._host.done, self, job, error))

    # ---- counters and warnings --------------------------------------------------------------

    def _count(self, what: str, count: int = 1) -> None:
        self.env.counters[f"{self.kind}_{what}"] += count

    def _warn(self, error: TierError, then: str = "") -> None:
        """Count and log a failure; `then`: its consequence."""
        self._count(error.kind)
        self.tally.errors += 1
        text = f"the {self.kind} tier: {error}{then and '; '}{then}"
        self._faults.warn(f"{self.kind} {error.kind}", f"{text}; further ones count as {self.kind}_{error.kind}")

    def _not_stored(self, keys: Sequence[bytes], why: str) -> None:
        self.history.note(keys, Cause.NOT_STORED, self.env.clock(), detail=why)
