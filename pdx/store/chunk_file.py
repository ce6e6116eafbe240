"""The file of one chunk of one shard in a disk tier: a header, then the chunk's bytes as they lie in the arena.

The header says what the file is for and has a digest of each slice. A file is written under another name and gets its
own name when it is whole, so a process that is killed leaves no half file under a chunk's name. What a machine without
power leaves is found by the digests when it is read.

    magic (8 bytes) | version (4) | bytes of the body (4) | digest of the body (8) | body, msgpack | zeros to 4 KiB

Everything here waits for the disk: it is for the threads of `pdx.store.disk`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import xxhash
from msgspec import Meta

from pdx.errors import LayoutError, StaleSlot, TierError
from pdx.memory.arena import Arena, round_up
from pdx.memory.layout import slice_span
from pdx.memory.slot import Bytes
from pdx.store.tier import Part
from pdx.wire.messages import MAX_LAYERS, Key, LayerCount, Shard

MAGIC = b"PDXCHUNK"
VERSION = 2
HEADER_BYTES = 4096  # of a chunk with fewer than about 500 slices; more slices need whole further blocks
WHOLE, PARTIAL = ".chunk", ".partial"
_DIGEST_BYTES = 8
_MAX_BODY_BYTES = _DIGEST_BYTES * MAX_LAYERS + 256
_PREFIX = struct.Struct("<8sIIQ")
_GROUP_BYTES = 8 << 20  # read or written by one system call; a job can end between two
_FOLDER = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"([0-9a-f]{2})([0-9a-f]{30})-([0-9]{1,6})(\.chunk|\.partial)")
_INLINE_BLOCKS = 4  # a file of so few blocks needs no block that says where they are …
_LISTED_BLOCKS = 340  # … and a larger one needs at most one for so many of them
_WRITE_KINDS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "read_only",
}
_READ_KINDS = {
    errno.ENOENT: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ELOOP: "corrupt",
    errno.EMFILE: "exhausted",
    errno.ENFILE: "exhausted",
    errno.ENOMEM: "exhausted",
}
Over = Callable[[], bool]


class Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a file says of itself."""

    key: Key
    shard: Shard
    nbytes: Bytes
    layers: LayerCount
    digests: Annotated[bytes, Meta(max_length=_DIGEST_BYTES * MAX_LAYERS)]


_decoder = msgspec.msgpack.Decoder(Header)


