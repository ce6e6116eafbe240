"""Every answer through prefiller, node and decoder equals the plain engine's, and nothing was computed twice."""

from __future__ import annotations

import itertools
import json
import urllib.request
from typing import Any

import pytest
from answers import computed_prompt_tokens, essence
from cases import CASES, completion, text
from http_client import post, stream
from pair import Pair

from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 128


@pytest.mark.parametrize("name", CASES)
def test_answer_equals_the_plain_engines(name: str, pair: Pair, expected: dict[str, Any]) -> None:
    answer = pair.post(*CASES[name])
    assert essence(answer) == essence(expected[name])


@pytest.mark.parametrize("name", ["one-token", "length-3000", "chat", "stop-string"])
def test_streamed_answer_equals_the_plain_engines(name: str, pair: Pair, expected: dict[str, Any]) -> None:
    path, body = CASES[name]
    events = list(stream(pair.proxy.url, path, {**body, "stream_options": {"include_usage": True}}))
    choices = [event["choices"][0] for event in events if event["choices"]]
    pieces = [(choice.get("text") if "text" in choice else choice["delta"].get("content")) or "" for choice in choices]
    assert len({event["id"] for event in events}) == 1
    (wanted, reason, _), usage = essence(expected[name])[0][0], essence(expected[name])[1]
    assert "".join(pieces) == wanted
    assert choices[-1]["finish_reason"] == reason
    assert {key: events[-1]["usage"][key] for key in usage} == usage


def test_a_first_token_that_was_forwarded_is_the_decoders_too(pair: Pair) -> None:
    """The client has it from the prefill engine; the decode engine samples it again, from the KV that it has loaded."""
    for seed in range(1020, 1027):
        told: dict[str, str] = {}
        path, body = completion(text(seed, 300 + seed % 7 * 100), max_tokens=8)
        pieces = [event["choices"][0]["text"] for event in stream(pair.proxy.url, path, body, told)]
        assert told["x-pdx-mode"] == "forward"
        plain = post(pair.decode.url, path, {**body, "cache_salt": "alone"})
        assert "".join(pieces) == plain["choices"][0]["text"]
    assert pair.proxy.metric("pdx_proxy_fallbacks_total", reason="first_token_differs") == 0


def test_the_decoder_computes_nothing_of_a_forwarded_prompt(pair: Pair) -> None:
    before, told = computed_prompt_tokens(pair.decode), {}
    assert list(stream(pair.proxy.url, *completion(text(1001, 1500)), told))
    assert told["x-pdx-mode"] == "forward"
    assert computed_prompt_tokens(pair.decode) - before <= 2  # the last one, to sample the first token from


def test_the_decoder_samples_the_first_token_of_a_chat_from_loaded_kv(pair: Pair) -> None:
    path, body = CASES["chat"]
    body = {**body, "messages": [{"role": "user", "content": text(1002, 900)}]}
    before = computed_prompt_tokens(pair.decode)
    answer = pair.post(path, body)
    assert answer["pdx"]["x-pdx-mode"] == "sampled"
    assert computed_prompt_tokens(pair.decode) - before <= 2


@pytest.mark.parametrize(("kind", "seed"), [("chat", 1010), ("sampled", 1011), ("forward", 1012)])
def test_cached_tokens_are_those_that_the_prefill_engine_had(kind: str, seed: int, pair: Pair) -> None:
    prompt = text(seed, 900)
    path, body = completion(prompt, max_tokens=4, stream_options={"include_usage": True})
    if kind != "forward":
        del body["stream_options"]
    if kind == "chat":
        path, body = CASES["chat"]
        body = {**body, "messages": [{"role": "user", "content": prompt}]}

    def cached(url: str) -> int:
        told: dict[str, str] = {}
        if kind == "forward":
            *_, answer = stream(url, path, body, told)
        else:
            answer = post(url, path, body)
            told = answer["pdx"]
        assert url != pair.proxy.url or told["x-pdx-mode"] == ("forward" if kind == "forward" else "sampled")
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(pair.proxy.url) == 0, "nobody had seen this prompt, although all was loaded where it is decoded"
    pair.wait_at_rest()
    again = cached(pair.proxy.url)
    assert again == cached(pair.prefill.url) >= 768


def test_second_turn_reuses_what_either_engine_has(pair: Pair) -> None:
    """A generated chunk is saved if the node grants room for it while the request lasts. Where busy engines have all
    cores, the node's turn may come seconds later: then other prompts are asked."""
    seeds = itertools.count(100_300, 10)

    def is_reused() -> bool:
        seed = next(seeds)
        first = text(seed, 1000)
        answer = pair.post(*completion(first, max_tokens=1400))["choices"][0]["text"][:400]
        pair.wait_at_rest()  # the last chunk that the decoder generated is stored beside the answer, not before it
        before = computed_prompt_tokens(pair.prefill)
        second = pair.post(*completion(first + answer + text(seed + 1, 50)))
        assert second["http_status"] == 200
        # The chunks that the decoder generated are in the store, too: 1,280 of 1,450 tokens are there.
        return computed_prompt_tokens(pair.prefill) - before <= 1450 - 1280

    wait_until(is_reused, timeout_s=90, what="all whole chunks of a first turn are reused")


def test_eight_at_once(pair: Pair, expected: dict[str, Any]) -> None:
    names = ["length-1000", "length-3000", "shared-1", "shared-2", "chat", "length-300", "token-ids", "many-tokens"]
    answers = pair.post_all([CASES[name] for name in names])
    assert [essence(answer) for answer in answers] == [essence(expected[name]) for name in names]
    pair.wait_at_rest()


def test_the_answer_depends_on_an_early_token(pair: Pair) -> None:
    """The oracle is worth something only if a wrong page would change the answer."""
    prompt = text(1005, 2000)
    changed = prompt[:5] + ("~" if prompt[5] != "~" else "!") + prompt[6:]
    assert pair.post(*completion(prompt))["choices"][0]["text"] != pair.post(*completion(changed))["choices"][0]["text"]


def test_timeline_shows_that_nothing_moved_after_prefill(pair: Pair) -> None:
    answer = pair.post(*completion(text(1006, 2000)))
    transfer = answer["pdx"]["x-pdx-transfer-id"]
    timeline: dict[str, Any] = {}

    def is_complete() -> bool:
        with urllib.request.urlopen(f"{pair.proxy.admin_url}/pdx/requests/{transfer}", timeout=5) as response:
            timeline.update(json.load(response))
        return {"prefill_end", "sealed", "runnable"} <= {moment["event"] for moment in timeline["moments"]}

    wait_until(is_complete, timeout_s=30, what="both engines' moments have arrived")
    assert timeline["breakdown"]["hidden_share"] >= 0.95
    assert timeline["breakdown"]["moved_bytes"] == 2048 * 4 * 2 * 4 * 64 * 4  # 16 blocks, 4 layers of 4 heads of 64
    # Below 0: the decode engine had all layers before the prefill engine was through with its step.
    assert -10_000 < timeline["breakdown"]["handoff_ms"] < 10_000
