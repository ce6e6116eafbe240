"""A handoff between two engines, on one node and on two: push, tail, the way back, and loads that begin early."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import NodeProcess, NodeThread
from toy_engine import BLOCK, CHUNK, LAYERS, ForwardFailed, Request, ToyEngine, decode_of, prefill_of
from two_nodes_bed import DECODE, LENGTH, PREFILL, TRANSFER, two_nodes

from pdx.engine import step_save
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Fill, Ping


class Pair:
    """A prefill engine and a decode engine, at one node or at two."""

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes = nodes
        self.first, self.second = (ToyEngine(node.address, f"toy-{at}") for at, node in enumerate((nodes * 2)[:2]))

    def handed_over(self, prompt: list[int]) -> Request:
        """Prefill in steps of a chunk; the decode leg, loaded."""
        self.first.finish(self.first.save(prompt, PREFILL, step=CHUNK))
        decode = Request("d", [*prompt, 7], {**DECODE, "prefill_tokens": len(prompt)})
        assert self.second.admit(decode) == set()
        return decode

    def close(self) -> None:
        try:
            for node in self.nodes:
                node.wait_at_rest()
        finally:
            self.first.close()
            self.second.close()


@pytest.fixture
def pair(place: Path, start_here: Callable[..., NodeThread]) -> Iterator[Pair]:
    with contextlib.closing(Pair(two_nodes(start_here, place))) as made:
        yield made


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_legs_that_come_when_their_transfers_are_over_load_all(
    place: Path, start_here: Callable[..., NodeThread], num_nodes: int, is_early: bool
) -> None:
    nodes = two_nodes(start_here, place, arena_bytes=1 << 20) if num_nodes == 2 else [start_here(name="one")]
    to, from_one = ({"decode_node": "two"}, {"prefill_node": "one"}) if num_nodes == 2 else ({}, {})
    lengths = [1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, LENGTH]
    legs = [(f"transfer-{at:020d}", numbers(10_000 * at, length)) for at, length in enumerate(lengths)]
    with contextlib.closing(Pair(nodes)) as pair:
        for transfer, prompt in legs:
            pair.first.finish(pair.first.save(prompt, prefill_of(transfer, **to), step=CHUNK))
        for transfer, prompt in legs:
            assert pair.second.load(prompt, decode_of(transfer, is_early=is_early, **from_one)) == len(prompt)


@pytest.mark.parametrize("length", [CHUNK - 1, 2 * CHUNK + 15])
def test_a_tail_that_lacks_the_last_token_of_its_chunk_is_no_hit_of_that(pair: Pair, length: int) -> None:
    """Where the decode leg has one token more than the transfer, its prompt ends with a full chunk."""
    decode = pair.handed_over(numbers(0, length))
    assert pair.second.load([*decode.all_token_ids, 8, 9]) <= length
    pair.second.finish(decode)


def test_layers_are_told_where_a_transfer_waits_for_them_and_nowhere_else(
    pair: Pair, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody waits for layers one message seals all chunks of a step."""
    monkeypatch.setattr(step_save, "GROUP_BYTES", 1)
    layers, whole = [(2, 1, False)] * LAYERS, (2, LAYERS, True)
    for at, (params, fills) in enumerate(
        (
            (None, [whole]),
            ({**PREFILL, "decode_node": "one"}, [*layers, whole]),
            ({**PREFILL, "transfer_id": "y" * 20}, [*layers, whole]),
        )
    ):
        told.clear()
        pair.first.finish(pair.first.save(numbers(1000 * at, 2 * CHUNK), params))
        assert [(len(body.slots), body.layers, body.seal) for body in told if isinstance(body, Fill)] == fills
    pair.nodes[1].wait_sealed(2)  # those that were pushed


def test_the_second_turn_pulls_generated_chunks_back(pair: Pair) -> None:
    """What was generated on node two is part of the next prompt on node one."""
    decode = pair.handed_over(numbers(0, CHUNK))
    generated = iter(numbers(100, 10 * CHUNK))

    def generate() -> bool:
        decode.all_token_ids.append(next(generated))
        pair.second.step((decode, 1))
        return pair.nodes[1].status().chunks.get("sealed", 0) >= 2

    wait_until(generate, what="a generated chunk is sealed on node two")
    pair.second.finish(decode)
    pair.nodes[1].wait_at_rest()
    sealed = pair.nodes[1].status().chunks["sealed"]
    following = [*decode.all_token_ids, *numbers(200, 5)]
    assert pair.first.load(following, {**PREFILL, "transfer_id": "y" * 20}) == sealed * CHUNK
    assert pair.nodes[1].counter("wants_served") == 1


def test_a_decoder_whose_prefill_was_given_up_computes(pair: Pair) -> None:
    prompt = numbers(0, 3 * CHUNK)
    request = Request("p", prompt, PREFILL)
    pair.first.admit(request)
    pair.first.step((request, CHUNK))
    pair.first.finish(request)  # in the middle
    assert pair.second.load(prompt, DECODE) in (0, CHUNK), "what was sealed may have arrived; nobody waits for the rest"


