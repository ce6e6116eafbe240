"""The same requests at a real node process and in the simulator: what is found, sealed and evicted is the same."""

import pytest
from sim_cases import case, some

from pdx.bench.sim.simulation import simulate
from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import Admit, Fill, Release

BLOCKS = 300
COUNTED = ("hit_chunks", "looked_up_chunks", "lookups", "sealed", "evicted", "evicted_unstored")


def trace():
    """Each request is over before the next one comes."""
    found = some(150, most=120)
    apart = [type(each)(at * 100.0, each.tokens, each.output, each.keys) for at, each in enumerate(found.requests)]
    return type(found)(found.name, found.block_tokens, apart)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_a_real_node_counts_the_same(start_node, attach, policy):
    node = start_node(arena_bytes=BLOCKS * GRANULE_BYTES, policy=policy)
    scheduler = attach(node, kind="scheduler", engine="one")
    worker = attach(node, kind="worker", engine="one")
    hits = 0
    for number, request in enumerate(trace().requests):
        ask = Admit(list(request.keys), GRANULE_BYTES, 1, lease_s=60.0, partial=True, request=f"request-{number}")
        answer = scheduler.ask(ask)
        hits += answer.hits
        if answer.lease:
            scheduler.ask(Release(answer.lease))
        if answer.granted_slots:
            worker.ask(Fill(answer.granted_slots, 0, 1, seal=True))
    counters = node.status().counters
    simulated = simulate(trace(), case(blocks=BLOCKS, policy=policy))
    assert {name: simulated.counters.get(name, 0) for name in COUNTED} == {
        name: counters.get(name, 0) for name in COUNTED
    }
    assert simulated.tiers[0].hit_tokens == hits * trace().block_tokens
    assert counters["evicted"] > 0
