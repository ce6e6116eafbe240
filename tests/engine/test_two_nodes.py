"""A handoff between two nodes, seen from both halves of the connector: push, tail, and the way back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import NodeProcess
from toy_engine import CHUNK, LAYERS, Request, ToyEngine
from two_peers import are_at_rest, two_nodes

from pdx.client.connection import Connection
from pdx.engine import step_save
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Fill

TRANSFER = "x" * 20
PREFILL = {"do_remote_decode": True, "transfer_id": TRANSFER, "decode_node": "two"}
DECODE = {"do_remote_prefill": True, "transfer_id": TRANSFER, "prefill_node": "one"}


class Pair:
    """A prefill engine on node one and a decode engine on node two."""

    def __init__(self, nodes: list[NodeProcess], shards: int = 1) -> None:
        self.nodes = nodes
        self.first, self.second = (
            ToyEngine(node.address, name=f"toy-{at}", shards=shards) for at, node in enumerate(nodes)
        )

    def were_asked_for(self, at: int) -> int:
        """How often a peer of node `at` had to ask for what was not pushed."""
        return self.nodes[at].status().counters.get("wants_served", 0)

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture
def make_pair(place: Path, start_node: Callable[..., NodeProcess]) -> Iterator[Callable[..., Pair]]:
    nodes = two_nodes(start_node, place)
    made: list[Pair] = []

    def make(shards: int = 1) -> Pair:
        made.append(Pair(nodes, shards))
        return made[-1]

    yield make
    for pair in made:
        try:
            wait_until(lambda pair=pair: are_at_rest(pair.nodes), what="both nodes are at rest")
        finally:
            pair.close()


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def handed_over(pair: Pair, prompt: list[int]) -> Request:
    """Prefill on node one, in two steps; the decode leg on node two, loaded."""
    request = Request("p", prompt, PREFILL)
    pair.first.admit(request)
    while request.num_computed < len(prompt):
        pair.first.step((request, min(CHUNK, len(prompt) - request.num_computed)))
    pair.first.finish(request)
    decode = Request("d", [*prompt, 7], {**DECODE, "prefill_tokens": len(prompt)})
    assert pair.second.admit(decode) == set()
    return decode


@pytest.mark.parametrize(("length", "shards"), [(1, 1), (2 * CHUNK + 7, 2), (3 * CHUNK, 1)])
def test_every_token_arrives(make_pair: Callable[..., Pair], length: int, shards: int) -> None:
    pair = make_pair(shards)
    decode = handed_over(pair, tokens(0, length))
    assert decode.num_computed == length
    pair.second.check_cache(decode, length)
    pair.second.finish(decode)


@pytest.mark.parametrize("length", [CHUNK - 1, 2 * CHUNK + 15])
def test_a_tail_that_lacks_the_last_token_of_its_chunk_is_no_hit_of_that(
    make_pair: Callable[..., Pair], length: int
) -> None:
    """Where the decode leg has one token more than the transfer, its prompt ends with a full chunk."""
    pair = make_pair()
    decode = handed_over(pair, tokens(0, length))
    stranger = Request("s", [*decode.all_token_ids, 8, 9])
    pair.second.admit(stranger)
    pair.second.check_cache(stranger, stranger.num_computed)
    assert stranger.num_computed <= length
    for request in (decode, stranger):
        pair.second.finish(request)


def test_layers_are_told_where_a_transfer_waits_for_them_and_nowhere_else(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody waits for layers one message seals all chunks of a step."""
    monkeypatch.setattr(step_save, "GROUP_BYTES", 1)
    told: list[Fill] = []
    tell = Connection.tell

    def recorded(self: Connection, body: Any) -> None:
        if isinstance(body, Fill):
            told.append(body)
        tell(self, body)

    monkeypatch.setattr(Connection, "tell", recorded)
    pair = make_pair()
    counts = {}
    for at, (name, params) in enumerate(
        {
            "reuse": None,
            "same node": {**PREFILL, "decode_node": "one"},
            "push": {**PREFILL, "transfer_id": "y" * 20},
        }.items()
    ):
        request = Request(name, tokens(1000 * at, 2 * CHUNK), params)
        pair.first.admit(request)
        pair.first.step((request, 2 * CHUNK))
        pair.first.finish(request)
        counts[name] = [(len(fill.slots), fill.layers, fill.seal) for fill in told]
        told.clear()
    whole = (2, LAYERS, True)
    assert counts == dict.fromkeys(("same node", "push"), [*[(2, 1, False)] * LAYERS, whole]) | {"reuse": [whole]}
    wait_until(lambda: pair.nodes[1].status().chunks.get("sealed") == 2, what="the pushed ones are on node two")


