"""Pins hold every shard, and outlive whoever set them, in sight of all, within their share."""

import pytest
from service_stage import CHUNKS, attach, keys, serving

from pdx.errors import ArenaFull, ChunkMissing
from pdx.memory.arena import GRANULE_BYTES
from pdx.node.reports import node_status
from pdx.wire.messages import Admit, Bye, Delete, Fill, Pin

KEY = keys([5000])


def test_a_pin_holds_every_shard_and_outlives_its_process_until_the_chunk_is_deleted(place, clock):
    with serving(place, clock) as service:
        scheduler = attach(service, "e", "scheduler", engine="e")
        workers = [attach(service, f"w{shard}", "worker", engine="e", shard=shard) for shard in range(2)]
        slots = service.handle(scheduler, Admit(KEY, 3 * GRANULE_BYTES, shards=2)).granted_slots
        for worker, slot in zip(workers, slots, strict=True):
            service.handle(worker, Fill([slot], layers=1, seal=True))
        for _ in range(2):
            assert service.handle(scheduler, Pin(KEY, shards=2)).count == 1
        service.handle(scheduler, Bye())
        status = node_status(service)
        assert (status.pins, status.pinned_bytes) == (4, 6 * GRANULE_BYTES)
        client = attach(service, "others")
        others = service.handle(client, Admit(keys(range(CHUNKS)), GRANULE_BYTES, partial=True)).granted_slots
        service.handle(client, Fill(others, layers=1, seal=True))
        assert service.handle(client, Admit(KEY, shards=2)).slots == slots
        service.handle(client, Delete(KEY))
        status = node_status(service)
        assert (status.pins, status.pinned_bytes) == (0, 0)


def test_pins_have_a_budget_and_a_pin_above_it_pins_nothing(place, clock):
    with serving(place, clock) as service:
        client, all_ = attach(service, "c"), keys(range(CHUNKS))
        slots = service.handle(client, Admit(all_, GRANULE_BYTES)).granted_slots
        service.handle(client, Fill(slots, layers=1, seal=True))
        most = int(0.8 * CHUNKS)
        for _ in range(2):  # what is pinned already costs nothing
            assert service.handle(client, Pin(all_[: most - 1])).count == most - 1
        with pytest.raises(ArenaFull, match="pin_share"):
            service.handle(client, Pin(all_[most - 1 : most + 1]))
        assert service.store.index.pinned_bytes == (most - 1) * GRANULE_BYTES
        assert service.handle(client, Pin([all_[most - 1]] * 2)).count == 2, "the last one that fits, named twice"
        assert service.counters["pins_refused"] == 1
        with pytest.raises(ChunkMissing):
            service.handle(client, Pin(KEY))
        assert service.handle(client, Pin(all_[:most], pinned=False)).count == most
