"""A real store with its log of events, a tier below it that the test fills, and what is there by their own word."""

import os
from types import SimpleNamespace

from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.node.events.log import EventLog
from pdx.store.chunk import Claim
from pdx.store.store import Store
from pdx.store.tier import Tier
from pdx.telemetry.env import Env

WRITER = 1
BLOCK = 16


def key(number):
    return number.to_bytes(2, "big") * 8


def names(*numbers):
    """Of blocks."""
    return b"".join(number.to_bytes(BLOCK, "big") for number in numbers)


class Below(Tier):
    """A fake: it has what the test says."""

    def __init__(self, name="disk"):
        self.kind = self.name = name
        self.there = {}  # key -> shards

    def holds(self, key, shards=0):
        return key in self.there and (not shards or self.there[key] >= shards)

    def keys(self):
        return list(self.there)

    def put(self, key, shards=1):
        self.there[key] = shards
        self.note([key])

    def drop(self, key):
        self.there.pop(key, None)
        self.note([key])

    def close(self):
        pass

    admit = store = cancel = copy_ended = close  # nobody calls them here


class EventsBed:
    """`gpus`: arenas besides, by name; each of `slots` chunks."""

    def __init__(self, folder, *, slots=8, gpus=(), **settings):
        self.arenas = []
        for number in range(1 + len(gpus)):
            path = folder / f"arena-{os.getpid()}-{number}"
            self.arenas.append(Arena.create(path, slots * GRANULE_BYTES))
        self.now = 0.0
        self.env = Env(lambda: self.now)
        self.store = Store(self.arenas[0], self.env, more=self.arenas[1:])
        self.disk, self.remote = Below("disk"), Below("remote")
        self.tiers = SimpleNamespace(below=[[self.disk], [self.remote]])
        self.counters = self.env.counters
        self.names = ["host", *gpus]
        self.log = EventLog(self.store, self.tiers, ["", *gpus], self.env, born_at=1000.0, **settings)

    def close(self):
        for arena in self.arenas:
            arena.close()
            arena.path.unlink()

    def reserve(self, keys, *, shards=1, arenas=(), **claim):
        """Slots by key."""
        asked = Claim(
            keys=keys,
            nbytes=GRANULE_BYTES,
            layers=1,
            owner=WRITER,
            writers=[WRITER] * shards,
            arenas=arenas,
            partial=True,
            **claim,
        )
        granted, slots, _ = self.store.reserve(asked)
        return {keys[index]: slots[at * shards : (at + 1) * shards] for at, index in enumerate(granted)}

    def seal(self, slots):
        self.store.seal(self.store.fill(slots, 0, 1, WRITER))

    def put(self, *keys, **claim):
        """Sealed in all shards, as far as there is room."""
        for slots in self.reserve(list(keys), **claim).values():
            self.seal(slots)

    def truth(self):
        """Key -> names of the tiers that have all of it."""
        found = {}
        for number, name in enumerate(self.names):
            for chunk in self.store.index.slots[number].values():
                shards = self.store.index.of(chunk.key)
                sealed = [
                    each
                    for each in shards
                    if each.state == "sealed" and each.slot.arena in (chunk.reservation.arenas or (0,))
                ]
                if len({each.shard for each in sealed}) == chunk.reservation.shards and not (
                    chunk.tail and not chunk.blocks
                ):
                    found.setdefault(chunk.key, set()).add(name)
        for tier in (self.disk, self.remote):
            for each in tier.there:
                found.setdefault(each, set()).add(tier.name)
        return found


def random_step(bed, rng):
    """Something happens to some chunk."""
    at = key(rng.randrange(24))
    tier = rng.choice([bed.disk, bed.remote])
    match rng.randrange(7):
        case 0 | 1 | 2:
            chunks = [key(rng.randrange(24)) for _ in range(rng.randrange(1, 5))]
            bed.put(*dict.fromkeys(chunks), shards=1 + (at[1] % 2 if len(bed.names) == 1 else 0))
        case 3:
            bed.store.delete([at])
        case 4:
            tier.put(at)
        case 5:
            tier.drop(at)
        case 6 if len(bed.names) > 1:
            bed.put(at, arenas=(1,))
