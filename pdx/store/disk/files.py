"""The files of a disk tier: written, read and removed within the cap, in step with the index. Which chunks are stored
or loaded is decided in `pdx.store.disk.tier`."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from pdx.errors import TierError
from pdx.memory.slot import Slot
from pdx.store.codecs.codec import LOSSLESS
from pdx.store.disk import chunk_file
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.folder import Folder, Task, file_of
from pdx.store.disk.index import FileIndex, Unsaved
from pdx.store.health import GONE, SILENT
from pdx.store.history import Cause
from pdx.store.store_tier import Pair, Recoding, StoreTier, Work, WorkQueue
from pdx.store.tier import Job, Part, TierHost

log = logging.getLogger("pdx.node")

THREADS = 8  # while one compares digests, the others keep the disk busy
SILENT_S = 5.0  # after so long in a system call the disk counts as silent
LOOK_S = 0.1  # between two checks for that
MAX_FILES = 2_000_000  # in the index, which takes about 360 bytes of memory for each
_PROBED = 64  # files from which a probe's file is chosen
_DISK_FAULTS = ("full", "denied", "read_only", "write_failed", "read_failed")
# Errors of loads whose file may be good: the disk is not to blame, …
_NOT_OF_THE_DISK = ("exhausted", "failed")
_OF_THE_DISK = ("read_failed", "denied")  # … or the disk may be, so that others may fail, too
_LEFT_OUT = {
    "not_counted": "the files from before are not counted yet",
    "paused": "reads or writes failed, and none are tried for some seconds",
    "too_large": "a chunk is larger than all of the cap",
    "busy": "all files that could make room are being written or removed",
    "wanted": "requests that wait will use all files that could make room, and the chunk not sooner",
}


class DiskFiles(StoreTier):
    """See `StoreTier`."""

    kind = "disk"

    def __init__(self, host: TierHost, folder: Folder, limit_bytes: int, codec: str, policy: str) -> None:
        self._folder = folder
        self._index = FileIndex(limit_bytes, host.env, host.wanted, policy)
        self._numbers = itertools.count(-1, -1)  # of recoding jobs; copies have positive numbers
        self._looked_at = -math.inf
        # key -> shards whose files are being written or removed, in the index or not, and the tasks that do so …
        self._busy: dict[bytes, list[tuple[int, Task]]] = {}
        self._later: dict[tuple[bytes, int], list[Job]] = {}  # … and the stores that wait for them
        self._reading: Counter[tuple[bytes, int]] = Counter()
        # Chunks being recoded: the number of files not written yet, and the first error.
        self._recoded: dict[Pair, tuple[int, TierError | None]] = {}
        self._loads = WorkQueue(THREADS)
        self._writes = WorkQueue(THREADS - 1)  # one thread is always left for loads
        super().__init__(host, codec, THREADS, [self._loads, self._writes])

    @property
    def used_bytes(self) -> int:
        """Bytes taken of the cap: all that may be on the disk."""
        return self._index.used_bytes

    @property
    def limit_bytes(self) -> int:
        return self._index.limit_bytes

    @property
    def num_chunks(self) -> int:
        """Number of chunks that can be found; each shard counts."""
        return self._index.num_files

    @property
    def folder(self) -> Path:
        return self._folder.root

    def _leave_out(self, why: str, keys: Sequence[bytes]) -> None:
        self._count(why, len(keys))
        self.tally.dropped += len(keys)
        self._not_stored(keys, _LEFT_OUT[why])
        self._faults.warn(f"disk {why}", f"the disk tier {self.folder} leaves out chunks: {_LEFT_OUT[why]}")

    def store(self, job: Job) -> None:
        part = job.parts[0]
        if self._health.doubt or (self._threads.has_silent and not self._threads.takes(self._writes)):
            return self._refuse(job, "paused")
        admitted = self._admitted.get(job.number, 0)
        is_forgotten = self._forgotten.last > admitted and self._forgotten.since(part.key, admitted)
        if is_forgotten or self._index.file(part.key, part.shard) is not None:
            return self._end(job)
        if part.key in self._busy and self._is_busy(part.key, part.shard):
            return self._later.setdefault((part.key, part.shard), []).append(job)
        why = self._begin(Task(job))
        return self._refuse(job, why) if why else None

    def _begin(self, task: Task) -> str:
        """Have a file written, evicting others if needed; return why not, empty if it is begun."""
        assert task.job is not None
        part, source = task.job.parts[0], task.source
        charge = chunk_file.disk_bytes(part.slot.nbytes, part.layers, block_bytes=self._folder.block_bytes)
        is_used = self._host.is_used if source is None else lambda key: key == source.key or self._host.is_used(key)
        lack = self._index.shortfall(charge)
        surplus = self._index.num_files + self._index.coming + 1 - MAX_FILES
        has_room = lack <= self._index.nbytes - self._index.pinned_bytes and surplus <= self._index.num_files
        victims: list[ChunkFile] = []
        if has_room and (lack > 0 or surplus > 0):
            victims, used = self._index.oldest(lack, surplus, is_used, part.key)
            for file in used:
                self._index.note(file)
        is_short = lack > sum(file.charge for file in victims) or surplus > len(victims)
        if not has_room or source in victims or is_short:
            why = "wanted" if has_room and is_short else "busy"
            self._leave_out(why, [part.key])
            return why
        freed, task.hold = 0, charge
        if victims:
            freed = sum(file.charge for file in victims)
            task.hold = max(charge, freed)
            self._index_is_full(surplus)
            task.victims = victims
            if source is None:  # else, if the source cannot be read, nothing is written and the reused file stays
                self._reuse(task)
            self._take_out(victims, task)
        self._index.used_bytes += task.hold - freed
        self._index.coming += 1
        self._busy.setdefault(part.key, []).append((part.shard, task))
        if source is not None:
            self._reading[source.key, source.shard] += 1
        self._give(task, self._writes)
        return ""

    def _is_busy(self, key: bytes, shard: int) -> bool:
        return any(each == shard for each, _ in self._busy.get(key, ()))

    def _refuse(self, job: Job, why: str) -> None:
        self._end(job, TierError(f"{self.folder} leaves it out: {_LEFT_OUT[why]}", why))

    def _reuse(self, task: Task) -> None:
        """Overwrite one of the victims instead of removing it, if it has the same size and is not being read."""
        size = task.part.slot.nbytes, task.part.layers
        for file in task.victims:
            if (file.nbytes, file.layers) == size and (file.key, file.shard) not in self._reading:
                task.reused = file
                task.victims = [*(each for each in task.victims if each is not file), file]
                return

    def _index_is_full(self, surplus: int) -> None:
        """Count, and log once, files removed because the index is full."""
        if surplus > 0:
            if not self.env.counters["disk_index_full"]:
                text = "%s has more than %d files: what was not used for longest is removed, counted as disk_index_full"
                log.warning(text, self.folder, MAX_FILES)
            self.env.counters["disk_index_full"] += surplus

    def _take_out(self, files: Sequence[ChunkFile], task: Task) -> None:
        """Take files out of the index; `task` removes them."""
        self._index.remove(files)
        self.note(file.key for file in files)
        for file in files:
            self._health.forget(file.key)
            self._busy.setdefault(file.key, []).append((file.shard, task))
            self._count("removed")
            why = Cause.FORGOTTEN if file.key in task.forgotten else Cause.REMOVED
            self.history.note([file.key], why, self.env.clock())
        self._host.removed(list(dict.fromkeys(file.key for file in files)))
        self._note()

    def load(self, job: Job) -> None:
        self._look()
        if not self._health.takes_loads:
            self._count("paused")
            return self._refuse(job, "paused")
        part = job.parts[0]
        self._reading[part.key, part.shard] += 1
        return self._give(Task(job, is_load=True, file=self._index.file(part.key, part.shard)), self._loads)

    # ---- recoding ---------------------------------------------------------------------------

    def recode_one(self, pair: Pair, recoding: Recoding) -> None:
        """See `StoreTier`. New files are written beside the old ones, which are removed when the new ones are there:
        file by file if the chunk keeps its key; all together if it gets another, because the codec is lossy. A process
        that is killed in between leaves whole files; of two under one key the next node keeps one."""
        old, new = pair
        files = self._index.of(old)
        if old == new:
            files = [file for file in files if bool(file.coded) != (recoding.codec == LOSSLESS)]
            if not files and old in self._index:
                return recoding.ended(old, None)
        if not files:
            return recoding.ended(old, TierError(f"chunk {old.hex()[:8]} is not there", "missing"))
        if old in self._busy or new in self._busy or (old != new and new in self._index):
            return recoding.ended(old, TierError(f"chunk {new.hex()[:8]} is being written or there already", "busy"))
        if old != new and old in self._index.pins:
            return recoding.ended(old, _pinned(old))
        self._recoded[pair] = len(files), None
        for file in files:
            part = Part(new, file.shard, file.layers, 0, file.layers, Slot(0, file.nbytes, 0))
            job = Job(next(self._numbers), [part], file.nbytes)
            task = Task(job, source=file, recoding=recoding)
            if self._health.doubt or not self.takes_stores:
                why = f"{self.folder} is not written to: {_LEFT_OUT['paused']}"
            else:
                why = f"{self.folder} has no room for another file of the chunk" if self._begin(task) else ""
            if why:
                self._rewritten(task, TierError(why, "busy"))
        return None

    def _rewritten(self, task: Task, error: TierError | None) -> None:
        """A recoding task is over: its new file is in the index, or there is an error."""
        assert task.source is not None
        assert task.recoding is not None
        old, new = pair = task.source.key, task.part.key
        left, first = self._recoded[pair]
        error = first or error
        if left > 1:
            self._recoded[pair] = left - 1, error
            return
        del self._recoded[pair]
        if old != new:
            if error is None and old not in self._index:
                error = TierError(f"chunk {old.hex()[:8]} was removed meanwhile", "missing")
            elif error is None and old in self._index.pins:
                error = _pinned(old)
            self._remove(list(self._index.of(old if error is None else new)), is_forgotten=True)
        task.recoding.ended(old, error)

    def _read(self, task: Task, job: Job) -> None:
        self._folder.load(task, job, self._is_closing)

    def _write(self, task: Task, job: Job) -> None:
        self._folder.store(task, job, task.part.form or self._codec, self._is_closing)

    def _is_closing(self) -> bool:
        return self._threads.is_closing

    def _remove(self, files: Sequence[ChunkFile], *, is_forgotten: bool) -> None:
        if files:
            task = Task(victims=files, hold=sum(file.charge for file in files))
            if is_forgotten:
                task.forgotten.update(file.key for file in files)
            self._take_out(files, task)
            self._clear(task)

    def _clear(self, task: Task) -> None:
        """Run a task that only removes files."""
        task.call, task.then = self._folder.clear, self._cleared
        self._index.leaving += task.hold
        self._give(task, self._writes, is_first=True)

    def _note(self) -> None:
        """Have uses and pins written to the disk."""
        if (unsaved := self._index.take_unsaved()) is not None:
            self._call(
                self._writes, partial(self._folder.write_unsaved, unsaved), partial(self._saved, unsaved), is_first=True
            )

    def _saved(self, unsaved: Unsaved, work: Work) -> None:
        self._index.saved(unsaved, is_done=work.error is None)
        if work.error is None:
            self._note()
        else:
            self._warn(work.error)

    def _remove_unfound(self, file: ChunkFile) -> None:
        """Remove a file that is not in the index, such as an older one of the same chunk found at the start."""
        task = Task(victims=[file], hold=file.charge, forgotten={file.key})
        self._busy.setdefault(file.key, []).append((file.shard, task))
        self._index.used_bytes += file.charge
        self._clear(task)

    def _doubt(self, why: str) -> None:
        """Put the disk in doubt, and fail the waiting work, which would hold memory and keep requests waiting."""
        self._health.doubts(why)
        for work in self._threads.take_back(self._loads, self._writes):
            work.error = TierError("the disk is in doubt", "paused")
            self.env.mailbox.post(partial(self.performed, work))

    def _look(self) -> None:
        """Check for silent calls, and probe a disk in doubt."""
        now = self.env.clock()
        if now - self._looked_at < LOOK_S and not self._health.doubt:
            return
        self._looked_at = now
        if self._threads.silent(now - SILENT_S):
            text = f"{self.folder} does not answer: nothing is loaded from there or stored until it does"
            self._warn(TierError(text, "silent"))
            self._doubt(SILENT)
        if self._health.begins_probe():
            files = list(itertools.islice(self._index.some(), _PROBED))
            file = files[self._health.probes % len(files)] if files else None  # a different one each time
            self._call(self._loads, partial(self._folder.probe, file), self._probed)

    # ---- ends of work, on the control loop --------------------------------------------------

    def _ended(self, work: Work) -> None:
        kind = work.error.kind if work.error is not None else ""
        if kind == "gone":
            self._doubt(GONE)
        elif work.is_silent and kind in ("", "cancelled", "stale"):
            self._health.answers()
        super()._ended(work)

    def _cleared(self, task: Task) -> None:
        self._settle(task)
        self._index.leaving -= task.hold
        if task.error is not None:
            self._warn(task.error)
        for file in task.victims:
            self._free(task, file.key, file.shard)

    def _settle(self, task: Task) -> None:
        """Give back the task's share of the cap, except for files that it should have removed and has not."""
        self._index.used_bytes -= task.hold
        for file in task.victims:
            if file in task.removed:
                continue
            if file.key not in task.forgotten:
                self._index.add_oldest(file)
                self.note([file.key])
            elif task.error is not None and task.error.kind == "paused":  # its removal was not tried
                self._remove_unfound(file)
            else:
                self._index.add_stuck(file)

    def _over(self, task: Task, job: Job) -> None:
        part = job.parts[0]
        if task.is_load:
            kind, file = task.error.kind if task.error is not None else "", self._index.file(part.key, part.shard)
            if kind == "missing" and file is not None and file != task.file:
                task.file, task.error = file, None  # it was rewritten meanwhile
                self._give(task, self._loads)
                return
            self._read_over(part.key, part.shard)
            self._loaded(part, task.error)
        else:
            if task.source is not None:
                self._read_over(task.source.key, task.source.shard)
            self._settle(task)
            self._stored(task, part)
        for file in task.victims:
            self._free(task, file.key, file.shard)
        self._free(task, part.key, part.shard)
        if task.source is not None:
            self._rewritten(task, task.error)
        else:
            self._host.done(self, job, task.error)

    def _read_over(self, key: bytes, shard: int) -> None:
        self._reading[key, shard] -= 1
        if not self._reading[key, shard]:
            del self._reading[key, shard]

    def _free(self, task: Task, key: bytes, shard: int) -> None:
        """A task is done with this file: begin the stores that waited for it."""
        of_key = self._busy.get(key, [])
        if (shard, task) in of_key:
            of_key.remove((shard, task))
            if not of_key:
                del self._busy[key]
        if self._later and not self._is_busy(key, shard):
            for job in self._later.pop((key, shard), ()):
                self.store(job)

    def _probed(self, work: Work) -> None:
        error, kind = work.error, work.error.kind if work.error is not None else ""
        is_of_file = kind not in ("", "gone", "paused", "cancelled", *_OF_THE_DISK, *_NOT_OF_THE_DISK)
        self._health.probed(works=error is None or is_of_file)
        if error is not None and kind in _OF_THE_DISK:
            self._warn(error)

    def _stored(self, task: Task, part: Part) -> None:
        error = task.error
        self._index.coming -= 1
        source = task.source
        file = task.file or file_of(part, self._folder.block_bytes)
        if source is not None and task.is_unread:
            self._loaded(msgspec.structs.replace(part, key=source.key), error)
            return
        if error is None:
            self._health.wrote()
            self._count("stored")
            if self._index.stuck:
                self._index.drop_stuck(file, file_of(part, self._folder.block_bytes))
            is_gone = part.key in task.forgotten
            if source is not None and source in self._index.of(part.key):  # recoded under the same key
                if file != source:
                    self._index.replace(source, file)
                    self._remove_unfound(source)
            else:
                self._index.add(file, part.lead, is_passed=part.is_passed)
                self.note([file.key])
                is_gone |= source is not None and source.key == part.key  # the source was evicted meanwhile
            if is_gone:
                self._remove([file], is_forgotten=True)
            return
        if error.is_left:
            self._index.add_stuck(file, is_unfinished=True)
        if error.kind != "cancelled":
            self._warn(error)
            self._not_stored([part.key], str(error))
            if error.kind in _DISK_FAULTS:
                self._health.not_written(is_read_only=error.kind == "read_only")
            if error.kind == "full":  # others use the disk, too: for a while, new files must replace old ones
                self._index.full()

    def _loaded(self, part: Part, error: TierError | None) -> None:
        files = self._index.of(part.key)
        if error is None:
            if (file := self._index.file(part.key, part.shard)) is not None:
                self._index.note(file)
                self._note()
            self._health.read(part.key, part.shard)
            self._count("loaded")
        elif error.kind == "paused":
            self._count("paused")
        elif error.kind not in ("cancelled", "stale"):
            if self._index.file(part.key, part.shard) is not None or error.kind != "missing":
                self._warn(error)
            if error.kind in _NOT_OF_THE_DISK:
                self._health.pause_reads()  # a waiting request would retry at once
            elif error.kind in _OF_THE_DISK and not self._health.not_read(part.key, part.shard):
                if self._health.doubt:
                    self._doubt(self._health.doubt)
                if not files:  # removed meanwhile: its error would never be forgotten
                    self._health.forget(part.key)
            elif error.kind != "gone":
                self._remove(files, is_forgotten=True)


def _pinned(key: bytes) -> TierError:
    return TierError(f"chunk {key.hex()[:8]} was pinned meanwhile", "pinned")
