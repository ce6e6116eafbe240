"""Pins at a real node: they hold every shard, and outlive whoever set them, in sight of all."""

import pytest
from node_harness import MIB, attached

from pdx.memory.arena import GRANULE_BYTES
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Delete, Fill, Pin

KEY = b"pinned".ljust(16, b".")
OTHERS = [number.to_bytes(16, "little") for number in range(8 * MIB // GRANULE_BYTES)]


@pytest.fixture
def node(node_here):
    yield node_here
    with attached(node_here.address) as cleaner:
        cleaner.ask(Delete([KEY, *OTHERS]))
        status = cleaner.status()
    assert (status.free_bytes, status.chunks, status.pins, status.pinned_bytes) == (8 * MIB, {}, 0, 0)


def fill_the_rest(client):
    reserved = client.ask(Admit(OTHERS, GRANULE_BYTES, partial=True))
    client.ask(Fill(reserved.granted_slots, layers=1, seal=True))


def test_a_pin_holds_every_shard_of_a_chunk(node, attach):
    scheduler = attach(node, kind="scheduler", engine="e")
    workers = [attach(node, kind="worker", engine="e", shard=shard) for shard in range(2)]
    slots = scheduler.ask(Admit([KEY], GRANULE_BYTES, shards=2)).granted_slots
    for worker, slot in zip(workers, slots, strict=True):
        worker.ask(Fill([slot], layers=1, seal=True))
    assert scheduler.ask(Pin([KEY], shards=2)).count == 1
    assert scheduler.status().pins == 2
    fill_the_rest(attach(node))
    assert scheduler.ask(Admit([KEY], shards=2)).slots == slots
    scheduler.ask(Pin([KEY], pinned=False, shards=2))
    assert scheduler.status().pins == 0


def test_a_pin_outlives_its_process_and_is_shown_with_its_bytes(node, attach):
    client = attach(node)
    with attached(node.address, name="pins") as other:
        slots = other.ask(Admit([KEY], 3 * GRANULE_BYTES)).granted_slots
        other.ask(Fill(slots, layers=1, seal=True))
        for _ in range(2):
            other.ask(Pin([KEY]))
    wait_until(lambda: "pins" not in {session.name for session in client.status().attached})
    status = client.status()
    assert (status.pins, status.pinned_bytes) == (2, 3 * GRANULE_BYTES)
    fill_the_rest(client)
    assert client.ask(Admit([KEY])).hits == 1
    client.ask(Delete([KEY]))
    status = client.status()
    assert (status.pins, status.pinned_bytes) == (0, 0)


def test_pins_have_a_budget_and_a_pin_above_it_pins_nothing(node, attach):
    client = attach(node)
    fill_the_rest(client)
    most = int(0.8 * len(OTHERS))
    assert client.ask(Pin(OTHERS[: most - 1])).count == most - 1
    assert client.ask(Pin(OTHERS[: most - 1])).count == most - 1, "what is pinned already costs nothing"
    refused = client.ask(Pin(OTHERS[most - 1 : most + 1]))
    assert (refused.error, "pin_share" in refused.text) == ("ArenaFull", True)
    assert client.status().pinned_bytes == (most - 1) * GRANULE_BYTES
    assert client.ask(Pin([OTHERS[most - 1], OTHERS[most - 1]])).count == 2, "the last one that fits, named twice"
    assert client.status().counters["pins_refused"] == 1
    assert client.ask(Pin([KEY])).error == "ChunkMissing"
    assert client.ask(Pin(OTHERS[:most], pinned=False)).count == most
