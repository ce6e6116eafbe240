"""Which files a disk can find, and which go first."""

from __future__ import annotations

import sys
from collections import Counter

from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.index import FileIndex
from pdx.telemetry.env import Env


def never(key):
    return False


def filled(count):
    index = FileIndex(1 << 40, Env())
    for number in range(count):
        index.add(ChunkFile(number.to_bytes(16, "big"), 0, 4, 4096))
    return index


def test_a_search_for_room_looks_at_no_pinned_file():
    """Its cost is the same with a hundred times as many."""

    def lines(count):
        index, counted = filled(count), Counter()
        for key in index.keys():  # noqa: SIM118 - no dict
            index.pin(key, 1)

        def trace(frame, event, arg):
            counted[event] += 1
            return trace

        sys.settrace(trace)
        try:
            found = index.oldest(1, 1, never)
        finally:
            sys.settrace(None)
        assert found == ([], [])
        return counted["line"]

    assert lines(1000) == lines(10)


def test_pins_change_what_goes_first_and_not_what_is_found():
    index = filled(4)
    keys = index.keys()
    charge = index.of(keys[0])[0].charge
    index.pin(keys[3], 1)
    index.pin(keys[3], 1)
    assert index.pinned_bytes == charge
    assert sorted(index.keys()) == sorted(keys)
    assert {file.key for file in index.last_used()} == set(keys)
    for key in keys:
        assert key in index
        assert index.held(key, 1) is not None
    index.touch(keys)
    assert keys[3] not in {file.key for file in index.oldest(1 << 30, 0, never)[0]}
    index.add(ChunkFile(keys[3], 1, 4, 4096))
    assert index.pinned_bytes == 2 * charge
    assert index.held(keys[3], 2) is not None
    index.pin(keys[3], -1)
    assert index.pinned_bytes == 2 * charge
    index.pin(keys[3], -1)
    assert (index.pinned_bytes, dict(index.pins), index._pinned) == (0, {}, {})
    assert keys[3] in {file.key for file in index.oldest(1 << 30, 0, never)[0]}
    index.pin(keys[3], 1)
    index.remove(index.of(keys[3]))
    assert keys[3] not in index
    assert (index.pinned_bytes, dict(index.pins), index._pinned, index.num_files) == (0, {}, {}, 3)


def test_a_pinned_chunk_in_another_file_is_pinned_still():
    index = FileIndex(1 << 40, Env())
    old, new = ChunkFile(b"k" * 16, 0, 4, 1000), ChunkFile(b"k" * 16, 0, 4, 500)
    index.add(old)
    index.pin(old.key, 1)
    index.replace(old, new)
    assert (index.of(old.key), index.pinned_bytes, index.nbytes) == ((new,), new.charge, new.charge)
    assert index.oldest(1, 0, never) == ([], [])
    index.pin(old.key, -1)
    assert (index.pinned_bytes, index.oldest(1, 0, never)[0]) == (0, [new])
