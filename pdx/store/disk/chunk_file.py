"""The file of one chunk of one shard in a disk tier: a header, then the chunk's bytes, encoded or not.

The format is that of `pdx.store.chunk_format`. A file is written under a temporary name, synced (`fdatasync`), and only
then renamed, so that neither a killed process nor a power failure leaves an incomplete file under a chunk's name. Other
damage is found by the digests when the file is read.

The name has all that the index needs, so that a node need not open the files when it starts:

    <two hex digits>/<key>-<shard>-<slices>-<bytes>.chunk
    <two hex digits>/<key>-<shard>-<slices>-<bytes>-<bytes after the header>.chunk    of an encoded chunk

The file's modification time is the time of the chunk's last use.

Everything here waits for the disk: it is for the threads of `pdx.store.disk.tier`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from pdx.errors import StaleSlot, TierError
from pdx.memory.arena import Arena, round_up
from pdx.security.socket_lock import is_lock
from pdx.store.chunk_format import (
    HEADER_BYTES,
    Header,
    Over,
    aligned,
    compare,
    end_if,
    header_bytes,
    packed,
    parsed,
    unpacked,
)
from pdx.store.codecs.codec import NONE
from pdx.store.tier import Part

WHOLE, PARTIAL = ".chunk", ".partial"
_FOLDER = re.compile(r"[0-9a-f]{2}")
NAME = re.compile(
    r"([0-9a-f]{32})-([0-9]{1,6})-([1-9][0-9]{0,5})"
    r"-([1-9][0-9]{0,14})(?:-([1-9][0-9]{0,14}))?\.chunk"  # sizes are positive, without leading zeros
)
_INLINE = 4  # up to so many blocks, of data or of pointers, need no further block of pointers …
_LISTED_BYTES = 12  # … in which each entry, and its header, takes so many bytes
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
_CALL_BYTES = 8 << 20  # per system call, whole blocks; a job can be cancelled between two


@lru_cache(1024)
def disk_bytes(nbytes: int, layers: int, *, block_bytes: int = HEADER_BYTES) -> int:
    """An upper bound of the disk space of a file with so many bytes after its header: whole blocks, and the file
    system's blocks of pointers to them."""
    blocks = -(-(header_bytes(layers) + round_up(nbytes)) // block_bytes)
    listed = (min(block_bytes, HEADER_BYTES) - _LISTED_BYTES) // _LISTED_BYTES  # the least of common file systems
    level = total = blocks
    while level > _INLINE:
        level = -(-level // listed)
        total += level
    return block_bytes * total


def path_of(root: Path, file: ChunkFile) -> Path:
    name = file.key.hex()
    coded = f"-{file.coded}" if file.coded else ""
    return root / name[:2] / f"{name}-{file.shard}-{file.layers}-{file.nbytes}{coded}{WHOLE}"


class ChunkFile(msgspec.Struct, frozen=True, gc=False, order=True):
    """A file, as its name describes it."""

    key: bytes
    shard: int
    layers: int
    nbytes: int
    coded: int = 0  # bytes after the header of an encoded chunk; 0: it is not encoded
    block_bytes: int = HEADER_BYTES  # of its file system; not in the name

    @property
    def charge(self) -> int:
        """Bytes that the file takes of the cap."""
        return disk_bytes(self.coded or self.nbytes, self.layers, block_bytes=self.block_bytes)

    @property
    def size(self) -> int:
        return header_bytes(self.layers) + (self.coded or self.nbytes)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder of chunks, unlike the disk's own `lost+found`."""
    return _FOLDER.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def named(match: re.Match[str], block_bytes: int = HEADER_BYTES) -> ChunkFile:
    """The file with a name that matched `NAME`."""
    key, shard, layers, nbytes, coded = match.groups()
    return ChunkFile(bytes.fromhex(key), int(shard), *_sizes(layers, nbytes), int(coded or 0), block_bytes)


@lru_cache(1024)
def _sizes(layers: str, nbytes: str) -> tuple[int, int]:
    """Slices and bytes of the chunk, cached so that a million files share these numbers."""
    return int(layers), int(nbytes)


def touch(path: Path) -> None:
    """Record that the chunk was used now. Best effort: on a read-only file system, for example, the order of use is
    lost."""
    with contextlib.suppress(OSError):
        now_ns = time.time_ns()
        os.utime(path, ns=(now_ns, now_ns), follow_symlinks=False)


def contents(path: Path, file: ChunkFile, is_over: Over, *, is_direct: bool) -> tuple[memoryview, int]:
    """The bytes of a chunk, checked and decoded, in whole granules, to be rewritten; and the time of its last use (ns
    since the epoch).

    :raises TierError: it could not be read, is damaged, or `is_over`.
    """
    header, data, info = _whole(path, file, is_over, is_direct=is_direct)
    return unpacked(header, data, path, is_over), info.st_mtime_ns


def write(
    path: Path,
    part: Part,
    source: Arena | memoryview,
    is_over: Over,
    *,
    is_direct: bool = False,
    reserve_bytes: int = 0,
    codec: str = NONE,
    used_ns: int | None = None,
) -> int:
    """Write a whole chunk to its file, from an arena or from the result of `contents`. `is_direct`: bypass the page
    cache. `reserve_bytes` of the file system stay free. With a `codec` the chunk is encoded if it then takes less, and
    the file then gets the name of an encoded chunk instead of `path`. `used_ns`: the last use, from the file that this
    one replaces; the name is then on the disk, too, when this returns.

    :returns: `ChunkFile.coded`.
    :raises TierError: it could not be written, or `is_over`. No file is left, unless the error's `is_left` is set.
    """
    partial, is_left = path.with_suffix(PARTIAL), False
    is_direct = is_direct and not (isinstance(source, Arena) and source.gpu)
    try:
        _make_folder(path.parent)
        try:
            fd = _partial(partial, os.O_DIRECT if is_direct else 0)
            try:
                if not os.fstat(fd).st_blocks:
                    _leave(reserve_bytes + part.slot.nbytes, fd)
                coded = _write(fd, part, source, is_over, is_direct, codec)
                time_ns = time.time_ns() if used_ns is None else used_ns
                os.utime(fd, ns=(time_ns, time_ns))
                os.fdatasync(fd)
                os.rename(partial, path.with_name(f"{path.stem}-{coded}{WHOLE}") if coded else path)
                if used_ns is not None:
                    _sync_folder(path.parent)
            finally:
                os.close(fd)
        except BaseException:  # even if it cannot be opened: `reuse` may have put a file there
            is_left = not is_gone(partial)
            raise
        return coded
    except OSError as error:
        kind = _WRITE_KINDS.get(error.errno or 0, "write_failed")
        raise TierError(f"{path} cannot be written: {error.strerror}", kind, is_left=is_left) from error
    except StaleSlot as error:
        raise TierError(f"{path} is not written: {error}", "stale", is_left=is_left) from error
    except TierError as error:
        raise TierError(str(error), error.kind, is_left=is_left) from error


def _partial(path: Path, flags: int) -> int:
    """Open the file to write. A file put there by `reuse` is overwritten, unless it has other hard links."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
        return fd
    os.close(fd)
    os.unlink(path)  # a copy of the folder by hard links shares the file
    return os.open(path, flags | os.O_EXCL, 0o600)


def _sync_folder(path: Path) -> None:
    """Sync a folder, so that its new names are on the disk before a later removal is. Best effort: not all file systems
    can."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _make_folder(path: Path) -> None:
    """:raises TierError: a symbolic link is there, whose target would not count for the cap."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if path.is_symlink():
            raise TierError(f"{path} is a link, which no tier has made", "foreign") from None


def _leave(nbytes: int, fd: int) -> None:
    """:raises TierError: the disk has less than that free."""
    disk = os.fstatvfs(fd)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        raise TierError(f"{free >> 20} MiB are left of the disk, too little for a chunk and the reserve", "full")


def reuse(old: Path, path: Path) -> None:
    """Move an old file to where the file of a chunk will be written, to reuse its blocks: to allocate new ones takes a
    file system as long as the writing. No-op if the file is gone.

    :raises TierError: it could not be moved.
    """
    try:
        _make_folder(path.parent)
        os.rename(old, path.with_suffix(PARTIAL))
    except FileNotFoundError:
        pass
    except OSError as error:
        kind = _WRITE_KINDS.get(error.errno or 0, "write_failed")
        if kind != "full":
            raise TierError(f"{old} cannot be written anew: {error.strerror}", kind) from error
        remove(old)  # there may be room for a folder only when it is gone


def is_gone(path: Path) -> bool:
    """Remove a file; return whether it is gone."""
    try:
        remove(path)
    except TierError:
        return False
    return True


def _write(fd: int, part: Part, source: Arena | memoryview, is_over: Over, is_direct: bool, codec: str) -> int:
    slot, start = part.slot, header_bytes(part.layers)
    os.ftruncate(fd, start + slot.nbytes)  # so that file systems do not reserve more than that
    if isinstance(source, Arena):
        source.check(slot)
        data = source.read(slot.offset, round_up(slot.nbytes) if is_direct else slot.nbytes)  # O_DIRECT: whole blocks
    else:
        data = source
    kept = packed(part, data, codec, is_over)
    body = kept.body if is_direct else kept.data
    for buffers, offset in _calls(kept.head, body, is_over):
        write_all(fd, buffers, offset)
    if kept.is_encoded or len(body) > kept.nbytes:
        os.ftruncate(fd, len(kept.head) + kept.nbytes)
    if isinstance(source, Arena):
        source.check(slot)
    return kept.coded


def _calls(head: memoryview, data: memoryview, is_over: Over) -> Iterator[tuple[list[memoryview], int]]:
    """What each system call reads or writes: (buffers, offset in the file)."""
    for first in range(0, len(data), _CALL_BYTES):
        end_if(is_over)
        piece = data[first : first + _CALL_BYTES]
        yield ([piece], len(head) + first) if first else ([head, piece], 0)


def write_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    while buffers:
        written = os.pwritev(fd, buffers, offset)
        buffers, offset = _behind(buffers, written), offset + written


def _behind(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the buffers after a system call that has done `nbytes`."""
    left = []
    for buffer in buffers:
        if nbytes < len(buffer):
            left.append(buffer[nbytes:])
        nbytes = max(0, nbytes - len(buffer))
    return left


def read(path: Path, into: Sequence[memoryview], is_over: Over, *, is_direct: bool = False) -> os.stat_result:
    """Read a file into two buffers, for its header and the bytes after that, as far as they go. `is_direct`: bypass the
    page cache.

    :raises TierError: it could not be read, became shorter meanwhile, or `is_over`.
    """
    head, data = into
    with _opened(path) as fd:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise TierError(f"{path} is not a file", "corrupt")
        if is_direct:  # only now, because only regular files may be opened so
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        for buffers, offset in _calls(head, data, is_over):
            while buffers and (count := os.preadv(fd, buffers, offset)):
                buffers, offset = _behind(buffers, count), offset + count
        if offset < min(info.st_size, len(head) + len(data)):
            raise TierError(f"{path} ends too early", "truncated")
        return info


def verify(path: Path, *, is_direct: bool) -> int:
    """Read a file and compare all digests, for a scrub or a probe; return its size.

    :raises TierError: it is not what its name says.
    :raises FileNotFoundError: a node has removed or replaced it meanwhile.
    """
    match = NAME.fullmatch(path.name)
    if match is None or path.parent.name != path.name[:2]:
        raise TierError(f"{path} is no tier's", "foreign")
    file, inode = named(match), _inode(path)
    try:
        header, data, _ = _whole(path, file, lambda: False, is_direct=is_direct)
        compare(header, data, path, lambda: False)
        return file.size
    except TierError as error:
        if error.kind == "missing" or _inode(path) != inode:
            raise FileNotFoundError(path) from error
        raise


def _whole(path: Path, file: ChunkFile, is_over: Over, *, is_direct: bool) -> tuple[Header, memoryview, os.stat_result]:
    """The header, which matches the name, and the bytes after it, not verified."""
    head, data = aligned(header_bytes(file.layers)), aligned(round_up(file.coded or file.nbytes))
    info = read(path, [head, data], is_over, is_direct=is_direct)
    header = parsed(head, info.st_size, path)
    if (*header.of, header.coded) != (file.key, file.shard, file.layers, file.nbytes, file.coded):
        raise TierError(f"{path} is the file of another chunk", "corrupt")
    return header, data, info


def some_file(root: Path) -> Path | None:
    """A file of the tier in this folder: its lock, or a chunk. None: no tier has used the folder.

    :raises OSError: it cannot be listed.
    """
    if is_lock(lock := root / "tier.lock"):
        return lock
    with os.scandir(root) as folders:
        names = [each.path for each in folders if is_folder(each)]
    for name in names:
        with os.scandir(name) as entries:
            for entry in entries:
                if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    return Path(entry.path)
    return None


def remove(path: Path) -> None:
    """Remove a file. No-op if it is gone.

    :raises TierError: it could not be removed.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        kind = _WRITE_KINDS.get(error.errno or 0, "write_failed")
        raise TierError(f"{path} cannot be removed: {error.strerror}", kind) from error


def _inode(path: Path) -> int:
    """The inode at this path; 0 if there is no file."""
    with _reading(path):
        try:
            return os.stat(path, follow_symlinks=False).st_ino
        except FileNotFoundError:
            return 0


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    with _reading(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            yield fd
        finally:
            os.close(fd)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """:raises TierError: a system call has failed within."""
    try:
        yield
    except OSError as error:
        kind = _READ_KINDS.get(error.errno or 0, "read_failed")
        raise TierError(f"{path} cannot be read: {error.strerror}", kind) from error
