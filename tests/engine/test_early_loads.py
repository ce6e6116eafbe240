"""A decode engine that copies what its prefill has computed while that still computes the rest, on one node and two."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import NodeProcess
from toy_engine import BLOCK, CHUNK, LAYERS, ForwardFailed, Request, ToyEngine
from two_peers import are_at_rest, two_nodes

from pdx.client.connection import Connection
from pdx.engine import step_save
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Ping

TRANSFER = "x" * 20
LENGTH = 2 * CHUNK + BLOCK + 1  # two chunks and a tail


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


class Bed:
    """A prefill engine and a decode engine, at one node or at two."""

    def __init__(self, nodes: list[NodeProcess]) -> None:
        self.nodes = nodes
        self.prefill, self.decode = (
            ToyEngine(node.address, name=f"toy-{at}") for at, node in enumerate((nodes * 2)[:2])
        )
        self.params = {"transfer_id": TRANSFER, **({"decode_node": "two"} if len(nodes) > 1 else {})}

    @property
    def decode_node(self) -> NodeProcess:
        return self.nodes[-1]

    def copies_as_slow_as(self, load_s: float) -> None:
        """What the node knows of the decode engine's copies."""
        connection: Any = self.decode.workers[0].link.connection
        connection.load_s = load_s
        connection.call(Ping(load_s=load_s), 10)

    def prefill_leg(self) -> Request:
        request = Request("p", list(range(LENGTH)), {**self.params, "do_remote_decode": True})
        self.prefill.admit(request)
        self.prefill.step((request, CHUNK))
        return request

    def decode_leg(self) -> Request:
        params = {"do_remote_prefill": True, "transfer_id": TRANSFER, "is_early": True}
        return Request("d", list(range(LENGTH)), params)

    def counted(self, name: str) -> int:
        return self.decode_node.status().counters.get(name, 0)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture(params=["one node", "two nodes"])
def bed(
    request: Any, place: Path, start_node: Callable[..., NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bed]:
    monkeypatch.setattr(step_save, "GROUP_BYTES", 1)
    made = Bed([start_node()] if request.param == "one node" else two_nodes(start_node, place, group_bytes=1))
    yield made
    try:
        wait_until(lambda: are_at_rest(made.nodes), what="the nodes are at rest")
    finally:
        made.close()


def loaded_layers(engine: ToyEngine, request: Request, position: int) -> int:
    """How many leading layers of a token are not zero."""
    pages = engine.caches[0][:, request.block_ids[position // BLOCK], position % BLOCK]
    return int(pages.any(dim=1).long().cumprod(0).sum())


def test_layers_are_loaded_while_the_next_ones_are_computed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the request may run as soon as the last one is there."""
    bed.copies_as_slow_as(60)
    prefill, gate = bed.prefill_leg(), Gated(bed.prefill, monkeypatch)
    gate.begin(prefill, LENGTH - CHUNK)
    gate.go_on(1)
    decode = bed.decode_leg()
    assert bed.decode.match(decode) == LENGTH, "before the other layers are computed"
    bed.decode.allocate(decode, LENGTH)
    bed.decode.idle()
    for layers in range(1, LAYERS):
        wait_until(lambda: loaded_layers(bed.decode, decode, LENGTH - 1) == layers, what=f"{layers} layers")  # noqa: B023
        assert loaded_layers(bed.decode, decode, 0) == LAYERS, "of the step before"
        assert bed.decode.waiting == {"d": {0}}
        gate.go_on(1)
    assert bed.decode.finish_load(decode) == set()
    gate.end()
    bed.decode.check_cache(decode, LENGTH)
    assert bed.counted("early_answers") == 1
    bed.decode.finish(decode)
    bed.prefill.finish(prefill)


@pytest.mark.parametrize("why", ["not measured", "faster than what is left"])
def test_blocks_are_not_taken_before_they_are_needed(bed: Bed, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    bed.copies_as_slow_as(0.0 if why == "not measured" else 1e-9)
    prefill, gate = bed.prefill_leg(), Gated(bed.prefill, monkeypatch)
    gate.begin(prefill, LENGTH - CHUNK)
    gate.go_on(2)
    decode = bed.decode_leg()
    with pytest.raises(AssertionError, match="never decided"):
        bed.decode.match(decode, deadline_s=0.5)
    gate.end()
    assert bed.decode.admit(decode) == set()
    bed.decode.check_cache(decode, LENGTH)
    if why == "not measured":  # else it may be answered between the last layer and the seal
        assert bed.counted("early_answers") == 0
    bed.decode.finish(decode)
    bed.prefill.finish(prefill)


@pytest.mark.parametrize("end", ["aborted", "forward fails", "its process ends"])
def test_a_prefill_that_ends_before_its_last_layer_costs_only_what_it_lacks(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    bed.copies_as_slow_as(60)
    prefill, gate = bed.prefill_leg(), Gated(bed.prefill, monkeypatch)
    gate.begin(prefill, LENGTH - CHUNK)
    gate.go_on(1)
    decode = bed.decode_leg()
    assert bed.decode.match(decode) == LENGTH
    bed.decode.allocate(decode, LENGTH)
    bed.decode.idle()
    wait_until(lambda: loaded_layers(bed.decode, decode, LENGTH - 1) == 1, what="a layer of the last tokens")
    worker: Connection = bed.prefill.workers[0].link.connection  # type: ignore[assignment]
    if end == "aborted":
        slots = [slot for grant in bed.prefill.scheduler.track(prefill).node.grants for slot in grant.slots]
        assert slots == [], "the step has them all"
        bed.prefill.scheduler.finished(prefill)
        worker.call(Abort([pages.slots[0] for pages in bed.prefill.workers[0]._saving.pages]), 10)  # noqa: SLF001
    elif end == "forward fails":
        bed.prefill.fails_at = 0, LAYERS - 1
        gate.end()
    else:
        worker.close()
    failed = bed.decode.finish_load(decode)
    assert failed == set(decode.block_ids[CHUNK // BLOCK : -(-LENGTH // BLOCK)]), "the first chunk was whole"
    if end != "forward fails":
        gate.end()
    decode.num_computed = CHUNK
    bed.decode.step((decode, LENGTH - CHUNK))
    bed.decode.check_cache(decode, LENGTH)
    bed.decode.finish(decode)
    bed.prefill.finish(prefill)
