"""Requests that load tokens which were computed at other positions, on an engine whose keys carry their position.

A key depends on its token and its position alone, the first half of a value on its token, and the second half on all
tokens before it. So of what was moved the keys and first halves are known exactly, and an exact request that is given
a byte of it is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import toy_engine
from moved_bed import MOVED, PAGE, SHAPE, TURNING, check_moved, kv_bytes, positions, tokens  # noqa: F401
from node_harness import MIB, NodeThread
from toy_engine import BLOCK, CHUNK, LAYERS, Request, ToyEngine, decode_of, prefill_of

from pdx.client.connection import Connection
from pdx.node.service import Service
from pdx.store.content_names import ContentNames
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit


def engine_of(node: Any, stack: ExitStack, **settings: Any) -> ToyEngine:
    settings = {"page_bytes": PAGE, "shape": SHAPE, "turning": TURNING, "moved": True, "num_blocks": 256, **settings}
    engine = stack.enter_context(ToyEngine(node.address, **settings))
    engine.node = node
    finish = engine.finish

    def finish_at_rest(request: Request) -> dict[str, Any]:
        """Until the node has heard of all that was computed."""
        told = finish(request)
        if not engine.scheduler.link.connection.running:
            node.wait_at_rest()
        return told

    engine.finish = finish_at_rest
    return engine


def ask_moved(engine: ToyEngine, prompt: list[int], **more: Any) -> tuple[int, str]:
    """A request with the hint, whose pages are right. How many of its tokens were loaded, and what it was told."""
    request = engine.save(prompt, {**MOVED, **more})
    check_moved(engine, request, len(prompt))
    told = engine.finish(request)
    return int(request.loaded), told["pdx_hints"]["reuse"]


HISTORY = 10 * CHUNK + 5


@pytest.fixture
def engine(start_here: Callable[..., NodeThread], stack: ExitStack) -> ToyEngine:
    return engine_of(start_here(arena_bytes=16 * MIB), stack)


@pytest.mark.parametrize(("kept", "lost"), [(1, 1), (5, CHUNK), (CHUNK, 7), (CHUNK + 3, 4 * CHUNK + 3), (2 * CHUNK, 1)])
def test_a_conversation_that_lost_tokens_keeps_the_rest(engine: ToyEngine, kept: int, lost: int) -> None:
    history = tokens((kept, lost), HISTORY)
    assert engine.run(history) == 0
    prompt = [*history[:kept], *history[kept + lost : 10 * CHUNK], *tokens("new", 6)]
    found = len(prompt) - 6
    request = engine.save(prompt, MOVED)
    assert request.loaded == found
    exact = check_moved(engine, request, len(prompt))
    assert exact == kept + 6, "the sink, and what is new"
    told = engine.finish(request)
    assert told["pdx_hints"]["reuse"] == f"accepted: {found - kept} of {found} tokens that are there are moved"
    assert engine.run(prompt) in (0, kept - kept % CHUNK, kept - kept % BLOCK), "an exact request finds its own alone"
    assert ask_moved(engine, [*prompt, *tokens("more", 20)])[0] == len(prompt) - len(prompt) % BLOCK, "its own"


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_turns_the_heads_that_it_has(
    start_here: Callable[..., NodeThread], stack: ExitStack, ranks: int
) -> None:
    engine = engine_of(start_here(arena_bytes=16 * MIB), stack, shards=2, ranks=ranks)
    history = tokens(1, HISTORY)
    engine.run(history)
    prompt = [*history[:5], *history[CHUNK + 3 : 8 * CHUNK], 1]
    request = engine.save(prompt, MOVED)
    assert request.loaded == len(prompt) - 1
    for rank, head in [(0, 0), (0, 1)] if ranks == 1 else [(0, 0), (1, 0)]:
        check_moved(engine, request, len(prompt), rank, head)
    engine.finish(request)


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 18), (23, 65), (85, 121), (124, 160)],  # tokens are left out here and there, and those behind them move up
        [(0, 16), (112, 144), (48, 80), (16, 48), (80, 112)],  # documents in another order
        [(0, 4), (2 * CHUNK, 5 * CHUNK)],
    ],
)
def test_whatever_a_prompt_is_made_of_is_found_and_its_last_token_is_computed(
    engine: ToyEngine, runs: list[tuple[int, int]]
) -> None:
    history = tokens(1, HISTORY)
    engine.run(history)
    prompt = [token for start, end in runs for token in history[start:end]]
    assert ask_moved(engine, prompt)[0] == len(prompt) - 1
    assert ask_moved(engine, history[CHUNK:]) == (0, "refused: nothing is there that begins as this prompt does")


def test_what_the_engines_own_cache_has_is_not_loaded_again(engine: ToyEngine) -> None:
    history = tokens(1, HISTORY)
    engine.run(history)
    prompt = [*history[:6], *history[2 * CHUNK : 6 * CHUNK], 1, 2, 3]
    for local in (0, BLOCK, 2 * CHUNK + BLOCK):
        request = Request(f"local {local}", prompt, MOVED)
        engine.scheduler_guard.arrived(request)
        external = engine.match(request, local)
        assert local + external == len(prompt) - 3
        engine.allocate(request, external)
        assert engine.finish_load(request) == set()
        for layer in range(LAYERS):
            engine.compute(0, layer, request, 0, local)
        check_moved(engine, request, len(prompt) - 3)
        engine.finish(request)


def test_moved_chunks_are_saved_under_their_forms_keys_and_moved_again(engine: ToyEngine) -> None:
    """So a chat that was cut once is cut again, and always sends the hint."""
    history = tokens(1, HISTORY)
    assert ask_moved(engine, history) == (0, "refused: nothing is there that begins as this prompt does")
    for cut in range(1, 4):
        history = [*history[:BLOCK], *history[BLOCK + CHUNK + 3 :], *tokens(cut, 2 * CHUNK)]
        found, _ = ask_moved(engine, history)
        assert found > len(history) - 4 * CHUNK
        assert engine.run(history) < CHUNK * cut + CHUNK, "an exact request has its own alone"


@pytest.mark.parametrize("salts", [("a", "b"), ("", "a")])
def test_tenants_never_meet(engine: ToyEngine, salts: tuple[str, str]) -> None:
    history, prompt = tokens(1, HISTORY), [*tokens(1, HISTORY)[:4], *tokens(1, HISTORY)[CHUNK : 5 * CHUNK], 1]

    def run(salt: str, prompt: list[int], params: Any = None) -> int:
        request = Request(f"{salt} {len(prompt)}", prompt, params)
        request.cache_salt = salt or None
        engine.scheduler_guard.arrived(request)
        assert engine.admit(request) == set()
        loaded = request.num_computed
        engine.step((request, len(prompt) - loaded))
        engine.finish(request)
        return loaded

    run(salts[0], history)
    assert run(salts[1], prompt, MOVED) == 0
    assert run(salts[0], prompt, MOVED) == len(prompt) - 1


def test_what_is_in_a_tier_is_moved_too(start_here: Callable[..., NodeThread], place: Path, stack: ExitStack) -> None:
    node = start_here(arena_bytes=16 * MIB, disks=[str(place / "disk")])
    engine = engine_of(node, stack)
    history = tokens(1, HISTORY)
    engine.run(history)
    node.wait_stored(10)
    node.forget()
    prompt = [*history[:4], *history[CHUNK + 3 : 8 * CHUNK], 1]
    assert ask_moved(engine, prompt)[0] == len(prompt) - 1


def test_what_is_gone_from_memory_is_not_promised(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    history = tokens(1, HISTORY)
    engine.run(history)
    engine.node.forget()
    prompt = [*history[:4], *history[CHUNK + 3 : 8 * CHUNK], 1]
    assert ask_moved(engine, prompt) == (0, "refused: nothing is there that begins as this prompt does")
    engine.node.forget()
    monkeypatch.setattr(Service, "_may_be_there", lambda self, key: True)
    assert ask_moved(engine, prompt) == (0, "refused: what was known of it is not there any more")
    monkeypatch.undo()
    monkeypatch.setattr(toy_engine, "kv_bytes", kv_bytes)
    engine.run(history)
    assert ask_moved(engine, [*prompt, 2, 3])[0] > CHUNK


def test_prefill_hands_over_what_it_has_moved(engine: ToyEngine, stack: ExitStack) -> None:
    decoder = engine_of(engine.node, stack)
    history = tokens(1, HISTORY)
    engine.run(history)
    prompt = [*history[:4], *history[CHUNK + 3 : 8 * CHUNK], 1, 2]
    transfer = "transfer-of-moved-chunks"
    first = engine.save(prompt, {**MOVED, **prefill_of(transfer)})
    assert first.loaded == len(prompt) - 2
    ToyEngine.finish(engine, first)
    second = Request("decode", prompt, {**MOVED, **decode_of(transfer)})
    decoder.scheduler_guard.arrived(second)
    assert decoder.match(second) == len(prompt)
    decoder.allocate(second, len(prompt))
    assert decoder.finish_load(second) == set()
    check_moved(decoder, second, len(prompt))
    decoder.finish(second)


@pytest.mark.parametrize(
    ("settings", "params", "text"),
    [
        ({"moved": False}, {}, "this engine runs without the option moved"),
        ({"turning": None}, {}, "the toy has no positions"),
        ({"keeps_apart": False}, {}, "the engine's own cache would give its blocks to requests that are exact"),
        ({"stages": (1, 2)}, {}, "it is for models of one cache group of full attention, without a draft model"),
        ({"beside": None}, {}, "its blocks have more than tokens, or an adapter that is not known here"),
        ({}, {"codec": "int8"}, "not beside a lossy codec"),
    ],
    ids=str,
)
def test_who_cannot_move_is_told_why_and_is_exact(
    start_here: Callable[..., NodeThread],
    stack: ExitStack,
    settings: dict[str, Any],
    params: dict[str, Any],
    text: str,
) -> None:
    node = start_here(arena_bytes=16 * MIB)
    engine = engine_of(node, stack, **settings)
    history = tokens(1, HISTORY)
    hints = {"pdx_hints": {"version": 1, "reuse": "moved", **params}}
    request = engine.save(history, hints)
    assert engine.finish(request)["pdx_hints"]["reuse"] == f"refused: {text}"
    wait_until(lambda: node.status().chunks.get("sealed", 0) >= 10, what="they are sealed")
    assert engine.run(history, hints if params else None) >= 10 * CHUNK
    wait_until(lambda: node.degraded("moved_refused") >= 1, what="it is counted")


def test_an_engine_without_the_option_tells_no_tokens(
    start_here: Callable[..., NodeThread], stack: ExitStack, asked: list[Any]
) -> None:
    node = start_here(arena_bytes=16 * MIB)
    history = tokens(1, HISTORY)
    engine_of(node, stack, moved=False).run(history, MOVED)
    assert {each.tokens for each in asked if isinstance(each, Admit)} == {None}
    asked.clear()
    engine_of(node, stack).run(history, {"pdx_hints": {"version": 1, "codec": "int8"}})
    assert {each.tokens for each in asked if isinstance(each, Admit)} == {None}, "nor of lossy forms"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []
    ask = Connection.ask

    def recorded(self: Connection, body: Any) -> int:
        log.append(body)
        return ask(self, body)

    monkeypatch.setattr(Connection, "ask", recorded)
    return log


def test_a_node_that_does_not_say_where_tokens_are_costs_a_moment(
    start_here: Callable[..., NodeThread], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start_here(arena_bytes=16 * MIB)
    engine = engine_of(node, stack, lookup_s=0.5)
    history = tokens(1, HISTORY)
    engine.run(history)
    monkeypatch.setattr(ContentNames, "find", lambda *args: 1 / 0)  # the control loop's guard answers nothing
    prompt = [*history[:4], *history[CHUNK + 3 : 8 * CHUNK], 1]
    loaded, told = ask_moved(engine, prompt)
    assert loaded == 0
    assert told.startswith("refused")


def test_a_reset_cache_moves_nothing_of_before(engine: ToyEngine) -> None:
    history = tokens(1, HISTORY)
    engine.run(history)
    prompt = [*history[:4], *history[CHUNK + 3 : 8 * CHUNK], 1]
    waiting = Request("waiting", prompt, MOVED)
    engine.scheduler_guard.arrived(waiting)
    assert engine.match(waiting) == len(prompt) - 1
    engine.scheduler.reset()
    assert engine.match(waiting) == 0
    engine.finish(waiting)
    assert ask_moved(engine, prompt)[0] == 0
    engine.run(history)
    assert ask_moved(engine, [*prompt, 3])[0] == len(prompt) - len(prompt) % BLOCK
