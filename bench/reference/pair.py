"""A prefill and a decode reference engine in processes of their own, and the nodes between them.

An engine process reads one JSON line for each order, [verb, arguments], and answers with one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pdx.bench.harness.nodes import Child, end
from pdx.bench.reference.engine import ReferenceEngine, Request
from pdx.bench.reference.model import AXES, SHAPES, Shapes
from pdx.client.api import connect
from pdx.config import ConnectorConfig, NodeConfig, listen_address, parse
from pdx.node.start import start

ATTACH_S = 20.0
NODES = ("one", "two")


class EngineProcess:
    """A reference engine in a process of its own. Orders are carried out one after the other; `send` does not wait."""

    def __init__(self, threads: int = 1) -> None:
        self._child = Child("pdx.bench.reference.pair", str(threads))
        self.close = self._child.close  # it detaches first

    def send(self, verb: str, **arguments: Any) -> None:
        """Order something (the methods of `_Orders`)."""
        self._child.tell([verb, arguments])

    def result(self) -> Any:
        """What became of the oldest order that was not asked about.

        :raises RuntimeError: it failed there, or the process is gone.
        """
        answer = self._child.heard()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def do(self, verb: str, **arguments: Any) -> Any:
        """Order something and wait for it."""
        self.send(verb, **arguments)
        return self.result()


class _Orders:
    """What an engine process can be told; each method is a verb."""

    def __init__(self) -> None:
        self._engine: ReferenceEngine | None = None
        self._begun: list[Request] = []

    @property
    def engine(self) -> ReferenceEngine:
        """The engine that was opened."""
        if self._engine is None:
            raise RuntimeError("no engine is open")
        return self._engine

    def open(self, *, shapes: dict[str, Any], connector: dict[str, Any] | None = None, **settings: Any) -> None:
        """Make the engine, in the place of the one before."""
        self.close()
        checked = None if connector is None else parse(ConnectorConfig, connector)
        self._engine = ReferenceEngine(Shapes(**shapes), connector=checked, **settings)

    def begin(self, *, requests: Sequence[dict[str, Any]]) -> None:
        """Take these requests (arguments of `ReferenceEngine.add`), and step until each has computed or loaded."""
        self._begun += (added := [self.engine.add(**request) for request in requests])
        while not all(request.num_computed for request in added):
            self.engine.step()

    def run(self, *, requests: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Take these requests, and step until all requests are finished; what became of them, in their order."""
        found = [*self._begun, *(self.engine.add(**request) for request in requests)]
        self._begun = []
        self.engine.run()
        return [{"name": request.request_id, "output": request.output, **asdict(request.stats)} for request in found]

    def close(self) -> None:
        """Close the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def serve(threads: int) -> None:
    """An engine process: orders from stdin, answers to stdout, until stdin ends."""
    torch.set_num_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    orders = _Orders()
    try:
        for line in sys.stdin:
            verb, arguments = json.loads(line)
            try:
                answer = {"result": getattr(orders, verb)(**arguments)}
            except Exception as error:  # noqa: BLE001 - whoever gave the order gets it
                answer = {"error": f"{verb}: {error!r}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        orders.close()


def legs(prompt: Sequence[int], max_tokens: int, nodes: Sequence[str] = ("", "")) -> tuple[dict[str, Any], ...]:
    """The prefill and the decode leg of one prompt, for engines on these nodes; both names empty: on one node."""
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
    """Run both legs of each prompt; what became of them, with the whole output in the decode leg's.

    `forward`: a decode leg starts when the prefill legs have answered, with the first token behind its prompt.
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
    """Addresses of the nodes of the prefill and the decode engine: one node, or two over `channel`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdx-reference-")))
        addresses = [f"ipc://{folder}/{name}.sock" for name in (NODES if channel else NODES[:1])]
        extra: dict[str, Any] = {}
        if channel:
            listens = (listen_address(NodeConfig(address=address)) for address in addresses)
            named = zip(NODES, listens, strict=True)
            (folder / "roster.toml").write_text("".join(f'[nodes.{name}]\naddress = "{at}"\n' for name, at in named))
            (folder / "roster.toml").chmod(0o600)
            extra = {"roster": str(folder / "roster.toml"), "channels": [channel]}
        for name, address in zip(NODES, addresses, strict=False):
            config = parse(NodeConfig, {"address": address, "name": name, **extra, **settings})
            stack.callback(end, start(config))
        for address in addresses:
            connect(address, ATTACH_S).close()
        yield [addresses[0], addresses[-1]]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """A pair and one engine alone, given the same prompts.

    `exposed_ms` is the time from the end of a prompt's prefill until its KV is in the decode engine; in mode `forward`
    it includes the start of the decode leg. Without `--exact`, a GPU's sums may differ between the pair and one engine.
    """
    shapes = SHAPES[arguments.shapes]
    generator = random.Random(arguments.seed)
    prompts = [
        [generator.randrange(shapes.vocab) for _ in range(arguments.prompt_tokens)] for _ in range(arguments.requests)
    ]
    names = NODES if arguments.channel else ("", "")
    with contextlib.ExitStack() as stack:
        nodes = {"arena_bytes": _arena_bytes(arguments), **arguments.node}
        addresses = stack.enter_context(nodes_for(arguments.channel, nodes))
        engines = [stack.enter_context(contextlib.closing(EngineProcess(arguments.threads))) for _ in NODES]
        devices = arguments.device.split(",")
        for at, (engine, role) in enumerate(zip(engines, ("prefill", "decode"), strict=True)):
            connector = {"node": addresses[at], "start_node": False, "role": role, **arguments.connector}
            engine.send("open", connector=connector, device=devices[-at], **_settings(arguments))
        for engine in engines:
            engine.result()
        pairs = [legs(prompt, arguments.max_tokens, names) for prompt in prompts]
        first, second = engines
        prefilled, decoded = hand_over(first, second, pairs, mode=arguments.mode)
        engines[0].do("open", device=devices[0], **_settings(arguments))
        alone = [
            {"name": str(at), "prompt": prompt, "max_tokens": arguments.max_tokens} for at, prompt in enumerate(prompts)
        ]
        plain = engines[0].do("run", requests=alone)
    return {
        "is_equal": [answer["output"] for answer in decoded] == [answer["output"] for answer in plain],
        "exposed_ms": [(d["loaded_ns"] - p["prefill_end_ns"]) / 1e6 for p, d in zip(prefilled, decoded, strict=True)],
        "prefill": prefilled,
        "decode": decoded,
        "alone": plain,
    }


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `_Orders.open`, with room for all requests at once."""
    blocks = -(-(arguments.prompt_tokens + arguments.max_tokens) // arguments.block_tokens)
    named = ("seed", "block_tokens", "order", "piece_tokens", "exact", "graphs")
    return {
        "shapes": asdict(SHAPES[arguments.shapes]),
        "num_blocks": 2 + arguments.requests * blocks,
        **{name: getattr(arguments, name) for name in named},
    }


def _arena_bytes(arguments: argparse.Namespace) -> int:
    """Twice what all requests need, at 4 bytes for each number."""
    shapes = SHAPES[arguments.shapes]
    tokens: int = arguments.requests * (arguments.prompt_tokens + arguments.max_tokens)
    return (64 << 20) + 2 * tokens * shapes.layers * shapes.kv_heads * 2 * shapes.head_dim * 4


def main() -> None:
    """The command line of `python -m pdx.bench.reference.engine`."""
    parser = argparse.ArgumentParser(
        prog="python -m pdx.bench.reference.engine",
        description="Prefill in one process, decode in another, and the same prompts in one engine alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; or cuda:0,cuda:1 for prefill and decode")
    parser.add_argument("--shapes", default="tiny", choices=sorted(SHAPES), help="the weights are random")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--requests", type=int, default=2, help="prompts, all at once")
    parser.add_argument("--prompt-tokens", type=int, default=600, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="generated for each prompt")
    parser.add_argument("--piece-tokens", type=int, default=2048, help="of prompts computed in one step")
    parser.add_argument("--block-tokens", type=int, default=16, help="of a block")
    parser.add_argument("--order", default=AXES, help="of the axes of the KV cache: LBNHC, LBHNC, BLNHC, BLHNC")
    parser.add_argument("--exact", action="store_true", default=None, help="equal bit for bit; always so on CPUs")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs for decoding")
    parser.add_argument("--mode", default="forward", choices=("forward", "sampled"), help="who samples the first token")
    parser.add_argument(
        "--channel", default="", help="between two nodes, such as tcp; empty: one node for both engines"
    )
    parser.add_argument("--node", type=json.loads, default={}, help="settings of the nodes, a JSON object")
    parser.add_argument("--connector", type=json.loads, default={}, help="settings of the connector, a JSON object")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of each engine")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
