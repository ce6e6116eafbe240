"""What chunks of one cache salt may keep of a full arena against others."""

from collections import OrderedDict

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_bed import name, put, there, use

from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.store.policies.by_name import find
from pdx.store.store import Store
from pdx.telemetry.env import Env
from pdx.wire.hints import Hints

ROOM, QUOTA = 12, 4  # chunks
A, B, NOBODY = Hints("", salt=b"a"), Hints("", salt=b"b"), Hints("")


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path / "arena", ROOM * GRANULE_BYTES) as made:
        yield made


def make(arena, policy="lru"):
    return Store(arena, Env(), policy=find(policy), quota=QUOTA / ROOM)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "gittins"])
@pytest.mark.parametrize("others", [B, NOBODY])
def test_who_floods_the_memory_drives_out_what_is_his_own(arena, policy, others):
    store = make(arena, policy)
    for number in range(QUOTA):
        put(store, [number], hints=others)
    for number in range(100, 200):
        put(store, [number], hints=A)
        assert there(store, range(QUOTA)) == list(range(QUOTA))
    assert there(store, range(196, 200)) == [196, 197, 198, 199], "and keeps what is newest of it"


def test_the_end_of_a_prompt_goes_before_its_beginning(arena):
    store = make(arena)
    put(store, range(8), hints=A)
    put(store, range(20, 28), hints=NOBODY)
    assert there(store, range(8)) == [0, 1, 2, 3]


def test_who_asks_is_told_why_it_is_gone(arena):
    store = make(arena)
    put(store, range(ROOM), hints=A)
    put(store, [50], hints=B, who="request b")
    assert "evicted for request b, being over the quota of its cache salt" in store.history.why(name(ROOM - 1)).text


@given(
    accesses=st.lists(st.tuples(st.sampled_from([A, B, NOBODY]), st.integers(0, 9)), max_size=120),
    how=st.sampled_from(["touch", "lease"]),
)
@settings(max_examples=examples(150), deadline=None)
def test_as_a_plain_model_has_it(tmp_path_factory, accesses, how):
    """Least recently used: first of what is over the quota, then of everything."""
    cache, over = OrderedDict(), OrderedDict()  # (salt, number), the oldest use first
    with Arena.create(tmp_path_factory.mktemp("a") / "arena", ROOM * GRANULE_BYTES) as arena:
        store = make(arena)
        for hints, number in accesses:
            key = hints.salt, number
            code = number + 100 * [A, B, NOBODY].index(hints)
            if there(store, [code]):
                use(store, code, how)
            else:
                put(store, [code], hints=hints)
                if len(cache) + len(over) == ROOM:
                    (over or cache).popitem(last=False)
            cache.pop(key, None)
            over.pop(key, None)
            cache[key] = None
            own = [each for each in cache if hints.salt and each[0] == hints.salt]
            for each in own[: max(0, len(own) - QUOTA)]:
                del cache[each]
                over[each] = None
            expected = {number + 100 * [A.salt, B.salt, b""].index(salt) for salt, number in [*cache, *over]}
            assert set(there(store, range(310))) == expected
