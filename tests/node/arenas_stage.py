"""A store with several arenas; the GPUs are fake ones."""

import ctypes

from pdx.cuda import driver
from pdx.cuda.arena import GpuArena
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.node.arena_tier import ArenaTier
from pdx.store.chunk import Claim, Wanted
from pdx.store.copies import Copies
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.tiers import Tiers
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until

LAYERS = 4
SLICE = GRANULE_BYTES // LAYERS
WRITER = 1


def key(number):
    return b"%016d" % number


class Stage:
    """A store with three arenas: one in host memory, and two on `gpus`; without these in host memory, too."""

    def __init__(self, folder, granules=16, gpus=(), tracer=None):
        self.now = 100.0
        self.env = Env(lambda: self.now)
        self.counters, self.mailbox = self.env.counters, self.env.mailbox
        nbytes = granules * GRANULE_BYTES
        self.arenas = [Arena.create(folder / f"arena{n}", nbytes) for n in range(3 - len(gpus))]
        self.arenas += [GpuArena.create(folder / f"gpu{gpu.ordinal}", nbytes, gpu) for gpu in gpus]
        self.store = Store(self.arenas[0], self.env, more=self.arenas[1:])
        self.copies = Copies(self.store, self.env, group_bytes=1, tracer=tracer)
        self.tier = ArenaTier(self.arenas, self.store, self.copies, self.env)
        self.tiers = Tiers(
            self.store,
            self.copies,
            self.env,
            memory=self.arenas,
            arenas=self.tier,
            store_s=20.0,
            load_s=5.0,
        )

    def reserve(self, numbers, arenas=(1,), **claim):
        claim = Claim(
            keys=[key(number) for number in numbers],
            nbytes=GRANULE_BYTES,
            layers=LAYERS,
            owner=WRITER,
            writers=[WRITER] * len(arenas),
            arenas=arenas,
            **{"partial": True} | claim,
        )
        _, slots, _ = self.store.reserve(claim)
        return slots

    def pattern(self, number, shard, layer):
        return bytes([(number * 16 + shard * 4 + layer) % 251 + 1]) * SLICE

    def write(self, number, at, data):
        arena = self.arenas[number]
        if arena.gpu:
            ctypes.memmove(driver.api().memory.look(arena.address + at, len(data)), data, len(data))
        else:
            arena.data[at : at + len(data)] = data

    def fill(self, slots, layers=range(LAYERS)):
        """As the writer: the slices of these layers; seals with the last."""
        for slot in slots:
            chunk = self.store.at(slot)
            for layer in layers:
                self.write(slot.arena, slot.offset + layer * SLICE, self.pattern(int(chunk.key), chunk.shard, layer))
                self.store.fill([slot], layer, 1, WRITER)
        chunks = [self.store.at(slot) for slot in slots]
        if all(chunk.is_complete for chunk in chunks):
            self.store.seal(chunks)
        self.changed(chunks)

    def save(self, numbers, arenas=(1,)):
        self.fill(self.reserve(numbers, arenas))
        self.settle()

    def changed(self, chunks):
        self.copies.changed(chunks)
        self.tiers.storing.changed(chunks)
        self.turn()

    def turn(self):
        self.mailbox.deliver()
        landed, self.copies.landed = self.copies.landed, []
        self.copies.changed(landed)
        self.tiers.storing.changed(landed)
        self.tiers.storing.turn()
        self.copies.pump()

    def settle(self):
        """Until no copy is under way."""

        def is_idle():
            self.turn()
            return not len(self.copies) and not self.copies.landed

        wait_until(is_idle)

    def hits(self, numbers, arenas=()):
        return len(self.store.find([key(number) for number in numbers], max(1, len(arenas)), arenas))

    def may_come(self, numbers, arenas, transfer=None):
        hits = self.hits(numbers, arenas)
        if hits == len(numbers):
            return False
        may = self.tiers.may_come(Wanted([key(n) for n in numbers], len(arenas) or 1, arenas), hits, transfer=transfer)
        self.copies.pump()
        return may

    def check(self):
        for arena, slots in enumerate(self.store.index.slots):
            for offset, chunk in slots.items():
                assert (chunk.slot.arena, chunk.slot.offset) == (arena, offset)
                if chunk.state is State.SEALED:
                    view = bytes(self.arenas[arena].read(offset, chunk.slot.nbytes))
                    expected = b"".join(self.pattern(int(chunk.key), chunk.shard, layer) for layer in range(LAYERS))
                    assert view == expected

    def assert_idle(self):
        self.settle()
        self.check()
        assert not self.tier._slots
        assert not self.tier._cancelled
        for slots in self.store.index.slots:
            for chunk in slots.values():
                assert chunk.leases == 0

    def close(self):
        self.tiers.close()
        self.mailbox.close()
        for arena in self.arenas:
            arena.close()
