"""The store's rules one by one: who is evicted first, what is granted, what a record costs."""

import gc

import pytest
from traced import traced

from pdx.errors import ProtocolError, StaleSlot
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.memory.slot import Slot
from pdx.store.chunk import Claim
from pdx.store.slot_pool import LOOKS
from pdx.store.store import Store
from pdx.telemetry.env import Env

OWNER = 1
GRANULES = 8


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def arena(tmp_path):
    with Arena.create(tmp_path / "arena", GRANULES * GRANULE_BYTES) as made:
        yield made


@pytest.fixture
def store(arena, clock):
    return Store(arena, Env(clock))


def claim(keys, *, granules=1, **settings):
    return Claim(
        **{
            "keys": keys,
            "nbytes": granules * GRANULE_BYTES,
            "layers": 1,
            "owner": OWNER,
            "writers": [OWNER],
            **settings,
        }
    )


def keys(text):
    return [letter.encode() for letter in text]


def put(store, text, **settings):
    """Reserve, fill and seal; in one message, as a worker does at the end of a step."""
    made = claim(keys(text), **settings)
    granted, slots, full = store.reserve(made)
    assert not full
    seal(store, slots, made.writers)
    return slots


def seal(store, slots, writers=(OWNER,)):
    for shard, writer in enumerate(writers):
        mine = slots[shard :: len(writers)]
        store.seal(store.fill(mine, 0, 1, writer))


def there(store, text, shards=1):
    return "".join(letter for letter in text if store.find([letter.encode()], shards))


# ---- eviction --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["read", "looked up"])
def test_the_end_of_a_prompt_goes_before_its_beginning_after_it_was(store, how):
    put(store, "abcdefgh")
    chunks = [chunks[0] for chunks in store.find(keys("abcdefgh"), 1)]
    if how == "read":
        store.release(store.lease(chunks, OWNER, 10), OWNER)
    else:
        store.touch(chunks)
    put(store, "xy")
    assert there(store, "abcdefgh") == "abcdef"


def named(letters):
    return b"".join(letter.encode() * 16 for letter in letters)


def put_end(store, key, blocks, **settings):
    """The end of a prompt, which is less than a chunk; its slot."""
    made = claim([key], tail_nbytes=GRANULE_BYTES, blocks=named(blocks), chunk_blocks=4, parent=b"root", **settings)
    slots = store.reserve(made)[1]
    seal(store, slots)
    return slots


def test_the_end_of_a_prompt_that_nobody_shares_goes_before_all_others(store):
    put(store, "abcd")
    put_end(store, b"e", "xyz")
    put(store, "fgh")
    put(store, "i")
    assert there(store, "e") == ""
    assert there(store, "abcd") == "abcd"


def test_the_end_of_a_prompt_takes_nothing_with_it_that_is_worth_more(store):
    """It is too short for a whole chunk; what lies beside it may be the chunk that was used last."""
    put(store, "a", granules=2)
    put_end(store, b"e", "xyz")
    put(store, "bc", granules=2)
    put_end(store, b"f", "uvw")
    store.touch([chunks[0] for chunks in store.find(keys("a"), 1)])
    put(store, "x", granules=2)
    assert there(store, "abc") == "ab", "the end of the prompt that was used least recently"


def test_ends_of_prompts_that_lie_together_go_before_whole_chunks(store):
    put(store, "abc", granules=2)
    put_end(store, b"e", "xyz")
    put_end(store, b"f", "uvw")
    put(store, "x", granules=2)
    assert there(store, "abcef") == "abc"


def test_a_chunk_takes_the_end_beside_it_with_it_in_its_turn(store):
    put(store, "a", granules=2)
    put_end(store, b"e", "xyz")
    put(store, "bc", granules=2)
    put_end(store, b"f", "uvw")
    store.touch([chunks[0] for chunks in store.find(keys("bc"), 1)])
    put(store, "x", granules=3)
    assert there(store, "abcef") == "bcf"


def test_chunks_find_room_however_many_ends_lie_between_them(tmp_path, clock):
    """None of the ends is room for a chunk, and those who search for one look at a bounded number."""
    count = LOOKS // 2
    with Arena.create(tmp_path / "large", 3 * count * GRANULE_BYTES) as arena:
        store = Store(arena, Env(clock))
        for number in range(2 * count):  # the last ones in the place of the first
            (found,) = store.reserve(claim([b"c%d" % number], granules=2))[1]
            seal(store, [found])
            assert put_end(store, b"e%d" % number, chr(1000 + number))
        assert store.counters["reserve_full"] == 0


@pytest.mark.parametrize("transfer", [None, "transfer"])
def test_the_end_of_a_prompt_that_another_shares_goes_in_its_turn(store, transfer):
    put(store, "abcd")
    put_end(store, b"e", "xyz", transfer=transfer)
    chunks, count = store.part(b"root", named("xyw"), 1)
    assert count == 2
    store.release(store.lease(chunks, OWNER, 1.0), OWNER)
    put(store, "fgh")
    put(store, "i")
    assert there(store, "e") == "e"
    assert there(store, "abcd") == "abc"


