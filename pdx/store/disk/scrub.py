"""The scrub of a disk tier: a few threads read all files and compare all digests.

It may run while a node uses the folder: by default it only reads, and ignores files that the node removes or replaces
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from pdx.errors import ConfigError, TierError
from pdx.store.disk import chunk_file
from pdx.store.disk.folder import reads_direct

THREADS = 4
_AHEAD = 4 * THREADS


class Report(msgspec.Struct):
    """What was found: `good` files of `nbytes` in all; `bad` ones by reason; `foreign` ones, which no tier wrote."""

    good: int = 0
    nbytes: int = 0
    bad: Counter[str] = msgspec.field(default_factory=Counter)
    left: int = 0  # bad files that are still there
    foreign: int = 0


def num_files(root: Path) -> int:
    """The number of files to read, for a progress bar.

    :raises ConfigError: it is not the folder of a disk tier.
    """
    return sum(1 for _ in _files(root))


def scrub(root: Path, on_file: Callable[[TierError | None], None], *, remove: bool = False) -> Report:
    """Read all files of a folder; `on_file` is called for each, with its error. `remove`: remove the bad ones.

    :raises ConfigError: it is not the folder of a disk tier.
    """
    report = Report()
    is_direct = False
    with contextlib.suppress(OSError):
        some = _some_file(root)  # before anything is removed
        is_direct = some is not None and reads_direct(some)
    with ThreadPoolExecutor(THREADS, "pdx-scrub") as pool:
        ahead: deque[Future[int | TierError | None]] = deque()
        for path in _files(root):
            ahead.append(pool.submit(_verify, path, is_direct, remove))
            if len(ahead) == _AHEAD:
                _count(report, ahead.popleft().result(), on_file)
        while ahead:
            _count(report, ahead.popleft().result(), on_file)
    return report


def _files(root: Path) -> Iterator[Path]:
    if _some_file(root) is None:
        raise ConfigError(f"{root} has neither a lock nor a chunk of a disk tier; name the folder that --disk has")
    with os.scandir(root) as folders:
        names = sorted(each.path for each in folders if chunk_file.is_folder(each))
    for name in names:
        with os.scandir(name) as entries:
            yield from (Path(entry.path) for entry in entries if not entry.name.endswith(chunk_file.PARTIAL))


def _some_file(root: Path) -> Path | None:
    try:
        return chunk_file.some_file(root)
    except OSError as error:
        raise ConfigError(f"{root} cannot be listed: {error.strerror}; name the folder of a disk tier") from error


def _verify(path: Path, is_direct: bool, remove: bool) -> int | TierError | None:
    """The size of a good file, or the error of a bad one; None if it is gone."""
    try:
        return chunk_file.verify(path, is_direct=is_direct)
    except FileNotFoundError:
        return None
    except OSError as error:
        return TierError(f"{path} cannot be read: {error.strerror}", "read_failed", is_left=True)
    except TierError as error:
        if error.kind == "foreign":
            return error
        text = str(error)
        try:
            if remove:
                chunk_file.remove(path)
                return TierError(f"{text}; it is removed", error.kind)
        except TierError as why:
            text += f"; {why}"
        return TierError(text, error.kind, is_left=True)


def _count(report: Report, found: int | TierError | None, on_file: Callable[[TierError | None], None]) -> None:
    if isinstance(found, int):
        report.good += 1
        report.nbytes += found
    elif found is not None and found.kind == "foreign":
        report.foreign += 1
    elif found is not None:
        report.bad[found.kind] += 1
        report.left += found.is_left
    on_file(found if isinstance(found, TierError) else None)