def test_a_decoder_whose_prefill_node_does_not_answer_computes(
    place: Path, start_node: Callable[..., NodeProcess]
) -> None:
    """The answer comes later than the engine believes in old ones; the next one must not wait for its own room."""
    prompt = numbers(0, 3 * CHUNK)
    with contextlib.closing(Pair(two_nodes(start_node, place, fetch_s=1.5))) as pair:
        pair.nodes[0].signal(signal.SIGSTOP)
        try:
            assert pair.second.run(prompt, DECODE) == 0
        finally:
            pair.nodes[0].signal(signal.SIGCONT)
        pair.nodes[1].wait_sealed(3)
        assert pair.second.load(prompt) == len(prompt)


def test_a_decoder_asks_for_what_was_not_pushed(pair: Pair) -> None:
    """The prefill leg knew of no other node, as when the planned decoder is gone: its node fetches, tail included."""
    prompt = numbers(0, 2 * CHUNK + 7)
    request = pair.first.save(prompt, {**PREFILL, "decode_node": ""})
    assert pair.second.load(prompt, DECODE) == len(prompt)
    assert pair.nodes[0].counter("wants_served") >= 1
    pair.first.finish(request)


def test_a_prefix_is_fetched_from_the_node_that_is_named(pair: Pair) -> None:
    prompt, other = numbers(0, 2 * CHUNK + 7), numbers(5000, 2 * CHUNK + 7)
    for each in (prompt, other):
        pair.first.finish(pair.first.save(each))
    pair.nodes[0].wait_sealed(6)  # two chunks and a part, twice
    assert pair.second.run([*prompt, 9], {"prefix_node": "two"}) == 0, "nobody is asked"
    assert pair.second.run([*other, 9], {"prefix_node": "one"}) == 2 * CHUNK
    assert pair.nodes[0].counter("wants_served") == 1
    assert pair.nodes[1].counter("peer_lookups") == 0


def test_where_no_node_is_named_peers_are_asked(place: Path, start_here: Callable[..., NodeThread]) -> None:
    with contextlib.closing(Pair(two_nodes(start_here, place, peer_lookup_s=20.0))) as pair:
        prompt = numbers(0, 3 * CHUNK + 7)
        pair.first.finish(pair.first.save(prompt[: 2 * CHUNK + 7]))
        pair.nodes[0].wait_sealed(3)
        assert pair.second.run(prompt, {**PREFILL, "decode_node": ""}) == 2 * CHUNK
        assert pair.nodes[0].counter("wants_served") == pair.nodes[1].counter("peer_lookups") == 1
        assert pair.first.load(numbers(900, CHUNK)) == 0, "and nobody has another one"


# ---- a decoder that copies what its prefill has computed while that still computes the rest ---


