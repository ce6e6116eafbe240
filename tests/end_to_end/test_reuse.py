"""Prefix reuse without disaggregation: engines started by vLLM's own command line, sharing a node they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from answers import computed_prompt_tokens, essence
from cases import CASES, completion, text
from engine_process import Server
from host import Host, hit_tokens
from http_client import post
from tiny import make_tiny

import pdx
from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(shared: Host, model: Path) -> Server:
    """An engine whose caches may be reset, with defaults of its own. The tests before it have ended theirs."""
    configured = json.dumps({"presence_penalty": 1.0, "max_new_tokens": 7})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        server = shared.serve("one", model, "--override-generation-config", configured)
    shared.wait_saving(server)
    return server


def test_after_the_node_was_killed_the_second_turn_is_served_from_its_disk(
    host: Host, model: Path, expected: dict[str, Any]
) -> None:
    server = host.serve("disk", model, disk=str(host.folder / "disk"), disk_limit="1GiB")
    host.wait_saving(server)
    before = host.sealed()
    assert essence(post(server.url, *CASES["length-1000"])) == essence(expected["length-1000"])
    wait_until(lambda: host.sealed() == before + 4, timeout_s=30, what="its three chunks and the block behind them")
    stored = wait_until(lambda: host.disk_chunks() == before + 3 and before + 3, what="whole chunks are on the disk")

    killed = psutil.Process(host.status().pid)
    killed.kill()
    killed.wait(30)
    host.wait_attached_again(killed.pid)
    wait_until(lambda: host.disk_chunks() == stored, what="the next node has read what is on the disk")
    assert host.sealed() == 0
    hits = hit_tokens(server)
    assert essence(post(server.url, *CASES["second-turn"])) == essence(expected["second-turn"])
    assert hit_tokens(server) - hits == 768
    assert host.status().counters["disk_loaded"] == 3
    told = {source: server.metric("vllm:pdx_hit_tokens_total", source=source) for source in ("disk", "memory")}
    assert told == {"disk": 768, "memory": 0}
    assert server.metric("vllm:pdx_loads_total", outcome="loaded") == 1
    assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") == 768
    assert server.metric("vllm:pdx_copied_bytes_total", direction="save") > 0
    with pdx.connect(host.address, timeout_s=10) as node:
        told = node.why().requests[0]
    assert (told.chunks, told.hits) == (4, 3), told
    assert [(each.count, each.is_hit) for each in told.reasons] == [(3, True), (1, False)]
    assert told.reasons[0].text.startswith("from disk at ")
    assert told.reasons[1].text == "never stored here under this key"


def test_reuse_under_tensor_parallelism_and_never_between_strangers(
    shared: Host, model: Path, expected: dict[str, Any], workplace: Path
) -> None:
    """One node serves a TP=2 engine, then another model and another block size; only equals hit."""
    body = CASES["length-1000"]
    sharded = shared.serve("tp2", model, "--tensor-parallel-size", "2", cores="0|1")
    shared.wait_saving(sharded)
    assert shared.workers() == 2, "both ranks are attached to the node that the engine has started"
    before = shared.sealed()
    assert essence(post(sharded.url, *body)) == essence(expected["length-1000"])
    wait_until(lambda: shared.sealed() == before + 2 * 4, timeout_s=30, what="three chunks and a block, of two shards")
    assert essence(post(sharded.url, *body)) == essence(expected["length-1000"])
    assert hit_tokens(sharded) == 896
    sharded.stop()
    wait_until(lambda: shared.workers() == 0, timeout_s=30, what="its processes are given back")

    other = shared.serve("other-model", make_tiny(workplace / "other", seed=1), cores="0")
    smaller = shared.serve("smaller-blocks", model, "--block-size", "64", cores="1")
    for server in (other, smaller):
        shared.wait_saving(server)
    before = shared.sealed()
    stranger = post(other.url, *body)
    assert essence(post(smaller.url, *body)) == essence(expected["length-1000"])
    assert hit_tokens(other) == hit_tokens(smaller) == 0
    wait_until(lambda: shared.sealed() == before + 2 * 4, timeout_s=30, what="each has chunks of its own")
    assert essence(stranger) != essence(expected["length-1000"])
    assert essence(post(other.url, *body)) == essence(stranger)
    assert hit_tokens(other) == 896
    assert essence(post(smaller.url, *body)) == essence(expected["length-1000"])
    assert hit_tokens(smaller) == 960
    other.stop()
    smaller.stop()


def test_engines_of_other_tensor_parallel_sizes_share_chunks_and_hand_prompts_over(
    shared: Host, model: Path, expected: dict[str, Any]
) -> None:
    """One rank and two, either way round: what one has computed the other loads, and answers as plain vLLM does."""
    one = shared.serve("one-rank", model, cores="0", shards=2)
    two = shared.serve("two-ranks", model, "--tensor-parallel-size", "2", cores="0|1", shards=2)
    for server in (one, two):
        shared.wait_saving(server)
    path, body = CASES["length-1000"]
    for salt, (first, second) in {"up": (one, two), "down": (two, one)}.items():
        salted = {**body, "cache_salt": f"reuse {salt}"}
        hits, before = hit_tokens(second), shared.sealed()
        assert essence(post(first.url, path, salted)) == essence(expected["length-1000"])
        wait_until(
            lambda before=before: shared.sealed() == before + 2 * 4, timeout_s=30, what="two shards of each chunk"
        )
        assert essence(post(second.url, path, salted)) == essence(expected["length-1000"])
        assert hit_tokens(second) - hits == 896

        transfer, hits = f"transfer-{salt}-0123456789", hit_tokens(second)
        salted = {**body, "cache_salt": f"handoff {salt}"}
        prefill = {**salted, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer}}
        post(first.url, path, prefill)
        decode = {"do_remote_prefill": True, "transfer_id": transfer, "prefill_tokens": 1000}
        answer = post(second.url, path, {**salted, "kv_transfer_params": decode})
        assert essence(answer) == essence(expected["length-1000"])
        assert hit_tokens(second) - hits >= 896
    one.stop()
    two.stop()


def test_ranks_of_data_parallelism_find_what_the_other_one_has_saved(
    shared: Host, model: Path, expected: dict[str, Any]
) -> None:
    """Each rank is an engine of its own, with halves of its own; they share the node, and one address."""
    server = shared.serve("dp2", model, "--data-parallel-size", "2", cores="nobind")
    server.wait_ready()

    def engines() -> set[str]:
        return {each.engine for each in shared.status().attached if each.kind == "scheduler"}

    wait_until(lambda: len(engines()) == 2 == shared.workers(), timeout_s=60, what="both ranks are attached")
    assert {name[-4:] for name in engines()} == {"_dp0", "_dp1"}
    path, body = CASES["length-1000"]
    for salt, (first, second) in {"up": "01", "down": "10"}.items():
        salted, hits, before = {**body, "cache_salt": f"ranks {salt}"}, hit_tokens(server), shared.sealed()
        answer = post(server.url, path, salted, **{"X-data-parallel-rank": first})
        assert essence(answer) == essence(expected["length-1000"])
        wait_until(lambda before=before: shared.sealed() == before + 4, timeout_s=30, what="what was computed is saved")
        assert hit_tokens(server) == hits
        answer = post(server.url, path, salted, **{"X-data-parallel-rank": second})
        assert essence(answer) == essence(expected["length-1000"])
        assert hit_tokens(server) - hits == 896
    server.stop()


def test_salt_keeps_tenants_apart(shared: Host, engine: Server) -> None:
    computed, hit = computed_prompt_tokens(engine), hit_tokens(engine)
    prompt = text(3000, 600)
    before = shared.sealed()
    first = essence(post(engine.url, *completion(prompt, cache_salt="one")))
    for salt, hits, sealed in (("two", 0, 2), ("one", 512, 4), ("two", 1024, 4)):
        wait_until(
            lambda sealed=sealed: shared.sealed() == before + sealed, timeout_s=30, what="what was computed is saved"
        )
        assert essence(post(engine.url, *completion(prompt, cache_salt=salt))) == first
        assert hit_tokens(engine) - hit == hits
    assert computed_prompt_tokens(engine) - computed == 4 * 600 - 1024


def test_after_a_reset_nothing_that_was_saved_before_is_found(shared: Host, engine: Server) -> None:
    """As vLLM does around a change of weights; here they stay, so that the answers do, too."""
    told = [process.facts for process in shared.status().attached if process.kind == "scheduler"]
    facts = {"max_model_len": 4096, "max_new_tokens": 7, "looks_back": True, "stops_short": False}
    assert told == [facts]
    body = completion(text(3100, 600))
    before, hit = shared.sealed(), hit_tokens(engine)
    first = essence(post(engine.url, *body))
    assert first[1]["completion_tokens"] == 7, "what the engine has told is what it does"
    for reset, hits, sealed in ((False, 512, 2), (True, 512, 4), (False, 1024, 4)):
        wait_until(
            lambda: shared.status().chunks.get("filling", 0) == 0, timeout_s=30, what="what was computed is saved"
        )
        if reset:
            assert post(engine.url, "/reset_prefix_cache?reset_external=true", {})["success"]
        assert essence(post(engine.url, *body)) == first
        assert hit_tokens(engine) - hit == hits
        wait_until(lambda sealed=sealed: shared.sealed() == before + sealed, timeout_s=30, what="what is there")


def test_two_questions_to_one_document_share_all_of_its_full_blocks(shared: Host, engine: Server) -> None:
    """They part within a chunk: its first block is loaded, and the rest of it computed."""
    document = text(3200, 900)
    bodies = [completion(document + text(3201 + number, 200)) for number in range(2)]
    alone = []
    for body in bodies:  # each computed by an engine that knows nothing
        assert post(engine.url, "/reset_prefix_cache?reset_external=true", {})["success"]
        alone.append(essence(post(engine.url, *body)))
    assert post(engine.url, "/reset_prefix_cache?reset_external=true", {})["success"]
    before = shared.sealed()
    assert essence(post(engine.url, *bodies[0])) == alone[0]
    wait_until(lambda: shared.sealed() == before + 4, timeout_s=30, what="what was computed is saved")
    assert post(engine.url, "/reset_prefix_cache", {})["success"]  # the engine's own
    hit = hit_tokens(engine)
    assert essence(post(engine.url, *bodies[1])) == alone[1]
    assert hit_tokens(engine) - hit == 3 * 256 + 128
