"""Each eviction policy in a real store against a plain model of it, and what all of them have in common."""

import itertools
import random
from pathlib import Path

import pytest
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_bed import SESSION, name, put, there, use
from policy_models import ACCESSES, MODELS, POLICIES, ROOM
from traced import traced

from pdx.errors import ConfigError
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.store.chunk import Claim
from pdx.store.policies import by_name
from pdx.store.policies.gittins import FOUND, NEW, PRIOR, Ages, worths
from pdx.store.policies.policy import EvictionPolicy
from pdx.store.policies.ranks import Ranks
from pdx.store.store import Store
from pdx.telemetry.env import Env
from pdx.wire.hints import Hints

# ---- the store ------------------------------------------------------------------------------


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path / "arena", ROOM * GRANULE_BYTES) as made:
        yield made


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(150))
@given(accesses=ACCESSES, how=st.sampled_from(["touch", "lease"]))
@example(accesses=[*range(12), *range(12), *range(3), *range(20), *range(12)], how="lease")
@example(accesses=random.Random(0).choices(range(14), k=100), how="touch")
@example(accesses=random.Random(0).choices(range(60), k=400), how="touch")  # more than is remembered
def test_hits_are_those_of_the_plain_model(tmp_path_factory, policy, accesses, how):
    path = tmp_path_factory.mktemp("arena") / "arena"
    with Arena.create(path, ROOM * GRANULE_BYTES) as arena:
        store = Store(arena, Env(), policy=by_name.find(policy))
        assert [use(store, number, how) for number in accesses] == list(MODELS[policy](accesses))
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("at_once", [1, ROOM])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_goes_from_its_end_whether_it_was_sealed_at_once_or_chunk_by_chunk(arena, policy, at_once):
    store = Store(arena, Env(), policy=by_name.find(policy))
    claim = Claim(
        keys=[name(number) for number in range(ROOM)], nbytes=GRANULE_BYTES, layers=1, owner=SESSION, writers=[SESSION]
    )
    _, slots, _ = store.reserve(claim)
    for first in range(0, ROOM, at_once):
        store.seal(store.fill(slots[first : first + at_once], 0, 1, SESSION))
    put(store, [100, 101, 102])
    assert there(store, range(ROOM)) == list(range(ROOM - 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_leased_or_pinned_is_no_victim_and_is_one_again_afterwards(arena, policy):
    store = Store(arena, Env(), policy=by_name.find(policy))
    put(store, range(ROOM))
    lease = store.lease([chunk for (chunk,) in store.find([name(number) for number in range(4)], 1)], SESSION, 1.0)
    store.pin([name(4), name(5)], 1, pinned=True)
    put(store, range(100, 100 + ROOM), partial=True)
    assert there(store, range(ROOM)) == list(range(6)), "nothing of them has gone"
    assert store.pools[0].available_bytes == 4 * GRANULE_BYTES
    store.release(lease, SESSION)
    store.pin([name(4), name(5)], 1, pinned=False)
    for first in range(200, 250, ROOM):
        assert put(store, range(first, first + ROOM)) == ROOM, "everything may be evicted again"
    assert there(store, range(ROOM)) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_less_important_goes_first_whatever_the_policy(arena, policy):
    store = Store(arena, Env(), policy=by_name.find(policy))
    put(store, [1, 2], hints=Hints("", priority=5))
    put(store, range(10, 10 + ROOM - 2))
    for first in range(100, 200, 5):
        put(store, range(first, first + 5))
    assert there(store, [1, 2]) == [1, 2]
    put(store, range(300, 300 + ROOM))
    assert there(store, [1, 2]) == [], "important is not pinned"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_deleted_is_forgotten_by_the_policy(arena, policy):
    store = Store(arena, Env(), policy=by_name.find(policy))
    for first in range(0, 100, ROOM):
        keys = range(first, first + ROOM)
        put(store, keys)
        lease = store.lease([chunk for (chunk,) in store.find([name(keys[0])], 1)], SESSION, 1.0)
        assert store.delete([name(number) for number in keys]) == ROOM
        store.release(lease, SESSION)
        assert store.free_bytes == store.pools[0].available_bytes == ROOM * GRANULE_BYTES


def test_one_search_spares_a_bounded_number_of_chunks(arena, monkeypatch):
    monkeypatch.setattr("pdx.store.policies.s3fifo.MAX_CHANCES", 3)
    store = Store(arena, Env(), policy=by_name.find("s3fifo"))
    put(store, range(ROOM))
    for _, number in itertools.product(range(3), range(ROOM)):
        store.touch(store.find([name(number)], 1)[0])
    assert put(store, [100]) == 1
    assert len(there(store, range(ROOM))) == ROOM - 1


# ---- Gittins --------------------------------------------------------------------------------


def test_a_chunk_is_worth_the_most_hits_per_time_that_keeping_it_can_give():
    assert worths([0.5], [1.0]) == pytest.approx([0.5 / 0.75])
    assert worths([0.0, 1.0], [1.0, 1.0]) == pytest.approx([1 / 1.5, 1 / 0.5]), "what comes later is worth the wait"
    assert worths([0.5, 0.0], [1.0, 9.0]) == pytest.approx([0.5 / 0.75, 0.0]), "nothing comes any more"


def test_worths_come_of_the_ages_at_which_chunks_were_found():
    ages = Ages(1000, PRIOR[NEW])
    for at in range(0, 100_000, 10):  # of ten chunks each, one is found at an age of 900, and no other
        ages.begins(at, 10)
        ages.ends(at, at + (900 if at % 100 == 0 else 8000), 10, is_found=at % 100 == 0)
        if at % 125 == 0:
            ages.look(at)
    assert ages.worths[ages.step(800)] > 2 * ages.worths[ages.step(1200)]
    assert ages.worths[ages.step(800)] > 5 * ages.worths[ages.step(4000)]


def test_chunks_that_stay_for_ever_do_not_add_up_to_periods_to_look_at():
    with traced() as held:
        ages = Ages(1000, PRIOR[NEW])
        for at in range(0, 200_000, 100):
            ages.begins(at, 1)
            ages.look(at)
        assert held() < 20_000
        for at in range(0, 200_000, 100):
            ages.ends(at, 200_000, 1, is_found=False)


def test_what_was_forgotten_does_not_add_up(arena, monkeypatch):
    monkeypatch.setattr("pdx.store.policies.gittins.MAX_GHOSTS", 5)
    store = Store(arena, Env(), policy=by_name.find("gittins"))
    for number in range(100):
        put(store, [number])
    for number, kind in ((84, NEW), (86, NEW), (88, FOUND)):  # each lets the next of 90, 91 and 92 be evicted
        put(store, [number])
        assert [chunk.rank[0] for chunk in store.index.of(name(number))] == [kind]


def test_each_shard_of_what_was_evicted_is_remembered(arena):
    store = Store(arena, Env(), policy=by_name.find("gittins"))
    for number in range(50):
        put(store, [number], writers=[SESSION, SESSION])
    for number, kind in ((25, NEW), (27, FOUND)):  # 45 and 46 are evicted then, and 20 are remembered
        put(store, [number], writers=[SESSION, SESSION])
        assert [chunk.rank[0] for chunk in store.index.of(name(number))] == [kind, kind]


# ---- TTL ------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_after_its_time_a_chunk_is_gone_though_there_is_room_and_it_was_used(arena, clock):
    store = Store(arena, Env(clock), policy=by_name.find("age:60", clock))
    put(store, [1, 2])
    clock.now += 50.0
    put(store, [3])
    use(store, 1, "lease")
    store.expire()
    assert there(store, [1, 2, 3]) == [1, 2, 3]
    clock.now += 10.0
    store.expire()
    assert there(store, [1, 2, 3]) == [3]
    assert store.counters["chunks_expired"] == 2
    assert store.free_bytes == (ROOM - 1) * GRANULE_BYTES


def test_what_is_leased_when_its_time_comes_is_not_found_and_goes_with_its_lease(arena, clock):
    store = Store(arena, Env(clock), policy=by_name.find("age:60", clock))
    put(store, [1, 2])
    lease = store.lease([chunk for (chunk,) in store.find([name(1), name(2)], 1)], SESSION, 1000.0)
    store.delete([name(2)])
    clock.now += 61.0
    store.expire()
    assert there(store, [1, 2]) == []
    assert store.counters["chunks_expired"] == 1, "what was deleted is no news"
    assert store.free_bytes == (ROOM - 2) * GRANULE_BYTES, "somebody reads them"
    store.release(lease, SESSION)
    assert store.free_bytes == ROOM * GRANULE_BYTES


def test_a_pin_outlives_the_time_and_its_end_does_not(arena, clock):
    store = Store(arena, Env(clock), policy=by_name.find("age:60", clock))
    put(store, [1])
    store.pin([name(1)], 1, pinned=True)
    clock.now += 61.0
    store.expire()
    assert there(store, [1]) == [1]
    store.pin([name(1)], 1, pinned=False)
    store.expire()
    assert there(store, [1]) == []


def test_by_idleness_a_chunk_that_is_used_or_read_stays_and_one_that_is_not_goes(arena, clock):
    store = Store(arena, Env(clock), policy=by_name.find("idle:60", clock))
    put(store, [1, 2])
    clock.now += 50.0
    use(store, 1, "lease")
    clock.now += 50.0
    store.expire()
    assert there(store, [1, 2]) == [1], "2 was used 100 s ago, 1 was used 50 s ago"
    lease = store.lease(store.find([name(1)], 1)[0], SESSION, 1000.0)
    clock.now += 61.0
    store.expire()
    assert there(store, [1]) == [1]
    store.release(lease, SESSION)
    for seconds, left in ((59.0, [1]), (1.0, [])):
        clock.now += seconds
        store.expire()
        assert there(store, [1]) == left, "its time counts from when its reader is done"
    assert store.free_bytes == ROOM * GRANULE_BYTES


def test_the_end_of_a_prompt_has_its_time_too(arena, clock):
    store = Store(arena, Env(clock), policy=by_name.find("age:60", clock))
    put(store, [1, 2], tail_nbytes=GRANULE_BYTES, blocks=b"x" * 48, chunk_blocks=2)
    clock.now += 30.0
    use(store, 2, "touch")
    clock.now += 30.0
    store.expire()
    assert there(store, [1, 2]) == []


# ---- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("belady", "no policy is named 'belady'; there are lru, s3fifo, gittins, age, idle"),
        ("", "no policy is named ''"),
        ("lru:3", "--policy lru:3: lru takes nothing behind a colon"),
        ("age", "say after how many seconds a chunk goes, as in age:3600"),
        ("age:-1", "age:3600"),
        ("age:nan", "age:3600"),
        ("age:soon", "age:3600"),
    ],
)
def test_a_name_that_makes_no_sense_is_refused_with_what_would(setting, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        by_name.find(setting)


class Point:
    name = "mine"
    value = "package:make"

    def __init__(self, make):
        self.load = make


def test_the_policy_of_the_docs_comes_by_its_entry_point(monkeypatch, arena):
    code = (Path(by_name.__file__).parents[3] / "docs/policies.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code, names := {"EvictionPolicy": EvictionPolicy, "Ranks": Ranks})  # noqa: S102 - the example of the docs
    asked = []

    def make(total_bytes, argument):
        asked.append((total_bytes, argument))
        return names["Fifo"]()

    monkeypatch.setattr(by_name, "entry_points", lambda group: [Point(lambda: make)])
    assert "mine" in by_name.names()
    store = Store(arena, Env(), policy=by_name.find("mine:7"))
    for number in range(ROOM + 3):
        put(store, [number])
    assert there(store, range(ROOM + 3)) == [*range(3, ROOM + 3)]
    assert asked == [(ROOM * GRANULE_BYTES, "7")]


def test_a_policy_that_does_not_import_is_named(monkeypatch):
    def load():
        raise ImportError("no module named package")

    monkeypatch.setattr(by_name, "entry_points", lambda group: [Point(load)])
    with pytest.raises(ConfigError, match="package:make cannot be had: no module named package"):
        by_name.find("mine")