class Gated:
    """An engine's forward pass that goes on layer by layer, in a thread."""

    def __init__(self, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self._layers = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        save_layer = engine.worker_guards[0].save_layer

        def gated(name: str) -> None:
            if threading.current_thread() is self._thread:
                assert self._layers.acquire(timeout=60)
            save_layer(name)

        monkeypatch.setattr(engine.worker_guards[0], "save_layer", gated)

    def begin(self, request: Request, count: int) -> None:
        def run() -> None:
            with contextlib.suppress(ForwardFailed):
                self.engine.step((request, count))

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def go_on(self, layers: int) -> None:
        for _ in range(layers):
            self._layers.release()

    def end(self) -> None:
        assert self._thread is not None
        self._layers.release(LAYERS)
        self._thread.join()


class Early(Pair):
    """The prefill leg has computed a chunk and some layers of the rest; the decode leg was sent together with it."""

    def begin(self, monkeypatch: pytest.MonkeyPatch, *, load_s: float, layers: int) -> None:
        """`load_s`: what the node knows of the decode engine's copies."""
        connection: Any = self.second.workers[0].link.connection
        connection.load_s = load_s
        connection.call(Ping(load_s=load_s), 10)
        params = PREFILL if len(self.nodes) > 1 else prefill_of(TRANSFER)
        self.prefill = Request("p", numbers(0, LENGTH), params)
        self.decode = Request("d", numbers(0, LENGTH), decode_of(TRANSFER, is_early=True))
        self.first.admit(self.prefill)
        self.first.step((self.prefill, CHUNK))
        self.gate = Gated(self.first, monkeypatch)
        self.gate.begin(self.prefill, LENGTH - CHUNK)
        self.gate.go_on(layers)

    def begin_load(self) -> None:
        assert self.second.match(self.decode) == LENGTH, "before the other layers are computed"
        self.second.allocate(self.decode, LENGTH)
        self.second.idle()

    def loaded_layers(self, position: int) -> int:
        """How many leading layers of a token of the decode leg are not zero."""
        pages = self.second.caches[0][:, self.decode.block_ids[position // BLOCK], 0, position % BLOCK]
        return int(pages.any(dim=1).long().cumprod(0).sum())

    def finish(self) -> None:
        self.second.finish(self.decode)
        self.first.finish(self.prefill)


@pytest.fixture
def early(
    request: Any, place: Path, start_here: Callable[..., NodeThread], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Early]:
    """On one node, or on as many as the test says."""
    monkeypatch.setattr(step_save, "GROUP_BYTES", 1)
    nodes = two_nodes(start_here, place, group_bytes=1) if getattr(request, "param", 1) == 2 else [start_here()]
    with contextlib.closing(Early(nodes)) as made:
        yield made


@pytest.mark.parametrize("early", [1, 2], indirect=True)
def test_layers_are_loaded_while_the_next_ones_are_computed(early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the request may run as soon as the last one is there."""
    early.begin(monkeypatch, load_s=60, layers=1)
    early.begin_load()
    for layers in range(1, LAYERS):
        wait_until(lambda: early.loaded_layers(LENGTH - 1) == layers, what=f"{layers} layers")  # noqa: B023
        assert early.loaded_layers(0) == LAYERS, "of the step before"
        assert early.second.waiting == {"d": {0}}
        early.gate.go_on(1)
    assert early.second.finish_load(early.decode) == set()
    early.gate.end()
    early.second.check_cache(early.decode, LENGTH)
    assert early.nodes[-1].counter("early_answers") == 1
    early.finish()


@pytest.mark.parametrize("load_s", [0.0, 1e-9], ids=["not measured", "faster than what is left"])
def test_blocks_are_not_taken_before_they_are_needed(
    early: Early, monkeypatch: pytest.MonkeyPatch, load_s: float
) -> None:
    early.begin(monkeypatch, load_s=load_s, layers=2)
    with pytest.raises(AssertionError, match="never decided"):
        early.second.match(early.decode, deadline_s=0.5)
    early.gate.end()
    assert early.second.admit(early.decode) == set()
    early.second.check_cache(early.decode, LENGTH)
    if not load_s:  # else it may be answered between the last layer and the seal
        assert early.nodes[-1].counter("early_answers") == 0
    early.finish()


@pytest.mark.parametrize("end", ["aborted", "forward fails", "its process ends"])
def test_a_prefill_that_ends_before_its_last_layer_costs_only_what_it_lacks(
    early: Early, told: list[Any], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    early.begin(monkeypatch, load_s=60, layers=1)
    early.begin_load()
    wait_until(lambda: early.loaded_layers(LENGTH - 1) == 1, what="a layer of the last tokens")
    worker: Any = early.first.workers[0]
    if end == "aborted":
        assert early.first.scheduler.track(early.prefill).node.grants == [], "the step has them all"
        early.first.scheduler.finished(early.prefill)
        fills = [body for body in told if isinstance(body, Fill)]
        sealed = {slot for body in fills if body.seal for slot in body.slots}
        filling = {slot for body in fills for slot in body.slots} - sealed
        assert len(filling) == 2, "a chunk and the tail"
        worker.link.connection.call(Abort([*filling]), 10)
    elif end == "forward fails":
        early.first.fails_at = 0, LAYERS - 1
        early.gate.end()
    else:
        worker.link.connection.close()
    decode = early.decode
    failed = early.second.finish_load(decode)
    assert failed == set(decode.block_ids[CHUNK // BLOCK : -(-LENGTH // BLOCK)]), "the first chunk was whole"
    if end != "forward fails":
        early.gate.end()
    decode.num_computed = CHUNK
    early.second.step((decode, LENGTH - CHUNK))
    early.second.check_cache(decode, LENGTH)
    early.finish()


# ---- a router made for NIXL names no transfer, and passes on what the answer has -----------------------------------

NIXL_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


@pytest.mark.parametrize(("num_nodes", "length"), [(1, 2 * CHUNK), (2, LENGTH)])
def test_an_engine_names_a_transfer_that_has_no_name(
    place: Path, start_here: Callable[..., NodeThread], length: int, num_nodes: int
) -> None:
    nodes = two_nodes(start_here, place) if num_nodes == 2 else [start_here(name="one")]
    with contextlib.closing(Pair(nodes)) as pair:
        prompt = numbers(0, length)
        for named in (PREFILL, None):
            assert pair.first.finish(pair.first.save(numbers(900, length), named)) == {}
        told = pair.first.finish(pair.first.save(prompt, NIXL_PREFILL, step=CHUNK))
        assert told.pop("transfer_id")
        assert told == {
            "do_remote_prefill": True, "do_remote_decode": False, "prefill_node": "one", "prefill_tokens": length
        }  # fmt: skip
        told = pair.first.finish(pair.first.save(prompt := numbers(500, length), NIXL_PREFILL, step=CHUNK))
        decode = Request("d", [*prompt, 7], told)
        assert pair.second.admit(decode) == set()
        assert decode.num_computed == length
        pair.second.check_cache(decode, length)
        assert pair.second.finish(decode) == {}


def test_legs_of_other_connectors_run_alone_with_one_warning(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    params = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_port": 5600}
    for start in (0, 1000):
        assert pair.second.run(numbers(start, LENGTH), params) == 0
    assert caplog.text.count("runs without a transfer: kv_transfer_params: a leg without a transfer_id") == 1
