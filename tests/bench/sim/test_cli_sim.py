"""`pdx sim` as it is typed: what it says, writes and refuses."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pdx.cli.main import main

SMALL = ("--sessions", 40, "--model", "llama-13b", "--gpu", "a100", "--tp", 2)


def sim(*arguments):
    return CliRunner().invoke(main, ["sim", *map(str, arguments)])


def write(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture
def trace(tmp_path):
    ids = [list(range(at // 2 * 5, at // 2 * 5 + 6)) for at in range(80)]
    records = [
        {"timestamp": 1000 * at, "input_length": 6 * 512 - 12, "output_length": 20, "hash_ids": each}
        for at, each in enumerate(ids)
    ]
    return write(tmp_path / "small_trace.jsonl", records)


def test_it_says_what_was_found_where_and_what_it_took(trace):
    result = sim(trace, "--host", "32GB", "--disk", "1TB", "--remote", "1TB")
    assert result.exit_code == 0, result.output
    for words in ("small, lru: 80 requests", "host", "disk", "remote", "TTFT", "per million tokens"):
        assert words in result.output


def test_json_is_the_same_for_the_same_seed_and_another_for_another():
    one, again, other = (json.loads(sim(*SMALL, "--json", "--seed", seed).stdout) for seed in (1, 1, 2))
    assert one == again != other
    (found,) = one
    assert 0 < found["hit_share"] <= found["possible_share"] < 1
    assert {tier["name"] for tier in found["tiers"]} == {"host"}
    assert found["dollars_per_million"] > 0


def test_apart_is_a_plain_cache(trace):
    result = sim(trace, "--apart", "--host", "32GB", "--policy", "belady", "--json")
    (row,) = json.loads(result.stdout)
    assert (row["trace"], row["policy"], row["blocks"]) == ("small", "belady", 512)
    assert row["hit_share"] > 0.4


def test_sweeps():
    points = json.loads(sim(*SMALL, "--sweep", "host=0.01x,0.1x,1x", "--policy", "lru,gittins", "--json").stdout)
    assert [point["of_demand"] for point in points[:3]] == pytest.approx([0.01, 0.1, 1.0])
    shares = [point["of_possible"] for point in points[:3]]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    points = json.loads(sim(*SMALL, "--sweep", "idle=1s,1m,2h", "--json").stdout)
    assert [point["kept_s"] for point in points] == [1, 60, 7200]
    assert points[0]["of_possible"] < points[1]["of_possible"] < points[2]["of_possible"] == pytest.approx(1.0)
    assert points[0]["room_bytes"] < points[2]["room_bytes"]
    assert "hit rate by time to live" in sim(*SMALL, "--sweep", "age=1s").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give the files of traces, or --sessions"),
        ((*SMALL, "--apart", "--sweep", "host=1GB"), "two different questions"),
        ((*SMALL, "--policy", "mru"), "no policy is named 'mru'"),
        ((*SMALL, "--sweep", "disk=1GB"), "host=16GB,64GB"),
        ((*SMALL, "--sweep", "host=ax"), "neither a size nor a share"),
        ((*SMALL, "--warm-up", "100000"), "--warm-up: of"),
        ((*SMALL, "--host", "1GB"), "are too few to simulate a node"),
        ((*SMALL, "--tp", "1", "--model", "llama-65b"), "larger --tp"),
        ((*SMALL, "--disk", "1TB", "--disk-speed", "fast"), "not a speed"),
        ((*SMALL, "--sweep", "idle=soon"), "not a time"),
        ((*SMALL, "--window", "128"), "no room for four blocks"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(arguments, said):
    result = sim(*arguments)
    assert result.exit_code == 1, result.output
    assert said in result.output
    assert "Traceback" not in result.output