def test_the_tail_of_a_transfer_goes_first_when_its_one_reader_has_read_it(store):
    put(store, "abcd")
    slots = put_end(store, b"e", "xyz", transfer="transfer")
    put(store, "fgh")
    put(store, "i")
    assert there(store, "e") == "e", "somebody will read it"
    store.release(store.lease([store.at(slots[0])], OWNER, 1.0), OWNER)
    put(store, "j")
    assert there(store, "e") == ""


def test_a_step_of_one_prompt_leaves_the_others_their_turns(store):
    slots = store.reserve(claim(keys("abcd")))[1]
    for slot in slots[:3]:
        seal(store, [slot])
    put(store, "xyz")
    store.touch([chunks[0] for chunks in store.find(keys("abc"), 1)])
    seal(store, slots[3:])
    put(store, "12")
    assert there(store, "xyz") == "xy", "the free granule and the oldest of the others"
    put(store, "3456")
    assert there(store, "abcdxyz") == "ab"


def test_chunks_of_one_step_that_were_reserved_apart_go_end_first(store):
    slots = [store.reserve(claim([key]))[1][0] for key in keys("abcdefgh")]
    seal(store, slots)
    put(store, "xyz")
    assert there(store, "abcdefgh") == "abcde"


def test_a_chunk_is_pinned_as_often_as_it_was_pinned(store):
    put(store, "abcdefgh")
    for _ in range(2):
        assert store.pin(keys("a"), 1, pinned=True) == 1
    store.pin(keys("a"), 1, pinned=False)
    assert store.reserve(claim(keys("stuvwxyz")))[2]
    for _ in range(3):
        store.pin(keys("a"), 1, pinned=False)
    put(store, "stuvwxyz")
    assert there(store, "a") == ""


def test_a_chunk_goes_with_all_its_shards(store):
    put(store, "abcd", writers=[2, 3])
    put(store, "x")
    assert there(store, "abcd", shards=2) == "abc"
    assert store.free_bytes == GRANULE_BYTES
    assert store.counters["evicted"] == 2


def test_a_shard_that_is_pinned_stays_when_the_others_go(store):
    slots = put(store, "a", writers=[2, 3])
    store.pin(keys("a"), 1, pinned=True)  # the first shard
    put(store, "stuvwxy")
    assert store.at(slots[0]).keep.pins == 1
    with pytest.raises(StaleSlot):
        store.at(slots[1])


# ---- what is granted ---------------------------------------------------------------------------


def leave(store, text, stay):
    """A full store of one-granule chunks, of which those in `stay` are leased."""
    for letter in text:
        put(store, letter)
    store.lease([store.find([letter.encode()], 1)[0][0] for letter in stay], OWNER, 10)


def test_a_hole_beside_a_chunk_is_part_of_its_window(store):
    leave(store, "abcdefgh", "beg")
    store.delete(keys("d"))
    assert store.reserve(claim(keys("x"), granules=2))[2] is False
    assert there(store, "abcdefgh") == "abefgh"
    assert store.counters["evicted"] == 1


