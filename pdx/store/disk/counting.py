"""What a disk tier finds out when it starts: how much of its cap the disk has, and which files are there."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pdx.errors import TierError
from pdx.store.chunk_format import Over
from pdx.store.disk import listing
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.listing import Useless

log = logging.getLogger("pdx.node")

MIB = 1 << 20
_BATCH = 256
Batch = Sequence[tuple[int, ChunkFile | Useless]]


class Scan:
    """How far the files from before are counted. Owned by the control loop; `heard` may be called on any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_over = False
        self.is_counted = False  # whether the index has all files
        self.is_silent = False  # nothing was heard for long; what is there is as if left out, until something is
        self.evicted: set[bytes] = set()  # meanwhile
        self.named_at: dict[
            bytes, int
        ] = {}  # when named chunks from before were used last, until all disks are counted
        self._heard_at = clock()

    def heard(self) -> None:
        """It goes on."""
        self._heard_at = self._clock()

    def falls_silent(self, after_s: float) -> bool:
        """Whether nothing was heard of it for so long, and that is new."""
        is_new = not (self.is_over or self.is_silent) and self._heard_at < self._clock() - after_s
        self.is_silent = self.is_silent or is_new
        return is_new


def attainable(root: Path, limit_bytes: int, reserve_bytes: int, counters: Counter[str]) -> int:
    """The cap, or what the file system has in all without the reserve."""
    disk = os.statvfs(root)
    total_bytes = disk.f_blocks * disk.f_frsize
    most = max(0, total_bytes - reserve_bytes)
    if limit_bytes > most:
        counters["disk_cap_lowered"] += 1
        text = "%s is on a disk of %.1f MiB: the cap of %.1f MiB is lowered to %.1f MiB, so that the reserve is left"
        log.warning(text, root, total_bytes / MIB, limit_bytes / MIB, most / MIB)
    return min(limit_bytes, most)


def count(
    root: Path,
    max_files: int,
    block_bytes: int,
    is_over: Over,
    post: Callable[[Callable[[], None]], None],
    on_found: Callable[[Batch], None],
    on_counted: Callable[[TierError | None], None],
) -> None:
    """The root of a thread: have the control loop told of all files from before, and then that these were all, or why
    there may be more."""
    why: TierError | None = None
    try:
        files = listing.listed(root, is_over, max_files, block_bytes)
        while not is_over() and (batch := list(itertools.islice(files, _BATCH))):
            post(partial(on_found, batch))
    except OSError as error:
        text = f"{root} cannot be listed: {error.strerror}; nothing is stored there"
        why = TierError(text, "read_failed")
    except Exception as error:  # the thread's root
        log.exception("the disk tier failed")
        why = TierError(f"{root} is not read: {type(error).__name__}; nothing is stored there", "failed")
    if not is_over():
        post(partial(on_counted, why))
