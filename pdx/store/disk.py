"""The disk tier: chunks in files, found again by the next node that is given the same folder.

The control loop owns the index, which says what is on the disk and in which order it was used, and the account of the
bytes. A few threads read, write and remove the files (`pdx.store.chunk_file`) and post what became of it. Loads go
first; one thread is left for them whatever is to be stored.

    <root>/<two hex digits>/<key>-<shard>.chunk

The account counts what may be on the disk: files, files that are being written, and files until they are removed. It
never exceeds the cap: a file is begun when there is room for all of it, if need be in place of the files that were not
used for longest, which the same thread removes first. Until all files from before are counted nothing is stored.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pdx.config import private_folder
from pdx.errors import ConfigError, TierError
from pdx.memory.arena import Arena
from pdx.security.socket_lock import owned
from pdx.store import chunk_file
from pdx.store.tier import Grant, Held, Job, Part, Tier
from pdx.telemetry.faults import Faults
from pdx.wire.messages import DiskStatus

if TYPE_CHECKING:
    from pdx.store.copy import Copy

log = logging.getLogger("pdx.node")

THREADS = 4
MAX_ERRORS = 3  # writes that may fail one after the other before there is a pause
PAUSE_S = 10.0
FULL_S = 60.0
JOIN_S = 10.0
_BATCH = 256
_DISK_FAULTS = ("full", "denied", "read_only", "write_failed")
_BROKEN = ("corrupt", "truncated", "outdated", "read_failed")  # what a file is that is of no use to anybody


@dataclass(frozen=True, slots=True)
class _File:
    """One file. `charge`: bytes of the cap."""

    key: bytes
    shard: int
    nbytes: int
    layers: int
    charge: int


@dataclass(eq=False, slots=True)
class _Task:
    """Work for a thread: a job, or only files to remove. The thread sets `gone` and `error`."""

    job: Job | None = None
    is_load: bool = False
    layout: bytes = b""
    victims: Sequence[_File] = ()  # to be removed first
    hold: int = 0  # bytes of the cap that are its own until it is over
    charge: int = 0  # of these, what its file takes
    is_cancelled: bool = False
    is_doomed: bool = False  # its file is to be removed as soon as it is there; or its victims are forgotten
    gone: list[_File] = field(default_factory=list)
    error: TierError | None = None

    @property
    def part(self) -> Part:
        """What the job is about."""
        assert self.job is not None
        return self.job.parts[0]


class DiskTier(Tier):
    """See `Tier`; all methods are for the control loop. `close` alone waits, for the threads."""

    kind = name = "disk"
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` has the control loop call something; `on_done` is `Copies.done`.

        :raises ConfigError: the folder cannot be this node's alone.
        """
        private_folder(root)
        self._root = root
        self.limit_bytes = limit_bytes
        self._arenas = arenas
        self._post = post
        self._on_done = on_done
        self._counters = counters
        self._faults = Faults(counters, clock)
        self._clock = clock
        self._index: OrderedDict[bytes, dict[int, _File]] = OrderedDict()  # by shard; what was used last is at the end
        self._charged = 0  # bytes that may be on the disk …
        self._leaving = 0  # … and of these, those of files that are to be removed in place of no other
        self._busy: dict[tuple[bytes, int], _Task | None] = {}  # files that are being written, or removed (None)
        self._later: dict[tuple[bytes, int], list[Job]] = {}  # what is to be stored then
        self._under_way: dict[_Task, None] = {}
        self._admitted: dict[int, tuple[bytes, set[bytes]]] = {}  # a layout, and keys to be forgotten since
        self._errors = 0  # writes that failed since the last one that did not
        self._paused_until = 0.0
        self._reached = limit_bytes  # bytes of files when the disk was full before the cap was reached, until …
        self._reached_until = 0.0
        self.is_counted = False  # whether the index has all files
        self._evicted_meanwhile: set[bytes] = set()
        self._condition = threading.Condition()  # guards the next five
        self._loads: deque[_Task] = deque()
        self._removals: deque[_Task] = deque()
        self._stores: deque[_Task] = deque()
        self._storing = 0
        self._is_closing = False
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(owned(root / "tier", self._taken))
        targets = [self._scan] + [self._work] * THREADS
        self._threads = [
            threading.Thread(target=target, name=f"pdx-disk-{number}", daemon=True)
            for number, target in enumerate(targets)
        ]
        for thread in self._threads:
            thread.start()

    def _taken(self, owner: str) -> ConfigError:
        return ConfigError(
            f"{self._root} is the disk tier of another node (process {owner}); two nodes cannot share one: "
            f"name another folder with --disk, or end that node"
        )

    def status(self) -> DiskStatus:
        """For `pdx node --status`."""
        return DiskStatus(str(self._root), self.num_chunks, self.used_bytes, self.limit_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of the cap that are in use."""
        return self._charged

    @property
    def num_chunks(self) -> int:
        """Chunks that can be found, each shard counted."""
        return sum(map(len, self._index.values()))

    # ---- the tier ---------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        """See `Tier.find`. What is found counts as used."""
        found: list[Held] = []
        for key in keys:
            held = self._held(key, shards)
            if held is None:
                break
            found.append(held)
        self._touch(keys[: len(found)])
        return found

    def _held(self, key: bytes, shards: int) -> Held | None:
        files = self._index.get(key, {})
        sizes = {(file.nbytes, file.layers) for file in files.values()}
        if len(sizes) != 1 or files.keys() != set(range(shards)):
            return None
        return Held(*sizes.pop())

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the end of the prompt becomes the older one
            if key in self._index:
                self._index.move_to_end(key)

    def admit(self, copy: Copy) -> Grant:
        """See `Tier.admit`."""
        self._admitted[copy.number] = (copy.layout, set())
        granted: list[int] = []
        for index, key in enumerate(copy.keys):
            if self._held(key, copy.shards) is not None:
                continue
            chunks = copy.chunks[index * copy.shards : (index + 1) * copy.shards]
            charges = [chunk_file.disk_bytes(chunk.slot.nbytes, chunk.layers) for chunk in chunks]
            why = self._why_not(sum(charges))
            if why:
                self._leave_out(why, len(copy.keys) - index)
                break
            granted.append(index)
        return Grant(granted)

    def _why_not(self, charge: int) -> str:
        if not self.is_counted:
            return "not_counted"
        if self._clock() < self._paused_until:
            return "paused"
        if charge > self.limit_bytes:
            return "too_large"
        return ""

    def _leave_out(self, why: str, chunks: int) -> None:
        self._counters[f"disk_{why}"] += chunks
        text = {
            "not_counted": "the files from before are not counted yet",
            "paused": "writes failed, and none are tried for some seconds",
            "too_large": f"a chunk is larger than all of {self.limit_bytes} bytes",
            "busy": "all files that could make room are being written or removed",
        }[why]
        self._faults.warn(f"disk {why}", f"the disk tier {self._root} leaves out chunks: {text}")

    def store(self, job: Job) -> None:
        """See `Tier.store`."""
        part, (layout, evicted) = job.parts[0], self._admitted.get(job.number, (b"", set()))
        charge = chunk_file.disk_bytes(part.slot.nbytes, part.layers)
        victims = self._room_for(charge)
        if part.key in evicted or part.shard in self._index.get(part.key, {}):
            self._post(partial(self._on_done, self.name, job, None))
        elif (part.key, part.shard) in self._busy:
            self._later.setdefault((part.key, part.shard), []).append(job)
        elif victims is None:
            self._leave_out("busy", 1)
            self._post(partial(self._on_done, self.name, job, TierError("there is no room now", "busy")))
        else:
            self._take_out(victims)
            freed = sum(file.charge for file in victims)
            hold = max(charge, freed)
            self._charged += hold - freed
            task = _Task(job, layout=layout, victims=victims, hold=hold, charge=charge)
            self._busy[part.key, part.shard] = task
            self._give(task, self._stores)

    def _room_for(self, charge: int) -> list[_File] | None:
        """The files that have to go first; None: there are not enough."""
        limit_bytes = self._reached if self._clock() < self._reached_until else self.limit_bytes
        lack = self._charged + charge - limit_bytes
        victims: list[_File] = []
        for files in self._index.values():
            if lack <= 0:
                break
            victims += files.values()
            lack -= sum(file.charge for file in files.values())
        return victims if lack <= 0 else None

    def _take_out(self, files: Iterable[_File]) -> None:
        """These cannot be found any more; whoever calls has them removed."""
        for file in files:
            self._index.pop(file.key, None)
            self._busy[file.key, file.shard] = None
            self._counters["disk_removed"] += 1

    def load(self, job: Job) -> None:
        """See `Tier.load`."""
        self._give(_Task(job, is_load=True), self._loads)

    def _give(self, task: _Task, queue: deque[_Task]) -> None:
        self._under_way[task] = None
        with self._condition:
            queue.append(task)
            self._condition.notify_all()

    def cancel(self, copy: Copy) -> None:
        """See `Tier.cancel`."""
        for task in self._under_way:
            if task.job is not None and task.job.number == copy.number:
                task.is_cancelled = True

    def over(self, copy: Copy) -> None:
        """See `Tier.over`."""
        if self._admitted.pop(copy.number, None) is not None:
            self._touch(copy.keys)

    def evict(self, keys: Sequence[bytes]) -> int:
        """See `Tier.evict`."""
        doomed = set(keys)
        if not self.is_counted:
            self._evicted_meanwhile |= doomed
        for _, evicted in self._admitted.values():
            evicted.update(doomed)
        for (key, _), task in self._busy.items():
            if task is not None and key in doomed:
                task.is_cancelled = task.is_doomed = True
        files = [list(self._index[key].values()) for key in dict.fromkeys(keys) if key in self._index]
        self._remove([file for of_key in files for file in of_key], is_forgotten=True)
        return len(files)

    def _remove(self, files: Sequence[_File], *, is_forgotten: bool = False) -> None:
        if files:
            self._take_out(files)
            nbytes = sum(file.charge for file in files)
            self._leaving += nbytes
            self._give(_Task(victims=files, hold=nbytes, is_doomed=is_forgotten), self._removals)

    def close(self) -> None:
        """See `Tier.close`."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)
        for queue in (self._loads, self._removals, self._stores):
            while queue:
                task = queue.popleft()
                task.error = TierError("the disk tier is closed", "cancelled")
                self._post(partial(self._over, task))
        for job in itertools.chain.from_iterable(self._later.values()):
            self._post(partial(self._on_done, self.name, job, TierError("the disk tier is closed", "cancelled")))
        self._later.clear()
        if not any(thread.is_alive() for thread in self._threads):
            self._lock.close()  # else the disk hangs, and no other node may have the folder until this process is gone

    # ---- what became of it, on the control loop ---------------------------------------------

    def _over(self, task: _Task) -> None:
        """A thread is done with this."""
        del self._under_way[task]
        self._settle(task)
        if task.job is None:
            self._leaving -= task.hold
            if task.error is not None:
                self._warn(task.error)
        elif task.is_load:
            self._loaded(task)
        else:
            self._stored(task.job, task)
        for file in task.victims:
            self._free((file.key, file.shard), None)
        if task.job is not None:
            self._free((task.part.key, task.part.shard), task)
            self._on_done(self.name, task.job, task.error)

    def _settle(self, task: _Task) -> None:
        """Count what is on the disk now in place of what the task held."""
        self._charged -= task.hold
        left = [file for file in task.victims if file not in task.gone]
        for file in left:
            if task.is_doomed and task.job is None:  # nobody may find it again; it is there until the next start
                self._charged += file.charge
                continue
            self._insert(file)
            self._index.move_to_end(file.key, last=False)

    def _free(self, name: tuple[bytes, int], task: _Task | None) -> None:
        """What `task` did to this file is over; if nothing else is to be done to it, what waits for that can be."""
        if name in self._busy and self._busy[name] is task:
            del self._busy[name]
            for job in self._later.pop(name, ()):
                self.store(job)

    def _insert(self, file: _File) -> None:
        self._index.setdefault(file.key, {})[file.shard] = file
        self._charged += file.charge

    def _stored(self, job: Job, task: _Task) -> None:
        part, error = task.part, task.error
        if error is None:
            self._errors = 0
            self._counters["disk_stored"] += 1
            file = _File(part.key, part.shard, part.slot.nbytes, part.layers, task.charge)
            self._insert(file)
            if task.is_doomed:
                self._remove([file])
        elif error.kind != "cancelled":
            self._warn(error)
            self._errors += error.kind in _DISK_FAULTS
            if error.kind == "full":  # others use the disk, too: for some time new files take the place of old ones
                self._reached, self._reached_until = self._charged, self._clock() + FULL_S
            if self._errors >= MAX_ERRORS:
                self._paused_until = self._clock() + PAUSE_S

    def _loaded(self, task: _Task) -> None:
        part, error = task.part, task.error
        file = self._index.get(part.key, {}).get(part.shard)
        if error is None:
            self._counters["disk_loaded"] += 1
        elif error.kind not in ("cancelled", "stale") and not (error.kind == "missing" and file is None):
            self._warn(error)
        if error is not None and error.kind in (*_BROKEN, "missing", "denied"):
            self._remove(list(self._index.get(part.key, {}).values()))

    def _warn(self, error: TierError) -> None:
        self._counters[f"disk_{error.kind}"] += 1
        self._faults.warn(f"disk {error.kind}", f"the disk tier: {error}; further ones count as disk_{error.kind}")

    def _found(self, files: Sequence[_File], stuck_bytes: int) -> None:
        """Files from before; those that were used last come first."""
        self._charged += stuck_bytes
        for file in files:
            self._insert(file)
            self._index.move_to_end(file.key, last=False)
        self.evict([file.key for file in files if file.key in self._evicted_meanwhile])
        lack = self._charged - self._leaving - self.limit_bytes
        excess: list[_File] = []
        for of_key in self._index.values():
            if lack <= 0:
                break
            excess += of_key.values()
            lack -= sum(file.charge for file in of_key.values())
        self._remove(excess)

    def _counted(self, seen: Counter[str]) -> None:
        self.is_counted = True
        self._evicted_meanwhile.clear()
        self._counters.update({f"disk_{kind}": count for kind, count in seen.items()})
        log.info(
            "disk tier %s: %d chunks, %d of %d MiB",
            self._root,
            self.num_chunks,
            self._charged >> 20,
            self.limit_bytes >> 20,
        )

    # ---- on the threads ---------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._do(task)
            except TierError as error:
                task.error = TierError(str(error), error.kind)  # a traceback would keep the arena's memory mapped
            except Exception as error:  # the thread's root: a job must end, and the thread must not
                log.exception("the disk tier failed")
                task.error = TierError(f"{type(error).__name__}: {error}", "failed")
            self._post(partial(self._over, task))

    def _next(self) -> _Task | None:
        with self._condition:
            while not self._is_closing:
                if self._loads:
                    return self._loads.popleft()
                if self._removals:
                    return self._removals.popleft()
                if self._stores and self._storing < THREADS - 1:
                    self._storing += 1
                    return self._stores.popleft()
                self._condition.wait()
        return None

    def _do(self, task: _Task) -> None:
        is_store = task.job is not None and not task.is_load
        try:
            for file in task.victims:
                chunk_file.remove(chunk_file.path_of(self._root, file.key, file.shard))
                task.gone.append(file)
            if task.job is None:
                return
            part = task.part
            path, arena = chunk_file.path_of(self._root, part.key, part.shard), self._arenas[part.slot.arena]
            if task.is_load:
                chunk_file.read(path, part, arena, lambda: task.is_cancelled or self._is_closing)
            else:
                chunk_file.write(path, part, arena, task.layout, lambda: task.is_cancelled or self._is_closing)
        finally:
            if is_store:
                with self._condition:
                    self._storing -= 1
                    self._condition.notify_all()

    def _scan(self) -> None:
        """Tell the control loop of all files from before."""
        seen: Counter[str] = Counter()
        try:
            self._scan_files(seen)
        except OSError as error:
            text = f"{self._root} cannot be listed: {error.strerror}; nothing is stored there"
            self._post(partial(self._warn, TierError(text, "read_failed")))
            return
        if not self._is_closing:
            self._post(partial(self._counted, seen))

    def _scan_files(self, seen: Counter[str]) -> None:
        paths = chunk_file.listed(self._root)
        for first in range(0, len(paths), _BATCH):
            files: list[_File] = []
            stuck_bytes = 0
            for path in paths[first : first + _BATCH]:
                if self._is_closing:
                    return
                header, error, left_bytes = chunk_file.salvage(path)
                stuck_bytes += left_bytes
                if header is not None:
                    charge = chunk_file.disk_bytes(header.nbytes, header.layers)
                    files.append(_File(header.key, header.shard, header.nbytes, header.layers, charge))
                if error is not None:
                    seen[error.kind] += 1
                    if error.kind not in ("unfinished", "foreign"):
                        self._post(partial(self._faults.warn, f"disk {error.kind}", f"the disk tier: {error}"))
            self._post(partial(self._found, files, stuck_bytes))
