"""What a disk tier finds in its folder when it starts: the files from before, those that were used last first, and how
much of its cap the disk has.

Everything here waits for the disk.
"""

from __future__ import annotations

import heapq
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from pdx.errors import TierError
from pdx.store.chunk_format import Over
from pdx.store.disk.chunk_file import NAME, ChunkFile, is_folder, is_gone, named, path_of

log = logging.getLogger("pdx.node")

MIB = 1 << 20
_UNFINISHED = re.compile(r"[0-9a-f]{32}-[0-9]{1,6}-[0-9]{1,6}-[0-9]{1,15}\.partial")
_FOLDERS = 256
_SPREAD = 64  # files of a folder, at the least, so that few of them need not be even
_LISTERS = 2  # more of them fight for the interpreter when the file system has all in memory


class Useless(msgspec.Struct, frozen=True):
    """A file from before that is of no use: why, and the bytes that it takes because it could not be removed."""

    why: TierError
    nbytes: int = 0


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


def most_of_folder(max_files: int) -> int:
    """How many files of one folder are kept in memory, where `max_files` of all of them are kept in the end: keys are
    spread evenly over the folders."""
    return _SPREAD + 2 * max_files // _FOLDERS


def listed(root: Path, is_over: Over, max_files: int, block_bytes: int) -> Iterator[tuple[int, ChunkFile | Useless]]:
    """All files in the tier's folders, those that were used last first, each with its time. Those of no
    use come before them, and are removed; so are those used longest ago where there are far more than `max_files`.
    What a file holds is looked at when it is read.

    :raises OSError: they cannot be listed.
    """
    with os.scandir(root) as folders:
        names = [each.path for each in folders if is_folder(each)]
    found: list[list[tuple[int, ChunkFile]]] = []
    with ThreadPoolExecutor(_LISTERS, "pdx-disk-list") as pool:  # a file system reads what it knows of a file in turn
        for files, useless in pool.map(lambda name: _listed(name, is_over, max_files, block_bytes), names):
            found.append(files)
            yield from ((0, each) for each in useless)
    # Merging lists lets other threads run in between, as sorting all at once does not.
    yield from ((time_ns, file) for time_ns, file in heapq.merge(*found, reverse=True))


def _listed(
    folder: str, is_over: Over, max_files: int, block_bytes: int
) -> tuple[list[tuple[int, ChunkFile]], list[Useless]]:
    files: list[tuple[int, ChunkFile]] = []
    useless: list[Useless] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_over():
                break
            try:
                time_ns, file = salvage(entry, folder, block_bytes)
            except FileNotFoundError:  # somebody else removes it
                continue
            if isinstance(file, Useless):
                useless.append(file)
            else:
                files.append((time_ns, file))
    files.sort(reverse=True)
    most = most_of_folder(max_files)
    for _, file in files[most:]:
        path = path_of(Path(folder).parent, file)
        why = TierError(f"{path} is one file too many", "index_full")
        useless.append(Useless(why, 0 if is_gone(path) else file.charge))
    return files[:most], useless


def salvage(entry: os.DirEntry[str], folder: str, block_bytes: int) -> tuple[int, ChunkFile | Useless]:
    """When a file from before was last used (ns since the epoch), and what it is.

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
