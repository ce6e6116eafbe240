"""Engines and tiers on virtual time: what takes how long, who goes first, and that the same comes of the same."""

import hashlib
from array import array

import msgspec
import pytest
from sim_cases import BLOCK, BLOCK_BYTES, MODEL, case, disk, key, request, some

from pdx.bench.sim.clock import Clock
from pdx.bench.sim.node import SimulatedNode
from pdx.bench.sim.replay import replay
from pdx.bench.sim.requests import Request, Trace
from pdx.bench.sim.simulation import simulate
from pdx.memory.arena import GRANULE_BYTES
from pdx.proxy.config import Routing


def of(*requests):
    return Trace("few", BLOCK, requests)


def prefill_s(blocks, context=0):
    return MODEL.prefill_s(blocks * BLOCK, context)


def test_a_request_alone_takes_its_prefill_and_a_step_for_each_further_token():
    result = simulate(of(request(range(20), output=101)), case())
    assert result.ttft_s.mean == pytest.approx(prefill_s(20))
    decode_s = sum(MODEL.step_s(1, 20 * BLOCK + at) for at in range(100))
    assert result.seconds == pytest.approx(prefill_s(20) + decode_s, rel=0.001)
    assert result.gpu_s == pytest.approx(result.seconds)
    assert (result.hit_share, result.possible_share) == (0.0, 0.0)


def test_what_host_memory_has_is_copied_and_the_rest_computed():
    result = simulate(of(request(range(20)), request(range(20), at_s=10.0)), case())
    copy_s = 20 * BLOCK_BYTES / 50e9
    assert result.hit_share == result.possible_share == 0.5
    assert result.ttft_s.p99 == pytest.approx(prefill_s(20))
    second_s = 2 * result.ttft_s.mean - prefill_s(20)
    assert second_s == pytest.approx(copy_s + MODEL.step_s(0, 0, 1, 20 * BLOCK - 1)), "the last token is computed"


def test_what_fell_to_the_disk_is_loaded_again_and_counts_as_the_disks():
    fill = [request(range(1000 * at, 1000 * at + 250), at_s=10.0 * at) for at in range(1, 4)]
    trace = of(request(range(100), at_s=0.0), *fill, request(range(100), at_s=50.0))
    result = simulate(trace, case(devices=[disk(10_000, gb_s=20.0)], ways={"early": 1}))
    host, below = result.tiers
    assert (host.hit_tokens, below.hit_tokens) == (0, 100 * BLOCK)
    assert below.loaded_bytes == pytest.approx(100 * BLOCK_BYTES)
    assert below.stored_bytes == pytest.approx(850 * BLOCK_BYTES)
    load_s = 100 * BLOCK_BYTES / 20e9
    assert load_s < 5 * result.ttft_s.mean - prefill_s(100) - 3 * prefill_s(250) < 3 * load_s
    assert result.hit_share == pytest.approx(100 / 950)


def test_what_takes_longer_than_computing_is_computed_unless_any_load_is_wanted():
    others = [request(range(1000 * at, 1000 * at + 250), at_s=10.0 * at) for at in (1, 2, 4, 5)]
    known = [request(range(100), at_s=at) for at in (0.0, 30.0, 60.0)]
    trace = of(*sorted([*others, *known], key=lambda each: each.at_s))
    slow = {"devices": [disk(10_000, gb_s=3.0)]}
    rule, none = (simulate(trace, case(**slow, pays=pays)) for pays in (True, False))
    assert rule.counters["loads_not_worth"] == 100, "the first load has told how slow the disk is"
    assert "loads_not_worth" not in none.counters
    assert none.tiers[1].hit_tokens == 2 * rule.tiers[1].hit_tokens > 0


@pytest.mark.long
def test_a_queue_is_loaded_ahead_of_its_turn():
    """Where the node knows what waits, host memory has it when its turn comes."""
    trace = some(400)
    settings = {"devices": [disk(100_000)], "queue": 8, "blocks": 400}
    ahead, blind = (
        simulate(trace, case(**settings, ways={"looks_ahead": is_so, "early": 0})) for is_so in (True, False)
    )
    assert ahead.counters["prefetched_chunks"] > 100
    assert ahead.tiers[0].hit_tokens > 1.2 * blind.tiers[0].hit_tokens
    assert "prefetched_chunks" not in blind.counters


@pytest.mark.parametrize("policy", ["lru", "gittins", "belady", "age:5"])
def test_the_same_gives_the_same_bit_by_bit(policy):
    settings = {"devices": [disk(500, gb_s=2.0)], "engines": 2, "policy": policy}
    trace, ended = some(60), []
    first, second = (simulate(trace, case(**settings), ended.append) for _ in range(2))
    assert sum(ended) == 2 * len(trace.requests), "progress counts each request that ends"
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    assert first.tiers[0].evicted_blocks > 0 or policy == "age:5"
    assert first.tiers[1].evicted_blocks > 0


# ---- the tier, driven by a real node's copies ------------------------------------------------


ROOM = 400  # chunks on the disk


