"""A conversation that was cut near its beginning, on one engine: `python -m pdx.bench.reuse.moved [ROUNDS]`.

Time to the first token of a prompt of 4,000 tokens and a question, with the 4,000 tokens computed, found as they were,
or found at other positions (`reuse: moved`) except for the first block. The model is a tiny random Llama; the engine
has no cache of its own. Every round has new texts.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path

from pdx.bench.harness import ask
from pdx.bench.harness.report import at_least, at_most, publish
from pdx.bench.harness.tiny_llama import make_model
from pdx.cli.ports import free_ports
from pdx.cli.processes import Processes, answers
from pdx.cli.serve import connector_option
from pdx.client.api import connect
from pdx.testing.waiting import wait_until

TOKENS, KEPT, CUT, QUESTION = 4000, 128, 2000, 60
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "8192", "--no-enable-prefix-caching")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
}


def text(draw: random.Random, length: int) -> str:
    """Random text of `length` tokens for the tiny model."""
    return "".join(chr(draw.randrange(0x20, 0x7F)) for _ in range(length))


async def ttft_ms(url: str, prompt: str, *, moved: bool = False) -> float:
    body = ask.completion("tiny", prompt, 1)
    if moved:
        body["kv_transfer_params"] = {"pdx_hints": {"version": 1, "reuse": "moved"}}
    async with ask.session() as session:
        return (await ask.ask(session, url, body, "bench")).ttft_ms


def save(url: str, node: str, prompt: str) -> None:
    """Have the prompt computed, and wait until its KV is kept."""
    asyncio.run(ttft_ms(url, prompt))
    with connect(node) as client:
        wait_until(lambda: client.status().chunks.keys() <= {"sealed"}, timeout_s=60, what="it is saved")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as place, Processes(Path(place) / "logs") as processes:
        folder = Path(place)
        (port,) = free_ports(1)
        url, node = f"http://127.0.0.1:{port}", f"ipc://{folder}/node.sock"
        arena = f"{rounds + 2}GiB"
        store = [sys.executable, "-P", "-m", "pdx.cli.main", "node", "--node", node, "--arena", arena, "--proxy", ""]
        processes.start("node", store, is_ready=lambda: answers(node))
        settings = {"node": node, "start_node": False, "proxy": "", "moved": True, "load": "always"}
        connector = connector_option(settings)
        program = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
        model = make_model(folder / "model")
        command = [
            *program,
            "--model",
            str(model),
            "--served-model-name",
            "tiny",
            "--port",
            str(port),
            *FLAGS,
            *connector,
        ]
        engine = processes.start("engine", command, is_ready=lambda: answers(url), env=ENVIRONMENT)
        wait_until(
            lambda: not processes.look() and answers(url), timeout_s=300, what=f"the engine is up ({engine.log})"
        )
        times: dict[str, list[float]] = {"computed": [], "found": [], "moved": []}
        for number in range(rounds + 1):
            draw = random.Random(number)
            history, question = text(draw, KEPT + CUT + TOKENS), text(draw, QUESTION)
            save(url, node, history)
            prompts = {
                "computed": (text(draw, TOKENS) + question, False),
                "found": (history[:TOKENS] + question, False),
                "moved": (history[:KEPT] + history[KEPT + CUT :][: TOKENS - KEPT] + question, True),
            }
            for name, (prompt, moved) in prompts.items():
                took = asyncio.run(ttft_ms(url, prompt, moved=moved))
                if number:  # the first round warms up
                    times[name].append(took)
        p50 = {name: statistics.median(each) for name, each in times.items()}
        figures = [
            at_least("cut conversation, 4,000 tokens: computed over moved", p50["computed"] / p50["moved"], "", 5),
            at_most("cut conversation, 4,000 tokens: moved over found", p50["moved"] / p50["found"], "", 1.3),
        ]
        publish("moved", f"time to first token, {rounds} rounds", figures, {"times_ms": times})


if __name__ == "__main__":
    main()
