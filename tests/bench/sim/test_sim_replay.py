"""Traces through the store alone: against an independent simulation, and Belady's policy against all others."""

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest
from sim_cases import BLOCK, request, some

from pdx.bench.sim.replay import AFTER, EACH, REQUEST, replay
from pdx.bench.sim.requests import Trace, read
from pdx.errors import ConfigError

SYNTHETIC = Path(__file__).parent / "data" / "mooncake-synthetic_trace.jsonl.gz"


def hit_share(*asked):
    return replay(*asked).hit_share


@pytest.fixture(scope="module")
def synthetic():
    return read(SYNTHETIC)


# Percent of tokens found in Mooncake's synthetic trace by an independent script, in one pool of so many blocks of 512.
@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "way", "blocks", "percent"),
    [
        ("age:1e9", AFTER, 10_000, 40.4),
        ("lru", EACH, 20_000, 58.2),
        ("s3fifo", EACH, 20_000, 57.2),
        ("belady", EACH, 20_000, 65.1),
    ],
)
def test_hit_rates_are_those_of_an_independent_simulation(synthetic, policy, way, blocks, percent):
    assert 100 * hit_share(synthetic, policy, blocks, way) == pytest.approx(percent, abs=0.3)


@pytest.mark.long
def test_gittins_finds_no_less_than_the_better_of_lru_and_s3fifo(synthetic):
    assert 100 * hit_share(synthetic, "gittins", 20_000) >= 58.2


@pytest.mark.parametrize("way", [REQUEST, EACH, AFTER])
def test_nothing_finds_more_than_belady_and_belady_no_more_than_a_store_that_forgets_nothing(way):
    trace = some(80)
    found = {policy: hit_share(trace, policy, 150, way) for policy in ("lru", "age:1e9", "s3fifo", "gittins", "belady")}
    possible = trace.found_by_all() / trace.tokens
    assert max(found, key=found.get) == "belady"
    assert found["belady"] < possible
    assert hit_share(trace, "lru", trace.distinct_blocks(), way) == pytest.approx(possible)


def brute_force(requests, room):
    """The most hits of blocks, one at a time, by all choices of what goes."""
    keys = [request.keys[0] for request in requests]

    def best(at, here):
        if at == len(keys):
            return 0
        if keys[at] in here:
            return 1 + best(at + 1, here)
        if len(here) < room:
            return best(at + 1, here | {keys[at]})
        return max(best(at + 1, (here - {gone}) | {keys[at]}) for gone in here)

    return best(0, frozenset())


def test_belady_is_the_best_of_all_choices():
    for seed in range(8):
        drawn = random.Random(seed)
        requests = [request([drawn.randrange(6)]) for _ in range(14)]
        trace = Trace("tiny", BLOCK, requests)
        assert hit_share(trace, "belady", 3, EACH) * len(requests) == pytest.approx(brute_force(requests, 3))


def test_what_is_kept_for_a_time_is_found_within_it():
    trace = Trace("tiny", BLOCK, [request([1, 2], 0.0), request([1, 2], 9.0), request([1, 2], 20.0)])
    assert replay(trace, "age:10", 100).hit_share * 3 == pytest.approx(1.0)
    assert replay(trace, "age:30", 100).hit_share * 3 == pytest.approx(2.0)
    assert replay(trace, "age:10", 100).most_blocks == 2


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "no trace in Mooncake's form"),
        (['{"timestamp": 0}'], "KeyError"),
        (['{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}'], "at least a token"),
        (['{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 1]}'], "different numbers"),
        (['{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}'], "different numbers"),
        (['{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}'], "OverflowError"),
        (['{"timestamp": Infinity, "input_length": 9, "output_length": 1, "hash_ids": [1]}'], "a time"),
        ([], "has no requests"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, lines, said):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=said):
        read(path)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:10] + b"\xff" + data[11:]])
def test_a_file_that_is_cut_or_damaged_is_refused(tmp_path, damage):
    path = tmp_path / "a_trace.jsonl.gz"
    line = b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n'
    path.write_bytes(damage(gzip.compress(line * 9)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read(path)


def test_requests_come_in_the_order_of_their_times(tmp_path):
    records = [{"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [at, at + 1]} for at in (2000, 0)]
    path = tmp_path / "a_trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(itertools.chain(map(json.dumps, records), [""])))
    trace = read(path)
    assert (trace.name, [each.at_s for each in trace.requests], trace.seconds) == ("a", [0.0, 2.0], 2.0)
    assert (trace.tokens, trace.distinct_blocks(), trace.found_by_all()) == (1200, 4, 0)
