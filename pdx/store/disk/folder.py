"""A disk tier's folder, for its threads: reads, writes and removes files, lists those of an earlier node, and examines
the file system: direct I/O, block size, and whether the folder is still the same.

Everything here waits for the disk.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import os
import re
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from pdx.errors import TierError
from pdx.memory.arena import Arena
from pdx.store import chunk_format
from pdx.store.chunk_format import HEADER_BYTES, Over, aligned
from pdx.store.disk import chunk_file, pins
from pdx.store.disk.chunk_file import NAME, PARTIAL, ChunkFile, is_folder, is_gone, named, some_file
from pdx.store.disk.index import Unsaved
from pdx.store.store_tier import Recoding, Work
from pdx.store.tier import Job, Part, TierHost

log = logging.getLogger("pdx.node")

_MOST_BLOCK_BYTES = 64 << 20  # larger values are not block sizes
MIB = 1 << 20
_UNFINISHED = re.compile(r"[0-9a-f]{32}-[0-9]{1,6}-[0-9]{1,6}-[0-9]{1,15}\.partial")
_LISTERS = 2  # more contend for the GIL if the file system has everything cached


class Task(Work):
    """A job, or files to remove. The thread also sets `removed`, `file` of a store, and `is_unread`."""

    victims: Sequence[ChunkFile] = ()  # to be removed first
    removed: set[ChunkFile] = msgspec.field(default_factory=set)  # victims that were removed
    reused: ChunkFile | None = None  # the last victim, if it is overwritten instead
    hold: int = 0  # bytes of the cap that the task takes until it is over
    file: ChunkFile | None = None  # the file that a load reads, or that a store has written
    source: ChunkFile | None = None  # the file to recode, instead of a chunk in the arena …
    recoding: Recoding | None = None  # … for this recoding
    is_unread: bool = False  # whether `source` could not be read
    forgotten: set[bytes] = msgspec.field(default_factory=set)  # deleted keys, among those it writes and removes


def file_of(part: Part, block_bytes: int) -> ChunkFile:
    """The file of a whole chunk of one shard."""
    return ChunkFile(part.key, part.shard, part.layers, part.slot.nbytes, block_bytes=block_bytes)


class Folder:
    """Reads and writes files in one folder. Its methods are for threads.

    :raises TierError: a call failed, or `is_over`, or the folder is gone.
    """

    def __init__(self, root: Path, host: TierHost, reserve_bytes: int) -> None:
        """`reserve_bytes` of the file system stay free.

        :raises OSError: there is no such folder.
        """
        self.root = root
        self.is_direct = False  # whether to bypass the page cache
        with contextlib.suppress(OSError):  # an unwritable, empty folder
            self.is_direct = takes_direct(root)
        self.block_bytes = block_bytes(root)  # the step in which files grow
        self.reserve_bytes = reserve_bytes
        self._arenas = host.memory
        self._clock = host.env.clock
        self._place = self._found_place()  # device and inode, whatever the path leads to later

    def path(self, file: ChunkFile) -> Path:
        return chunk_file.path_of(self.root, file)

    def _found_place(self) -> tuple[int, int]:
        info = os.stat(self.root)
        return info.st_dev, info.st_ino

    def check(self) -> None:
        """Check that the folder was not removed or unmounted; another folder may be at its path now."""
        try:
            is_there = self._found_place() == self._place
        except FileNotFoundError:
            is_there = False
        except OSError as error:
            raise TierError(f"{self.root} cannot be read: {error.strerror}", "read_failed") from error
        if not is_there:
            raise TierError(f"{self.root} is not there any more", "gone")

    def probe(self, file: ChunkFile | None, work: Work) -> None:
        """Check that the folder is there and that this file can be read."""
        self.check()
        if file is not None:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile; but the disk has answered
                chunk_file.verify(self.path(file), is_direct=self.is_direct)

    def write_unsaved(self, unsaved: Unsaved, work: Work) -> None:
        """Write uses, as modification times, and pins to the disk."""
        self.check()
        for file in unsaved.used:
            work.seen_at = self._clock()
            chunk_file.touch(self.path(file))
        if unsaved.pins:
            work.seen_at = self._clock()
            pins.write(self.root, unsaved.pins, unsaved.num_pinned)

    def clear(self, task: Task) -> None:
        """Remove the victims of a task, all that can be removed."""
        self.check()
        for file in task.victims:
            task.seen_at = self._clock()
            try:
                if file is task.reused and task.error is None:
                    chunk_file.reuse(self.path(file), self.path(file_of(task.part, self.block_bytes)))
                else:
                    chunk_file.remove(self.path(file))
                task.removed.add(file)
            except TierError as error:
                task.error = TierError(str(error), error.kind)
        if task.error is not None:
            raise task.error

    def load(self, task: Task, job: Job, is_over: Over) -> None:
        """Read the file of a job into the arena."""
        self.check()
        file = task.file or file_of(task.part, self.block_bytes)
        path, is_over = self.path(file), partial(self._is_over, task, is_over)

        def read(into: Sequence[memoryview]) -> int:
            return chunk_file.read(path, into, is_over, is_direct=self.is_direct).st_size

        chunk_format.load(job, self._arenas[task.part.slot.arena], path, read, is_over, file.coded)

    def store(self, task: Task, job: Job, codec: str, is_over: Over) -> None:
        """Write the file of a job in place of its victims, from the arena with a codec or recoded from another file."""
        self.clear(task)
        part, is_over = task.part, partial(self._is_over, task, is_over)
        source: Arena | memoryview = self._arenas[part.slot.arena]
        used_ns = None
        job.start_ns = time.monotonic_ns()
        if task.source is not None and task.recoding is not None:
            codec = task.recoding.codec
            try:
                read = partial(chunk_file.contents, self.path(task.source), task.source, is_over)
                source, used_ns = read(is_direct=self.is_direct)
            except TierError:
                task.is_unread = True
                raise
        file = file_of(part, self.block_bytes)
        job.coded_bytes = chunk_file.write(
            self.path(file),
            part,
            source,
            is_over,
            is_direct=self.is_direct,
            reserve_bytes=self.reserve_bytes,
            codec=codec,
            used_ns=used_ns,
        )
        task.file = msgspec.structs.replace(file, coded=job.coded_bytes)
        job.end_ns = time.monotonic_ns()

    def _is_over(self, task: Task, is_over: Over) -> bool:
        task.seen_at = self._clock()
        return task.is_cancelled or (task.recoding is not None and task.recoding.is_cancelled) or is_over()


def block_bytes(root: Path) -> int:
    """The step in which files grow on the disk, measured. If nothing can be or was written, the block size that the
    file system reports, which ignores clusters, and is megabytes on NFS and CephFS.

    :raises OSError: there is no such folder.
    """
    block = os.statvfs(root).f_frsize or HEADER_BYTES
    takes = 0
    with contextlib.suppress(OSError):
        fd = _unnamed(root, 0)
        try:
            os.ftruncate(fd, HEADER_BYTES)  # so that file systems do not reserve more than that
            os.pwrite(fd, bytes(HEADER_BYTES), 0)
            os.fsync(fd)
            takes = os.fstat(fd).st_blocks * 512
        finally:
            os.close(fd)
    if not HEADER_BYTES <= takes <= _MOST_BLOCK_BYTES:
        return block
    return min(block, takes) if takes == HEADER_BYTES else takes


def takes_direct(root: Path) -> bool:
    """Whether a folder's file system supports direct I/O. If it is full or read-only, an existing file is tried.

    :raises OSError: nothing can be written there, and there is no file to read.
    """
    try:
        fd = _unnamed(root, os.O_DIRECT)
        try:
            return os.pwritev(fd, [aligned(HEADER_BYTES)], 0) == HEADER_BYTES
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        some = some_file(root)
        if some is None:
            raise
        return reads_direct(some)


def _unnamed(root: Path, flags: int) -> int:
    """Open a new anonymous file with `flags`, which is gone when it is closed; if the file system has no such files, a
    temporary file, already unlinked."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(root, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    fd, name = tempfile.mkstemp(PARTIAL, "tier-", root)
    try:
        return os.open(name, flags | os.O_NOFOLLOW)
    finally:
        os.close(fd)
        os.unlink(name)


