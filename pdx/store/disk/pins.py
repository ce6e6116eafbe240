"""The pins of a disk tier, in the file `tier.pins` of its folder, so that they outlive the node.

    pdx pins 1
    <key, 32 hex digits> <number of pins>

A later line for a key overrides earlier ones; 0: not pinned. Lines are appended; a file of which half is obsolete is
rewritten. One thread writes at a time. An unterminated last line was left by a killed process.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pdx.errors import TierError
from pdx.store.disk.chunk_file import write_all

MAX_BYTES = 256 << 20
NAME = "tier.pins"
_ANEW_BYTES = 1 << 20  # a longer file is rewritten …
_LINE_BYTES = 35  # … if it is twice as long as the current pins need
_HEAD = b"pdx pins 1\n"
_LINE = re.compile(rb"^([0-9a-f]{32}) ([0-9]{1,9})\n", re.MULTILINE)


def read(root: Path) -> dict[bytes, int]:
    """The number of pins of each pinned chunk.

    :raises TierError: the file cannot be read, or is no file of pins.
    """
    path = root / NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            _check(fd, path)
            lines = file.read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TierError(f"{path} cannot be read: {error.strerror}", "read_failed") from error
    pins = {bytes.fromhex(key.decode()): int(count) for key, count in _LINE.findall(lines)}
    return {key: count for key, count in pins.items() if count}


def write(root: Path, pins: Mapping[bytes, int], live: int = 0) -> None:
    """Write new pin counts, synced when this returns. `live`: the number of chunks pinned now.

    :raises TierError: the file could not be written, or is no file of pins.
    """
    path = root / NAME
    try:
        if not _add(path, _lines(pins), max(_ANEW_BYTES, 2 * live * _LINE_BYTES)):
            _replace(path, {**read(root), **pins})
    except OSError as error:
        raise TierError(f"{path} cannot be written: {error.strerror}", "write_failed") from error


def _check(fd: int, path: Path) -> int:
    """The size of a file of pins. :raises TierError: it is another file."""
    info = os.fstat(fd)
    is_one = stat.S_ISREG(info.st_mode) and info.st_size <= MAX_BYTES
    if not is_one or info.st_size and os.pread(fd, len(_HEAD), 0) != _HEAD:
        raise TierError(f"{path} is there and says no pins of a disk tier; remove it, so that pins are kept", "foreign")
    return info.st_size


def _lines(pins: Mapping[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (key.hex().encode(), count) for key, count in pins.items())


def _add(path: Path, lines: bytes, most: int) -> bool:
    """Append lines, synced; return False if there is no such file, or it would have more than `most` bytes."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        size = _check(fd, path)
        if not size or size + len(lines) > most:
            return False
        is_torn = os.pread(fd, 1, size - 1) != b"\n"
        write_all(fd, [memoryview(b"?\n" * is_torn + lines)], size)  # ends a torn line so that it is ignored
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return True


def _replace(path: Path, pins: Mapping[bytes, int]) -> None:
    fd, name = tempfile.mkstemp(prefix=f"{NAME}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_HEAD + _lines({key: count for key, count in pins.items() if count}))
            file.flush()
            os.fdatasync(fd)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
