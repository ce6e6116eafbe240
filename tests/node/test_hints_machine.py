"""Hints, pins and deletions in any order: leases keep no more than their shares, and give all of it back."""

import contextlib

import pytest
from examples import examples
from hints_bed import A, B, Bed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from service_stage import CHUNKS, keys

from pdx.errors import ArenaFull, ChunkMissing
from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.hints import Hints
from pdx.wire.messages import Abort, Admit, Delete, Fill, Pin
from pdx.wire.verbs import Advise


class Leases(RuleBasedStateMachine):
    """Never more than the shares, and all of it is given back. `run` gives it a place."""

    place = None
    numbers = st.integers(0, 7).map(lambda first: range(first * 4, first * 4 + 12))
    tenants = st.sampled_from([b"", A, B])

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.open = []

    @initialize(policy=st.sampled_from(["lru", "s3fifo", "gittins", "age:40"]), quota=st.sampled_from([1.0, 0.2]))
    def start(self, policy, quota):
        self.bed = Bed(self.stack, self.place, has_tier=False, policy=policy, salt_quota=quota)

    def keys_of(self, tenant, numbers):
        """Keys cover the salt."""
        offset = {b"": 0, A: 1000, B: 2000}[tenant]
        return keys(number + offset for number in numbers)

    @rule(
        numbers=numbers,
        who=tenants,
        seconds=st.sampled_from([None, 1.0, 20.0, 5000.0]),
        reuse_s=st.sampled_from([0.0, 10.0, 300.0]),
        priority=st.integers(0, 9),
        is_done=st.booleans(),
    )
    def request(self, numbers, who, seconds, reuse_s, priority, is_done):
        hints = Hints("", priority, reuse_s, who, lease_s=seconds)
        ask = Admit(self.keys_of(who, numbers), GRANULE_BYTES, 1, lease_s=5.0, partial=True, hints=hints)
        answer = self.bed.ask(ask)
        if is_done:
            self.bed.end(answer)
        else:
            self.open.append(answer)

    @rule(at=st.integers(0, 9), how=st.sampled_from(["seal", "abort"]))
    def finish(self, at, how):
        if self.open:
            answer = self.open.pop(at % len(self.open))
            if how == "seal":
                self.bed.ask(Fill(answer.granted_slots, 0, 1, True))
            else:
                self.bed.ask(Abort(answer.granted_slots))

    @rule(numbers=numbers, who=tenants, seconds=st.sampled_from([0.0, 30.0]))
    def advise(self, numbers, who, seconds):
        self.bed.ask(Advise(Hints("", salt=who, lease_s=seconds), self.keys_of(who, numbers)))

    @rule(numbers=numbers, who=tenants, pinned=st.booleans())
    def pin(self, numbers, who, pinned):
        with contextlib.suppress(ArenaFull, ChunkMissing):
            self.bed.ask(Pin(self.keys_of(who, numbers), pinned))

    @rule(numbers=numbers, who=tenants)
    def delete(self, numbers, who):
        self.bed.ask(Delete(self.keys_of(who, numbers)))

    @rule(seconds=st.sampled_from([0.5, 15.0, 700.0]))
    def wait(self, seconds):
        self.bed.wait(seconds)

    @invariant()
    def holds(self):
        store = self.bed.service.store
        chunks = [chunk for slots in store.index.slots for chunk in slots.values()]
        leased = [chunk for chunk in chunks if chunk.keep.leased_until]
        for who in (b"", A, B):
            nbytes = sum(chunk.room_bytes for chunk in leased if chunk.keep.lessee == who)
            assert nbytes == store.tenant_leases.nbytes(who) <= CHUNKS * GRANULE_BYTES / 8
        assert sum(chunk.room_bytes for chunk in leased) == store.tenant_leases.total_bytes()
        kept = sum(chunk.slot.nbytes for chunk in chunks if chunk.keep.pins or chunk.keep.leased_until)
        assert kept == store.index.kept_bytes <= CHUNKS * GRANULE_BYTES / 4
        [pool] = store.pools
        evictable = [chunk for chunk in chunks if chunk.is_evictable]
        # A policy leaves out of `peek` what it would spare now.
        assert set(pool.order.peek()) <= {chunk for chunk in chunks if chunk in pool.order} == set(evictable)
        assert sum(chunk.room_bytes for chunk in evictable) == pool.order.nbytes
        assert all(chunk.keep.leased_until <= self.bed.now + 600 for chunk in leased)

    def teardown(self):
        store = self.bed.service.store
        for answer in self.open:
            self.bed.ask(Abort(answer.granted_slots))
        for who in (b"", A, B):
            for numbers in (range(200),):
                for _ in range(1 + max((c.keep.pins for s in store.index.slots for c in s.values()), default=0)):
                    for key in self.keys_of(who, numbers):
                        if store.find([key], 1):
                            self.bed.ask(Pin([key], pinned=False))
        self.bed.wait(1000.0)
        assert (store.index.kept_bytes, store.tenant_leases.total_bytes()) == (0, 0)
        assert store.pools[0].available_bytes == CHUNKS * GRANULE_BYTES, "all of it is given back"
        self.stack.close()


@pytest.mark.hypothesis
def test_leases_never_keep_more_than_their_shares_and_all_is_given_back(place):
    Leases.place = place
    run_state_machine_as_test(
        Leases, settings=settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
    )
