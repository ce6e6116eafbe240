"""What files of a disk tier are to say that they do not say yet: that they were loaded, and what is pinned."""

from __future__ import annotations

from collections import Counter

from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.folder import Task

MAX_USES = 1 << 16  # files that are to say that they were loaded


class Notes:
    """Owned by the control loop. One thread at a time writes them: where writes do not return, loads do not wait."""

    def __init__(self) -> None:
        self._uses: Counter[ChunkFile] = Counter()  # loads
        self._pins: dict[bytes, int] = {}  # how often chunks are pinned
        self._is_under_way = False

    def loaded(self, file: ChunkFile) -> None:
        """Once more."""
        self._uses[file] += 1
        if len(self._uses) > MAX_USES:
            del self._uses[next(iter(self._uses))]

    def pinned(self, key: bytes, count: int) -> None:
        """So often from now on."""
        self._pins[key] = count

    def take(self, num_pinned: int, *, always: bool = False) -> Task | None:
        """What a thread is to write, where none writes, or `always`. `num_pinned`: chunks that are pinned now."""
        if not (self._uses or self._pins) or (self._is_under_way and not always):
            return None
        self._is_under_way = True
        task = Task(used=list(self._uses.items()), pins=self._pins, num_pinned=num_pinned)
        self._uses.clear()
        self._pins = {}
        return task

    def over(self, task: Task) -> None:
        """It is written; or, where that failed, what is pinned is written with the next."""
        self._is_under_way = False
        if task.error is not None:
            self._pins = {**task.pins, **self._pins}
