"""A prefill and a decode reference engine in processes of their own, and their nodes.

An engine process reads each order as one JSON line, [verb, arguments], and answers it with one JSON line.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from pdx.bench.harness.nodes import Child, nodes
from pdx.bench.reference.engine import ReferenceEngine, Request
from pdx.bench.reference.model import Shapes
from pdx.client.api import connect
from pdx.config import ConnectorConfig, parse

ATTACH_S = 20.0
NODES = ("one", "two")


class EngineProcess:
    """A reference engine in a process of its own. Orders are carried out one after the other; `send` does not wait."""

    def __init__(self, threads: int = 1) -> None:
        self._child = Child("pdx.bench.reference.pair", str(threads))
        self.close = self._child.close  # it detaches first

    def send(self, verb: str, **arguments: Any) -> None:
        """Send an order: a method of `_Orders` and its arguments."""
        self._child.send([verb, arguments])

    def result(self) -> Any:
        """Wait for the result of the oldest order whose result was not yet returned.

        :raises RuntimeError: the order failed, or the process is gone.
        """
        answer = self._child.receive()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def do(self, verb: str, **arguments: Any) -> Any:
        self.send(verb, **arguments)
        return self.result()


class _Orders:
    """The orders of an engine process; each method is a verb."""

    def __init__(self) -> None:
        self._engine: ReferenceEngine | None = None
        self._begun: list[Request] = []

    @property
    def engine(self) -> ReferenceEngine:
        if self._engine is None:
            raise RuntimeError("no engine is open")
        return self._engine

    def open(self, *, shapes: dict[str, Any], connector: dict[str, Any] | None = None, **settings: Any) -> None:
        """Create the engine, in place of an earlier one."""
        self.close()
        checked = None if connector is None else parse(ConnectorConfig, connector)
        self._engine = ReferenceEngine(Shapes(**shapes), connector=checked, **settings)

    def begin(self, *, requests: Sequence[dict[str, Any]]) -> None:
        """Add these requests (arguments of `ReferenceEngine.add`), and step until each has computed or loaded some."""
        self._begun += (added := [self.engine.add(**request) for request in requests])
        while not all(request.num_computed for request in added):
            self.engine.step()

    def run(self, *, requests: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Add these requests, and step until all requests are finished; returns their outputs and stats, in order."""
        found = [*self._begun, *(self.engine.add(**request) for request in requests)]
        self._begun = []
        self.engine.run()
        return [{"name": request.request_id, "output": request.output, **asdict(request.stats)} for request in found]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def serve(threads: int) -> None:
    """An engine process: orders from stdin, answers to stdout, until stdin ends."""
    torch.set_num_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # output of libraries is no answer
    orders = _Orders()
    try:
        for line in sys.stdin:
            verb, arguments = json.loads(line)
            try:
                answer = {"result": getattr(orders, verb)(**arguments)}
            except Exception as error:  # noqa: BLE001 - the answer tells the caller
                answer = {"error": f"{verb}: {error!r}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        orders.close()


def legs(prompt: Sequence[int], max_tokens: int, nodes: Sequence[str] = ("", "")) -> tuple[dict[str, Any], ...]:
    """The prefill and the decode leg of one prompt, for engines on these nodes; both names empty: one node."""
    transfer = secrets.token_hex(16)
    prefill = {"do_remote_decode": True, "transfer_id": transfer, "decode_node": nodes[1]}
    decode = {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "prefill_node": nodes[0],
        "prefill_tokens": len(prompt),
    }
    return (
        {"name": f"p-{transfer}", "prompt": list(prompt), "max_tokens": 1, "params": prefill},
        {"name": f"d-{transfer}", "prompt": list(prompt), "max_tokens": max_tokens, "params": decode},
    )


def hand_over(
    first: EngineProcess, second: EngineProcess, pairs: Sequence[Sequence[dict[str, Any]]], *, mode: str = "forward"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run both legs of each prompt and return their results; a decode leg's result has the whole output.

    `forward`: a decode leg starts when the prefill legs have answered, with the first token appended to its prompt.
    `sampled`: it waits in the decode engine while the prompt is computed, and samples every token.
    """
    prefills, decodes = [pair[0] for pair in pairs], [dict(pair[1]) for pair in pairs]
    if mode == "sampled":
        first.do("begin", requests=prefills)
        first.send("run")
        second.send("run", requests=decodes)
        return first.result(), second.result()
    prefilled = first.do("run", requests=prefills)
    for leg, answer in zip(decodes, prefilled, strict=True):
        leg["prompt"] = [*leg["prompt"], *answer["output"]]
        leg["max_tokens"] -= 1
    decoded = second.do("run", requests=decodes)
    for before, answer in zip(prefilled, decoded, strict=True):
        answer["output"] = before["output"] + answer["output"]
    return prefilled, decoded


@contextlib.contextmanager
def nodes_for(channel: str, settings: dict[str, Any]) -> Iterator[list[str]]:
    """Addresses of the prefill and the decode engine's nodes: one node for both, or two connected by `channel`."""
    more: dict[str, Any] = {"channels": [channel]} if channel else {}
    with nodes(NODES if channel else NODES[:1], **more, **settings) as addresses:
        for address in addresses:
            connect(address, ATTACH_S).close()
        yield [addresses[0], addresses[-1]]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
