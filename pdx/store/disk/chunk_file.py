"""The file of one chunk of one shard in a disk tier: a header, then the chunk's bytes, encoded or not.

Both are as `pdx.store.chunk_format` has them. A file is written under another name, its bytes
are on the disk (`fdatasync`) and only then it gets its own name: neither a process that is killed nor a machine without
power leaves a half file under a chunk's name. What goes wrong all the same is found by the digests when it is read.

Its name says what an index needs, so that a node which starts has to open none of them:

    <two hex digits>/<key>-<shard>-<slices>-<bytes>.chunk
    <two hex digits>/<key>-<shard>-<slices>-<bytes>-<bytes behind the header>.chunk    of an encoded chunk

The file's modification time says when the chunk was last used.

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
_INLINE = 4  # a file of so few blocks needs no block that says where they are, nor do so few of those …
_LISTED_BYTES = 12  # … and each takes so many of such a block, behind as many of its own
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
_CALL_BYTES = 8 << 20  # read or written by one system call, whole blocks; a job can end between two


@lru_cache(1024)
def disk_bytes(nbytes: int, layers: int, *, block_bytes: int = HEADER_BYTES) -> int:
    """The most that a file with so many bytes behind its header takes on a disk: whole blocks, and those that say where
    they are."""
    blocks = -(-(header_bytes(layers) + round_up(nbytes)) // block_bytes)
    listed = (min(block_bytes, HEADER_BYTES) - _LISTED_BYTES) // _LISTED_BYTES  # of one file system or another
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
    """One file, as its name says."""

    key: bytes
    shard: int
    layers: int
    nbytes: int
    coded: int = 0  # of an encoded chunk, the bytes behind the header; 0: it is not encoded
    block_bytes: int = HEADER_BYTES  # of its file system, which its name does not say

    @property
    def charge(self) -> int:
        """Bytes of the cap."""
        return disk_bytes(self.coded or self.nbytes, self.layers, block_bytes=self.block_bytes)

    @property
    def size(self) -> int:
        return header_bytes(self.layers) + (self.coded or self.nbytes)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder of chunks; a disk's own `lost+found` is none."""
    return _FOLDER.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def named(match: re.Match[str], block_bytes: int = HEADER_BYTES) -> ChunkFile:
    """The file of this name."""
    key, shard, layers, nbytes, coded = match.groups()
    return ChunkFile(bytes.fromhex(key), int(shard), *_sizes(layers, nbytes), int(coded or 0), block_bytes)


@lru_cache(1024)
def _sizes(layers: str, nbytes: str) -> tuple[int, int]:
    """Slices and bytes of the chunk. Cached, so that a million files share these numbers."""
    return int(layers), int(nbytes)


def touch(path: Path) -> None:
    """The chunk was used just now. Where the file cannot say so, as on a file system that is read-only, the order of
    use is lost."""
    with contextlib.suppress(OSError):
        now_ns = time.time_ns()
        os.utime(path, ns=(now_ns, now_ns), follow_symlinks=False)


