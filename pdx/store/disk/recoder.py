"""Files of a disk tier that are written anew in another form: beside the old ones, which go when the new ones are
there.

A chunk that keeps its key is replaced shard by shard. One that gets another key, because something is lost, is removed
under its old one when all its shards are there under the new. A process that is killed in between leaves whole files:
the old one, the new one or both. Of two under one key the next node keeps one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from pdx.errors import TierError
from pdx.memory.slot import Slot
from pdx.store.codecs.codec import LOSSLESS
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.folder import Task
from pdx.store.disk.index import FileIndex
from pdx.store.recoding import Pair, Recoding, check
from pdx.store.tier import Job, Part


class _Chunk(msgspec.Struct, eq=False):
    """One that is under way."""

    pair: Pair
    recoding: Recoding
    left: int  # files that are not written yet
    error: TierError | None = None


class Recoder:
    """Owned by the control loop, as the tier is."""

    def __init__(
        self,
        index: FileIndex,
        *,
        begin: Callable[[Task], str],
        remove: Callable[[Sequence[ChunkFile]], None],
        is_busy: Callable[[bytes], bool],
    ) -> None:
        """`begin` gives a task that writes a file, or says why not; `remove` forgets files and removes them; `is_busy`:
        files of this key are being written or removed."""
        self._index = index
        self._begin_task = begin
        self._remove = remove
        self._is_busy = is_busy
        self._numbers = itertools.count(-1, -1)  # of jobs: no copy has such
        self._chunks: dict[Task, _Chunk] = {}

    def recode(
        self, pairs: Sequence[Pair], codec: str, on_chunk: Callable[[bytes, TierError | None], None]
    ) -> Recoding:
        """See `DiskTier.recode`."""
        check(pairs, codec)
        recoding = Recoding(pairs, lambda pair, own: self._begin(pair, codec, own), self._stop, on_chunk)
        recoding.go_on()
        return recoding

    def _begin(self, pair: Pair, codec: str, recoding: Recoding) -> None:
        old, new = pair
        files = self._index.of(old)
        if old == new:
            files = [file for file in files if bool(file.coded) != (codec == LOSSLESS)]
            if not files and old in self._index:
                return recoding.ended(old, None)
        if not files:
            return recoding.ended(old, TierError(f"chunk {old.hex()[:8]} is not there", "missing"))
        if self._is_busy(old) or self._is_busy(new) or (old != new and new in self._index):
            return recoding.ended(old, TierError(f"chunk {new.hex()[:8]} is being written or there already", "busy"))
        if old != new and old in self._index.pins:
            return recoding.ended(old, _pinned(old))
        chunk = _Chunk(pair, recoding, len(files))
        for file in files:
            slot = Slot(0, file.nbytes, 0)
            job = Job(next(self._numbers), [Part(new, file.shard, file.layers, 0, file.layers, slot)], file.nbytes)
            task = Task(job, charge=msgspec.structs.replace(file, coded=0).charge, source=file, codec=codec)
            self._chunks[task] = chunk
            if why := self._begin_task(task):
                self.ended(task, TierError(why, "busy"))
        return None

    def ended(self, task: Task, error: TierError | None) -> None:
        """A file is written, which the tier has in its index by now, or is not."""
        chunk = self._chunks.pop(task)
        chunk.left -= 1
        chunk.error = chunk.error or error
        if chunk.left:
            return
        old, new = chunk.pair
        if old != new:
            if chunk.error is None and old not in self._index:
                chunk.error = TierError(f"chunk {old.hex()[:8]} was removed meanwhile", "missing")
            elif chunk.error is None and old in self._index.pins:
                chunk.error = _pinned(old)
            self._remove(list(self._index.of(old if chunk.error is None else new)))
        chunk.recoding.ended(old, chunk.error)

    def _stop(self, recoding: Recoding) -> None:
        for task, chunk in self._chunks.items():
            if chunk.recoding is recoding:
                task.is_cancelled = True


def _pinned(key: bytes) -> TierError:
    return TierError(f"chunk {key.hex()[:8]} was pinned meanwhile", "pinned")
