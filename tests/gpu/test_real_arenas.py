"""Several arenas in one node: what is sealed on a GPU is copied to host memory, comes back, and goes to another GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from device_bytes import read, write

from pdx.cuda.arena import GpuArena
from pdx.cuda.gpu import Gpu
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.node.arena_tier import ArenaTier
from pdx.store.chunk import Claim
from pdx.store.copies import Copies
from pdx.store.copy import Priority
from pdx.store.store import Store
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until

MIB = 1 << 20
CHUNKS, LAYERS, CHUNK_BYTES = 6, 4, 4 * MIB
KEYS = [b"%016d" % number for number in range(CHUNKS)]
WRITER = 1


class Stage:
    """Host memory and these GPUs, each with an arena of `CHUNKS` chunks; the first chunks are on the first GPU."""

    def __init__(self, folder: Path, gpus: list[Gpu], undo: ExitStack) -> None:
        nbytes = CHUNKS * CHUNK_BYTES
        self.gpus = gpus
        self.arenas: list[Arena] = [undo.enter_context(Arena.create(folder / "host", nbytes))]
        self.arenas += [
            undo.enter_context(GpuArena.create(folder / f"gpu{gpu.ordinal}", nbytes, gpu)) for gpu in self.gpus
        ]
        env = Env(lambda: 0.0)
        self.counters, self.mailbox = env.counters, env.mailbox
        self.store = Store(self.arenas[0], env, more=self.arenas[1:])
        self.copies = Copies(self.store, env, group_bytes=MIB)
        undo.callback(self.mailbox.close)
        self.tier = ArenaTier(self.arenas, self.store, self.copies, env)
        undo.callback(self.tier.close)
        self.contents = [os.urandom(CHUNK_BYTES) for _ in KEYS]

    def save(self) -> None:
        """As an engine on the first GPU does."""
        claim = Claim(keys=KEYS, nbytes=CHUNK_BYTES, layers=LAYERS, owner=WRITER, writers=[WRITER], arenas=(1,))
        _, slots, _ = self.store.reserve(claim)
        for slot, content in zip(slots, self.contents, strict=True):
            write(self.gpus[0], self.arenas[1].address + slot.offset, content)
            self.store.fill([slot], 0, LAYERS, WRITER)
        self.store.seal([self.store.at(slot) for slot in slots])

    def copy(self, source: int, target: int) -> None:
        """Until all chunks of an arena are in the other one, too."""
        copies = self.copies.store(
            self.tier, KEYS, 1, arenas=(source,), to=(target,), priority=Priority.AWAITED, deadline=1e9
        )
        assert sum(len(copy.keys) for copy in copies) == CHUNKS

        def is_over() -> bool:
            self.mailbox.deliver()
            self.copies.pump()
            return not len(self.copies)

        wait_until(is_over, timeout_s=60.0, what="the copy is over")
        assert self.counters["jobs_failed"] == 0

    def forget(self, arena: int) -> None:
        """Evict what is there, and overwrite it."""
        for slot in self.slots(arena):
            if self.arenas[arena].gpu:
                write(self.gpus[arena - 1], self.arenas[arena].address + slot.offset, bytes(CHUNK_BYTES))
            self.store.pools[arena].drop(self.store.at(slot), "evicted")

    def slots(self, arena: int) -> list[Slot]:
        """Of all chunks, in their order."""
        return [chunk.slot for (chunk,) in self.store.find(KEYS, 1, (arena,))]

    def found(self, arena: int) -> list[bytes]:
        """What the chunks hold there."""
        if not self.arenas[arena].gpu:
            return [bytes(self.arenas[arena].view(slot)) for slot in self.slots(arena)]
        address = self.arenas[arena].address
        return [read(self.gpus[arena - 1], address + slot.offset, slot.nbytes) for slot in self.slots(arena)]


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("is_locked", [True, False], ids=["page-locked", "at once"])
def test_chunks_go_to_host_memory_and_come_back(gpu: Gpu, tmp_path: Path, undo: ExitStack, is_locked: bool) -> None:
    stage = Stage(tmp_path, [gpu], undo)
    lock = stage.tier._page_lock
    assert lock is not None
    if is_locked:
        wait_until(lambda: lock.covers(0, stage.arenas[0].nbytes), timeout_s=60.0, what="page-locked")
    stage.save()
    stage.copy(1, 0)
    assert stage.found(0) == stage.contents
    stage.forget(1)
    stage.copy(0, 1)
    assert stage.found(1) == stage.contents
    assert not lock.error


def test_chunks_go_from_a_gpu_to_another(gpu: Gpu, peer_gpu: Gpu, tmp_path: Path, undo: ExitStack) -> None:
    stage = Stage(tmp_path, [gpu, peer_gpu], undo)
    stage.save()
    stage.copy(1, 2)
    assert stage.found(2) == stage.contents
    assert stage.found(0) == []
