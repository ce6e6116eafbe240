"""Spans: when which layers of which transfer were computed, gathered, written to a peer and scattered.

Off unless a folder is named (`trace_folder`). Every recording process has a file of its own there, one JSON array per
line, written in batches. The folder's file `on` switches all of them while they run: they record as long as it begins
with "1", so `switch` and a shell's `echo 1 > on` do the same. Times are CLOCK_MONOTONIC nanoseconds of one host, as in
`pdx.telemetry.timeline`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.closing import Closing
from pdx.config import private_folder
from pdx.errors import ConfigError, ProtocolError

log = logging.getLogger(__name__)

MAX_PENDING = 1 << 16  # spans in memory
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 1024  # in one folder
MAX_LINE_BYTES = 4096
_SWITCHED = (b"", b"0", b"1")  # all valid contents of a switch

_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Name = Annotated[str, Meta(max_length=512)]


class Lane(StrEnum):
    """A kind of activity; the comment says which process records it, and from when to when."""

    PREFILL = "prefill"  # a worker of the prefill engine: from hook to hook, without the gather between them on a CPU
    GATHER = "gather"  # the same: pages to slots. CPU: the copy; GPU: from queueing it to having seen its end
    WIRE = "wire"  # the prefill's node: from handing a write to its channel to its acknowledgment
    DISK_STORE = "disk_store"  # a node: one chunk, arena to file; the transfer of these and of the next is mostly ""
    DISK_LOAD = "disk_load"  # the same, file to arena
    REMOTE_STORE = "remote_store"  # the same, arena to the remote store
    REMOTE_LOAD = "remote_load"  # the same, remote store to arena
    ARENAS = "arenas"  # a node: slices from one arena to another, as one call of the driver if possible
    SCATTER = "scatter"  # a worker of either engine: one load, slots to pages


class TraceSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Layers [first_layer, first_layer + num_layers) of one transfer were in this lane from `start_ns` to `end_ns`.

    A prompt that is computed in several steps has spans of each step, and the time after the last layer's hook is
    another span of that layer. `nbytes`: bytes of this transfer that were moved, 0 in the prefill lane. `who` recorded
    the span: a node's name, or `engine/shard`.
    """

    lane: Lane
    transfer: _Name
    first_layer: _Number
    num_layers: _Number
    start_ns: _Number
    end_ns: _Number
    nbytes: _Number
    who: _Name


