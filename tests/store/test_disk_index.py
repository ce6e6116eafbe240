"""Which files a disk can find, and which go first."""

from __future__ import annotations

from steps import lines_run

from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.index import FileIndex
from pdx.telemetry.env import Env


def never(key):
    return False


def filled(count, wanted=None, policy="lru"):
    index = FileIndex(1 << 40, Env(), {} if wanted is None else wanted, policy)
    for number in range(count):
        index.add_oldest(ChunkFile(number.to_bytes(16, "big"), 0, 4, 4096))
    return index


def test_a_search_for_room_looks_at_no_pinned_file():
    """Its cost is the same with a hundred times as many."""

    def lines(count):
        index = filled(count)
        for key in index.keys():  # noqa: SIM118 - no dict
            index.pin(key, 1)
        with lines_run() as counted:
            found = index.oldest(1, 1, never)
        assert found == ([], [])
        return len(counted)

    assert lines(1000) == lines(10)


def test_pins_change_what_goes_first_and_not_what_is_found():
    index = filled(4)
    keys = index.keys()
    charge = index.of(keys[0])[0].charge
    index.pin(keys[3], 1)
    index.pin(keys[3], 1)
    assert index.pinned_bytes == charge
    assert sorted(index.keys()) == sorted(keys)
    assert {file.key for file in index.some()} == set(keys)
    assert {each.file.key for each in index._order.peek()} == set(keys[:3])
    for key in keys:
        assert key in index
        assert index.held(key, 1) is not None
    index.use(keys)
    assert keys[3] not in {file.key for file in index.oldest(1 << 30, 0, never)[0]}
    index.add(ChunkFile(keys[3], 1, 4, 4096))
    assert index.pinned_bytes == 2 * charge
    assert index.held(keys[3], 2) is not None
    index.pin(keys[3], -1)
    assert index.pinned_bytes == 2 * charge
    index.pin(keys[3], -1)
    assert (index.pinned_bytes, dict(index.pins)) == (0, {})
    assert keys[3] in {file.key for file in index.oldest(1 << 30, 0, never)[0]}
    index.pin(keys[3], 1)
    index.remove(index.of(keys[3]))
    assert keys[3] not in index
    assert (index.pinned_bytes, dict(index.pins), index.num_files) == (0, {}, 3)


def test_a_pinned_chunk_in_another_file_is_pinned_still():
    index = FileIndex(1 << 40, Env())
    old, new = ChunkFile(b"k" * 16, 0, 4, 1000), ChunkFile(b"k" * 16, 0, 4, 500)
    index.add(old)
    index.pin(old.key, 1)
    index.replace(old, new)
    assert (index.of(old.key), index.pinned_bytes, index.nbytes) == ([new], new.charge, new.charge)
    assert index.oldest(1, 0, never) == ([], [])
    index.pin(old.key, -1)
    assert (index.pinned_bytes, index.oldest(1, 0, never)[0]) == (0, [new])


# ---- what requests that wait will use ---------------------------------------------------------


def leaves(index, count, instead=None):
    """The numbers of the chunks that would go for so many files."""
    return [int.from_bytes(file.key, "big") for file in index.oldest(0, count, never, instead)[0]]


def test_what_the_queue_wants_goes_last_and_of_that_what_the_last_request_wants():
    wanted = {}
    index = filled(6, wanted)
    keys = [number.to_bytes(16, "big") for number in range(6)]
    index.use(keys[::-1])  # the first number was used longest ago
    wanted |= {keys[0]: {7: 0, 9: 3}, keys[1]: {7: 1}, keys[2]: {8: 0}, keys[3]: {8: 1}}
    index.refresh(keys[:4])
    assert leaves(index, 6) == [4, 5, 3, 2, 1, 0]
    assert [int.from_bytes(each.file.key, "big") for each in index._order.peek()] == [4, 5, 3, 2, 1, 0]
    assert all(key in index and index.held(key, 1) for key in keys)
    index.pin(keys[3], 1)
    index.pin(keys[2], 1)
    assert leaves(index, 6) == [4, 5, 1, 0], "what is pinned stays in any case"
    index.pin(keys[2], -1)
    del wanted[keys[0]][7]  # the first request has its turn: others may still want what it does
    del wanted[keys[1]]
    index.refresh(keys[:2])
    assert leaves(index, 6) == [4, 5, 1, 0, 2]
    index.remove(index.of(keys[2]))
    assert leaves(index, 6) == [4, 5, 1, 0]


def test_a_chunk_that_is_wanted_takes_the_place_of_none_that_is_wanted_sooner():
    wanted = {}
    index = filled(3, wanted)
    keys = [number.to_bytes(16, "big") for number in range(5)]
    wanted |= {key: {number: 0} for number, key in enumerate(keys[:2], 1)} | {keys[3]: {1: 5}}
    index.refresh(keys)
    assert leaves(index, 3, instead=keys[3]) == [2, 1]
    assert leaves(index, 3, instead=keys[4]) == [2, 1, 0], "who will want this one is not known yet"
    assert leaves(index, 3) == [2, 1, 0]


def test_a_search_for_room_looks_at_nothing_that_is_wanted_if_there_is_other():
    def lines(count):
        wanted = {}
        index = filled(count, wanted)
        keys = index.keys()
        wanted |= {key: {1: place} for place, key in enumerate(keys[1:])}
        index.refresh(keys)
        with lines_run() as counted:
            gone = leaves(index, 1)
        assert len(gone) == 1
        return len(counted)

    assert lines(1000) == lines(10)