def test_the_second_turn_pulls_generated_chunks_back(make_pair: Callable[..., Pair]) -> None:
    """What was generated on node two is part of the next prompt on node one."""
    pair = make_pair()
    decode = handed_over(pair, tokens(0, CHUNK))
    generated = iter(tokens(100, 10 * CHUNK))

    def generate() -> bool:
        decode.all_token_ids.append(next(generated))
        pair.second.step((decode, 1))
        return pair.nodes[1].status().chunks.get("sealed", 0) >= 2

    wait_until(generate, what="a generated chunk is sealed on node two")
    pair.second.finish(decode)
    wait_until(lambda: are_at_rest(pair.nodes), what="all that is saved is sealed")
    turn, sealed = list(decode.all_token_ids), pair.nodes[1].status().chunks["sealed"]
    following = Request("next", [*turn, *tokens(200, 5)], {**PREFILL, "transfer_id": "y" * 20})
    assert pair.first.admit(following) == set()
    assert following.num_computed == sealed * CHUNK
    pair.first.check_cache(following, following.num_computed)
    assert pair.were_asked_for(1) == 1
    pair.first.finish(following)


def test_a_decoder_whose_prefill_was_given_up_computes(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    prompt = tokens(0, 3 * CHUNK)
    request = Request("p", prompt, PREFILL)
    pair.first.admit(request)
    pair.first.step((request, CHUNK))
    pair.first.finish(request)  # in the middle
    decode = Request("d", prompt, DECODE)
    pair.second.admit(decode)
    assert decode.num_computed in (0, CHUNK), "what was sealed may have arrived; the rest is not waited for"
    pair.second.check_cache(decode, decode.num_computed)
    pair.second.finish(decode)


def test_a_decoder_whose_prefill_node_does_not_answer_computes(make_pair: Callable[..., Pair]) -> None:
    """The answer comes later than the engine believes in old ones; the next one must not wait for its own room."""
    pair = make_pair()
    pair.nodes[0].signal(signal.SIGSTOP)
    try:
        prompt = tokens(0, 3 * CHUNK)
        decode = Request("d", prompt, DECODE)
        pair.second.admit(decode)
        assert decode.num_computed == 0
        pair.second.step((decode, len(prompt)))
        pair.second.finish(decode)
    finally:
        pair.nodes[0].signal(signal.SIGCONT)
    wait_until(lambda: pair.nodes[1].status().chunks == {"sealed": 3}, what="what was computed is sealed")
    again = Request("again", prompt)
    assert pair.second.admit(again) == set()
    assert again.num_computed == len(prompt)
    pair.second.finish(again)


def test_a_decoder_asks_for_what_was_not_pushed(make_pair: Callable[..., Pair]) -> None:
    """The prefill leg knew of no other node, as when the planned decoder is gone: its node fetches, tail included."""
    pair = make_pair()
    prompt = tokens(0, 2 * CHUNK + 7)
    request = Request("p", prompt, {**PREFILL, "decode_node": ""})
    pair.first.admit(request)
    pair.first.step((request, len(prompt)))
    decode = Request("d", prompt, DECODE)
    assert pair.second.admit(decode) == set()
    assert decode.num_computed == len(prompt)
    pair.second.check_cache(decode, len(prompt))
    assert pair.were_asked_for(0) >= 1
    pair.first.finish(request)
    pair.second.finish(decode)
