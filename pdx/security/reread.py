"""Contents of files that may change while a process runs, and are taken over without a restart."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from pdx.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")


SETTLE_S = 0.2  # a file changed less long ago may still be being written, and a truncated one may be valid, too


def stamp(*paths: str) -> tuple[int, ...]:
    """A value that changes when a file is modified, replaced, or given another mode or owner."""
    found: list[int] = []
    for path in paths:
        try:
            info = os.stat(path)
        except OSError:
            continue
        found += (info.st_mtime_ns, info.st_size, info.st_ino, info.st_mode, info.st_uid)
    return tuple(found)


class Reread(Generic[T]):
    """The last valid contents of files, as `value`: files that are invalid or gone change nothing, and are logged."""

    def __init__(self, load: Callable[[], T], *paths: str, what: str, counters: Counter[str] | None = None) -> None:
        """`load` reads the files at `paths`. `counters`: invalid contents are counted there as `reread_failed`.

        :raises ConfigError: as `load` does.
        """
        self._load, self._paths, self._what = load, paths, what
        self._counters = Counter[str]() if counters is None else counters
        self._seen: tuple[int, ...] = ()
        self._seen_at = 0.0
        self._stamp = stamp(*paths)  # before they are read, so that later changes are read again
        self.value = load()

    def refresh(self) -> bool:
        """Read the files again if they changed; return whether `value` changed."""
        found = stamp(*self._paths)
        if found == self._stamp or not self._is_settled(found):
            return False
        self._stamp = found
        try:
            fresh = self._load()
        except ConfigError as error:
            log.warning("%s stays as it was: %s", self._what, error)
            self._counters["reread_failed"] += 1
            return False
        is_new = fresh != self.value
        if is_new:
            log.info("%s was read again", self._what)
            self.value = fresh
        return is_new

    def _is_settled(self, found: tuple[int, ...]) -> bool:
        age_ns = time.time_ns() - max(found[::5], default=0)
        if age_ns >= 0:
            return age_ns >= SETTLE_S * 1e9
        if found != self._seen:  # the file server's clock is ahead of this one: wait for SETTLE_S without a change
            self._seen, self._seen_at = found, time.monotonic()
        return time.monotonic() - self._seen_at >= SETTLE_S
