"""Several arenas with a disk below, in any order: what is hit is what was written last, and nothing is left behind."""

import random
from types import SimpleNamespace

import pytest
from arenas_stage import SLICE, Stage, key

from pdx.memory.arena import GRANULE_BYTES
from pdx.store.disk.tier import DiskTier
from pdx.store.lifecycle import State
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until


class Whole(Stage):
    """`versions`: how often what a name means was changed, as a client may that deletes a chunk."""

    def __init__(self, folder, random_):
        super().__init__(folder, granules=random_.choice([4, 6, 16]))
        self.random = random_
        env = Env()  # the clock of copies jumps, and no thread of the disk would seem to answer
        env.counters, env.mailbox = self.counters, self.mailbox
        host = SimpleNamespace(
            env=env,
            memory=self.arenas,
            done=self.tiers.done,
            removed=self.tiers.removed,
            is_used=self.tiers.is_used,
            wanted=self.store.wanted,
        )
        self.disk = DiskTier(host, folder / "disk", random_.choice([3, 10, 50]) * 3 * GRANULE_BYTES)
        self.tiers.below.append([self.disk])
        self.versions = {}
        self.filling = []  # slots of reservations
        self.leases = []

    def pattern(self, number, shard, layer):
        return bytes([(number * 16 + shard * 4 + layer + 97 * self.versions.get(number, 0)) % 251 + 1]) * SLICE

    def any_step(self):
        first = self.random.randrange(8)
        numbers = list(range(first, first + self.random.randrange(1, 5)))
        arenas = self.random.choice([(), (), (1,), (2,), (1, 2)])
        verbs = [self.save, self.save, self.save, self.ask, self.ask, self.change, self.evict, self.end, self.late]
        self.random.choice([*verbs, self.lease, self.release])(numbers, arenas)
        for _ in range(self.random.randrange(3)):
            self.turn()

    def save(self, numbers, arenas):
        self.filling.append(self.reserve(numbers, arenas or (0,)))
        if self.random.random() < 0.7:
            self.end()

    def end(self, *_):
        """A writer is done, or gives up where something of it was given up for it."""
        if self.filling:
            slots = self.filling.pop()
            left = self.store.unfinished(slots)
            if len(left) == len(slots):
                self.fill(slots)
            else:
                self.store.let_go(left)
                self.changed(left)

    def ask(self, numbers, arenas):
        self.may_come(numbers, arenas)

    def change(self, numbers, _):
        for slots in self.filling:
            left = self.store.unfinished(slots)
            self.store.let_go(left)
            self.changed(left)
        self.filling.clear()
        for number in numbers:
            self.store.delete([key(number)])
            self.tiers.forget([key(number)])
            self.versions[number] = self.versions.get(number, 0) + 1

    def evict(self, numbers, arenas):
        for chunk in list(self.store.index.slots[max(arenas, default=0)].values()):
            if chunk.state is State.SEALED and int(chunk.key) in numbers:
                self.store.pools[chunk.slot.arena].drop(chunk, "evicted")

    def late(self, *_):
        self.now += self.random.randrange(1, 30)
        late = self.store.expire()
        self.changed(late)
        self.copies.tick(self.now)

    def lease(self, numbers, arenas):
        found = self.store.find([key(number) for number in numbers], max(1, len(arenas)), arenas)
        if found:
            self.leases.append(self.store.lease([chunk for chunks in found for chunk in chunks], 1, 1e9))

    def release(self, *_):
        if self.leases:
            self.store.release(self.leases.pop(), 1)

    def assert_all_over(self, folder):
        while self.filling:
            self.end()
        while self.leases:
            self.release()
        wait_until(lambda: self.turn() or (self.disk.is_counted and self.disk.is_idle and not len(self.copies)))
        self.assert_idle()
        for name in ("_admitted", "_busy", "_later"):
            assert not getattr(self.disk, name), name
        files = list((folder / "disk").glob("??/*"))
        assert len(files) == self.disk.num_chunks
        assert sum(path.stat().st_blocks * 512 for path in files) <= self.disk.used_bytes <= self.disk.limit_bytes
        chunks = [chunk for slots in self.store.index.slots for chunk in slots.values()]
        assert {chunk.state for chunk in chunks} <= {State.SEALED}
        self.store.delete([chunk.key for chunk in chunks])
        assert self.store.free_bytes == self.store.total_bytes


@pytest.mark.parametrize("seed", range(8))
def test_what_is_hit_is_what_was_written_last_and_nothing_is_left(tmp_path, seed):
    tmp_path.chmod(0o700)
    stage = Whole(tmp_path, random.Random(seed))
    try:
        for _ in range(100):
            stage.any_step()
            stage.check()
        stage.assert_all_over(tmp_path)
    finally:
        stage.close()