def reads_direct(path: Path) -> bool:
    """Whether this file can be read with direct I/O.

    :raises OSError: it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
        try:
            os.preadv(fd, [aligned(HEADER_BYTES)], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


class Useless(msgspec.Struct, frozen=True):
    """An unusable file of an earlier node: why, and the bytes that it still takes if it could not be removed."""

    why: TierError
    nbytes: int = 0


def attainable(root: Path, limit_bytes: int, reserve_bytes: int, counters: Counter[str]) -> int:
    """The cap, lowered to the file system's total size without the reserve."""
    disk = os.statvfs(root)
    total_bytes = disk.f_blocks * disk.f_frsize
    most = max(0, total_bytes - reserve_bytes)
    if limit_bytes > most:
        counters["disk_cap_lowered"] += 1
        text = "%s is on a disk of %.1f MiB: the cap of %.1f MiB is lowered to %.1f MiB, so that the reserve is left"
        log.warning(text, root, total_bytes / MIB, limit_bytes / MIB, most / MIB)
    return min(limit_bytes, most)


def listed(root: Path, is_over: Over, block_bytes: int) -> Iterator[tuple[int, ChunkFile | Useless]]:
    """All files in the tier's folders with the times of their last use, most recent first. Unusable ones come before
    all others, and are removed. Contents are checked only when a file is read.

    :raises OSError: they cannot be listed.
    """
    with os.scandir(root) as folders:
        names = [each.path for each in folders if is_folder(each)]
    found: list[list[tuple[int, ChunkFile]]] = []
    with ThreadPoolExecutor(_LISTERS, "pdx-disk-list") as pool:  # reads of inodes overlap
        for files, useless in pool.map(lambda name: _listed(name, is_over, block_bytes), names):
            found.append(files)
            yield from ((0, each) for each in useless)
    # Unlike a sort of all files at once, merging lets other threads run in between.
    yield from ((time_ns, file) for time_ns, file in heapq.merge(*found, reverse=True))


