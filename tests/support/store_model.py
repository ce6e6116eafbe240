"""A model of the store, which its state machine compares it with: what is in each slot, and who may use it."""

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from pdx.errors import StaleSlot
from pdx.memory.arena import GRANULE_BYTES, Arena, round_up
from pdx.memory.slot import Slot
from pdx.store.lifecycle import State
from pdx.store.policies import by_name
from pdx.store.store import Store
from pdx.telemetry.env import Env

GRANULES = 24
WRITABLE = (State.FILLING, State.QUARANTINED)


@dataclass
class Record:
    """What the model knows of one slot."""

    key: bytes
    shard: int
    slot: Slot
    layers: int
    owner: int
    writer: int
    deadline: float
    tail: bool
    number: int
    state: State = State.FILLING
    filled: set = field(default_factory=set)
    leases: int = 0
    pins: int = 0
    blocks: bytes = b""
    parent: bytes = b""

    def begins(self, other):
        """Whether it has nothing but leading blocks of the other one."""
        return bool(self.blocks) and self.parent == other.parent and other.blocks.startswith(self.blocks)

    def slice(self, layer):
        """(offset, bytes) of a slice."""
        start = self.slot.nbytes * layer // self.layers
        return self.slot.offset + start, self.slot.nbytes * (layer + 1) // self.layers - start

    def pattern(self, layer):
        nbytes = self.slice(layer)[1]
        return ((self.number << 8 | layer).to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]


@dataclass
class Lease:
    session: int
    deadline: float
    records: list


class StoreModel(RuleBasedStateMachine):
    """A store over a small arena, what the model knows of it, and what both do together; the rules are the test's."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.arena = Arena.create(Path(self.folder.name) / "arena", GRANULES * GRANULE_BYTES)
        self.now = 100.0
        self.numbers = itertools.count(1)
        self.sessions = {"client": next(self.numbers), "other": next(self.numbers)}
        self.sessions |= {"scheduler": next(self.numbers), "rank 0": next(self.numbers), "rank 1": next(self.numbers)}
        self.live = {}  # offset -> Record
        self.dead = []
        self.leases = {}  # number -> Lease
        self.holds = []  # lists of records
        self.last_generation = {}
        self.queue = {}  # number of a request that waits -> keys

    @initialize(policy=st.sampled_from(["lru", "s3fifo", "gittins"]))
    def start(self, policy):
        self.store = Store(self.arena, Env(lambda: self.now), policy=by_name.find(policy))

    def index(self, shard, key):
        """The record that stands in the index."""
        for record in self.live.values():
            if (record.shard, record.key) == (shard, key) and record.state in (State.FILLING, State.SEALED):
                return record
        return None

    def is_absent(self, key, shards):
        present = [record for shard in range(shards) if (record := self.index(shard, key))]
        return len(present) < shards and all(record.state is State.SEALED for record in present)

    def die(self, record):
        del self.live[record.slot.offset]
        self.dead.append(record.slot)

    def drop(self, record):
        if record.leases:
            record.state = State.RETIRED
        else:
            self.die(record)

    def end_lease(self, number):
        self.unread(self.leases.pop(number).records)

    def unread(self, records):
        for record in records:
            record.leases -= 1
            is_for_one = record.tail and not record.blocks
            is_spent = record.state is State.RETIRED or (is_for_one and record.state is State.SEALED)
            if not record.leases and is_spent:
                self.die(record)

    def let_go_model(self, record):
        """Its writer writes no more; a push may still read what it wrote."""
        if record.leases:
            record.state = State.RETIRED
        else:
            self.die(record)

    def hits(self, keys, shards):
        """The leading run that is sealed in all shards."""
        found = []
        for key in keys:
            records = [self.index(shard, key) for shard in range(shards)]
            if not all(record and record.state is State.SEALED for record in records):
                break
            found.append(records)
        return found

    def pick(self, index, *states):
        records = [record for record in self.live.values() if record.state in states]
        return records[index % len(records)] if records else None

    def is_evictable(self, record):
        return record.state is State.SEALED and not record.leases and not record.pins

    def free_bytes(self):
        return self.arena.nbytes - sum(round_up(record.slot.nbytes) for record in self.live.values())

    def fitting(self, size):
        """How many slots of `size` bytes would fit if everything were evicted that may be."""
        stays = sorted(
            (record.slot.offset, record.slot.offset + round_up(record.slot.nbytes))
            for record in self.live.values()
            if not self.is_evictable(record)
        )
        edges = [0, *itertools.chain.from_iterable(stays), self.arena.nbytes]
        return sum((end - start) // size for start, end in zip(edges[::2], edges[1::2], strict=True))

    def take_evicted(self):
        """Records that the store evicted: only ones that nobody holds."""
        evicted = [record for record in self.live.values() if not self.is_there(record)]
        for record in evicted:
            assert self.is_evictable(record), f"evicted {record}"
            self.die(record)
        return evicted

    def is_there(self, record):
        try:
            self.store.at(record.slot)
        except StaleSlot:
            return False
        return True

    def is_new(self, slot):
        """A granted slot overlaps nobody's memory and has a generation that was never promised there before."""
        end = slot.offset + round_up(slot.nbytes)
        for other in self.live.values():
            other_end = other.slot.offset + round_up(other.slot.nbytes)
            assert end <= other.slot.offset or other_end <= slot.offset, f"{slot} overlaps {other}"
        assert slot.generation > self.last_generation.get(slot.offset, -1)
        self.last_generation[slot.offset] = slot.generation
        assert self.arena.is_current(slot)

    def write(self, record, layer):
        start, nbytes = record.slice(layer)
        self.arena.data[start : start + nbytes] = record.pattern(layer)

    def seal_model(self, record):
        if record.state is State.QUARANTINED:
            self.let_go_model(record)
        else:
            record.state = State.SEALED
            for gone in self.take_evicted():
                assert gone.key != record.key
                assert gone.begins(record)

    def end_hold(self, records):
        self.store.unhold([self.store.at(record.slot) for record in records])
        self.unread(records)

    def end(self, session):
        self.store.end_session(session)
        for number, lease in list(self.leases.items()):
            if lease.session == session:
                self.end_lease(number)
        for record in list(self.live.values()):
            if record.state in WRITABLE and record.writer == session:
                self.let_go_model(record)
            elif record.state is State.FILLING and record.owner == session:
                record.state = State.QUARANTINED


def writing(store):
    """Offsets of chunks that somebody may still write, by what the store knows of their writers."""
    writers = store.index.writers
    return {chunk.slot.offset for session, _, _ in writers.sizes() for chunk in writers.of(session)}