def disk_bytes(nbytes: int, layers: int) -> int:
    """The most that the file of a chunk takes on a disk: whole blocks, and those that say where they are."""
    blocks = (_header_bytes(layers) + round_up(nbytes)) // HEADER_BYTES
    return HEADER_BYTES * (blocks + (blocks // _LISTED_BLOCKS + 1 if blocks > _INLINE_BLOCKS else 0))


def _header_bytes(layers: int) -> int:
    return round_up(_PREFIX.size + 128 + _DIGEST_BYTES * layers)


def path_of(root: Path, key: bytes, shard: int) -> Path:
    """Where the chunk's file is."""
    name = key.hex()
    return root / name[:2] / f"{name}-{shard}{WHOLE}"


def listed(root: Path) -> list[Path]:
    """All files in the tier's folders, those that were used last first.

    :raises OSError: they cannot be listed.
    """
    times: list[tuple[int, str]] = []
    with os.scandir(root) as folders:  # a disk's own `lost+found` is none of them
        names = [each.path for each in folders if _FOLDER.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    for name in names:
        with os.scandir(name) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # somebody else removes it
                    times.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    return [Path(path) for _, path in sorted(times, reverse=True)]


def salvage(path: Path) -> tuple[Header | None, TierError | None, int]:
    """What a file from before says of itself, or why it is of no use; the bytes of one of no use that stays.

    One of no use is removed, if it is not the process that cannot read it.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or match[1] != path.parent.name:
        return None, TierError(f"{path} is no tier's", "foreign"), 0
    try:
        if path.suffix == PARTIAL:
            raise TierError(f"{path} was not finished", "unfinished")
        return inspect(path), None, 0
    except TierError as error:
        why = error
    if why.kind != "exhausted" and _is_gone(path):
        return None, why, 0
    try:
        return None, why, path.lstat().st_blocks * 512
    except OSError:  # somebody else has removed it
        return None, why, 0


def write(path: Path, part: Part, arena: Arena, is_over: Over) -> None:
    """Copy a whole chunk from an arena to its file.

    :raises TierError: it could not be written, or `is_over`; no file is left, but where `is_left` says so.
    """
    partial, is_left = path.with_suffix(PARTIAL), False
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _write(fd, part, arena, is_over)
            os.rename(partial, path)
        except BaseException:
            is_left = not _is_gone(partial)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        kind = _WRITE_KINDS.get(error.errno or 0, "write_failed")
        raise TierError(f"{path} cannot be written: {error.strerror}", kind, is_left=is_left) from error
    except StaleSlot as error:
        raise TierError(f"{path} is not written: {error}", "stale", is_left=is_left) from error
    except TierError as error:
        raise TierError(str(error), error.kind, is_left=is_left) from error


def _is_gone(path: Path) -> bool:
    try:
        remove(path)
    except TierError:
        return False
    return True


def _write(fd: int, part: Part, arena: Arena, is_over: Over) -> None:
    slot, start = part.slot, _header_bytes(part.layers)
    os.ftruncate(fd, start + slot.nbytes)  # so that file systems do not reserve more than that
    arena.check(slot)
    digests = bytearray()
    for _, first, nbytes, spans in _groups(part):
        _end_if(is_over)
        data = arena.read(slot.offset + first, nbytes)
        for offset, count in spans:
            digests += xxhash.xxh3_64_digest(data[offset : offset + count])
        _write_all(fd, data, start + first)
    arena.check(slot)
    header = Header(part.key, part.shard, slot.nbytes, part.layers, bytes(digests))
    _write_all(fd, memoryview(_encoded(header, start)), 0)


def _encoded(header: Header, nbytes: int) -> bytes:
    body = msgspec.msgpack.encode(header)
    return (_PREFIX.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body).ljust(nbytes, b"\0")


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwritev(fd, [data], offset)
        data, offset = data[written:], offset + written


def read(path: Path, part: Part, arena: Arena, is_over: Over) -> None:
    """Copy a whole chunk from its file into an arena, and compare the digest of each slice.

    :raises TierError: it could not be read, or is not what was written, or `is_over`. The slot may hold anything then.
    """
    slot = part.slot
    with _opened(path) as fd:
        header, start = _header(fd, path)
        if (header.key, header.shard, header.nbytes, header.layers) != (part.key, part.shard, slot.nbytes, part.layers):
            raise TierError(f"{path} is the file of another chunk", "corrupt")
        try:
            arena.check(slot)
            memory = arena.data[slot.offset : slot.offset + slot.nbytes]
            for layer, first, nbytes, spans in _groups(part):
                _end_if(is_over)
                data = memory[first : first + nbytes]
                _read_all(fd, data, start + first, path)
                _compare(data, spans, header.digests[_DIGEST_BYTES * layer :], path)
            arena.check(slot)
        except (StaleSlot, LayoutError) as error:
            raise TierError(f"{path} is not read: {error}", "stale") from error
        with contextlib.suppress(OSError):  # a file system may be read-only: then the order of use is lost
            os.utime(fd)


def _compare(data: memoryview, spans: list[tuple[int, int]], digests: bytes, path: Path) -> None:
    for number, (offset, count) in enumerate(spans):
        expected = digests[_DIGEST_BYTES * number : _DIGEST_BYTES * (number + 1)]
        if xxhash.xxh3_64_digest(data[offset : offset + count]) != expected:
            raise TierError(f"{path} has other bytes than were written", "corrupt")


def _read_all(fd: int, data: memoryview, offset: int, path: Path) -> None:
    while data:
        count = os.preadv(fd, [data], offset)
        if not count:
            raise TierError(f"{path} ends too early", "truncated")
        data, offset = data[count:], offset + count


def inspect(path: Path) -> Header:
    """What a file says of itself. Its slices are compared when they are read.

    :raises TierError: it is no chunk's file, or not whole.
    """
    with _opened(path) as fd:
        header, _ = _header(fd, path)
    if path_of(path.parent.parent, header.key, header.shard) != path:
        raise TierError(f"{path} is the file of another chunk", "corrupt")
    return header


def remove(path: Path) -> None:
    """Remove a file, if it is there.

    :raises TierError: it is there still.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        kind = _WRITE_KINDS.get(error.errno or 0, "write_failed")
        raise TierError(f"{path} cannot be removed: {error.strerror}", kind) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        kind = _READ_KINDS.get(error.errno or 0, "read_failed")
        raise TierError(f"{path} cannot be read: {error.strerror}", kind) from error


def _header(fd: int, path: Path) -> tuple[Header, int]:
    """The header, and how long it is."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise TierError(f"{path} is not a file", "corrupt")
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise TierError(f"{path} ends in its header", "truncated")
    magic, version, body_bytes, digest = _PREFIX.unpack(prefix)
    if magic != MAGIC or body_bytes > _MAX_BODY_BYTES:
        _damaged(path)
    if version != VERSION:
        raise TierError(f"{path} has format {version}; this is {VERSION}", "outdated")
    body = os.pread(fd, body_bytes, _PREFIX.size)
    if len(body) < body_bytes:
        raise TierError(f"{path} ends in its header", "truncated")
    if xxhash.xxh3_64_intdigest(body) != digest:
        _damaged(path)
    try:
        header = _decoder.decode(body)
    except msgspec.MsgspecError:
        _damaged(path)
    start = _header_bytes(header.layers)
    if len(header.digests) != _DIGEST_BYTES * header.layers or info.st_size > start + header.nbytes:
        _damaged(path)
    if info.st_size < start + header.nbytes:
        raise TierError(f"{path} has {info.st_size} bytes, not {start + header.nbytes}", "truncated")
    return header, start


def _damaged(path: Path) -> NoReturn:
    raise TierError(f"{path} has a damaged header", "corrupt")


def _end_if(is_over: Over) -> None:
    if is_over():
        raise TierError("cancelled", "cancelled")


def _groups(part: Part) -> Iterator[tuple[int, int, int, list[tuple[int, int]]]]:
    """Slices that are next to each other, until they are worth a system call: (the first one, start, bytes, their spans
    in these bytes)."""
    first = start = 0
    spans: list[tuple[int, int]] = []
    for layer in range(part.layers):
        offset, count = slice_span(part.slot.nbytes, part.layers, layer, 1)
        spans.append((offset - start, count))
        end = offset + count
        if end - start >= _GROUP_BYTES or layer == part.layers - 1:
            yield first, start, end - start, spans
            first, start, spans = layer + 1, end, []