def _listed(folder: str, is_over: Over, block_bytes: int) -> tuple[list[tuple[int, ChunkFile]], list[Useless]]:
    files: list[tuple[int, ChunkFile]] = []
    useless: list[Useless] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_over():
                break
            try:
                time_ns, file = salvage(entry, folder, block_bytes)
            except FileNotFoundError:  # removed meanwhile
                continue
            if isinstance(file, Useless):
                useless.append(file)
            else:
                files.append((time_ns, file))
    files.sort(reverse=True)
    return files, useless


def salvage(entry: os.DirEntry[str], folder: str, block_bytes: int) -> tuple[int, ChunkFile | Useless]:
    """The last use (ns since the epoch) of an earlier node's file, and the file. An unusable one is removed, unless it
    is foreign.

    :raises FileNotFoundError: it is gone.
    """
    info = entry.stat(follow_symlinks=False)
    try:
        match = NAME.fullmatch(entry.name)
        if match is not None and folder.endswith(entry.name[:2]):
            file = named(match, block_bytes)
            if not stat.S_ISREG(info.st_mode):
                raise TierError(f"{entry.path} is not a file", "corrupt")
            if file.coded >= file.nbytes > 0:
                raise TierError(f"{entry.path} is larger than a chunk that is not encoded", "corrupt")
            if info.st_size != file.size:
                raise TierError(f"{entry.path} has {info.st_size} bytes, not {file.size}", "truncated")
            return info.st_mtime_ns, file
        if _UNFINISHED.fullmatch(entry.name) is None:
            return 0, Useless(TierError(f"{entry.path} is no tier's", "foreign"))
        raise TierError(f"{entry.path} is unfinished", "unfinished")
    except TierError as error:
        return 0, Useless(error, 0 if is_gone(Path(entry.path)) else info.st_blocks * 512)
