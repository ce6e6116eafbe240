"""The store against a model, with writers that really write and readers that really read (invariants 1 to 4).

Two kinds of sessions use one small arena: clients that write one shard themselves, and engines whose scheduler
reserves what two workers write. Every chunk has a pattern of its own; a writer may write whenever its slot is not
let go, also after its reservation was aborted. Pushes hold chunks in any state but the last, and read them meanwhile.
"""

import itertools

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from store_model import WRITABLE, Lease, Record, StoreModel, writing

from pdx.errors import ArenaTooSmall, ChunkMissing, ProtocolError, StaleSlot
from pdx.memory.arena import GRANULE_BYTES, NEVER, round_up
from pdx.memory.keys import KEY_BYTES
from pdx.store.chunk import Claim
from pdx.store.lifecycle import State
from pdx.store.siblings import common

KEYS = {1: [b"c%d" % n for n in range(6)], 2: [b"e%d" % n for n in range(6)]}  # by shards
HOLDABLE = (State.FILLING, State.SEALED)
indices = st.integers(0, 1 << 16)
WIDTH = 2  # blocks to a chunk
names = st.text("ab", max_size=5 * WIDTH)  # of the blocks of a prompt
parents = st.sampled_from([b"p" * KEY_BYTES, b"c0"])  # what leads up to its first chunk


def named(letters):
    return b"".join(letter.encode() * KEY_BYTES for letter in letters)


