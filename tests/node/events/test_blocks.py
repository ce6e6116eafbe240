"""From changes by chunk to events by block: what is told, and what it costs, whatever the prompts are."""

import os
import random
import struct
import time
from collections import Counter

import msgspec
import plain_chunk

from pdx.memory.slot import Slot
from pdx.node.events.blocks import Blocks
from pdx.node.events.log import Change, Place
from pdx.wire.kv_events import BlockStored

BLOCKS = 4  # of a chunk


def chunk(blocks, parent=b""):
    return plain_chunk.chunk(os.urandom(16), Slot(0, 0, 1), 1, blocks=blocks, parent=parent, block_tokens=16)


def stored(chunks):
    return Change("host", True, [each.key for each in chunks], chunks)


def seconds_each(count, make):
    """Processor time for each of `count`, the best of three: `make` gives what is measured."""
    times = []
    for _ in range(3):
        measured = make(count)
        start = time.thread_time()
        measured()
        times.append((time.thread_time() - start) / count)
    return min(times)


def test_chunks_that_begin_alike_cost_no_more_when_they_are_many():
    """As all first chunks of conversations do that have the same system prompt."""

    def come_and_go(count):
        blocks, first = Blocks(), os.urandom(16)
        chunks = [chunk(first + os.urandom(16 * (BLOCKS - 1))) for _ in range(count)]

        def measured():
            for each in chunks:
                blocks.apply([stored([each])])
            for each in chunks:
                (removed,) = blocks.apply([Change("host", False, [each.key])])
                assert len(removed.block_hashes) == BLOCKS - (each is not chunks[-1])

        return measured

    assert seconds_each(1000, come_and_go) < 4 * seconds_each(100, come_and_go)


def test_each_block_comes_once_to_a_place_and_goes_once():
    """Readers that count find nothing twice: not a block of several chunks, nor a chunk in several tiers of a place."""
    places = {"host": Place("CPU", "LOCAL"), "disk": Place("STORAGE", "LOCAL"), "remote": Place("STORAGE", "REMOTE")}
    places["other disk"] = places["disk"]
    rng = random.Random(7)
    names = [os.urandom(16) for _ in range(12)]
    chunks = [chunk(b"".join(names[first:end])) for first, end in ((0, 4), (0, 3), (0, 1), (4, 8), (4, 5), (8, 9))]
    blocks, there, counted = Blocks(places), set(), Counter()

    def count(events):
        for event in events:
            step = 1 if isinstance(event, BlockStored) else -1
            counted.update({(each, event.medium, event.locality): step for each in event.block_hashes})

    def truth():
        return {
            (hashed, *msgspec.structs.astuple(places[tier]))
            for tier, each in there
            for hashed in struct.unpack(">" + "8xQ" * (len(chunks[each].blocks) // 16), chunks[each].blocks)
        }

    for number in range(2000):
        one = (rng.choice(list(places)), rng.randrange(len(chunks)))
        named = chunks[one[1]]
        if one in there:
            there.remove(one)
            count(blocks.apply([Change(one[0], False, [named.key])]))
        else:
            there.add(one)
            count(blocks.apply([Change(one[0], True, [named.key], [named] if rng.random() < 0.9 else [])]))
        if number % 100 == 99:  # all names are known, and somebody asks for everything
            for tier, each in sorted(there):
                count(blocks.apply([Change(tier, True, [chunks[each].key], [chunks[each]])]))
            assert +counted == dict.fromkeys(truth(), 1)
            assert not -counted
            counted.clear()
            for events in blocks.everything():
                count(events)
            assert counted == dict.fromkeys(truth(), 1)