@pytest.mark.parametrize("partial", [False, True])
def test_a_slot_does_not_lie_where_it_would_split_the_only_window(store, partial):
    leave(store, "abcdefgh", "gh")
    store.delete(keys("bcd"))
    granted, slots, full = store.reserve(claim(keys("xy"), granules=3, partial=partial))
    assert (granted, full) == ([0, 1], False)
    assert sorted(slot.offset // GRANULE_BYTES for slot in slots) == [0, 3]


def test_what_lies_before_a_chunk_goes_with_it_first(store):
    put(store, "abcdefgh")
    put(store, "x", granules=3)
    assert there(store, "abcdefgh") == "abcde", "the end of the prompt"
    store.touch([chunks[0] for chunks in store.find(keys("abc"), 1)])
    put(store, "y", granules=2)
    assert there(store, "abcdex") == "abcx"


def test_a_search_that_finds_nothing_goes_on_where_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("pdx.store.slot_pool.LOOKS", 10)
    with Arena.create(tmp_path / "wide", 100 * GRANULE_BYTES) as arena:
        store = Store(arena, Env())
        names = [number.to_bytes(16, "little") for number in range(100)]
        for name in names:
            seal(store, store.reserve(claim([name]))[1])
        store.lease([store.find([name], 1)[0][0] for name in names[:80:2]], OWNER, 1000)
        answers = [store.reserve(claim(keys("x"), granules=4))[2] for _ in range(6)]
        assert answers[0] is True, "it gives up after so many chunks"
        assert False in answers
        assert store.counters["evicted"] == 4


def test_one_large_chunk_among_many_small_ones_evicts_its_window_and_no_more(tmp_path):
    with Arena.create(tmp_path / "wide", 1000 * GRANULE_BYTES) as arena:
        store = Store(arena, Env())
        names = [number.to_bytes(16, "little") for number in range(1000)]
        for name in names:
            seal(store, store.reserve(claim([name]))[1])
        store.lease([store.find([name], 1)[0][0] for name in names[::101]], OWNER, 1000)
        assert store.reserve(claim(keys("x"), granules=101)) == ([], [], True)
        assert store.counters["evicted"] == 0
        assert store.reserve(claim(keys("x"), granules=100))[2] is False
        assert store.counters["evicted"] == 100


# ---- filling and sealing -----------------------------------------------------------------------


@pytest.mark.parametrize("aborted", [False, True])
def test_a_slot_that_stands_twice_is_sealed_once(store, aborted):
    slots = store.reserve(claim(keys("a")))[1]
    chunks = store.fill(slots * 3, 0, 1, OWNER)
    if aborted:
        store.abort(chunks)
    store.seal(chunks)
    assert there(store, "a") == ("" if aborted else "a")
    assert store.counters["sealed"] == (not aborted)


def test_layers_out_of_range_are_refused(store):
    slots = store.reserve(claim(keys("a"), layers=3))[1]
    for first, count in ((0, 4), (3, 1), (2, 2), (4095, 4096)):
        with pytest.raises(ProtocolError, match="layers"):
            store.fill(slots, first, count, OWNER)


@pytest.mark.parametrize(
    "forge",
    [
        lambda slot: Slot(slot.offset, slot.nbytes, slot.generation + 1),
        lambda slot: Slot(slot.offset, slot.nbytes, slot.generation - 1),
        lambda slot: Slot(slot.offset, slot.nbytes + 1, slot.generation),
        lambda slot: Slot(slot.offset + GRANULE_BYTES, slot.nbytes, slot.generation),
        lambda slot: Slot(slot.offset + 1, slot.nbytes, slot.generation),
        lambda slot: Slot(1 << 47, slot.nbytes, slot.generation),
    ],
)
def test_a_forged_slot_is_nobodys(store, forge):
    """CVE-2026-103764, CVE-2026-96762: a handle is checked whole, at every use."""
    slot = store.reserve(claim(keys("a")))[1][0]
    with pytest.raises(StaleSlot):
        store.at(forge(slot))
    with pytest.raises(StaleSlot):
        store.fill([forge(slot)], 0, 1, OWNER)


# ---- tails, leases, deletion --------------------------------------------------------------------


def test_only_the_tails_of_a_transfer_are_dropped_with_it(store):
    put(store, "at", tail_nbytes=100, transfer="one")
    put(store, "bu", tail_nbytes=100, transfer="two")
    store.drop_tails("one")
    assert there(store, "atbu") == "abu"


def test_the_names_of_one_chunk_change_no_other_of_its_reservation(store):
    put(store, "ab")
    [one], [other] = map(store.index.of, keys("ab"))
    store.name([one], b"before", bytes(16), 64)
    store.name([other], b"a", bytes(16))  # who has kept its names does not know how many tokens they stand for
    assert one.block_tokens == 64


# ---- what it costs --------------------------------------------------------------------------------


def test_a_chunk_record_takes_less_than_a_kilobyte(tmp_path):
    count = 20_000
    names = [number.to_bytes(16, "little") for number in range(count)]
    path = tmp_path / "arena"
    path.write_bytes(b"")
    with open(path, "r+b") as file:
        file.truncate(count * (GRANULE_BYTES + 8 + 2))  # sparse: no byte of it is touched
    with Arena(path, count * GRANULE_BYTES, writable_generations=True) as arena, traced() as held:
        store = Store(arena, Env())
        granted, slots, full = store.reserve(claim(names, layers=80))
        assert not full
        store.seal(store.fill(slots, 0, 80, OWNER))
        del granted, slots
        per_chunk = held() / count
    assert per_chunk <= 1024, f"{per_chunk:.0f} bytes per chunk"


# ---- generations -------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [(1 << 63) - 1, (1 << 63), (1 << 64) - 1])
def test_a_generation_that_somebody_wrote_over_ends_nothing(store, arena, written):
    """Once the largest number of the table ended the node at the next free."""
    for _ in range(3):
        (slot,) = put(store, "a")
        arena.generations[slot.offset // GRANULE_BYTES] = written
        store.delete(keys("a"))
        (slot,) = put(store, "a")
        assert 0 <= slot.generation < 1 << 63
        assert arena.is_current(slot)
        store.delete(keys("a"))
    assert store.free_bytes == arena.nbytes


def test_the_collector_of_python_has_no_more_to_look_at_where_there_are_more_chunks(tmp_path):
    """Else the node would stand still while all chunks are walked through."""
    with Arena.create(tmp_path / "many", 4096 * GRANULE_BYTES) as arena:
        store = Store(arena, Env())
        tracked = []
        for part in range(4):
            put_many = [part.to_bytes(2, "big") + index.to_bytes(2, "big") for index in range(1000)]
            _, slots, _ = store.reserve(claim(put_many))
            store.seal(store.fill(slots, 0, 1, OWNER))
            del slots
            gc.collect()
            gc.collect()  # a tuple of what is not looked at is not looked at any more behind the first
            tracked.append(len(gc.get_objects()))
        assert tracked[-1] - tracked[0] < 100