class StoreMachine(StoreModel):
    # ---- reserving and writing -------------------------------------------------------------

    @rule(
        who=st.sampled_from(["client", "other", "scheduler"]),
        chosen=st.lists(st.integers(0, 5), min_size=1, max_size=5),
        granules=st.sampled_from([1, 1, 2, 3, 3, 30]),
        layers=st.integers(1, 3),
        tail=st.booleans(),
        partial=st.booleans(),
        seconds=st.integers(1, 50),
        letters=names,
        parent=parents,
    )
    def reserve(self, who, chosen, granules, layers, tail, partial, seconds, letters, parent):
        shards = 2 if who == "scheduler" else 1
        keys = [KEYS[shards][index] for index in chosen]
        owner = self.sessions[who]
        writers = [self.sessions["rank 0"], self.sessions["rank 1"]] if shards == 2 else [owner]
        nbytes, deadline = granules * GRANULE_BYTES - 100, self.now + seconds
        claim = Claim(
            keys=keys,
            nbytes=nbytes,
            layers=layers,
            owner=owner,
            writers=writers,
            tail_nbytes=700 if tail else 0,
            partial=partial,
            deadline=deadline,
            blocks=named(letters[: WIDTH * len(keys)]),
            chunk_blocks=WIDTH,
            parent=parent,
        )
        if len(set(keys)) < len(keys):
            with pytest.raises(ProtocolError, match="twice"):
                self.store.reserve(claim)
            return
        wanted = [index for index, key in enumerate(keys) if self.is_absent(key, shards)]
        sizes = [700 if tail and index == len(keys) - 1 else nbytes for index in range(len(keys))]
        total = sum(round_up(sizes[index]) for index in wanted) * shards
        for key in (keys[index] for index in wanted):
            for record in filter(None, (self.index(shard, key) for shard in range(shards))):
                self.drop(record)  # what is left of a chunk that lost a shard
        least = max((round_up(sizes[i]) * shards for i in wanted), default=0) if partial else total
        if least > self.arena.nbytes:
            with pytest.raises(ArenaTooSmall):
                self.store.reserve(claim)
            return
        free_before = self.free_bytes()
        fitting = self.fitting(round_up(claim.nbytes))
        evictable = sum(round_up(r.slot.nbytes) for r in self.live.values() if self.is_evictable(r))
        granted, slots, full = self.store.reserve(claim)
        evicted = self.take_evicted()
        assert granted == wanted[: len(granted)], "grants are leading"
        assert len(slots) == len(granted) * shards
        assert full == (len(granted) < len(wanted))
        assert partial or granted in ([], wanted)
        if not partial and total > free_before + evictable:
            assert full
        if not partial and full:
            assert not evicted, "evicted in vain"
        if len({round_up(sizes[index]) for index in wanted}) == 1 and not (tail and wanted[0] == len(keys) - 1):
            possible = min(fitting // shards, len(wanted))
            assert len(granted) == (possible if partial or possible == len(wanted) else 0), "as many as can fit"
        for number, slot in enumerate(slots):
            index, shard = granted[number // shards], number % shards
            assert slot.nbytes == sizes[index]
            self.is_new(slot)
            self.live[slot.offset] = Record(
                keys[index],
                shard,
                slot,
                layers,
                owner,
                writers[shard],
                deadline,
                tail=tail and index == len(keys) - 1,
                number=next(self.numbers),
                blocks=claim.blocks[16 * WIDTH * index : 16 * WIDTH * (index + 1)],
                parent=keys[index - 1] if index else parent,
            )

    @rule(index=indices, layer=st.integers(0, 2))
    def fill(self, index, layer):
        if record := self.pick(index, *WRITABLE):
            layer %= record.layers
            self.write(record, layer)
            self.store.fill([record.slot], layer, 1, record.writer)
            record.filled.add(layer)

    @rule(index=indices)
    def fill_and_seal(self, index):
        """What a worker does for a whole chunk at once; most chunks are sealed so."""
        if record := self.pick(index, *WRITABLE):
            for layer in range(record.layers):
                self.write(record, layer)
                record.filled.add(layer)
            chunks = self.store.fill([record.slot], 0, record.layers, record.writer)
            self.store.seal(chunks)
            self.seal_model(record)

    @rule(index=indices)
    def seal(self, index):
        if record := self.pick(index, *WRITABLE):
            chunk = self.store.at(record.slot)
            if record.state is State.FILLING and len(record.filled) < record.layers:
                with pytest.raises(ProtocolError, match="missing"):
                    self.store.seal([chunk])
            else:
                self.store.seal([chunk])
                self.seal_model(record)

    @rule(index=indices)
    def scribble(self, index):
        """A writer that has not let go writes, whatever became of its reservation."""
        if record := self.pick(index, *WRITABLE):
            start, nbytes = record.slice(0)
            self.arena.data[start : start + nbytes] = b"\xff" * nbytes
            record.filled.discard(0)
            chunk = self.store.at(record.slot)
            chunk.filled &= ~1
            if record.state is State.FILLING:
                self.store.pools[0].tell_filled(chunk)

    @rule(index=indices, who=st.sampled_from(["client", "other", "scheduler", "rank 0", "rank 1"]))
    def fill_what_belongs_to_another(self, index, who):
        if (record := self.pick(index, *State)) and (
            record.writer != self.sessions[who] or record.state not in WRITABLE
        ):
            with pytest.raises(StaleSlot):
                self.store.fill([record.slot], 0, record.layers, self.sessions[who])

    @rule(index=indices)
    def abort(self, index):
        if record := self.pick(index, *State):
            self.store.abort([self.store.at(record.slot)])
            if record.state is State.FILLING:
                record.state = State.QUARANTINED

    @rule(index=indices)
    def let_go(self, index):
        if record := self.pick(index, *State):
            self.store.let_go([self.store.at(record.slot)])
            if record.state in WRITABLE:
                self.let_go_model(record)

    # ---- reading ---------------------------------------------------------------------------

    @rule(
        shards=st.sampled_from([1, 2]),
        chosen=st.lists(st.integers(0, 5), min_size=1, max_size=6),
        who=st.sampled_from(["client", "other", "scheduler"]),
        seconds=st.integers(1, 30),
    )
    def find_and_lease(self, shards, chosen, who, seconds):
        keys = [KEYS[shards][index] for index in chosen]
        found = self.store.find(keys, shards)
        expected = self.hits(keys, shards)
        assert [[c.slot for c in chunks] for chunks in found] == [[r.slot for r in rs] for rs in expected]
        if found:
            session = self.sessions[who]
            number = self.store.lease([chunk for chunks in found for chunk in chunks], session, seconds)
            records = [record for records in expected for record in records]
            self.leases[number] = Lease(session, self.now + seconds, records)
            for record in records:
                record.leases += 1

    @rule(shards=st.sampled_from([1, 2]), parent=parents, letters=names)
    def find_part(self, shards, parent, letters):
        blocks = named(letters)
        sealed = [record for record in self.live.values() if record.state is State.SEALED and record.parent == parent]
        found = self.store.part(parent, blocks, shards)
        if found is not None:
            chunks, count = found
            records = [self.live[chunk.slot.offset] for chunk in chunks]
            assert [record.shard for record in records] == list(range(shards))
            assert len({record.key for record in records}) == 1
            assert records[0].parent == parent
            assert 0 < count <= common(records[0].blocks, blocks)
        if not any(record.key in KEYS[2] for record in sealed):  # of two shards one may be missing, or name others
            most = max((common(record.blocks, blocks) for record in sealed), default=0)
            assert (found[1] if found is not None else 0) == (most if shards == 1 else 0)

    @rule(index=indices)
    def release(self, index):
        if self.leases:
            number = sorted(self.leases)[index % len(self.leases)]
            with pytest.raises(ChunkMissing):
                self.store.release(number, -1)
            self.store.release(number, self.leases[number].session)
            self.end_lease(number)
            with pytest.raises(ChunkMissing):
                self.store.release(number, -1)

    @rule(shards=st.sampled_from([1, 2]), first=st.integers(0, 5), count=st.integers(1, 3), is_use=st.booleans())
    def hold(self, shards, first, count, is_use):
        """What a copy does: it holds the chunks that are here or being filled."""
        found = [(key, self.store.index.known(key, shards)) for key in KEYS[shards][first : first + count]]
        for key, chunks in found:
            records = [self.index(shard, key) for shard in range(shards)]
            assert (chunks is None) == (None in records)
            assert chunks is None or [chunk.slot for chunk in chunks] == [record.slot for record in records]
        held = [chunk for _, chunks in found for chunk in chunks or ()]
        records = [self.live[chunk.slot.offset] for chunk in held]
        assert all(record.state in HOLDABLE for record in records)
        self.store.hold(held, is_use=is_use)
        for record in records:
            record.leases += 1
        self.holds.append(records)

    @rule(shards=st.sampled_from([1, 2]), first=st.integers(0, 5), count=st.integers(1, 3), seconds=st.integers(1, 30))
    def lease_what_is_filling(self, shards, first, count, seconds):
        """What a decode engine is given that copies slices while others are filled."""
        known = [self.store.index.known(key, shards) for key in KEYS[shards][first : first + count]]
        chunks = [chunk for found in known for chunk in found or ()]
        if chunks:
            records = [self.live[chunk.slot.offset] for chunk in chunks]
            session = self.sessions["scheduler"]
            number = self.store.lease(chunks, session, seconds)
            self.leases[number] = Lease(session, self.now + seconds, records)
            for record in records:
                record.leases += 1

    @rule(index=indices)
    def unhold(self, index):
        if self.holds:
            self.end_hold(self.holds.pop(index % len(self.holds)))

    @rule(index=indices, seconds=st.integers(1, 50))
    def renew(self, index, seconds):
        if self.leases:
            number = sorted(self.leases)[index % len(self.leases)]
            self.store.renew(number, self.leases[number].session, seconds)
            self.leases[number].deadline = self.now + seconds

    @rule(shards=st.sampled_from([1, 2]), index=st.integers(0, 5), pinned=st.booleans())
    def pin(self, shards, index, pinned):
        key = KEYS[shards][index]
        expected = self.hits([key], shards)
        assert self.store.pin([key], shards, pinned=pinned) == len(expected)
        for record in itertools.chain(*expected):
            record.pins = max(0, record.pins + (1 if pinned else -1))

    @rule(shards=st.sampled_from([1, 2]), index=st.integers(0, 5))
    def delete(self, shards, index):
        key = KEYS[shards][index]
        sealed = [r for shard in range(shards) if (r := self.index(shard, key)) and r.state is State.SEALED]
        assert self.store.delete([key]) == bool(sealed)
        for record in sealed:
            self.drop(record)

    # ---- time and sessions -----------------------------------------------------------------

    @rule(shards=st.sampled_from([1, 2]), chosen=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def want(self, shards, chosen):
        """A request in a queue tells what it will use."""
        keys = [KEYS[shards][index] for index in chosen]
        number = next(self.numbers)
        self.store.want(keys, number)
        self.queue[number] = keys

    @rule(index=indices)
    def want_no_more(self, index):
        if self.queue:
            number = sorted(self.queue)[index % len(self.queue)]
            self.store.want_no_more(self.queue.pop(number), number)

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds):
        self.now += seconds
        late = self.store.expire()
        for number, lease in list(self.leases.items()):
            if lease.deadline <= self.now:
                self.end_lease(number)
        aborted = [r for r in self.live.values() if r.state is State.FILLING and r.deadline <= self.now]
        assert {chunk.slot for chunk in late} == {record.slot for record in aborted}
        for record in aborted:
            record.state = State.QUARANTINED

    @precondition(lambda self: self.live)
    @rule(who=st.sampled_from(["client", "other", "scheduler", "rank 0", "rank 1"]))
    def session_ends(self, who):
        session = self.sessions[who]
        self.sessions[who] = next(self.numbers)
        self.end(session)

    # ---- what always holds -----------------------------------------------------------------

    @invariant()
    def readers_see_what_is_filled(self):
        """Without asking: leading slices may be read, or the rest will never come."""
        for record in self.live.values():
            count = self.arena.filled_slices(record.slot)
            leading = next((at for at in range(record.layers) if at not in record.filled), record.layers)
            if record.state is State.QUARANTINED:
                assert count == NEVER
            elif record.state is not State.RETIRED:
                assert count == (record.layers if record.state is State.SEALED else leading)
                for layer in range(count):
                    start, nbytes = record.slice(layer)
                    assert self.arena.data[start : start + nbytes] == record.pattern(layer)
            else:
                assert count in (NEVER, record.layers)

    @invariant()
    def promises_hold(self):
        for record in self.live.values():
            assert self.is_there(record)
            assert self.arena.is_current(record.slot)
            if record.state in (State.SEALED, State.RETIRED):
                for layer in record.filled:
                    start, nbytes = record.slice(layer)
                    assert self.arena.data[start : start + nbytes] == record.pattern(layer), "a sealed chunk changed"
        for slot in self.dead[-20:]:
            assert not self.arena.is_current(slot), "a dead slot looks alive"

    @invariant()
    def the_order_has_what_may_be_evicted(self):
        evictable = {record.slot.offset for record in self.live.values() if self.is_evictable(record)}
        order = self.store.pools[0].order
        assert {chunk.slot.offset for chunk in order.victims()} == evictable
        assert order.nbytes == sum(round_up(self.live[offset].slot.nbytes) for offset in evictable)
        assert set(self.store.wanted) == {key for keys in self.queue.values() for key in keys}

    @invariant()
    def numbers_agree(self):
        chunks, nbytes, pins = self.store.index.census()
        states = [record.state for record in self.live.values()]
        assert chunks == {state: states.count(state) for state in set(states)}
        assert sum(nbytes.values()) == sum(record.slot.nbytes for record in self.live.values())
        assert pins == sum(record.pins for record in self.live.values())
        assert self.store.index.pinned_bytes == sum(record.slot.nbytes for record in self.live.values() if record.pins)
        assert self.store.num_leases == len(self.leases)
        assert self.store.free_bytes == self.free_bytes()
        named_keys = {r.key for r in self.live.values() if r.blocks and r.state is State.SEALED}
        assert len(self.store.index.siblings) == len(named_keys)
        assert writing(self.store) == {r.slot.offset for r in self.live.values() if r.state in WRITABLE}

    def teardown(self):
        for session in self.sessions.values():
            self.end(session)
        self.now += 1000
        self.store.expire()
        for held in self.holds:
            self.end_hold(held)
        states = {record.state for record in self.live.values()}
        assert self.store.num_leases == 0
        assert states <= {State.SEALED}, "an ended session still holds memory"
        self.store.delete([*KEYS[1], *KEYS[2]])
        assert self.store.free_bytes == self.arena.nbytes
        assert self.store.index.census() == ({}, {}, 0)
        assert not writing(self.store)
        self.arena.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=50)
TestStore = StoreMachine.TestCase
