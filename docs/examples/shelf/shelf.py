"""A remote store in a folder that several nodes have mounted. docs/tutorials/add-a-tier.md explains it.

Bytes go from the memory of chunks into files and back, without a copy in between.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pdx.errors import TierError
from pdx.store.remote.backend import Backend, Found, RemoteSettings
from pdx.store.remote.tier import RemoteTier
from pdx.store.tier import Tier, TierHost


def make(host: TierHost, settings: RemoteSettings) -> Tier:
    """What the entry point names: a tier for an address such as shelf:///mnt/shared/chunks."""
    return RemoteTier(host, Shelf(settings.url), settings.codec)


class Shelf(Backend):
    """See `Backend`. A file for each name, at two levels of folders."""

    batch = 64

    def __init__(self, url: str) -> None:
        self.place = url
        self._root = Path(urlsplit(url).path)

    def connect(self, count: int) -> None:
        """See `Backend.connect`: there is nothing to be opened, so the folder is looked at."""
        with self._told("the folder"):
            os.listdir(self._root)

    def heads(self, names: Sequence[str], nbytes: int) -> list[Found | None]:
        """See `Backend.heads`."""
        return [self._head(name, nbytes) for name in names]

    def _head(self, name: str, nbytes: int) -> Found | None:
        with self._opened(name) as fd:
            return None if fd is None else Found(memoryview(os.pread(fd, nbytes, 0)), os.fstat(fd).st_size)

    def read(self, name: str, into: Sequence[memoryview]) -> int | None:
        """See `Backend.read`: the kernel writes to the memory of the chunk."""
        with self._opened(name) as fd:
            if fd is None:
                return None
            left, at = list(into), 0
            while left and (done := os.preadv(fd, left, at)):
                at += done
                left = _behind(left, done)
            return os.fstat(fd).st_size

    def write(self, name: str, data: Sequence[memoryview]) -> None:
        """See `Backend.write`. Who reads finds the old file or the new one: it gets its name when it is whole."""
        path = self._root / name
        with self._told(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(dir=path.parent)
            try:
                left = list(data)
                while left:
                    left = _behind(left, os.writev(fd, left))
                os.rename(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise
            finally:
                os.close(fd)

    def remove(self, names: Sequence[str]) -> None:
        """See `Backend.remove`."""
        for name in names:
            with self._told(name):
                (self._root / name).unlink(missing_ok=True)

    def close(self) -> None:
        """See `Backend.close`: no connection is kept."""

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        with self._told(name), contextlib.ExitStack() as stack:
            try:
                fd: int | None = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
            except FileNotFoundError:
                fd = None
            yield fd

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """An error of the system becomes one of the tier, by the kind that says what follows from it."""
        try:
            yield
        except OSError as error:
            kinds = {28: "full", 30: "read_only", 13: "denied", 2: "unreachable"}  # by errno
            raise TierError(f"{self.place}: {what}: {error.strerror}", kinds.get(error.errno or 0, "failed")) from error


def _behind(pieces: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of these when so many bytes are done."""
    while pieces and nbytes >= len(pieces[0]):
        nbytes -= len(pieces.pop(0))
    return [pieces[0][nbytes:], *pieces[1:]] if pieces else []
