"""The disk tier: chunks in files, found again by the next node that is given the same folder.

The control loop owns the index, which says what is on the disk and in which order it was used, and the account of the
bytes. A few threads read, write and remove the files (`pdx.store.disk.chunk_file`) and post what became of it. Loads go
first; one thread is left for them whatever is to be stored or removed.

    <root>/<two hex digits>/<key>-<shard>-<slices>-<bytes>.chunk

The account counts what may be on the disk: files, files that are being written, and files until they are removed. It
never exceeds the cap: a file is begun when there is room for all of it, if need be in place of the files that were not
used for longest, which the same thread removes first. Until all files from before are counted nothing is stored.

What was forgotten, or is broken, is never found again, even if its file stays: a client's name says nothing of bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pdx.config import private_folder
from pdx.errors import ConfigError, TierError
from pdx.memory.arena import Arena
from pdx.security.socket_lock import owned
from pdx.store.copy import Copy
from pdx.store.disk import chunk_file
from pdx.store.disk.chunk_file import ChunkFile, Useless
from pdx.store.tier import Grant, Held, Job, Part, Tier
from pdx.telemetry.faults import Faults
from pdx.wire.messages import COUNTING, TierStatus

log = logging.getLogger("pdx.node")

MIB = 1 << 20
THREADS = 8  # while one compares digests, the others keep the disk busy
MAX_ERRORS = 3  # writes that may fail one after the other before there is a pause
PAUSE_S = 10.0
FULL_S = 60.0
JOIN_S = 10.0
_BATCH = 256
_DISK_FAULTS = ("full", "denied", "read_only", "write_failed")
_NOT_OF_THE_FILE = ("exhausted", "failed")  # why a load fails though its file may be good
_LEFT_OUT = {
    "not_counted": "the files from before are not counted yet",
    "paused": "writes failed, and none are tried for some seconds",
    "too_large": "a chunk is larger than all of the cap",
    "busy": "all files that could make room are being written or removed",
}


class _Task(msgspec.Struct, eq=False):
    """Work for a thread: a job, or only files to remove. The thread sets `left` and `error`."""

    job: Job | None = None
    is_load: bool = False
    victims: Sequence[ChunkFile] = ()  # to be removed first
    reused: ChunkFile | None = None  # the last of them, if it is written anew instead
    hold: int = 0  # bytes of the cap that are its own until it is over
    charge: int = 0  # of these, what its file takes
    is_cancelled: bool = False
    forgotten: set[bytes] = msgspec.field(default_factory=set)  # of what it writes and removes
    left: list[ChunkFile] = msgspec.field(default_factory=list)  # victims that could not be removed
    error: TierError | None = None

    @property
    def part(self) -> Part:
        """What the job is about."""
        assert self.job is not None
        return self.job.parts[0]


class DiskTier(Tier):
    """See `Tier`; all methods are for the control loop. `close` alone waits, for the threads."""

    kind = "disk"
    is_whole = True
    max_inflight_bytes = 256 << 20

    def __init__(
        self,
        root: Path,
        limit_bytes: int,
        *,
        arenas: Sequence[Arena],
        post: Callable[[Callable[[], None]], None],
        on_done: Callable[[str, Job, TierError | None], None],
        counters: Counter[str],
        reserve_bytes: int = 0,
        name: str = "disk",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` has the control loop call something; `on_done` is `Copies.done`. `reserve_bytes` of the file system
        are left to others, whatever the cap.

        :raises ConfigError: the folder cannot be this node's alone.
        """
        private_folder(root)
        self.name = name
        self._root = root
        self._counters = counters
        self._faults = Faults(counters, clock)
        self._reserve_bytes = reserve_bytes
        self.limit_bytes = self._attainable(limit_bytes)
        self.is_direct = False  # whether files are read and written without the page cache
        self._arenas = arenas
        self._post = post
        self._on_done = on_done
        self._clock = clock
        self._index: OrderedDict[bytes, tuple[ChunkFile, ...]] = (
            OrderedDict()
        )  # of all shards; the last used is at the end
        self._hits: dict[bytes, int] = {}  # how often chunks were loaded, where that is not never
        self.num_chunks = 0  # that can be found, each shard counted
        self.used_bytes = 0  # of the cap: what may be on the disk …
        self._leaving = 0  # … and of that, files that are to be removed in place of no other
        self._found_bytes = 0  # … and files that can be found
        self._stuck: dict[ChunkFile, int] = {}  # … and what cannot be found, nor removed: until it is replaced
        self._busy: dict[bytes, dict[int, _Task]] = {}  # files that are being written or removed
        self._later: dict[tuple[bytes, int], list[Job]] = {}  # what is to be stored then
        self._under_way: dict[int, dict[_Task, None]] = {}  # by copy
        self._read: Counter[tuple[bytes, int]] = Counter()  # files that are being read
        self._admitted: OrderedDict[int, int] = OrderedDict()  # copy -> what had been forgotten, by then
        self._forgotten: OrderedDict[bytes, int] = OrderedDict()  # since the first of these: its place in the order
        self._places = itertools.count(1)
        self._errors = 0  # writes that failed since the last one that did not
        self._paused_until = 0.0
        self._blind_until = 0.0  # nothing is found until then
        self._reached = self.limit_bytes  # bytes of files when the disk was full before the cap was reached, until …
        self._reached_until = 0.0
        self.is_counted = False  # whether the index has all files
        self._is_scanning = True
        self._evicted_meanwhile: set[bytes] = set()
        self._condition = threading.Condition()  # guards the next five
        self._loads: deque[_Task] = deque()
        self._removals: deque[_Task] = deque()
        self._stores: deque[_Task] = deque()
        self._writing = 0  # threads that store or remove
        self._is_closing = False
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(owned(root / "tier", self._taken))
        with contextlib.suppress(OSError):  # a folder that nothing can be written to is read as it can be
            self.is_direct = chunk_file.takes_direct(root)
        if not self.is_direct:
            log.warning("%s is read and written through the page cache: no direct I/O there", root)
        self._threads = [
            threading.Thread(target=target, name=f"pdx-disk-{number}", daemon=True)
            for number, target in enumerate([self._scan] + [self._work] * THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _taken(self, owner: str) -> ConfigError:
        what = f"{self._root} is the disk tier of another node (process {owner})"
        return ConfigError(f"{what}; two nodes cannot share one: name another folder with --disk, or end that node")

    def _attainable(self, limit_bytes: int) -> int:
        """The cap, or what the file system has in all without the reserve."""
        disk = os.statvfs(self._root)
        total_bytes = disk.f_blocks * disk.f_frsize
        most = max(0, total_bytes - self._reserve_bytes)
        if limit_bytes > most:
            self._counters["disk_cap_lowered"] += 1
            text = (
                "%s is on a disk of %.1f MiB: the cap of %.1f MiB is lowered to %.1f MiB, so that the reserve is left"
            )
            log.warning(text, self._root, total_bytes / MIB, limit_bytes / MIB, most / MIB)
        return min(limit_bytes, most)

    def status(self) -> TierStatus:
        """For `pdx node --status`."""
        state = "ok" if self.is_direct else "by way of the page cache"
        if self._clock() < self._paused_until:
            state = "paused: writes failed"
        elif not self.is_counted:
            state = COUNTING if self._is_scanning else "not readable"
        is_up = (self.is_counted or self._is_scanning) and self._clock() >= self._blind_until
        found = TierStatus(self.name, str(self._root), self.num_chunks, self.used_bytes, self.limit_bytes, state)
        return msgspec.structs.replace(found, is_up=is_up)

    # ---- the tier ---------------------------------------------------------------------------

    @property
    def takes_stores(self) -> bool:
        """See `Tier.takes_stores`."""
        return self.is_counted and self._clock() >= self._paused_until

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        """See `Tier.find`. What is found counts as used."""
        found: list[Held] = []
        for key in keys if self._clock() >= self._blind_until else ():
            held = self._held(key, shards)
            if held is None:
                break
            found.append(held)
        self._touch(keys[: len(found)])
        return found

    def _held(self, key: bytes, shards: int) -> Held | None:
        files = self._index.get(key, ())
        sizes = {(file.nbytes, file.layers) for file in files}
        if len(sizes) != 1 or len(files) != shards or {file.shard for file in files} != set(range(shards)):
            return None
        return Held(*sizes.pop())

    def hits(self, key: bytes) -> int:
        """How often this chunk was loaded, also by nodes before this one."""
        return self._hits.get(key, 0)

    def why_not(self, key: bytes) -> str:
        """See `Tier.why_not`."""
        if key in self._index:
            return "is not read for some seconds, because a load failed" if self._clock() < self._blind_until else ""
        if self.is_counted:
            return ""
        return "has not counted its files yet" if self._is_scanning else "could not be listed"

    def _has(self, key: bytes, shard: int) -> bool:
        return any(file.shard == shard for file in self._index.get(key, ()))

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the end of the prompt becomes the older one
            if key in self._index:
                self._index.move_to_end(key)

    def admit(self, copy: Copy) -> Grant:
        """See `Tier.admit`."""
        self._admitted[copy.number] = next(self._places)
        granted: list[int] = []
        for index, key in enumerate(copy.keys):
            if self._held(key, copy.shards) is not None:
                continue
            chunks = copy.chunks[index * copy.shards : (index + 1) * copy.shards]
            charge = sum(chunk_file.disk_bytes(chunk.slot.nbytes, chunk.layers) for chunk in chunks)
            if not self.takes_stores or charge > self.limit_bytes:
                why = "too_large" if self.takes_stores else "paused" if self.is_counted else "not_counted"
                self._leave_out(why, copy.keys[index:])
                break
            granted.append(index)
        return Grant(granted)

    def _leave_out(self, why: str, keys: Sequence[bytes]) -> None:
        self._counters[f"disk_{why}"] += len(keys)
        self.tally.dropped += len(keys)
        self.history.note(keys, f"not stored: {_LEFT_OUT[why]}", self._clock())
        self._faults.warn(f"disk {why}", f"the disk tier {self._root} leaves out chunks: {_LEFT_OUT[why]}")

    def store(self, job: Job) -> None:
        """See `Tier.store`."""
        part = job.parts[0]
        is_forgotten = self._forgotten.get(part.key, 0) > self._admitted.get(job.number, 0)
        if is_forgotten or self._has(part.key, part.shard):
            return self._post(partial(self._on_done, self.name, job, None))
        if part.shard in self._busy.get(part.key, {}):
            return self._later.setdefault((part.key, part.shard), []).append(job)
        charge = chunk_file.disk_bytes(part.slot.nbytes, part.layers)
        limit_bytes = self._reached if self._clock() < self._reached_until else self.limit_bytes
        lack = self.used_bytes + charge - limit_bytes
        if lack > self._found_bytes:
            self._leave_out("busy", [part.key])
            return self._post(partial(self._on_done, self.name, job, TierError("there is no room now", "busy")))
        victims = self._oldest(lack)
        freed = sum(file.charge for file in victims)
        task = _Task(job, victims=victims, hold=max(charge, freed), charge=charge)
        self._reuse(task)
        self.used_bytes += task.hold - freed
        self._take_out(victims, task)
        self._busy.setdefault(part.key, {})[part.shard] = task
        return self._give(task, self._stores)

    def _reuse(self, task: _Task) -> None:
        """Write one of the victims anew, if it is of the same size and nobody reads it."""
        size = task.part.slot.nbytes, task.part.layers
        for file in task.victims:
            if (file.nbytes, file.layers) == size and (file.key, file.shard) not in self._read:
                task.reused = file
                task.victims = [*(each for each in task.victims if each is not file), file]
                return

    def _oldest(self, nbytes: int) -> list[ChunkFile]:
        """So many bytes of files that were not used for longest."""
        files: list[ChunkFile] = []
        of_keys = iter(self._index.values())
        while nbytes > 0 and (of_key := next(of_keys, None)) is not None:
            files += of_key
            nbytes -= sum(file.charge for file in of_key)
        return files

    def _take_out(self, files: Iterable[ChunkFile], task: _Task) -> None:
        """These cannot be found any more; `task` removes them."""
        for file in files:
            self._index.pop(file.key, None)
            self._hits.pop(file.key, None)
            self._busy.setdefault(file.key, {})[file.shard] = task
            self.num_chunks -= 1
            self._found_bytes -= file.charge
            self._counters["disk_removed"] += 1
            why = "deleted, or broken" if file.key in task.forgotten else "removed to make room"
            self.history.note([file.key], why, self._clock())

    def load(self, job: Job) -> None:
        """See `Tier.load`."""
        self._read[job.parts[0].key, job.parts[0].shard] += 1
        self._give(_Task(job, is_load=True), self._loads)

    def _give(self, task: _Task, queue: deque[_Task]) -> None:
        self._under_way.setdefault(task.job.number if task.job is not None else 0, {})[task] = None
        with self._condition:
            queue.append(task)
            self._condition.notify_all()
        if self._is_closing:
            self._end_queued()

    def cancel(self, copy: Copy) -> None:
        """See `Tier.cancel`."""
        for task in self._under_way.get(copy.number, ()):
            task.is_cancelled = True

    def over(self, copy: Copy) -> None:
        """See `Tier.over`."""
        if self._admitted.pop(copy.number, None) is None:
            return
        self._touch(copy.keys)
        first = next(iter(self._admitted.values()), math.inf)  # what was forgotten since, a copy may still bring
        while self._forgotten and next(iter(self._forgotten.values())) < first:
            self._forgotten.popitem(last=False)

    def evict(self, keys: Sequence[bytes]) -> int:
        """See `Tier.evict`."""
        files: list[ChunkFile] = []
        count = 0
        for key in dict.fromkeys(keys):
            if self._is_scanning:
                self._evicted_meanwhile.add(key)
            if self._admitted:
                self._forgotten[key] = next(self._places)
                self._forgotten.move_to_end(key)
            for shard, task in self._busy.get(key, {}).items():
                task.forgotten.add(key)
                if task.job is not None and (task.part.key, task.part.shard) == (key, shard):
                    task.is_cancelled = True
            files += self._index.get(key, ())
            count += key in self._index
        self._remove(files, is_forgotten=True)
        return count

    def _remove(self, files: Sequence[ChunkFile], *, is_forgotten: bool) -> None:
        if files:
            task = _Task(victims=files, hold=sum(file.charge for file in files))
            if is_forgotten:
                task.forgotten.update(file.key for file in files)
            self._take_out(files, task)
            self._leaving += task.hold
            self._give(task, self._removals)

    def close(self) -> None:
        """See `Tier.close`. What was forgotten is removed first, as far as the disk answers."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        end = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._end_queued()
        if not any(thread.is_alive() for thread in self._threads):
            self._lock.close()  # else the disk hangs, and no other node may have the folder until this process is gone

    def _end_queued(self) -> None:
        """The tier is closed: what no thread has begun is over."""
        for queue in (self._loads, self._removals, self._stores):
            while queue:
                task = queue.popleft()
                task.left += task.victims
                task.error = TierError("the disk tier is closed", "cancelled")
                self._post(partial(self._over, task))
        for job in itertools.chain.from_iterable(self._later.values()):
            self._post(partial(self._on_done, self.name, job, TierError("the disk tier is closed", "cancelled")))
        self._later.clear()

    # ---- what became of it, on the control loop ---------------------------------------------

    def _over(self, task: _Task) -> None:
        """A thread is done with this."""
        _take(self._under_way, task.job.number if task.job is not None else 0, task)
        self.used_bytes -= task.hold
        for file in task.left:
            self._insert(file, is_forgotten=file.key in task.forgotten)
        if task.job is None:
            self._leaving -= task.hold
            if task.error is not None:
                self._warn(task.error)
        elif task.is_load:
            name = task.part.key, task.part.shard
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
                for job in self._later.pop((key, shard), ()):
                    self.store(job)
        if task.job is not None:
            self._on_done(self.name, task.job, task.error)

    def _insert(self, file: ChunkFile, *, is_forgotten: bool = False) -> None:
        """There is this file; it counts as not used for longest."""
        self.used_bytes += file.charge
        if is_forgotten:
            self._stuck[file] = file.charge
            return
        self._index[file.key] = *self._index.get(file.key, ()), file
        self._index.move_to_end(file.key, last=False)
        self.num_chunks += 1
        self._found_bytes += file.charge

    def _stored(self, task: _Task) -> None:
        part, error = task.part, task.error
        file = _file(part)
        if error is None:
            self._errors = 0
            self._counters["disk_stored"] += 1
            self.used_bytes -= self._stuck.pop(file, 0)
            self._insert(file)
            self._index.move_to_end(part.key)
            if part.key in task.forgotten:
                self._remove([file], is_forgotten=True)
            return
        if error.is_left and file not in self._stuck:
            self._insert(file, is_forgotten=True)
        if error.kind != "cancelled":
            self._warn(error)
            self.history.note([part.key], f"not stored: {error}", self._clock())
            self._errors += error.kind in _DISK_FAULTS
            if error.kind == "full":  # others use the disk, too: for some time new files take the place of old ones
                self._reached, self._reached_until = self.used_bytes, self._clock() + FULL_S
            if self._errors >= MAX_ERRORS:
                self._paused_until = self._clock() + PAUSE_S

    def _loaded(self, part: Part, error: TierError | None) -> None:
        files = self._index.get(part.key, ())
        if error is None:
            self._counters["disk_loaded"] += 1
            if part.key in self._index and part.shard == 0:
                self._hits[part.key] = self.hits(part.key) + 1
        elif error.kind not in ("cancelled", "stale"):
            if self._has(part.key, part.shard) or error.kind != "missing":
                self._warn(error)
            if error.kind in _NOT_OF_THE_FILE:
                self._blind_until = self._clock() + PAUSE_S  # whoever waits would have it loaded at once again
            else:
                self._remove(files, is_forgotten=True)

    def _warn(self, error: TierError) -> None:
        self._counters[f"disk_{error.kind}"] += 1
        self.tally.errors += 1
        self._faults.warn(f"disk {error.kind}", f"the disk tier: {error}; further ones count as disk_{error.kind}")

    def _found(self, batch: Sequence[tuple[int, ChunkFile | Useless]]) -> None:
        """Files from before, with their hits; those that were used last come first."""
        for hits, file in batch:
            if isinstance(file, Useless):
                self.used_bytes += file.nbytes
                if file.why.kind in ("unfinished", "foreign"):
                    self._counters[f"disk_{file.why.kind}"] += 1
                else:
                    self._warn(file.why)
                continue
            if self._has(file.key, file.shard):
                self._remove_outdone(file)
            else:
                self._insert(file)
                if hits:
                    self._hits[file.key] = hits
            if file.key in self._evicted_meanwhile:
                self.evict([file.key])
        self._remove(self._oldest(self.used_bytes - self._leaving - self.limit_bytes), is_forgotten=False)

    def _remove_outdone(self, file: ChunkFile) -> None:
        """There is a newer file of the same chunk with another size: this one could not be removed in its time."""
        self.used_bytes += file.charge
        self._leaving += file.charge
        self._give(_Task(victims=[file], hold=file.charge, forgotten={file.key}), self._removals)

    def _scanned(self, error: TierError | None) -> None:
        """No more files are found; where that is an error, the cap cannot be kept, and nothing is stored."""
        self._is_scanning = False
        self._evicted_meanwhile.clear()
        if error is not None:
            self._warn(error)
        else:
            self.is_counted = True
            used, limit = self.used_bytes / MIB, self.limit_bytes / MIB
            log.info("disk tier %s: %d chunks, %.0f of %.0f MiB", self._root, self.num_chunks, used, limit)

    # ---- on the threads ---------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._do(task)
            except TierError as error:  # a traceback would keep the arena's memory mapped
                task.error = TierError(str(error), error.kind, is_left=error.is_left)
            except Exception as error:  # the thread's root: a job must end, and the thread must not
                log.exception("the disk tier failed")
                task.error = TierError(f"{type(error).__name__}: {error}", "failed")
            if not task.is_load:
                with self._condition:
                    self._writing -= 1
                    self._condition.notify_all()
            self._post(partial(self._over, task))

    def _next(self) -> _Task | None:
        with self._condition:
            while True:
                if self._loads and not self._is_closing:
                    return self._loads.popleft()
                queue = self._removals or (not self._is_closing and self._stores)
                if queue and (self._writing < THREADS - 1 or self._is_closing):
                    self._writing += 1
                    return queue.popleft()
                if self._is_closing:
                    return None
                self._condition.wait()

    def _do(self, task: _Task) -> None:
        for file in task.victims:
            old = self._path(file)
            try:
                if file is task.reused and task.error is None:
                    chunk_file.reuse(old, self._path(_file(task.part)))
                else:
                    chunk_file.remove(old)
            except TierError as error:
                task.left.append(file)
                task.error = TierError(str(error), error.kind)
        if task.job is None or task.error is not None:
            return
        part = task.part
        path, arena = self._path(_file(part)), self._arenas[part.slot.arena]

        def is_over() -> bool:
            return task.is_cancelled or self._is_closing

        task.job.start_ns = time.monotonic_ns()
        if task.is_load:
            chunk_file.read(path, part, arena, is_over, is_direct=self.is_direct)
        else:
            reserve = self._reserve_bytes
            chunk_file.write(path, part, arena, is_over, is_direct=self.is_direct, reserve_bytes=reserve)
        task.job.end_ns = time.monotonic_ns()

    def _path(self, file: ChunkFile) -> Path:
        return chunk_file.path_of(self._root, file)

    def _scan(self) -> None:
        """Tell the control loop of all files from before."""
        why: TierError | None = None
        try:
            files = chunk_file.listed(self._root, lambda: self._is_closing)
            while not self._is_closing and (batch := list(itertools.islice(files, _BATCH))):
                self._post(partial(self._found, batch))
        except OSError as error:
            text = f"{self._root} cannot be listed: {error.strerror}; nothing is stored there"
            why = TierError(text, "read_failed")
        except Exception as error:  # the thread's root
            log.exception("the disk tier failed")
            why = TierError(f"{self._root} is not read: {type(error).__name__}; nothing is stored there", "failed")
        if not self._is_closing:
            self._post(partial(self._scanned, why))


def _file(part: Part) -> ChunkFile:
    """The file of a whole chunk of one shard."""
    return ChunkFile(part.key, part.shard, part.layers, part.slot.nbytes)


def _take(groups: dict[Any, dict[Any, Any]], name: object, member: object) -> None:
    """Take one out of a group that is dropped with its last."""
    del groups[name][member]
    if not groups[name]:
        del groups[name]
