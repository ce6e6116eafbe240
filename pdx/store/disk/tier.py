"""The disk tier: chunks in files, found again by the next node that is given the same folder.

The control loop owns the index, which says what is on the disk and in which order it was used, and the account of the
bytes. A few threads (`pdx.store.disk.workers`) read, write and remove the files (`pdx.store.disk.chunk_file`) and post
what became of it.

    <root>/<two hex digits>/<key>-<shard>-<slices>-<bytes>[-<bytes when encoded>].chunk

The account counts what may be on the disk: files, files that are being written, and files until they are removed. It
never exceeds the cap: a file is begun when there is room for all of it, not encoded, if need be in place of the files
that were not used for longest, which the same thread removes first. A file that is encoded takes less in the end. Until
all files from before are counted nothing is stored.

What was forgotten, or is broken, is never found again, even if its file stays: a client's name says nothing of bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pdx.config import private_folder
from pdx.errors import ArenaFull, ConfigError, TierError
from pdx.memory.arena import Arena
from pdx.memory.keys import is_named
from pdx.security.socket_lock import owned
from pdx.store.codecs.codec import NONE
from pdx.store.copy import Copy
from pdx.store.disk import chunk_file, file_system, pins
from pdx.store.disk.chunk_file import ChunkFile, Useless
from pdx.store.disk.counting import attainable, count
from pdx.store.disk.health import GONE, SILENT, DiskHealth
from pdx.store.disk.index import FileIndex
from pdx.store.disk.recoder import Recoder
from pdx.store.disk.workers import Task, Workers, file_of
from pdx.store.history import Cause
from pdx.store.recoding import OnChunk, Pair, Recoding
from pdx.store.tier import Grant, Held, Job, Part, Tier
from pdx.telemetry.faults import Faults
from pdx.wire.status import COUNTING, TierStatus

log = logging.getLogger("pdx.node")

MIB = 1 << 20
FULL_S = 60.0
JOIN_S = 10.0
SILENT_JOIN_S = 1.0  # … where the disk does not answer
SILENT_S = 5.0  # for so long a system call may take
MAX_FORGOTTEN = 1 << 16  # that are remembered while a copy from before is under way
MAX_USES = 1 << 16  # files that are to say that they were loaded
MAX_FILES = 2_000_000  # that can be found: the index takes about 360 bytes of memory for each
_PROBED = 64  # files, those that were used last, one of which is read for a probe
_DISK_FAULTS = ("full", "denied", "read_only", "write_failed", "read_failed")
# Why a load fails though its file may be good: for no reason of the disk, …
_NOT_OF_THE_DISK = ("exhausted", "failed")
_OF_THE_DISK = ("read_failed", "denied")  # … or for one that may hold for others, too
_LEFT_OUT = {
    "not_counted": "the files from before are not counted yet",
    "paused": "reads or writes failed, and none are tried for some seconds",
    "too_large": "a chunk is larger than all of the cap",
    "busy": "all files that could make room are being written or removed",
}


class DiskTier(Tier):
    """See `Tier`; all methods are for the control loop. `close` alone waits, for the threads."""

    kind = "disk"
    can_pin = can_recode = True
    is_whole = True
    max_inflight_bytes = 256 << 20

    def __init__(
        self,
        root: Path,
        limit_bytes: int,
        *,
        arenas: Sequence[Arena],
        post: Callable[[Callable[[], None]], None],
        on_done: Callable[[Tier, Job, TierError | None], None],
        counters: Counter[str],
        reserve_bytes: int = 0,
        codec: str = NONE,
        name: str = "disk",
        is_used: Callable[[bytes], bool] = lambda key: False,
        on_removed: Callable[[Sequence[bytes]], None] = lambda keys: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` has the control loop call something; `on_done` is `Copies.done`. `reserve_bytes` of the file system
        are left to others, whatever the cap. `codec`: by which chunks are encoded whose requests ask for none of their
        own. `is_used` says of a key whether memory has it for requests, which so do
        not ask for it here. `on_removed` is told of the keys that are not here any more.

        :raises ConfigError: the folder cannot be this node's alone.
        """
        private_folder(root)
        self.name = name
        self._root = root
        self._counters = counters
        self._faults = Faults(counters, clock, log=log)
        self._block_bytes = file_system.block_bytes(root)
        self.limit_bytes = attainable(root, limit_bytes, reserve_bytes, counters)
        self.is_direct = False  # whether files are read and written without the page cache
        self._post = post
        self._on_done = on_done
        self._is_used = is_used
        self._on_removed = on_removed
        self._clock = clock
        self._index = FileIndex()
        self._coming = 0  # files that are being written
        self.used_bytes = 0  # of the cap: what may be on the disk …
        self._leaving = 0  # … and of that, files that are to be removed in place of no other …
        # … and what cannot be found, nor removed, until it is replaced: which file, and whether it is unfinished
        self._stuck: set[tuple[ChunkFile, bool]] = set()
        self._busy: dict[bytes, dict[int, Task]] = {}  # files that are being written or removed
        self._later: dict[tuple[bytes, int], list[Job]] = {}  # what is to be stored then
        self._under_way: dict[int, dict[Task, None]] = {}  # by copy
        self._going: Counter[tuple[bytes, int]] = Counter()  # files that are removed and cannot be found
        self._recoder = Recoder(
            self._index,
            begin=self._rewrite,
            remove=partial(self._remove, is_forgotten=True),
            is_busy=lambda key: key in self._busy,
        )
        self._uses: Counter[ChunkFile] = Counter()  # loads that their files do not say yet …
        self._pins: dict[bytes, int] = {}  # how often chunks are pinned, where their file does not say it yet …
        self._is_noting = False  # … and whether a thread has both say so
        self._read: Counter[tuple[bytes, int]] = Counter()  # files that are being read
        self._admitted: OrderedDict[int, int] = OrderedDict()  # copy -> what had been forgotten, by then
        self._forgotten: OrderedDict[bytes, int] = OrderedDict()  # since the first of these: its place in the order
        self._all_forgotten = 0  # what was admitted before this place may be of any that was forgotten
        self._places = itertools.count(1)
        self._health = DiskHealth(clock)
        self._reached = self.limit_bytes  # bytes of files when the disk was full before the cap was reached, until …
        self._reached_until = 0.0
        self.siblings: Sequence[DiskTier] = ()  # the other disks of the node: a chunk may lie on one of them, too
        self._named_at: dict[bytes, int] = {}  # when named chunks from before were used last, until all are counted
        self.is_counted = False  # whether the index has all files
        self._is_scanning = True
        self._scanned_at = clock()  # when something was last heard of the scan, which its threads say, too
        self._is_scan_silent = False  # that was long ago
        self._evicted_meanwhile: set[bytes] = set()
        self._lock = contextlib.ExitStack()
        lock = self._lock.enter_context(owned(root / "tier", self._taken, may_be_read_only=True))
        if not lock.is_written:
            self._health.begins_read_only(is_ours=lock.is_held)
            self._warn(TierError(f"{root} is read-only: chunks are loaded from there, and none stored", "read_only"))
        try:
            self._index.pins.update(pins.read(root))
        except TierError as error:
            self._warn(error)
        with contextlib.suppress(OSError):  # a folder that nothing can be written to is read as it can be
            self.is_direct = file_system.takes_direct(root)
        if not self.is_direct:
            counters["disk_not_direct"] += 1
            log.warning("%s is read and written through the page cache: no direct I/O there", root)
        self._workers = Workers(
            root,
            arenas,
            is_direct=self.is_direct,
            block_bytes=self._block_bytes,
            reserve_bytes=reserve_bytes,
            codec=codec,
            on_over=lambda task: post(partial(self._over, task)),
            clock=clock,
        )
        self._workers.start(
            partial(count, root, MAX_FILES, self._block_bytes, self._is_scan_over, post, self._found, self._scanned)
        )

    def _taken(self, owner: str) -> ConfigError:
        what = f"{self._root} is the disk tier of another node (process {owner})"
        return ConfigError(f"{what}; two nodes cannot share one: name another folder with --disk, or end that node")

    def status(self) -> TierStatus:
        """For `pdx node --status`."""
        self._look()
        state = self._health.text or ("" if self._workers.takes_writes else "writes do not return")
        if not state and not self.is_counted:
            state = COUNTING if self.is_listing else SILENT if self._is_scanning else "not readable"
        elif not state and self._clock() < self._reached_until:
            state = "full"
        elif not state:
            state = "ok" if self.is_direct else "by way of the page cache"
        is_up = (self.is_counted or self.is_listing) and self._health.takes_loads
        found = TierStatus(self.name, str(self._root), self.num_chunks, self.used_bytes, self.limit_bytes, state)
        return msgspec.structs.replace(found, is_up=is_up)

    # ---- the tier ---------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """See `Tier.is_idle`."""
        return not self._under_way

    @property
    def takes_stores(self) -> bool:
        """See `Tier.takes_stores`."""
        self._look()
        return self.is_counted and self._health.takes_stores and self._workers.takes_writes

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        """See `Tier.find`."""
        self._look()
        found: list[Held] = []
        for key in keys if self._health.takes_loads else ():
            held = self._index.held(key, shards)
            if held is None or self._health.hides(key) or self._may_be_old(key):
                break
            found.append(held)
        return found

    def use(self, keys: Sequence[bytes]) -> None:
        """See `Tier.use`."""
        self._index.touch(keys)

    def holds(self, key: bytes, shards: int = 0) -> bool:
        """See `Tier.holds`."""
        return self._index.held(key, shards or len(self._index.of(key))) is not None

    def keys(self) -> list[bytes]:
        """See `Tier.keys`."""
        return self._index.keys()

    def _may_be_old(self, key: bytes) -> bool:
        """Whether another disk, which is not counted yet, may have a newer chunk of this name."""
        return key in self._named_at and any(each.is_listing for each in self.siblings)

    @property
    def is_listing(self) -> bool:
        """Whether it is being found out which files are here. A disk that does not answer meanwhile is as one that is
        left out, until it does."""
        if self._is_scanning and not self._is_scan_silent and self._scanned_at < self._clock() - SILENT_S:
            self._is_scan_silent = True
            text = f"{self._root} does not answer: which chunks are there is not known until it does"
            self._warn(TierError(text, "silent"))
        return self._is_scanning and not self._is_scan_silent

    def _is_scan_over(self) -> bool:
        self._scanned_at = self._clock()
        return self._workers.is_closing

    def _is_newest(self, key: bytes, time_ns: int) -> bool:
        """Whether a named chunk from before is newer than what the other disks have of it; then that is forgotten. A
        disk that was left out for a life of the node has what clients have written anew meanwhile."""
        for each in self.siblings:
            if each._named_at.get(key, math.inf if key in each._index else -1) >= time_ns:
                return False  # what is not from before was stored since
        for each in self.siblings:
            if key in each._named_at:
                each.evict([key])
        self._named_at.setdefault(key, time_ns)
        return True

    def _look(self) -> None:
        """Notice what takes too long, and find out whether a disk in doubt works again."""
        if self._workers.silent(self._clock() - SILENT_S):
            text = f"{self._root} does not answer: nothing is loaded from there or stored until it does"
            self._warn(TierError(text, "silent"))
            self._doubt(SILENT)
        if self._health.begins_probe():
            files = list(itertools.islice(self._index.last_used(), _PROBED))
            file = files[self._health.probes % len(files)] if files else None  # another one each time
            self._give(Task(is_probe=True, probed=file), self._workers.loads)

    def _doubt(self, why: str) -> None:
        """What waits for a thread is given up: it would keep memory, and those who wait for it."""
        self._health.doubts(why)
        workers = self._workers
        self._end(workers.take_back(workers.loads, workers.stores), "paused")

    @property
    def num_chunks(self) -> int:
        """How many can be found, each shard counted."""
        return self._index.num_files

    def hits(self, key: bytes) -> int:
        """How often this chunk was loaded, also by nodes before this one."""
        return self._index.hits(key)

    def why_not(self, key: bytes) -> str:
        """See `Tier.why_not`."""
        if key in self._index:
            is_old = "has it, and another disk, which may have a newer one, is not counted yet"
            return self._health.why_not(key) or (is_old if self._may_be_old(key) else "")
        if self.is_counted:
            return ""
        return "has not counted its files yet" if self._is_scanning else "could not be listed"

    def admit(self, copy: Copy) -> Grant:
        """See `Tier.admit`."""
        self._admitted[copy.number] = next(self._places)
        granted: list[int] = []
        for index, key in enumerate(copy.keys):
            if self._index.held(key, copy.shards) is not None:
                continue
            chunks = copy.chunks[index * copy.shards : (index + 1) * copy.shards]
            charge = sum(self._charge(chunk.slot.nbytes, chunk.layers) for chunk in chunks)
            if not self.takes_stores or charge > self.limit_bytes:
                why = "too_large" if self.takes_stores else "paused" if self.is_counted else "not_counted"
                self._leave_out(why, copy.keys[index:])
                break
            granted.append(index)
        return Grant(granted)

    def _charge(self, nbytes: int, layers: int) -> int:
        return chunk_file.disk_bytes(nbytes, layers, block_bytes=self._block_bytes)

    def _leave_out(self, why: str, keys: Sequence[bytes]) -> None:
        self._counters[f"disk_{why}"] += len(keys)
        self.tally.dropped += len(keys)
        self.history.note(keys, Cause.NOT_STORED, self._clock(), detail=_LEFT_OUT[why])
        self._faults.warn(f"disk {why}", f"the disk tier {self._root} leaves out chunks: {_LEFT_OUT[why]}")

    def store(self, job: Job) -> None:
        """See `Tier.store`."""
        part = job.parts[0]
        if self._health.doubt or not self._workers.takes_writes:
            return self._refuse(job, "paused")
        forgotten = max(self._forgotten.get(part.key, 0), self._all_forgotten)
        is_forgotten = forgotten > self._admitted.get(job.number, 0)
        if is_forgotten or self._index.has(part.key, part.shard):
            return self._post(partial(self._on_done, self, job, None))
        if part.shard in self._busy.get(part.key, {}) or self._going[part.key, part.shard]:
            return self._later.setdefault((part.key, part.shard), []).append(job)
        task = Task(job, charge=self._charge(part.slot.nbytes, part.layers))
        return None if self._begin(task) else self._refuse(job, "busy")

    def _begin(self, task: Task) -> bool:
        """Have a file written, if there is room, or can be made."""
        part, charge, source = task.part, task.charge, task.source
        is_used = self._is_used if source is None else lambda key: key == source.key or self._is_used(key)
        limit_bytes = self._reached if self._clock() < self._reached_until else self.limit_bytes
        lack = self.used_bytes + charge - limit_bytes
        surplus = self.num_chunks + self._coming + 1 - MAX_FILES
        has_room = lack <= self._index.nbytes - self._index.pinned_bytes and surplus <= self.num_chunks
        victims, used = self._index.oldest(lack, surplus, is_used) if has_room else ([], [])
        if not has_room or source in victims:
            self._leave_out("busy", [part.key])
            return False
        self._index_is_full(surplus)
        freed = sum(file.charge for file in victims)
        task.victims, task.hold = victims, max(charge, freed)
        task.used = [(file, 0) for file in used]
        self._reuse(task)
        self.used_bytes += task.hold - freed
        self._coming += 1
        self._take_out(victims, task)
        self._busy.setdefault(part.key, {})[part.shard] = task
        self._give(task, self._workers.stores)
        return True

    def _refuse(self, job: Job, why: str) -> None:
        error = TierError(f"{self._root} leaves it out: {_LEFT_OUT[why]}", why)
        self._post(partial(self._on_done, self, job, error))

    def _reuse(self, task: Task) -> None:
        """Write one of the victims anew, if it is of the same size and nobody reads it."""
        size = task.part.slot.nbytes, task.part.layers
        for file in task.victims:
            if (file.nbytes, file.layers) == size and (file.key, file.shard) not in self._read:
                task.reused = file
                task.victims = [*(each for each in task.victims if each is not file), file]
                return

    def _index_is_full(self, surplus: int) -> None:
        """So many files are removed for that, if any."""
        if surplus > 0:
            if not self._counters["disk_index_full"]:
                text = "%s has more than %d files: what was not used for longest is removed, counted as disk_index_full"
                log.warning(text, self._root, MAX_FILES)
            self._counters["disk_index_full"] += surplus

    def _take_out(self, files: Sequence[ChunkFile], task: Task) -> None:
        """These cannot be found any more; `task` removes them."""
        self._pins.update((file.key, 0) for file in files if file.key in self._index.pins)
        self._index.remove(files)
        self.note(file.key for file in files)
        for file in files:
            self._health.forget(file.key)
            self._busy.setdefault(file.key, {})[file.shard] = task
            self._counters["disk_removed"] += 1
            why = Cause.FORGOTTEN if file.key in task.forgotten else Cause.REMOVED
            self.history.note([file.key], why, self._clock())
        self._on_removed(list(dict.fromkeys(file.key for file in files)))
        self._note()

    def load(self, job: Job) -> None:
        """See `Tier.load`."""
        self._look()
        if not self._health.takes_loads:
            self._counters["disk_paused"] += 1
            return self._refuse(job, "paused")
        part = job.parts[0]
        self._read[part.key, part.shard] += 1
        file = self._file(part.key, part.shard)
        return self._give(Task(job, is_load=True, file=file), self._workers.loads)

    def _file(self, key: bytes, shard: int) -> ChunkFile | None:
        return next((file for file in self._index.of(key) if file.shard == shard), None)

    def recode(self, pairs: Sequence[Pair], codec: str, shards: int, on_chunk: OnChunk) -> Recoding:
        """See `Tier.recode`."""
        return self._recoder.recode(pairs, codec, on_chunk)

    def _rewrite(self, task: Task) -> str:
        if self._health.doubt or not self.takes_stores:
            return f"{self._root} is not written to: {_LEFT_OUT['paused']}"
        return "" if self._begin(task) else f"{self._root} has no room for another file of the chunk"

    def _give(self, task: Task, queue: deque[Task]) -> None:
        self._under_way.setdefault(task.job.number if task.job is not None else 0, {})[task] = None
        self._workers.give(task, queue)
        if self._workers.is_closing:
            self._end_queued()

    def cancel(self, copy: Copy) -> None:
        """See `Tier.cancel`."""
        for task in self._under_way.get(copy.number, ()):
            task.is_cancelled = True

    def over(self, copy: Copy) -> None:
        """See `Tier.over`."""
        if self._admitted.pop(copy.number, None) is None:
            return
        self._index.touch(copy.keys)
        first = next(iter(self._admitted.values()), math.inf)  # what was forgotten since, a copy may still bring
        while self._forgotten and next(iter(self._forgotten.values())) < first:
            self._forgotten.popitem(last=False)

    def evict(self, keys: Sequence[bytes], shards: int = 0) -> int:
        """See `Tier.evict`."""
        files: list[ChunkFile] = []
        count = 0
        for key in dict.fromkeys(keys):
            if self._is_scanning:
                self._evicted_meanwhile.add(key)
            if self._admitted:
                self._forgotten[key] = next(self._places)
                self._forgotten.move_to_end(key)
                if len(self._forgotten) > MAX_FORGOTTEN:
                    _, self._all_forgotten = self._forgotten.popitem(last=False)
            for shard, task in self._busy.get(key, {}).items():
                task.forgotten.add(key)
                if task.job is not None and (task.part.key, task.part.shard) == (key, shard):
                    task.is_cancelled = True
            files += self._index.of(key)
            count += key in self._index
        self._remove(files, is_forgotten=True)
        return count

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    def is_pinned(self, key: bytes) -> bool:
        """See `Tier.is_pinned`."""
        return key in self._index.pins

    def pin(self, keys: Sequence[bytes], *, pinned: bool, share: float) -> None:
        """See `Tier.pin`."""
        if pinned:
            fresh = [key for key in keys if key not in self._index.pins]
            nbytes = self._index.pinned_bytes + sum(file.charge for key in fresh for file in self._index.of(key))
            most = int(self.limit_bytes * share)
            if fresh and nbytes > most:
                raise ArenaFull(f"{nbytes} bytes would be pinned in {self.name}, where {most} may be (pin_share)")
        for key in keys:
            self._index.pin(key, 1 if pinned else -1)
            self._pins[key] = self._index.pins[key]
        self._note()

    def _remove(self, files: Sequence[ChunkFile], *, is_forgotten: bool) -> None:
        if files:
            task = Task(victims=files, hold=sum(file.charge for file in files))
            if is_forgotten:
                task.forgotten.update(file.key for file in files)
            self._take_out(files, task)
            self._leaving += task.hold
            self._give(task, self._workers.removals)

    def close(self) -> None:
        """See `Tier.close`. What was forgotten is removed first, as far as the disk answers."""
        self._look()
        has_ended = self._workers.close(SILENT_JOIN_S if self._health.doubt == SILENT else JOIN_S)
        if has_ended and (self._uses or self._pins):
            self._workers.finish(self._noted())
        self._end_queued()
        if has_ended:
            self._lock.close()  # else the disk hangs, and no other node may have the folder until this process is gone

    def _end_queued(self) -> None:
        """The tier is closed: what no thread has begun is over."""
        workers = self._workers
        self._end(workers.take_back(workers.loads, workers.removals, workers.stores), "cancelled")
        for job in itertools.chain.from_iterable(self._later.values()):
            self._post(partial(self._on_done, self, job, TierError("the disk tier is closed", "cancelled")))
        self._later.clear()

    def _end(self, tasks: Iterable[Task], kind: str) -> None:
        """No thread begins these."""
        for task in tasks:
            task.left += task.victims
            task.error = TierError("the disk tier is closed" if kind == "cancelled" else "the disk is in doubt", kind)
            self._post(partial(self._over, task))

    # ---- what became of it, on the control loop ---------------------------------------------

    def _over(self, task: Task) -> None:
        """A thread is done with this."""
        _take(self._under_way, task.job.number if task.job is not None else 0, task)
        self.used_bytes -= task.hold
        kind = task.error.kind if task.error is not None else ""
        for file in task.left:
            if kind == "paused" and file.key in task.forgotten:  # nobody has tried to remove it
                self._remove_anew(file)
            else:
                self._insert(file, is_forgotten=file.key in task.forgotten)
        if kind == "gone":
            self._doubt(GONE)
        elif task.is_silent and kind in ("", "cancelled", "stale"):
            self._health.answers()
        if task.is_unfound:
            self._going -= Counter((file.key, file.shard) for file in task.victims)
        if task.is_probe:
            self._probed(task.error)
        elif task.job is None:
            self._leaving -= task.hold
            if task.used or task.pins:
                self._is_noting = False
                if task.error is None:
                    self._note()
                else:  # with the next note
                    self._pins = {**task.pins, **self._pins}
            if task.error is not None:
                self._warn(task.error)
        elif task.is_load:
            name = task.part.key, task.part.shard
            if kind == "missing" and (now := self._file(*name)) is not None and now != task.file:
                task.file, task.error = now, None  # it was written anew meanwhile
                self._give(task, self._workers.loads)
                return
            self._read[name] -= 1
            if not self._read[name]:
                del self._read[name]
            self._loaded(task.part, task.error)
        else:
            self._stored(task)
        own = [(task.part.key, task.part.shard)] if task.job is not None else []
        for key, shard in [*((file.key, file.shard) for file in task.victims), *own]:
            if self._busy.get(key, {}).get(shard) is task:  # else something else is to be done to this file now
                _take(self._busy, key, shard)
            if shard not in self._busy.get(key, {}):
                for job in self._later.pop((key, shard), ()):
                    self.store(job)
        if task.source is not None:
            self._recoder.ended(task, task.error)
        elif task.job is not None:
            self._on_done(self, task.job, task.error)

    def _probed(self, error: TierError | None) -> None:
        kind = error.kind if error is not None else ""
        is_of_file = kind not in ("", "gone", "paused", "cancelled", *_OF_THE_DISK, *_NOT_OF_THE_DISK)
        self._health.probed(works=error is None or is_of_file)
        if error is not None and kind in _OF_THE_DISK:
            self._warn(error)

    def _insert(self, file: ChunkFile, *, is_forgotten: bool = False) -> None:
        """There is this file; it counts as not used for longest."""
        if is_forgotten:
            self._stick(file)
            return
        self.used_bytes += file.charge
        self._index.add(file)
        self.note([file.key])

    def _stick(self, file: ChunkFile, *, is_unfinished: bool = False) -> None:
        self.used_bytes += file.charge * ((file, is_unfinished) not in self._stuck)
        self._stuck.add((file, is_unfinished))

    def _stored(self, task: Task) -> None:
        part, error = task.part, task.error
        self._coming -= 1
        file, source = task.file or file_of(part, self._block_bytes), task.source
        if source is not None and task.is_unread:
            self._loaded(msgspec.structs.replace(part, key=source.key), error)
            return
        if error is None:
            self._health.wrote()
            self._counters["disk_stored"] += 1
            replaced = {(file, False), (file_of(part, self._block_bytes), True)} & self._stuck
            self.used_bytes -= file.charge * len(replaced)
            self._stuck -= replaced
            is_gone = part.key in task.forgotten
            if source is not None and source in self._index.of(part.key):
                self._replaced(source, file)
            else:
                self._insert(file)
                self._index.touch([part.key])
                is_gone |= source is not None and source.key == part.key  # it has made room for another
            if is_gone:
                self._remove([file], is_forgotten=True)
            return
        if error.is_left:
            self._stick(file, is_unfinished=True)
        if error.kind != "cancelled":
            self._warn(error)
            self.history.note([part.key], Cause.NOT_STORED, self._clock(), detail=str(error))
            if error.kind in _DISK_FAULTS:
                self._health.not_written(is_read_only=error.kind == "read_only")
            if error.kind == "full":  # others use the disk, too: for some time new files take the place of old ones
                self._reached, self._reached_until = self.used_bytes, self._clock() + FULL_S

    def _replaced(self, source: ChunkFile, file: ChunkFile) -> None:
        """The chunk keeps its key and has another file, or the same one anew."""
        if file != source:
            self._index.replace(source, file)
            self.used_bytes += file.charge - source.charge
            self._remove_unfound(source)

    def _note(self) -> None:
        """Have files say that they were loaded, and what is pinned, by one thread that writes: where writes do not
        return, loads do not wait for them."""
        if (self._uses or self._pins) and not self._is_noting:
            self._is_noting = True
            self._give(self._noted(), self._workers.removals)

    def _noted(self) -> Task:
        task = Task(used=list(self._uses.items()), pins=dict(self._pins), num_pinned=len(self._index.pins))
        self._uses.clear()
        self._pins.clear()
        return task

    def _loaded(self, part: Part, error: TierError | None) -> None:
        files = self._index.of(part.key)
        if error is None:
            if (file := self._file(part.key, part.shard)) is not None:
                self._uses[file] += 1
                if len(self._uses) > MAX_USES:
                    del self._uses[next(iter(self._uses))]
                self._note()
            self._health.read(part.key, part.shard)
            self._counters["disk_loaded"] += 1
            if part.key in self._index and part.shard == 0:
                self._index.set_hits(part.key, self.hits(part.key) + 1)
        elif error.kind == "paused":
            self._counters["disk_paused"] += 1
        elif error.kind not in ("cancelled", "stale"):
            if self._index.has(part.key, part.shard) or error.kind != "missing":
                self._warn(error)
            if error.kind in _NOT_OF_THE_DISK:
                self._health.pause_reads()  # whoever waits would have it loaded at once again
            elif error.kind in _OF_THE_DISK and not self._health.not_read(part.key, part.shard):
                if self._health.doubt:
                    self._doubt(self._health.doubt)
                if not files:  # it was removed meanwhile: nobody would forget that it failed
                    self._health.forget(part.key)
            elif error.kind != "gone":
                self._remove(files, is_forgotten=True)

    def _warn(self, error: TierError) -> None:
        self._counters[f"disk_{error.kind}"] += 1
        self.tally.errors += 1
        self._faults.warn(f"disk {error.kind}", f"the disk tier: {error}; further ones count as disk_{error.kind}")

    def _found(self, batch: Sequence[tuple[int, ChunkFile | Useless]]) -> None:
        """Files from before, with their times; those that were used last come first."""
        self._scanned_at = self._clock()
        for time_ns, file in batch:
            if isinstance(file, Useless):
                self.used_bytes += file.nbytes
                if file.why.kind == "index_full":
                    self._index_is_full(1)
                elif file.why.kind in ("unfinished", "foreign"):
                    self._counters[f"disk_{file.why.kind}"] += 1
                else:
                    self._warn(file.why)
                continue
            is_old = is_named(file.key) and not self._is_newest(file.key, time_ns)
            if is_old or self._index.has(file.key, file.shard):
                self._remove_unfound(file)
            else:
                self._insert(file)
                if hits := chunk_file.hits_of(time_ns):
                    self._index.set_hits(file.key, hits)
            if file.key in self._evicted_meanwhile:
                self.evict([file.key])
        surplus = self.num_chunks - MAX_FILES
        self._index_is_full(surplus)
        files, _ = self._index.oldest(self.used_bytes - self._leaving - self.limit_bytes, surplus, self._is_used)
        self._remove(files, is_forgotten=False)

    def _remove_anew(self, file: ChunkFile) -> None:
        """This one, which cannot be found, could not be removed in its time; a store of its chunk waits for that."""
        self._busy.setdefault(file.key, {})[file.shard] = self._remove_unfound(file)

    def _remove_unfound(self, file: ChunkFile) -> Task:
        """Remove a file that cannot be found. At the start: there is a newer one of its chunk with another size."""
        task = Task(victims=[file], hold=file.charge, forgotten={file.key}, is_unfound=True)
        self._going[file.key, file.shard] += 1
        self.used_bytes += file.charge
        self._leaving += file.charge
        self._give(task, self._workers.removals)
        return task

    def _scanned(self, error: TierError | None) -> None:
        """No more files are found; where that is an error, the cap cannot be kept, and nothing is stored."""
        self._is_scanning = False
        self._evicted_meanwhile.clear()
        disks = (self, *self.siblings)
        if not any(each._is_scanning for each in disks):
            for each in disks:
                each._named_at.clear()
        if error is not None:
            self._warn(error)
        else:
            self.is_counted = True
            self._drop_pins()
            used, limit = self.used_bytes / MIB, self.limit_bytes / MIB
            log.info("disk tier %s: %d chunks, %.0f of %.0f MiB", self._root, self.num_chunks, used, limit)

    def _drop_pins(self) -> None:
        """Pins from before: of chunks that are not there any more, and those that a smaller cap has no room for."""
        gone = [key for key in self._index.pins if key not in self._index]
        for key in gone:
            del self._index.pins[key]
        too_many: list[bytes] = []
        lack = self.used_bytes - self._leaving - self.limit_bytes
        for key in self._index.pins if lack > 0 else ():
            too_many.append(key)
            lack -= sum(file.charge for file in self._index.of(key))
            if lack <= 0:
                break
        for key in too_many:
            self._index.pin(key, -self._index.pins[key])
        self._pins.update((key, 0) for key in (*gone, *too_many))
        if too_many:
            self._counters["disk_pins_dropped"] += len(too_many)
            text = "%s: pins of %d chunks are dropped: the cap is smaller than what was pinned"
            log.warning(text, self._root, len(too_many))
            files, _ = self._index.oldest(self.used_bytes - self._leaving - self.limit_bytes, 0, self._is_used)
            self._remove(files, is_forgotten=False)
        self._note()


def _take(groups: dict[Any, dict[Any, Any]], name: object, member: object) -> None:
    """Take one out of a group that is dropped with its last."""
    del groups[name][member]
    if not groups[name]:
        del groups[name]
