"""What the scheduler half tells the workers: whole on the other side, and few objects."""

from __future__ import annotations

import pickle

from pdx.engine.plan import LoadPlan, PagesPlan
from pdx.memory.slot import Slot


def plan(num_shards: int, num_chunks: int) -> list[PagesPlan]:
    return [
        PagesPlan(
            [Slot(4096 * (chunk * num_shards + shard), 4096 + chunk, (1 << 62) + shard) for shard in range(num_shards)],
            num_blocks=16,
            first=chunk % 3,
            block_ids=list(range(100 * chunk, 100 * chunk + 16 - chunk % 3)),
        )
        for chunk in range(num_chunks)
    ]


def test_each_shard_reads_its_part_of_a_load() -> None:
    pages = plan(num_shards=3, num_chunks=5)
    load = pickle.loads(pickle.dumps(LoadPlan.of("r", "transfer", pages, 7)))
    assert (load.request_id, load.transfer, load.num_chunks, load.epoch) == ("r", "transfer", 5, 7)
    assert load.block_ids == [block for each in pages for block in each.block_ids]
    for shard in range(3):
        own = load.pages_of(shard)
        assert [each.slot_of(shard) for each in own] == [each.slot_of(shard) for each in pages]
        assert [(each.num_blocks, each.first, each.block_ids, each.completes) for each in own] == [
            (each.num_blocks, each.first, each.block_ids, each.completes) for each in pages
        ]


def test_a_load_of_no_chunk_is_empty() -> None:
    load = LoadPlan.of("r", None, [])
    assert (load.num_chunks, load.block_ids, load.pages_of(0)) == (0, [], [])


def test_a_load_is_one_object_on_its_way_however_long_the_prompt() -> None:
    short, long = (
        len(pickle.dumps(LoadPlan.of("r", None, plan(8, chunks)))) - len(LoadPlan.of("r", None, plan(8, chunks)).packed)
        for chunks in (1, 500)
    )
    assert long - short < 32, "a few more digits of a length"
