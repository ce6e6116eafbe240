"""The threads of a disk tier: they read, write and remove its files, and say what became of it.

Loads go first; one thread is left for them whatever is to be stored or removed. The control loop gives tasks; a thread
that is done with one calls `on_over`, which posts it back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from pdx.errors import TierError
from pdx.memory.arena import Arena
from pdx.store.codecs.codec import LOSSLESS, NONE
from pdx.store.disk import chunk_file, pins
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.tier import Job, Part

log = logging.getLogger("pdx.node")

THREADS = 8  # while one compares digests, the others keep the disk busy


class Task(msgspec.Struct, eq=False):
    """Work for a thread: a job, or only files to remove, or a probe. The thread sets `left`, `error` and `seen_at`."""

    job: Job | None = None
    is_load: bool = False
    is_probe: bool = False  # whether the folder is there, and a file of it can be read: …
    probed: ChunkFile | None = None  # … this one, if there is one
    used: Sequence[tuple[ChunkFile, int]] = ()  # whose files are to say so, and how many times they were loaded
    pins: Mapping[bytes, int] = {}  # how often chunks are pinned now, which the file of pins is to say …
    num_pinned: int = 0  # … and how many are
    victims: Sequence[ChunkFile] = ()  # to be removed first
    reused: ChunkFile | None = None  # the last of them, if it is written anew instead
    hold: int = 0  # bytes of the cap that are its own until it is over
    charge: int = 0  # of these, what its file takes if it is not encoded
    file: ChunkFile | None = None  # of a job: what is read; or what was written, which the thread sets
    source: ChunkFile | None = None  # what is written anew in another form, instead of what is in the arena …
    codec: str = NONE  # … by this codec
    is_unread: bool = False  # that could not be read, which the thread sets
    is_unfound: bool = False  # its victim cannot be found, nor keeps its key from being found
    is_cancelled: bool = False
    forgotten: set[bytes] = msgspec.field(default_factory=set)  # of what it writes and removes
    left: list[ChunkFile] = msgspec.field(default_factory=list)  # victims that could not be removed
    error: TierError | None = None
    seen_at: float = 0.0  # when the last system call came back, by the tier's clock
    is_silent: bool = False  # that was long ago, as the control loop knows

    @property
    def part(self) -> Part:
        """What the job is about."""
        assert self.job is not None
        return self.job.parts[0]


def file_of(part: Part, block_bytes: int) -> ChunkFile:
    """The file of a whole chunk of one shard."""
    return ChunkFile(part.key, part.shard, part.layers, part.slot.nbytes, block_bytes=block_bytes)


class Workers:
    """Owned by the control loop, whose methods never wait but `close`."""

    def __init__(
        self,
        root: Path,
        arenas: Sequence[Arena],
        *,
        is_direct: bool,
        block_bytes: int,
        reserve_bytes: int,
        codec: str,
        on_over: Callable[[Task], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_over` is called on a thread. The rest: see `DiskTier`."""
        self._root = root
        self._place = chunk_file.place_of(root)
        self._arenas = arenas
        self._is_direct = is_direct
        self._block_bytes = block_bytes
        self._reserve_bytes = reserve_bytes
        self._codec = codec
        self._on_over = on_over
        self._clock = clock
        self._at_work: list[Task | None] = [None] * THREADS
        self.is_closing = False
        self.loads: deque[Task] = deque()
        self.removals: deque[Task] = deque()
        self.stores: deque[Task] = deque()
        self._writing = 0  # threads that store or remove
        self._condition = threading.Condition()  # guards the four above
        self._threads: list[threading.Thread] = []

    def start(self, also: Callable[[], None]) -> None:
        """To be called once. `also` is called on a thread of its own."""
        targets: list[Callable[[], None]] = [also, *(partial(self._work, number) for number in range(THREADS))]
        for number, target in enumerate(targets):
            self._threads.append(threading.Thread(target=target, name=f"pdx-disk-{number}", daemon=True))
            self._threads[-1].start()

    def give(self, task: Task, queue: deque[Task]) -> None:
        """Have this done."""
        with self._condition:
            queue.append(task)
            self._condition.notify_all()

    def take_back(self, *queues: deque[Task]) -> list[Task]:
        """What no thread has begun of these, and never will."""
        with self._condition:
            tasks = [task for queue in queues for task in queue]
            for queue in queues:
                queue.clear()
        return tasks

    def silent(self, before: float) -> list[Task]:
        """What threads are at whose last system call has not come back since `before`, each once."""
        found = [task for task in self._at_work if task is not None and task.seen_at < before and not task.is_silent]
        for task in found:
            task.is_silent = True
        return found

    @property
    def takes_writes(self) -> bool:
        """Whether a thread may come to what is to be stored: not all that may write wait for calls that were found
        silent."""
        silent = [task for task in self._at_work if task is not None and task.is_silent]
        return sum(not (task.is_load or task.is_probe) for task in silent) < THREADS - 1

    def close(self, timeout_s: float) -> bool:
        """Begin no load or store any more, remove what is to be removed, and wait; whether all threads have ended."""
        with self._condition:
            self.is_closing = True
            self._condition.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def finish(self, task: Task) -> None:
        """Note what there was no time for; all threads have ended."""
        with contextlib.suppress(TierError):  # what is not written is lost
            self._do(task)

    # ---- on the threads ---------------------------------------------------------------------

    def _work(self, number: int) -> None:
        while (task := self._next()) is not None:
            task.seen_at = self._clock()
            self._at_work[number] = task
            try:
                self._do(task)
            except TierError as error:  # a traceback would keep the arena's memory mapped
                task.error = TierError(str(error), error.kind, is_left=error.is_left)
            except Exception as error:  # the thread's root: a job must end, and the thread must not
                log.exception("the disk tier failed")
                task.error = TierError(f"{type(error).__name__}: {error}", "failed")
            self._at_work[number] = None
            if not (task.is_load or task.is_probe):
                with self._condition:
                    self._writing -= 1
                    self._condition.notify_all()
            self._on_over(task)

    def _next(self) -> Task | None:
        with self._condition:
            while True:
                if self.loads and not self.is_closing:
                    return self.loads.popleft()
                queue = self.removals or (not self.is_closing and self.stores)
                if queue and (self._writing < THREADS - 1 or self.is_closing):
                    self._writing += 1
                    return queue.popleft()
                if self.is_closing:
                    return None
                self._condition.wait()

    def _do(self, task: Task) -> None:
        try:
            chunk_file.check_place(self._root, self._place)
        except TierError:
            task.left += task.victims
            raise
        if task.probed is not None:
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile, which the disk has answered
                chunk_file.verify(self._path(task.probed), is_direct=self._is_direct)
        for file, loads in task.used:
            task.seen_at = self._clock()
            chunk_file.touch(self._path(file), loads)
        if task.pins:
            task.seen_at = self._clock()
            pins.write(self._root, task.pins, task.num_pinned)
        for file in task.victims:
            task.seen_at = self._clock()
            old = self._path(file)
            try:
                if file is task.reused and task.error is None:
                    chunk_file.reuse(old, self._path(file_of(task.part, self._block_bytes)))
                else:
                    chunk_file.remove(old)
            except TierError as error:
                task.left.append(file)
                task.error = TierError(str(error), error.kind)
        if task.job is None or task.error is not None:
            return
        part = task.part

        def is_over() -> bool:
            task.seen_at = self._clock()
            return task.is_cancelled or self.is_closing

        task.job.start_ns = time.monotonic_ns()
        if task.is_load:
            file, arena = task.file or file_of(part, self._block_bytes), self._arenas[part.slot.arena]
            is_direct = self._is_direct
            codec = chunk_file.read(self._path(file), part, arena, is_over, is_direct=is_direct, coded=file.coded)
            task.job.form = "" if codec == LOSSLESS else codec
        else:
            source: chunk_file.Source = self._arenas[part.slot.arena]
            used_ns, codec = None, part.form or self._codec
            if task.source is not None:
                codec = task.codec
                try:
                    read = partial(chunk_file.contents, self._path(task.source), task.source, is_over)
                    found = read(is_direct=self._is_direct)
                except TierError:
                    task.is_unread = True
                    raise
                source, used_ns = found, found.used_ns
            coded = chunk_file.write(
                self._path(file_of(part, self._block_bytes)),
                part,
                source,
                is_over,
                is_direct=self._is_direct,
                reserve_bytes=self._reserve_bytes,
                codec=codec,
                used_ns=used_ns,
            )
            file = task.file = msgspec.structs.replace(file_of(part, self._block_bytes), coded=coded)
        task.job.coded_bytes = file.coded
        task.job.end_ns = time.monotonic_ns()

    def _path(self, file: ChunkFile) -> Path:
        return chunk_file.path_of(self._root, file)
