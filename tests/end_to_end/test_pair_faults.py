"""What goes wrong around two real engines costs recomputation, never a wrong answer, a leak or an engine.

The last tests kill engines; nothing that needs both may come after them.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from answers import essence
from cases import CASES, completion, text
from http_client import TIMEOUT_S, open_request, post, stream
from pair import ARENA_BYTES, Pair, wait_prefilling

import pdx
from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG = "length-3000"  # eight steps of prefill


# ---- bad input ------------------------------------------------------------------------------

BAD_PARAMS: dict[str, Any] = {
    "unknown-names": {"remote_host": "198.51.100.7", "remote_port": 1, "tp_size": 1 << 62},
    "both-roles": {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "x" * 20},
    "unknown-transfer": {"do_remote_prefill": True, "transfer_id": "x" * 20, "prefill_tokens": 1 << 30},
    "nested": {"do_remote_prefill": [[[[{}]]]], "transfer_id": {"a": "b"}},
}


@pytest.mark.parametrize("params", BAD_PARAMS.values(), ids=BAD_PARAMS.keys())
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_absurd_transfer_params_harm_nobody(
    role: str, params: dict[str, Any], pair: Pair, expected: dict[str, Any]
) -> None:
    path, body = CASES["length-300"]
    server = pair.prefill if role == "prefill" else pair.decode
    answer = post(server.url, path, {**body, "kv_transfer_params": params})
    if answer["http_status"] == 200:
        assert essence(answer) == essence(expected["length-300"])
    assert server.is_healthy()
    pair.wait_at_rest()


def test_transfer_params_of_a_client_are_not_believed(pair: Pair, expected: dict[str, Any]) -> None:
    path, body = CASES["length-1000"]
    params = {"do_remote_prefill": True, "transfer_id": "x" * 20, "remote_host": "198.51.100.7"}
    assert essence(pair.post(path, {**body, "kv_transfer_params": params})) == essence(expected["length-1000"])


def test_several_requests_under_one_transfer_id(pair: Pair) -> None:
    """Two prefills and three decodes that claim one transfer: everybody gets the right answer."""
    path, body = completion(text(2000, 700))
    wanted = essence(pair.post(path, body))
    transfer = {"transfer_id": "one-id-for-all-of-them"}
    for server, role, tokens in (
        (pair.prefill, "do_remote_decode", 1),
        (pair.prefill, "do_remote_decode", 1),
        (pair.decode, "do_remote_prefill", 20),
        (pair.decode, "do_remote_prefill", 20),
        (pair.prefill, "do_remote_prefill", 20),
    ):
        answer = post(server.url, path, {**body, "max_tokens": tokens, "kv_transfer_params": {role: True, **transfer}})
        assert answer["choices"][0]["text"] == wanted[0][0][0][:tokens]
    pair.wait_at_rest()


# ---- clients that are gone ------------------------------------------------------------------


def test_client_gone_while_prefill_computes(pair: Pair) -> None:
    connection = open_request(pair.proxy.url, *completion(text(2100, 3900)))
    wait_prefilling(pair)
    connection.close()
    pair.wait_at_rest()


def test_client_gone_at_once(pair: Pair) -> None:
    for seed in range(4):
        open_request(pair.proxy.url, *completion(text(2110 + seed, 1500))).close()
    pair.wait_at_rest(20)


def test_client_gone_while_the_decoder_generates(pair: Pair) -> None:
    for seed, tokens in ((2130, 1), (2140, 51)):
        events = stream(pair.proxy.url, *completion(text(seed, 1000), max_tokens=2000))
        assert len(list(itertools.islice(events, tokens))) == tokens
        events.close()
    pair.wait_at_rest()
    wait_until(
        lambda: all(process.running == 0 for process in pair.status().attached),
        timeout_s=30,
        what="the engines have stopped working",
    )


# ---- an arena that is full ------------------------------------------------------------------


def test_full_arena_means_no_transfer_but_an_answer(pair: Pair) -> None:
    body = completion(text(2200, 600))
    with pdx.connect(pair.node_address) as node:
        before = node.status().counters.get("reserve_full", 0)
        ballast = node.reserve("ballast", ARENA_BYTES - (2 << 20))
        try:
            answers = pair.post_all([body] * 4)
        finally:
            ballast.abort()
        assert node.status().counters["reserve_full"] > before
    assert [essence(answer) for answer in answers] == [essence(pair.post(*body))] * 4
    pair.wait_at_rest()


def test_64_at_once_with_room_for_one_chunk(pair: Pair) -> None:
    """The arena can hold one chunk at a time: all requests finish, and most without a transfer."""
    one_chunk = 256 * 4 * 2 * 4 * 64 * 4  # tokens, layers, K and V, heads, their size, float32
    with pdx.connect(pair.node_address) as node:
        forget = node.reserve("room", ARENA_BYTES)
        forget.abort()
        with node.reserve("ballast", ARENA_BYTES - one_chunk - 8192) as ballast:
            bodies = [completion(text(2250 + number, 300), max_tokens=4) for number in range(64)]
            answers = pair.post_all(bodies)
            ballast.abort()
    assert [answer for answer in answers if answer["http_status"] != 200] == []
    pair.wait_at_rest()
    alone = [essence(post(pair.decode.url, *body)) for body in bodies[:8]]
    assert [essence(answer) for answer in answers[:8]] == alone


# ---- processes that stop, die and come back -------------------------------------------------


def test_a_stopped_engine_damages_nobody_when_it_goes_on(pair: Pair) -> None:
    """A worker stopped in the middle of gathering, for longer than its reservation lasts, while others take room."""
    (worker,) = [process.pid for process in pair.status().attached if process.kind == "worker" and is_of(pair, process)]
    body, answer = stopped_while_gathering(pair, worker)
    try:
        with pdx.connect(pair.node_address) as node:
            taken = take_all_room(node)
            assert taken, "the rest of the arena can be used"
            os.kill(worker, signal.SIGCONT)
            assert answer.result(TIMEOUT_S)["http_status"] == 200
            for chunk, pattern in taken:
                assert bytes(chunk.view) == pattern, f"{chunk} was overwritten"
            for chunk, _ in taken:
                chunk.abort()
    finally:
        os.kill(worker, signal.SIGCONT)
    pair.wait_at_rest()
    assert essence(answer.result()) == essence(post(pair.decode.url, *body))


def stopped_while_gathering(pair: Pair, worker: int) -> tuple[Any, Future[Any]]:
    """Stop the worker and outlast its reservation; new prompts until one is caught with a chunk half full."""
    for number in range(2300, 2320):
        body = completion(text(number, 3900))
        answer = ThreadPoolExecutor(1).submit(pair.post, *body)
        wait_prefilling(pair, answer)
        os.kill(worker, signal.SIGSTOP)
        is_caught = False
        try:
            wait_until(lambda: not pair.status().chunks.get("filling"), timeout_s=30, what="its reservation has ended")
            is_caught = bool(pair.status().chunks.get("quarantined"))
        finally:
            if not is_caught:
                os.kill(worker, signal.SIGCONT)
        if is_caught:
            return body, answer
        assert answer.result(TIMEOUT_S)["http_status"] == 200
    raise AssertionError("never caught in the middle of a chunk")


def is_of(pair: Pair, process: Any) -> bool:
    return process.pid in pair.prefill.descendants("")


def take_all_room(node: pdx.Node) -> list[tuple[Any, bytes]]:
    """Reserve everything that can be had, in pieces of 1 MB with a pattern of their own."""
    taken = []
    while True:
        try:
            chunk = node.reserve(f"taken-{len(taken)}", 1 << 20)
        except pdx.errors.ArenaFull:
            return taken
        pattern = bytes([len(taken) % 251]) * chunk.nbytes
        chunk.view[:] = pattern
        taken.append((chunk, pattern))


def test_node_killed_while_prefill_computes(pair: Pair) -> None:
    body = completion(text(2400, 3900))
    answer = ThreadPoolExecutor(1).submit(pair.post, *body)
    wait_prefilling(pair)
    pid = pair.status().pid
    os.kill(pid, signal.SIGKILL)
    assert answer.result(TIMEOUT_S)["http_status"] == 200
    wait_until(
        lambda: is_back(pair, pid), timeout_s=30, what="an engine has started the next node, and all are attached to it"
    )
    assert essence(answer.result()) == essence(post(pair.decode.url, *body))
    prompts = itertools.count(2401)
    wait_until(lambda: pair.hands_over(text(next(prompts), 700)), timeout_s=20, what="prompts are handed over again")
    pair.wait_at_rest()


def is_back(pair: Pair, old: int) -> bool:
    try:
        return pair.status().pid != old and pair.is_attached()
    except pdx.PdxError:
        return False


def test_prefiller_killed_while_it_computes(pair: Pair) -> None:
    body = completion(text(2500, 3900))
    answer = ThreadPoolExecutor(1).submit(pair.post, *body)
    wait_prefilling(pair)
    pair.prefill.kill()
    killed = time.monotonic()
    wait_until(lambda: pair.is_at_rest(), timeout_s=30, what="what it held is given back")
    assert answer.result(TIMEOUT_S)["http_status"] == 200
    assert answer.result()["pdx"]["x-pdx-mode"] == "alone"
    assert time.monotonic() - killed < 30  # the decoder computes the prompt itself
    assert essence(answer.result()) == essence(post(pair.decode.url, *body))


def test_without_a_prefiller_the_decoder_serves_alone(pair: Pair, expected: dict[str, Any]) -> None:
    answers = pair.post_all([CASES[LONG], CASES["chat"]])
    assert [essence(answer) for answer in answers] == [essence(expected[LONG]), essence(expected["chat"])]


def test_decoder_killed_while_it_generates(pair: Pair) -> None:
    events = stream(pair.proxy.url, *completion(text(2600, 300), max_tokens=3000))
    next(events)
    pair.decode.kill()
    killed = time.monotonic()
    assert any("error" in event for event in events), "the stream ends with an error event"
    assert time.monotonic() - killed < 30
    assert post(pair.proxy.url, *completion("hello"))["http_status"] in (502, 503)
    pair.wait_at_rest()