class Tracer(Closing):
    """One process's spans. Any thread may record and flush; the writing thread holds `_writing`.

    Once open, nothing here fails: spans that cannot be kept or written are counted (`num_dropped`), with one warning.
    """

    def __init__(self, folder: Path, who: str) -> None:
        """Make FOLDER/<who>-<pid>-<n>.spans, and the folder's switch, off, if there is none.

        :raises ConfigError: there is no such folder, others may enter it, or it cannot be written.
        """
        check_trace_folder(folder)
        with contextlib.ExitStack() as undo:
            try:
                self._switch = os.open(folder / "on", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                undo.callback(os.close, self._switch)
                self.path, self._file = _new_file(folder, who)
            except OSError as error:
                raise ConfigError(f"cannot record spans in {folder}: {error.strerror}") from error
            undo.pop_all()
        self.num_dropped = 0
        self._who = who
        self._room_bytes = MAX_FILE_BYTES
        self._is_open = True
        self._spans: deque[TraceSpan] = deque()
        self._writing = threading.Lock()
        self._dropping = threading.Lock()  # guards num_dropped

    @property
    def is_on(self) -> bool:
        """Whether spans are wanted now: reads one byte with a system call, because touching a mapped file that has just
        been truncated would end the process."""
        try:
            return self._is_open and os.pread(self._switch, 1, 0) == b"1"
        except OSError:  # closed just now by another thread, or the folder's file system is gone
            return False

    def span(
        self, lane: Lane, transfer: str, first_layer: int, num_layers: int, start_ns: int, end_ns: int, nbytes: int
    ) -> None:
        """Record a span in memory. Only while `is_on`, which the caller checks as often as it sees fit."""
        if len(self._spans) >= MAX_PENDING:
            self._drop(1, f"more than {MAX_PENDING} were waiting to be written")
            return
        self._spans.append(TraceSpan(lane, transfer, first_layer, num_layers, start_ns, end_ns, nbytes, self._who))

    def flush(self, at_least: int = 1) -> None:
        """Write the recorded spans if there are `at_least` so many. If another thread is writing, that thread or the
        next flush does it."""
        while len(self._spans) >= at_least and self._writing.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._writing.release()

    def close(self) -> None:
        """Write remaining spans and close. Later spans are lost. Idempotent."""
        with self._writing:
            if self._is_open:
                self._write()
                self._is_open = False
                os.close(self._file)
                os.close(self._switch)

    def _write(self) -> None:
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        lines = _encoder.encode_lines(spans)
        if not self._is_open or len(lines) > self._room_bytes:
            self._room_bytes = 0  # no line may follow the missing ones
            self._drop(len(spans), f"{self.path} is closed, or {MAX_FILE_BYTES >> 20} MiB long")
            return
        self._room_bytes -= len(lines)
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._room_bytes = 0  # a line may be cut off: nothing may follow it
            self._drop(len(spans), f"{self.path}: {error.strerror}")

    def _drop(self, count: int, why: str) -> None:
        with self._dropping:
            was_none, self.num_dropped = not self.num_dropped, self.num_dropped + count
        if was_none and count:
            log.warning("spans are lost: %s", why)


def trace_folder(setting: str) -> Path | None:
    """The folder where spans are recorded: the setting, else PDX_TRACE, else None.

    :raises ConfigError: there is no such folder, or others may enter it.
    """
    name = setting or os.environ.get("PDX_TRACE", "")
    if not name:
        return None
    check_trace_folder(Path(name))
    return Path(name)


def check_trace_folder(folder: Path) -> None:
    """:raises ConfigError: there is no such folder, or others may enter it."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} for spans; make one: mkdir -m 700 {folder}")
    private_folder(folder)


def tracer_for(setting: str, who: str) -> Tracer | None:
    """The tracer for a `trace` setting; None: spans are never recorded.

    :raises ConfigError: see `Tracer`.
    """
    folder = trace_folder(setting)
    return Tracer(folder, who) if folder is not None else None


def switch(folder: Path, on: bool) -> None:
    """Switch recording on or off for all processes with this folder, including those not started yet.

    :raises ConfigError: there is no such folder, others may enter it, or its switch cannot be written.
    """
    check_trace_folder(folder)
    path = folder / "on"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if os.pread(file, 3, 0).strip() not in _SWITCHED:
                raise ConfigError(f"{path} is there and is no switch of PDX; name another folder for spans")
            os.pwrite(file, b"1" if on else b"0", 0)
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def read(folder: Path) -> list[TraceSpan]:
    """All spans in the folder, the earliest start first. A last line without its end, still being written, is left out.

    :raises ConfigError: there is no such folder.
    :raises ProtocolError: a file is not a `Tracer`'s, or there are too many; the text names it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder with spans")
    paths = sorted(folder.glob("*.spans"))
    if len(paths) > MAX_FILES:
        raise ProtocolError(f"{folder}: {len(paths)} files with spans, {MAX_FILES} at most")
    return sorted((span for path in paths for span in _spans_of(path)), key=lambda span: span.start_ns)


def _spans_of(path: Path) -> Iterator[TraceSpan]:
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
        raise ProtocolError(f"{path}: not a file, or longer than {MAX_FILE_BYTES} bytes")
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise ProtocolError(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes")
                return
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"{path}:{number}: {error}") from error


def _new_file(folder: Path, who: str) -> tuple[Path, int]:
    name = re.sub(r"[^0-9A-Za-z._-]", "_", who)[:100]
    for number in range(MAX_FILES):
        path = folder / f"{name}-{os.getpid()}-{number}.spans"
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    raise ConfigError(f"{folder} has {MAX_FILES} files of {who} already; remove them")


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TraceSpan)
