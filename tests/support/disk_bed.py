"""A disk tier over a real folder, with a control loop that the test turns."""

import os
import queue
import random
import subprocess
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pdx.memory.arena import GRANULE_BYTES, Arena, round_up
from pdx.memory.slot import Slot
from pdx.store.disk import chunk_file
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.tier import DiskTier
from pdx.store.tier import Job, Part

MIB = 1 << 20
HANGS_S = 60.0  # what takes so long hangs
is_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")


def key(number):
    return number.to_bytes(2, "big") * 8


def content(number, shard, nbytes):
    return random.Random(number << 8 | shard).randbytes(nbytes)


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


class Bed:
    """`arena` has `slots` slots of `slot_bytes`, by number; `now` is the tier's clock."""

    def __init__(self, folder, *, limit_bytes=MIB, slot_bytes=32 << 10, slots=16, wait=True, **settings):
        self.root, self.limit_bytes, self.settings = folder / "tier", limit_bytes, settings
        self.slot_bytes = slot_bytes
        self.arena = Arena.create(folder / f"arena-{os.getpid()}", slots * round_up(slot_bytes))
        self.now = 100.0
        self.counters = Counter()
        self.numbers = iter(range(1, 1 << 30))
        self.tier = None
        self.open(wait=wait)

    def open(self, *, wait=True, **settings):
        """A tier as a node that starts has it; the one before must be closed, or its process dead."""
        calls = queue.SimpleQueue()
        self.settings |= settings
        self.tier = DiskTier(
            self.root,
            self.limit_bytes,
            arenas=[self.arena],
            post=calls.put,
            on_done=self._done,
            counters=self.counters,
            clock=lambda: self.now,
            **self.settings,
        )
        self.calls = calls
        self.over = {}  # number of a copy -> how its job ended
        while wait and not self.is_counted:
            self.turn()

    def restart(self, **settings):
        self.close_tier()
        self.open(**settings)

    def close_tier(self):
        self.tier.close()
        while not self.calls.empty():
            self.turn()

    def close(self):
        self.close_tier()
        self.arena.close()
        self.arena.path.unlink()

    def _content(self, number, shard, nbytes):
        return content(number, shard, nbytes)

    @property
    def is_counted(self):
        return self.tier.is_counted

    def _done(self, tier, job, error):
        assert tier is self.tier
        assert job.number not in self.over, "a job ended twice"
        self.over[job.number] = error

    def turn(self):
        """Make one posted call."""
        self.calls.get(timeout=HANGS_S)()

    def settle(self):
        """Until nothing is under way."""
        while self.tier._under_way or not self.calls.empty():
            self.turn()

    # ---- jobs -------------------------------------------------------------------------------

    def slot(self, number, nbytes=None):
        offset = number * round_up(self.slot_bytes)
        return Slot(offset, nbytes or self.slot_bytes, self.arena.generations[offset // GRANULE_BYTES])

    def put(self, slot, data):
        self.arena.data[slot.offset : slot.offset + slot.nbytes] = data

    def bytes_at(self, slot):
        return bytes(self.arena.view(slot))

    def copy(self, keys, shards=1, nbytes=None, layers=4):
        chunks = [SimpleNamespace(slot=self.slot(0, nbytes), layers=layers) for _ in range(len(keys) * shards)]
        return SimpleNamespace(number=next(self.numbers), keys=keys, shards=shards, chunks=chunks)

    def start_store(self, number, shard=0, *, shards=1, at=0, nbytes=None, layers=4, form=""):
        """Copy chunk `number` from slot `at`; the copy, or None if the tier left it out."""
        slot = self.slot(at, nbytes)
        self.put(slot, self._content(number, shard, slot.nbytes))
        copy = self.copy([key(number)], shards, nbytes, layers)
        if not self.tier.admit(copy).keys:
            self.tier.over(copy)
            return None
        part = Part(key(number), shard, layers, 0, layers, slot, form=form)
        self.tier.store(Job(copy.number, [part], slot.nbytes))
        return copy

    def start_load(self, number, shard=0, *, at=1, nbytes=None, layers=4):
        slot = self.slot(at, nbytes)
        self.put(slot, bytes(slot.nbytes))
        copy = self.copy([key(number)], 1, nbytes, layers)
        self.tier.load(Job(copy.number, [Part(key(number), shard, layers, 0, layers, slot)], slot.nbytes))
        return copy

    def end(self, copy):
        """Wait for the copy's job; its error."""
        while copy.number not in self.over:
            self.turn()
        self.tier.over(copy)
        return self.over[copy.number]

    def store(self, number, shard=0, **settings):
        """Whether it is stored."""
        copy = self.start_store(number, shard, **settings)
        if copy is None:
            return False
        error = self.end(copy)
        self.settle()
        return error is None

    def load(self, number, shard=0, *, at=1, nbytes=None, **settings):
        """The error, or None if the right bytes are in the arena."""
        error = self.end(self.start_load(number, shard, at=at, nbytes=nbytes, **settings))
        self.settle()
        if error is None:
            assert self.bytes_at(self.slot(at, nbytes)) == self._content(number, shard, nbytes or self.slot_bytes)
        return error

    def has(self, number, shards=1):
        return bool(self.tier.find([key(number)], shards))

    # ---- the folder -------------------------------------------------------------------------

    def file(self, number, shard=0, *, layers=4, nbytes=None):
        return chunk_file.path_of(self.root, ChunkFile(key(number), shard, layers, nbytes or self.slot_bytes))

    @property
    def files(self):
        return sorted(path for path in self.root.glob("??/*"))

    @property
    def disk_bytes(self):
        return sum(_blocks(path) for path in self.files)

    @property
    def charge(self):
        """Bytes of the cap that a chunk of one slot takes."""
        return chunk_file.disk_bytes(self.slot_bytes, 4, block_bytes=self.tier._block_bytes)


KV_BYTES = 256 << 10  # of a chunk of a `KvBed`


def kv(number: int, nbytes: int) -> bytes:
    """As bf16 has it: exponents that are alike."""
    values = np.random.default_rng(number).standard_normal(nbytes // 2 + 1).astype("<f4").view("<u4")
    return (values >> 16).astype("<u2").tobytes()[:nbytes]


class KvBed(Bed):
    """Whose chunks can be encoded."""

    def _content(self, number: int, shard: int, nbytes: int) -> bytes:
        return kv(number << 4 | shard, nbytes)

    @property
    def names(self) -> list[str]:
        return [path.name for path in self.files]

    def coded(self, number: int, shard: int = 0) -> int:
        """Bytes of its file behind the header; 0: it is not encoded, or not there."""
        return next((file.coded for file in self.tier._index.of(key(number)) if file.shard == shard), 0)

    def path(self, number: int) -> Path:
        (file,) = self.tier._index.of(key(number))
        return chunk_file.path_of(self.root, file)


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
