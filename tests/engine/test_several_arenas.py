"""An engine on a GPU of a node that has host memory, too: it gathers on its GPU, and the node copies to the host.

The GPU, its driver and its copy engines are the fake ones.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from node_harness import MIB
from stream_bed import Bed
from toy_engine import BLOCK, CHUNK, LAYERS, PAGE_BYTES, tokens

from pdx.memory.arena import round_up
from pdx.testing.waiting import wait_until

CHUNK_BYTES = round_up(LAYERS * CHUNK // BLOCK * PAGE_BYTES)
AT_ONCE = 8  # chunks of a prompt that drives others out


@pytest.fixture
def bed(beds: Callable[..., Bed]) -> Bed:
    """A node with 8 MiB of host memory, and on the GPU as little as there can be."""
    return beds(True, gpu="", more_gpus=["0"], gpu_arena_bytes=MIB)


def used(bed: Bed) -> list[int]:
    """Bytes in use in each arena."""
    return [arena.total_bytes - arena.free_bytes for arena in bed.node.status().arenas]


def test_what_is_saved_on_the_gpu_is_in_host_memory_too(bed: Bed) -> None:
    first, second = bed.engine(), bed.engine()
    prompt = tokens(1, 3 * CHUNK + 3)
    first.finish(first.save(prompt, step=7))
    bed.node.wait_sealed(6)
    assert used(bed) == [3 * CHUNK_BYTES, 3 * CHUNK_BYTES]
    assert [arena.gpu != "" for arena in bed.node.status().arenas] == [False, True]
    assert second.load(prompt) == 3 * CHUNK
    bed.node.wait_at_rest()


def test_what_was_evicted_from_the_gpu_comes_back_from_host_memory(bed: Bed) -> None:
    engine = bed.engine()
    room = bed.node.status().arenas[1].total_bytes // CHUNK_BYTES
    first = tokens(1, 3 * CHUNK)
    engine.finish(engine.save(first))
    bed.node.wait_sealed(6)
    for number in range(room // AT_ONCE):
        engine.finish(engine.save(tokens(2 + number, AT_ONCE * CHUNK)))
        kept = 3 + (number + 1) * AT_ONCE
        wait_until(lambda kept=kept: used(bed)[0] == kept * CHUNK_BYTES, what="it is in host memory")
    loaded = bed.node.status().counters["arenas_stored_bytes"]
    assert engine.load(first) == 3 * CHUNK
    assert bed.node.status().counters["arenas_stored_bytes"] >= loaded + 3 * LAYERS * CHUNK // BLOCK * PAGE_BYTES
    bed.node.wait_at_rest()


def test_the_ranks_of_an_engine_have_their_chunks_on_their_gpus(beds: Callable[..., Bed]) -> None:
    on_two = beds(True, "--gpus", "2", gpu="", more_gpus=["0", "1"], gpu_arena_bytes=MIB)
    engine = on_two.engine(gpus=("0", "1"))
    prompt = tokens(4, 3 * CHUNK + 3)
    engine.finish(engine.save(prompt, step=7))
    on_two.node.wait_sealed(12)
    assert used(on_two) == [6 * CHUNK_BYTES, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES], "both shards are in host memory"
    gpus = [arena.gpu for arena in on_two.node.status().arenas]
    assert gpus == ["", *(worker.gpu().uuid for worker in engine.by_rank if worker is not None)]
    assert on_two.engine(gpus=("0", "1")).load(prompt) == 3 * CHUNK
    on_two.node.wait_at_rest()
