"""Room for several cache groups at once, in arenas that are more or less full and scattered."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from examples import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from push_stage import WRITER, StoreStage, key

from pdx.errors import ArenaTooSmall, ProtocolError
from pdx.memory.arena import GRANULE_BYTES as G
from pdx.store import cache_groups
from pdx.store.chunk import Claim

GRANULES = 48


def claims_of(sizes, count, *, partial, shards=1, first=1000):
    """One for each group, of chunks of so many granules."""
    return [
        Claim(
            keys=[key(first * (group + 1) + chunk) for chunk in range(count)],
            nbytes=nbytes * G,
            layers=1,
            owner=WRITER,
            writers=[WRITER] * shards,
            partial=partial,
        )
        for group, nbytes in enumerate(sizes)
    ]


others = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["goes", "stays", "went"])), max_size=24)


@contextmanager
def stage_of():
    folder = Path(tempfile.mkdtemp(prefix="pdx-test-"))
    try:
        stage = StoreStage(folder, GRANULES)
        with stage.arena:
            yield stage
    finally:
        shutil.rmtree(folder)


def fill_some(stage, others):
    """Chunks of so many granules: each may go, or stays, or has left a hole."""
    for number, (size, fate) in enumerate(others):
        if stage.store.free_bytes < size * G:
            return
        chunks = stage.store.fill(stage.reserve([number], size * G), 0, 1, WRITER)
        stage.store.seal(chunks)
        if fate == "stays":
            stage.store.hold(chunks)
        elif fate == "went":
            stage.store.delete([key(number)])


@settings(max_examples=examples(300))
@given(st.data())
def test_all_groups_get_room_up_to_one_chunk_or_none_does(data):
    with stage_of() as stage:
        store = stage.store
        fill_some(stage, data.draw(others))
        sizes, is_partial = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)), data.draw(st.booleans())
        count, shards = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 2))
        claims = claims_of(sizes, count, partial=is_partial, shards=shards)
        every = [(group, chunk) for group in range(len(sizes)) for chunk in range(count)]
        for group, chunk in data.draw(st.sets(st.sampled_from(every), max_size=3)):
            if store.free_bytes >= sizes[group] * G * shards:
                _, slots, _ = store.reserve(replace(claims[group], keys=[claims[group].keys[chunk]]))
                store.seal(store.fill(slots, 0, 1, WRITER))
        there = {(group, chunk) for group, chunk in every if store.find([claims[group].keys[chunk]], shards)}
        missing = [[chunk for chunk in range(count) if (group, chunk) not in there] for group in range(len(sizes))]
        kept = sum(sizes[group] * G * shards for group, _ in there)
        wanted = sum(sizes[group] * G * shards for group, _ in set(every) - there)
        available, evicted = store.pools[0].available_bytes - kept, store.counters["evicted"]
        try:
            granted, slots, is_full = cache_groups.reserve(store, claims)
        except ArenaTooSmall:
            event("too small")
            assert sum(sizes) * shards > GRANULES or wanted > GRANULES * G
            return
        event(f"full {is_full}, granted {any(granted)}")
        end = max((indices[-1] + 1 for indices in granted if indices), default=0)
        assert granted == [[chunk for chunk in indices if chunk < end] for indices in missing]
        assert (granted == missing) is not is_full
        assert is_full or wanted <= available
        if is_full and not is_partial:
            assert not any(granted)
            assert wanted <= available or store.counters["evicted"] == evicted
        for claim, indices, of_claim in zip(claims, granted, slots, strict=True):
            assert [slot.nbytes for slot in of_claim] == [claim.nbytes] * len(indices) * shards
            found = [store.at(slot).key for slot in of_claim]
            assert found == [claim.keys[chunk] for chunk in indices for _ in range(shards)]
        assert all(store.find([claims[group].keys[chunk]], shards) for group, chunk in there), "they make no room"
        taken = sum(chunk.room_bytes for chunk in store.index.slots[0].values())
        assert store.free_bytes == store.total_bytes - taken, "nothing is lost"


@pytest.mark.parametrize("is_partial", [False, True])
def test_where_the_room_is_scattered_it_is_all_or_nothing_too(is_partial):
    """Group 0 lacks its last chunk alone, for which there are bytes, but no two granules together."""
    with stage_of() as stage:
        store = stage.store
        claims = claims_of([2, 1], 3, partial=is_partial)
        for chunk in range(2):
            _, slots, _ = store.reserve(replace(claims[0], keys=[claims[0].keys[chunk]]))
            store.seal(store.fill(slots, 0, 1, WRITER))
        slots = stage.reserve(list(range(GRANULES - 4)), G)
        store.let_go([store.at(slot) for slot in sorted(slots, key=lambda slot: slot.offset)[::2]])
        granted, _, is_full = cache_groups.reserve(store, claims)
        assert (granted, is_full) == ([[], [0, 1] if is_partial else []], True)


def test_a_key_of_two_groups_is_refused_before_anything_is_taken():
    with stage_of() as stage:
        with pytest.raises(ProtocolError, match="twice"):
            cache_groups.reserve(stage.store, claims_of([1], 3, partial=True) * 2)
        assert stage.store.free_bytes == stage.store.total_bytes
