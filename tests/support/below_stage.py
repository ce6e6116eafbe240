"""A store with a tier below it: a dictionary whose jobs end when the test says so.

It stands for a disk: bytes move at the end of a job, which is the latest moment at which a tier may touch the arena.
"""

from pathlib import Path

from pdx.errors import NodeError
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.store.chunk import Claim, Wanted
from pdx.store.copies import Copies
from pdx.store.lifecycle import State
from pdx.store.store import LRU, Store
from pdx.store.tier import Grant, Held, Tier
from pdx.store.tiers import Tiers
from pdx.telemetry.env import Env

LAYERS = 2
WRITER = 1
GRANULES = 16


def key(number):
    return b"%016d" % number


def pattern(name, shard):
    return bytes([name[-1] * 3 + shard + 1]) * GRANULE_BYTES


class DictTier(Tier):
    """A fake: chunks in a dictionary, jobs that end by `end`."""

    kind = name = "below"
    is_whole = takes_stores = True

    def __init__(self, arena, copies_of):
        self.arena = arena
        self.copies_of = copies_of
        self.chunks = {}
        self.jobs = []  # (verb, job)
        self.cancelled = set()
        self.is_over = []

    def find(self, keys, shards):
        held = []
        for name in keys:
            if not all((name, shard) in self.chunks for shard in range(shards)):
                break
            held.append(Held(GRANULE_BYTES, LAYERS))
        return held

    def admit(self, copy):
        return Grant([at for at, name in enumerate(copy.keys) if not self.find([name], copy.shards)])

    def store(self, job):
        self.jobs.append(("store", job))

    def load(self, job):
        self.jobs.append(("load", job))

    def cancel(self, copy):
        self.cancelled.add(copy.number)

    def copy_ended(self, copy):
        assert all(job.number != copy.number for _, job in self.jobs), "a job of it is under way"
        self.is_over.append((copy.number, copy.is_complete))

    def evict(self, keys, shards=0):
        gone = {where for where in self.chunks if where[0] in keys}
        for where in gone:
            del self.chunks[where]
        return len({name for name, _ in gone})

    def close(self):
        pass

    def end(self, at=0, *, fails=False):
        """A job is over."""
        verb, job = self.jobs.pop(at)
        error = NodeError("asked to") if fails else None
        for part in job.parts:
            self.arena.check(part.slot)  # nobody else was given the memory
            assert (part.first_layer, part.count) == (0, LAYERS)
            view = self.arena.view(part.slot)
            where = part.key, part.shard
            if fails:
                continue
            if verb == "store":
                self.chunks[where] = bytes(view)
            elif where in self.chunks:
                view[:] = self.chunks[where]
            else:
                error = NodeError("evicted meanwhile")
            view.release()
        self.copies_of().done(self, job, error)


class Stage:
    """A store with a tier below."""

    def __init__(self, folder, granules=GRANULES, more_granules=0, policy=LRU, **settings):
        self.now = 100.0
        self.arena = Arena.create(Path(folder) / "arena", granules * GRANULE_BYTES)
        sizes = [more_granules * GRANULE_BYTES] if more_granules else []
        self.more = [Arena.create(Path(folder) / "arena-1", size) for size in sizes]
        self.env = Env(lambda: self.now)
        self.counters = self.env.counters
        self.store = Store(self.arena, self.env, more=self.more, policy=policy)
        self.copies = Copies(self.store, self.env, group_bytes=1 << 20)
        self.tier = DictTier(self.arena, lambda: self.copies)
        self.tiers = Tiers(
            self.store,
            self.copies,
            self.env,
            below=[[self.tier]],
            store_s=20.0,
            load_s=5.0,
            **settings,
        )

    def save(self, numbers, shards=1):
        """A worker fills and seals what is not there."""
        claim = Claim(
            keys=[key(number) for number in numbers],
            nbytes=GRANULE_BYTES,
            layers=LAYERS,
            owner=WRITER,
            writers=[WRITER] * shards,
            partial=True,
        )
        _, slots, _ = self.store.reserve(claim)
        for slot in slots:
            chunk = self.store.at(slot)
            self.arena.view(slot)[:] = pattern(chunk.key, chunk.shard)
        chunks = self.store.fill(slots, 0, LAYERS, WRITER)
        self.store.seal(chunks)
        self.tiers.storing.changed(chunks)
        self.turn()

    def turn(self):
        self.copies.pump()
        landed, self.copies.landed = self.copies.landed, []
        self.copies.changed(landed)
        self.tiers.storing.changed(landed)
        self.tiers.storing.turn()
        self.copies.pump()

    def hits(self, numbers, shards=1):
        return len(self.store.find([key(number) for number in numbers], shards))

    def may_come(self, numbers, shards=1):
        hits = self.hits(numbers, shards)
        may = hits < len(numbers) and self.tiers.may_come(Wanted([key(n) for n in numbers], shards), hits)
        self.turn()
        return may

    def end(self, at=0, *, fails=False):
        self.tier.end(at, fails=fails)
        self.turn()

    def end_all(self):
        while self.tier.jobs:
            self.end()

    def forget(self, numbers):
        return self.store.delete([key(number) for number in numbers])

    def check(self):
        """What can be hit has the right bytes, in the arena and below."""
        for chunk in self.store.index.slots[0].values():
            if chunk.state is State.SEALED:
                assert bytes(self.arena.view(chunk.slot)) == pattern(chunk.key, chunk.shard)
        for (name, shard), data in self.tier.chunks.items():
            assert data == pattern(name, shard)

    def assert_idle(self):
        self.end_all()
        assert len(self.copies) == 0
        queue = self.copies.queue(self.tier)
        assert (queue.copies, queue.in_flight, queue.loads, queue.stored_bytes) == ({}, 0, 0, 0)
        for chunk in self.store.index.slots[0].values():
            assert chunk.leases == 0
            assert chunk.state is State.SEALED, "what is not sealed has no owner any more"

    def close(self):
        for arena in [self.arena, *self.more]:
            arena.close()
