"""Each engine on a node of its own, joined by one channel after the other: same answers, nothing computed twice.

Runs behind the tests of one node, the last of which end their engines: there are never more than two at a time. Only
the nodes change with the channel; every prompt carries the channel as its cache salt, so nothing is left over from the
channel before, in engines either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from answers import computed_prompt_tokens, essence
from cases import CASES, chat, completion, text
from http_client import TIMEOUT_S, post, stream
from pair import Pair, wait_prefilling
from routers import check_handed_over, vllm_router

from pdx.testing.waiting import wait_until
from pdx.wire.status import PeerStatus

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

KV_BYTES = 4 * 2 * 4 * 64 * 4  # of one token: layers, K and V, heads, their size, float32
CHANNELS = ["tcp", "nixl"]
SELECTION = [
    *("length-1", "length-1024", "length-3000", "shared-1", "shared-2"),
    *("many-tokens", "seeded", "two-prompts", "two-samples", "chat-turns"),
]


class Wired:
    """The pair, and the channel that joins its nodes now."""

    def __init__(self, pair: Pair, channel: str) -> None:
        self.pair = pair
        self.channel = channel
        self._prompts = itertools.count(7000)

    def salted(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The same request, but for the keys of its chunks."""
        return path, {**body, "cache_salt": self.channel}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.pair.post(*self.salted(path, body))

    def decoder_alone(self, path: str, body: dict[str, Any]) -> Any:
        """What the decode engine answers when it computes all of it itself."""
        return post(self.pair.decode.url, path, {**body, "cache_salt": f"{self.channel}, alone"})

    def peer(self, role: str) -> PeerStatus:
        """What this role's node says of the other one."""
        (peer,) = self.pair.status(role).peers
        return peer

    def wait_handing_over(self) -> None:
        """Until the decoder computes nothing of new prompts."""

        def hands_over() -> bool:
            before = computed_prompt_tokens(self.pair.decode)
            self.post(*completion(text(next(self._prompts), 700), max_tokens=2))
            return computed_prompt_tokens(self.pair.decode) - before <= 2

        wait_until(hands_over, timeout_s=30, what="prompts are handed over")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, model: Path, expected: dict[str, Any]) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("w")
    folder.chmod(0o700)
    pair = Pair(folder, model, CHANNELS[0])
    try:
        pair.wait_ready()
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module", params=CHANNELS)
def wired(request: pytest.FixtureRequest, engines: Pair) -> Wired:
    if engines.configs["prefill"].channels != [request.param]:
        engines.join_by(request.param)
    return Wired(engines, request.param)


@pytest.mark.parametrize("name", SELECTION)
def test_answer_equals_the_plain_engines(name: str, wired: Wired, expected: dict[str, Any]) -> None:
    assert essence(wired.post(*CASES[name])) == essence(expected[name])


@pytest.mark.parametrize("name", ["length-300", "chat"])
def test_streamed_answer_equals_the_plain_engines(name: str, wired: Wired, expected: dict[str, Any]) -> None:
    events = list(stream(wired.pair.proxy.url, *wired.salted(*CASES[name])))
    choices = [event["choices"][0] for event in events if event["choices"]]
    pieces = [(choice.get("text") if "text" in choice else choice["delta"].get("content")) or "" for choice in choices]
    (wanted, reason, _) = essence(expected[name])[0][0]
    assert "".join(pieces) == wanted
    assert choices[-1]["finish_reason"] == reason


@pytest.mark.parametrize("request_", [completion(text(7101, 1500)), chat(text(7102, 900))])
def test_the_decoder_computes_nothing_and_the_bytes_came_over_the_channel(
    request_: tuple[str, dict[str, Any]], wired: Wired
) -> None:
    computed, landed = computed_prompt_tokens(wired.pair.decode), wired.peer("decode").landed_bytes
    answer = wired.post(*request_)
    assert answer["pdx"]["x-pdx-mode"] == "sampled"
    assert computed_prompt_tokens(wired.pair.decode) - computed <= 2
    assert wired.peer("prefill").channel == wired.channel
    arrived = wired.peer("decode").landed_bytes - landed
    assert arrived >= answer["usage"]["prompt_tokens"] * KV_BYTES
    assert essence(answer) == essence(wired.decoder_alone(*request_))
    wired.pair.wait_at_rest()