@pytest.fixture
def bed(place):
    clock = Clock()
    node = SimulatedNode(place, clock, blocks=300, block_bytes=BLOCK_BYTES, devices=[disk(ROOM, gb_s=1.0)])
    yield node, clock
    node.close()


def pass_time(node, clock):
    while clock.step():
        node.turn()


def put(node, clock, first):
    """A prompt of 60 chunks is in memory, and on the disk."""
    numbers = range(first, first + 60)
    node.admit("put", request(numbers), lambda answer, _: (node.seal_granted(answer), node.release(answer)))
    node.turn()
    pass_time(node, clock)


def test_a_load_takes_as_long_as_the_device_and_the_node_measures_its_rate(bed):
    node, clock = bed
    for first in range(0, 6000, 1000):
        put(node, clock, first)
    assert node.in_memory([key(0)]) == 0
    began, answers = clock.now, []
    node.admit("again", request(range(60)), lambda answer, _: answers.append(answer))
    assert not answers, "it is on the disk"
    node.turn()
    pass_time(node, clock)
    assert (answers[0].hits, node.origins([key(0)])) == (60, ["disk"])
    assert clock.now - began == pytest.approx(60 * BLOCK_BYTES / 1e9 + 1e-4)
    rate = node.service.tiers.below[0][0].load_rate.gb_s * BLOCK_BYTES / GRANULE_BYTES
    assert rate == pytest.approx(1.0, rel=0.05)
    node.release(answers[0])


def test_a_full_disk_loses_the_end_of_the_prompt_that_was_used_longest_ago(bed):
    node, clock = bed
    for first in range(0, 7000, 1000):
        put(node, clock, first)
    (tier,) = node.tiers
    assert tier.removed == 7 * 60 - ROOM
    assert [number for number in range(60) if key(number) not in tier] == list(range(40, 60))
    assert tier.status().used_bytes == ROOM * GRANULE_BYTES


# ---- several nodes ---------------------------------------------------------------------------


def alike(count, every_s, prompts=3):
    """Requests in turn for some prompts that have nothing in common."""
    return of(
        *(request(range(100 * (at % prompts), 100 * (at % prompts) + 20), at_s=at * every_s) for at in range(count))
    )


def routed(routing, every_s=1.0, **more):
    return simulate(alike(40, every_s), msgspec.structs.replace(case(), nodes=4, routing=Routing(routing), **more))


def test_by_prefix_a_prompt_is_computed_once_and_by_turns_once_on_each_node():
    assert routed("prefix").hit_share == pytest.approx(37 / 40)
    assert routed("round-robin").hit_share == pytest.approx(28 / 40)


def test_where_a_network_is_fast_a_node_fetches_what_another_one_has():
    result = routed("round-robin", peer_bytes_s=1e12)
    assert result.hit_share == pytest.approx(37 / 40)
    assert {tier.name: tier.hit_tokens for tier in result.tiers}["peers"] == 9 * 20 * BLOCK
    slow = routed("round-robin", peer_bytes_s=1e3)
    assert slow.hit_share < 0.75, "one chunk of each node is a look how fast it is"


def test_by_prefix_a_queue_that_is_too_long_is_left():
    """One prompt, more of it than an engine can take: others compute it, too."""
    result = simulate(alike(64, 0.0001, prompts=1), msgspec.structs.replace(case(), nodes=4, routing=Routing.PREFIX))
    alone = simulate(alike(64, 0.0001, prompts=1), msgspec.structs.replace(case(), nodes=1))
    assert result.ttft_s.mean < 0.75 * alone.ttft_s.mean


def test_what_blocks_hold_is_found_wherever_it_stands_behind_a_known_beginning():
    """By hand: nothing; 1 + 18; 1 + 10 + 3; nothing without its beginning; the beginning alone."""
    prompts = [
        [*range(30)], [0, *range(12, 34)], [0, *range(20, 30), *range(31, 34), 36], [50, *range(20, 33)], [0, 41, 42]
    ]  # fmt: skip
    requests = []
    for at, blocks in enumerate(prompts):
        keys = [hashlib.md5(repr(blocks[: end + 1]).encode()).digest() for end in range(len(blocks))]
        content = array("I", blocks).tobytes()
        requests.append(Request(at * 100.0, len(blocks) * BLOCK, 1, keys, content=content))
    trace, total = of(*requests), sum(map(len, prompts))
    served = simulate(trace, case(pays=False))
    assert served.hit_share * total == pytest.approx(19 + 14 + 1)
    assert served.hit_share == pytest.approx(served.tiers[0].hit_tokens / trace.tokens)
    assert served.counters["moved_tokens"] == 18 + 13  # blocks: to the node each is a token here
    assert served.counters["sealed"] == total - 3, "what was moved lies there under its own keys, too"
    assert replay(trace, "lru", 300).hit_share == pytest.approx(served.hit_share)
    plain = of(*(msgspec.structs.replace(each, content=b"") for each in requests))
    assert simulate(plain, case(pays=False)).hit_share * total == pytest.approx(1 + 1 + 1)
