"""A disk tier over a real folder, with a control loop that the test turns."""

import errno
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pdx.store.disk import chunk_file
from pdx.store.disk.chunk_file import NAME, ChunkFile, named
from pdx.store.disk.folder import block_bytes
from pdx.store.disk.tier import DiskTier
from pdx.testing import tier_stage
from pdx.testing.tier_stage import TierStage
from pdx.testing.tier_stage import content as content
from pdx.testing.tier_stage import key as key

MIB = 1 << 20
is_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")


def without_direct_io(patch):
    """No file can be opened past the page cache."""
    real = os.open

    def refusing(path, flags, *args, **settings):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **settings)

    patch.setattr(os, "open", refusing)


def is_file(opened, path):
    """Whether that is the file that was opened, under another name perhaps."""
    return os.path.samestat(os.fstat(opened.fileno()), path.stat())


def _blocks(path):
    """Bytes on the disk; none where the file was removed meanwhile, by a thread of the tier."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


@contextmanager
def closing_all(make):
    """`make`; whatever it has made is closed in the end."""
    made = []

    def make_one(*args, **settings):
        made.append(make(*args, **settings))
        return made[-1]

    try:
        yield make_one
    finally:
        for each in made:
            each.close()


class Bed(TierStage):
    """A disk tier over a real folder, with a cap."""

    def __init__(self, folder, *, limit_bytes=MIB, slot_bytes=32 << 10, slots=16, wait=True, **settings):
        self.root, self.limit_bytes, self.settings, self._waits = folder / "tier", limit_bytes, settings, wait
        content = settings.pop("content", tier_stage.content)
        super().__init__(folder, self._make_tier, slot_bytes=slot_bytes, slots=slots, content=content)
        self.block_bytes = block_bytes(self.root)

    def _make_tier(self, host):
        return DiskTier(host, self.root, self.limit_bytes, **self.settings)

    def open(self, *, wait=None, **settings):
        """A tier as a node that starts has it; the one before must be closed, or its process dead."""
        self.settings |= settings
        super().open()
        if self._waits if wait is None else wait:
            self.until(lambda: self.is_counted)

    def restart(self, **settings):
        self.close_tier()
        self.open(**settings)

    @property
    def is_counted(self):
        return self.tier.is_counted

    def has(self, number, shards=1):
        return bool(self.tier.find([tier_stage.key(number)], shards))

    # ---- the folder -------------------------------------------------------------------------

    def file(self, number, shard=0, *, layers=4, nbytes=None):
        return chunk_file.path_of(
            self.root, ChunkFile(tier_stage.key(number), shard, layers, nbytes or self.slot_bytes)
        )

    @property
    def files(self):
        return sorted(path for path in self.root.glob("??/*"))

    @property
    def kept(self):
        """The whole ones, as their names say what they are."""
        return [named(match, self.block_bytes) for path in self.files if (match := NAME.fullmatch(path.name))]

    def of(self, number):
        """The one file of a chunk."""
        [file] = [file for file in self.kept if file.key == tier_stage.key(number)]
        return file

    @property
    def disk_bytes(self):
        return sum(_blocks(path) for path in self.files)

    @property
    def charge(self):
        """Bytes of the cap that a chunk of one slot takes."""
        return chunk_file.disk_bytes(self.slot_bytes, 4, block_bytes=self.block_bytes)


KV_BYTES = 256 << 10  # of a chunk of a `KvBed`


def kv(number: int, nbytes: int) -> bytes:
    """As bf16 has it: exponents that are alike."""
    values = np.random.default_rng(number).standard_normal(nbytes // 2 + 1).astype("<f4").view("<u4")
    return (values >> 16).astype("<u2").tobytes()[:nbytes]


def kv_content(number: int, shard: int, nbytes: int) -> bytes:
    return kv(number << 4 | shard, nbytes)


class KvBed(Bed):
    """Whose chunks can be encoded."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **{"content": kv_content} | settings)

    @property
    def names(self) -> list[str]:
        return [path.name for path in self.files]

    def coded(self, number: int, shard: int = 0) -> int:
        """Bytes of its file behind the header; 0: it is not encoded, or not there."""
        of_key = (file for file in self.kept if file.key == tier_stage.key(number))
        return next((file.coded for file in of_key if file.shard == shard), 0)

    def path(self, number: int) -> Path:
        return chunk_file.path_of(self.root, self.of(number))


@contextmanager
def disk_image(folder: Path, nbytes: int, options: str):
    """An ext4 of so many bytes, made with these options and mounted at `folder`."""
    folder.mkdir(mode=0o700)
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(nbytes)
    for command in (
        ["mkfs.ext4", "-q", *options.split(), str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        try:
            done = subprocess.run(command, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no mkfs.ext4 here")
        if done.returncode:
            pytest.skip(f"cannot be made or mounted here: {done.stderr.decode()}")
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def small_disk(folder: Path, nbytes: int, options: str = ""):
    """A file system of so many bytes, mounted at `folder`."""
    folder.mkdir(mode=0o700)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700{options}", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