def contents(path: Path, file: ChunkFile, is_over: Over, *, is_direct: bool) -> tuple[memoryview, int]:
    """The bytes of a chunk, checked and decoded, in whole granules, for who writes them anew; and when it was used last
    (ns since the epoch).

    :raises TierError: it could not be read, or is not what was written, or `is_over`.
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
    """Write a whole chunk to its file, from an arena or what `contents` has; `is_direct`: without a copy in the page
    cache. A new file leaves `reserve_bytes` of its file system to others. By a `codec` it is encoded where it then
    takes less, and its file has the name that says so instead of `path`. `used_ns`: when it was used last, as another
    file says it; then its name is on the disk, too, when this returns.

    :returns: `ChunkFile.coded`.
    :raises TierError: it could not be written, or `is_over`; no file is left, but where `is_left` says so.
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
        except BaseException:  # also where it cannot be opened: `reuse` may have put a file there
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
    """The file that is to be written: what `reuse` has put there is overwritten, unless somebody else has it, too."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
        return fd
    os.close(fd)
    os.unlink(path)  # a copy of the folder by hard links has the same file
    return os.open(path, flags | os.O_EXCL, 0o600)


def _sync_folder(path: Path) -> None:
    """Its names are on the disk before a later removal is. A file system that cannot do that has its own order."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _make_folder(path: Path) -> None:
    """:raises TierError: a link is there, which leads where nothing is counted."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if path.is_symlink():
            raise TierError(f"{path} is a link, which no tier has made", "foreign") from None


def _leave(nbytes: int, fd: int) -> None:
    """:raises TierError: the disk has less than that."""
    disk = os.fstatvfs(fd)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        raise TierError(f"{free >> 20} MiB are left of the disk, too little for a chunk and the reserve", "full")


def reuse(old: Path, path: Path) -> None:
    """A file that is not needed any more is where the file of a chunk will be written: its blocks need not be found
    anew, which takes a file system as long as the writing. Nothing where there is none.

    :raises TierError: it is there still.
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
    """Remove it; whether it is not there any more."""
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
        data = source.read(slot.offset, round_up(slot.nbytes) if is_direct else slot.nbytes)  # a disk knows blocks only
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
    """What each system call reads or writes: (memory, offset in the file)."""
    for first in range(0, len(data), _CALL_BYTES):
        end_if(is_over)
        piece = data[first : first + _CALL_BYTES]
        yield ([piece], len(head) + first) if first else ([head, piece], 0)


def write_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    while buffers:
        written = os.pwritev(fd, buffers, offset)
        buffers, offset = _behind(buffers, written), offset + written


def _behind(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the memory of a system call that has done so much."""
    left = []
    for buffer in buffers:
        if nbytes < len(buffer):
            left.append(buffer[nbytes:])
        nbytes = max(0, nbytes - len(buffer))
    return left


def read(path: Path, into: Sequence[memoryview], is_over: Over, *, is_direct: bool = False) -> os.stat_result:
    """Read a file into the place of its header and that of what is behind it, as far as it goes; `is_direct`: without
    a copy in the page cache.

    :raises TierError: it could not be read, or got shorter meanwhile, or `is_over`.
    """
    head, data = into
    with _opened(path) as fd:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise TierError(f"{path} is not a file", "corrupt")
        if is_direct:  # only now: what is no file may not be opened so
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        for buffers, offset in _calls(head, data, is_over):
            while buffers and (count := os.preadv(fd, buffers, offset)):
                buffers, offset = _behind(buffers, count), offset + count
        if offset < min(info.st_size, len(head) + len(data)):
            raise TierError(f"{path} ends too early", "truncated")
        return info


def verify(path: Path, *, is_direct: bool) -> int:
    """Read a file and compare all digests, for whoever looks after the folder; returns the bytes read.

    :raises TierError: it is not what its name says.
    :raises FileNotFoundError: a node has removed it, or writes another in its place, meanwhile.
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
    """What its header says, which is what its name says, and the bytes behind that, which are not looked at."""
    head, data = aligned(header_bytes(file.layers)), aligned(round_up(file.coded or file.nbytes))
    info = read(path, [head, data], is_over, is_direct=is_direct)
    header = parsed(head, info.st_size, path)
    if (*header.of, header.coded) != (file.key, file.shard, file.layers, file.nbytes, file.coded):
        raise TierError(f"{path} is the file of another chunk", "corrupt")
    return header, data, info


def some_file(root: Path) -> Path | None:
    """A tier's own: its lock, or a chunk. None: it is the folder of no tier.

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


def _inode(path: Path) -> int:
    """Which file is there; 0: none."""
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
    """:raises TierError: a system call has failed meanwhile."""
    try:
        yield
    except OSError as error:
        kind = _READ_KINDS.get(error.errno or 0, "read_failed")
        raise TierError(f"{path} cannot be read: {error.strerror}", kind) from error
