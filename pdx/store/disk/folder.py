"""What the threads of a disk tier do in its folder: read, write and remove its files, for one task each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from pdx.errors import TierError
from pdx.memory.arena import Arena
from pdx.store.codecs.codec import LOSSLESS
from pdx.store.disk import chunk_file, listing, pins
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.recoding import Recoding
from pdx.store.threads import Work
from pdx.store.tier import Part


class Task(Work):
    """Work for a thread: a job, or only files to remove, or a probe. The thread sets `left`, too."""

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
    recoding: Recoding | None = None  # … for this
    is_unread: bool = False  # that could not be read, which the thread sets
    is_unfound: bool = False  # its victim cannot be found, nor keeps its key from being found
    forgotten: set[bytes] = msgspec.field(default_factory=set)  # of what it writes and removes
    left: list[ChunkFile] = msgspec.field(default_factory=list)  # victims that could not be removed

    def drop(self, error: TierError) -> None:
        self.error = error
        self.left += self.victims


def file_of(part: Part, block_bytes: int) -> ChunkFile:
    """The file of a whole chunk of one shard."""
    return ChunkFile(part.key, part.shard, part.layers, part.slot.nbytes, block_bytes=block_bytes)


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """How files are read and written there."""

    root: Path
    arenas: Sequence[Arena]
    is_direct: bool  # without the page cache
    block_bytes: int  # in how many files grow
    reserve_bytes: int  # of the file system, which are left to others
    place: tuple[int, int]  # the folder itself, whatever its name leads to later

    def path(self, file: ChunkFile) -> Path:
        """Where a file is."""
        return chunk_file.path_of(self.root, file)

    def do(self, task: Task, codec: str, clock: Callable[[], float], is_closing: Callable[[], bool]) -> None:
        """On a thread. `codec`: see `StoreTier`.

        :raises TierError: it could not be done, or was cancelled, or `is_closing`.
        """
        try:
            listing.check_place(self.root, self.place)
        except TierError:
            task.left += task.victims
            raise
        if task.probed is not None:
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile, which the disk has answered
                chunk_file.verify(self.path(task.probed), is_direct=self.is_direct)
        for file, loads in task.used:
            task.seen_at = clock()
            chunk_file.touch(self.path(file), loads)
        if task.pins:
            task.seen_at = clock()
            pins.write(self.root, task.pins, task.num_pinned)
        for file in task.victims:
            task.seen_at = clock()
            old = self.path(file)
            try:
                if file is task.reused and task.error is None:
                    chunk_file.reuse(old, self.path(file_of(task.part, self.block_bytes)))
                else:
                    chunk_file.remove(old)
            except TierError as error:
                task.left.append(file)
                task.error = TierError(str(error), error.kind)
        if task.job is None or task.error is not None:
            return
        part = task.part

        def is_over() -> bool:
            task.seen_at = clock()
            is_cancelled = task.is_cancelled or (task.recoding is not None and task.recoding.is_cancelled)
            return is_cancelled or is_closing()

        task.job.start_ns = time.monotonic_ns()
        if task.is_load:
            file, arena = task.file or file_of(part, self.block_bytes), self.arenas[part.slot.arena]
            is_direct = self.is_direct
            codec = chunk_file.read(self.path(file), part, arena, is_over, is_direct=is_direct, coded=file.coded)
            task.job.form = "" if codec == LOSSLESS else codec
        else:
            source: Arena | chunk_file.Contents = self.arenas[part.slot.arena]
            used_ns, codec = None, part.form or codec
            if task.source is not None and task.recoding is not None:
                codec = task.recoding.codec
                try:
                    read = partial(chunk_file.contents, self.path(task.source), task.source, is_over)
                    found = read(is_direct=self.is_direct)
                except TierError:
                    task.is_unread = True
                    raise
                source, used_ns = found, found.used_ns
            coded = chunk_file.write(
                self.path(file_of(part, self.block_bytes)),
                part,
                source,
                is_over,
                is_direct=self.is_direct,
                reserve_bytes=self.reserve_bytes,
                codec=codec,
                used_ns=used_ns,
            )
            file = task.file = msgspec.structs.replace(file_of(part, self.block_bytes), coded=coded)
        task.job.coded_bytes = file.coded
        task.job.end_ns = time.monotonic_ns()