def test_routers_that_know_nothing_of_pdx_hand_over_what_is_prefilled(wired: Wired, tmp_path: Path) -> None:
    """The decode leg's node gets it from the node that the prefill engine has named."""
    pair, first = wired.pair, 8200 + 100 * CHANNELS.index(wired.channel)
    with vllm_router(tmp_path, pair.prefill.url, pair.decode.url) as router:
        check_handed_over(router.url, pair.prefill, pair.decode, first)
    check_handed_over("", pair.prefill, pair.decode, first + 50)
    pair.wait_at_rest()


def test_a_prefix_that_the_decoders_node_has_is_not_sent_again(wired: Wired) -> None:
    prompt = text(7110, 1280)
    wired.post(*completion(prompt, max_tokens=2))
    wired.pair.wait_at_rest()
    landed = wired.peer("decode").landed_bytes
    wired.post(*completion(prompt + text(7111, 100), max_tokens=2))
    wired.pair.wait_at_rest()
    assert 0 < wired.peer("decode").landed_bytes - landed < 400 * KV_BYTES


def test_a_second_turn_pulls_the_decoders_chunks_back_to_the_prefiller(wired: Wired) -> None:
    """Where busy engines have all cores, the node may grant room for generated chunks too late: other prompts are
    asked then."""
    pair, rounds = wired.pair, []

    def is_pulled(seed: int) -> bool:
        first = text(seed, 1000)
        answer = wired.post(*completion(first, max_tokens=1400))["choices"][0]["text"][:400]
        pair.wait_at_rest()
        computed = computed_prompt_tokens(pair.prefill)
        hits = pair.prefill.metric("vllm:external_prefix_cache_hits_total")
        landed = wired.peer("prefill").landed_bytes
        request = completion(first + answer + text(seed + 1, 50))
        second = wired.post(*request)
        assert essence(second) == essence(wired.decoder_alone(*request))
        computed = computed_prompt_tokens(pair.prefill) - computed
        hits = pair.prefill.metric("vllm:external_prefix_cache_hits_total") - hits
        landed = wired.peer("prefill").landed_bytes - landed
        rounds.append((computed, hits, landed, pair.status("prefill").counters))
        # Of 1,450 tokens 1,280 are in whole chunks; the prefiller has computed 1,000 of them before, the decoder the
        # rest.
        return computed <= 1450 - 1280 and hits >= 256 and landed > 0

    assert any(is_pulled(seed) for seed in range(712_000, 712_080, 10)), rounds
    pair.wait_at_rest()


def test_eight_at_once(wired: Wired, expected: dict[str, Any]) -> None:
    names = ["length-1000", "length-300", "shared-1", "shared-2", "chat", "token-ids", "stop-string"]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: wired.post(*CASES[name]), names))
    assert [essence(answer) for answer in answers] == [essence(expected[name]) for name in names]
    wired.pair.wait_at_rest()


def test_a_prompt_that_the_decoders_node_has_needs_no_prefill_engine(wired: Wired) -> None:
    """By the tokens that an engine makes of a text, and what nodes tell of their chunks."""
    pair, request = wired.pair, completion(text(7120, 520))
    pair.serve_anew("--routing", "prefix", "--min-split-tokens", "16")
    try:
        wired.wait_handing_over()
        answers = [wired.post(*request)]

        def is_cached() -> bool:
            before = computed_prompt_tokens(pair.decode)
            answers.append(wired.post(*request))
            return answers[-1]["pdx"]["x-pdx-mode"] == "alone" and computed_prompt_tokens(pair.decode) - before < 16

        assert answers[0]["pdx"]["x-pdx-mode"] != "alone"
        wait_until(is_cached, timeout_s=30, what="the proxy knows of the chunks")
        assert {str(essence(answer)) for answer in answers} == {str(essence(wired.decoder_alone(*request)))}
    finally:
        pair.serve_anew()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_node_is_killed_while_a_prompt_is_pushed(role: str, wired: Wired) -> None:
    """Its engine computes what is missing, attaches to the next node at that address, and all goes on."""
    pair, number = wired.pair, {"decode": 7130, "prefill": 7140}[role]
    request = completion(text(number, 3900))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(wired.post, *request)
        wait_prefilling(pair)
        pair.kill_node(role)
        pair.start_node(role)  # as a supervisor would
        assert answer.result(TIMEOUT_S)["http_status"] == 200
    assert essence(answer.result()) == essence(wired.decoder_alone(*request))
    wait_until(pair.is_attached, timeout_s=30, what="all processes are attached to the nodes")
    wired.wait_handing_over()
    pair.wait_at_rest(10)
