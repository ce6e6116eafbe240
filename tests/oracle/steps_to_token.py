"""Steps and time to first token beside requests that run, and the time of schedule() in a burst, with PDX and without.

Without: PDX is switched off in the same engine, whose scheduler then goes on alone. Steps take 30 ms. From the root of
the checkout: PYTHONPATH=.:tests/oracle:tests/support python -P tests/oracle/steps_to_token.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from exact_engine import BLOCK, Engine, Shape, tokens
from node_harness import NodeProcess

from pdx.bench.harness.tiny_llama import make_model
from pdx.config import NodeConfig

tell = partial(print, flush=True)
STEP_S = 0.03
DOCUMENT = 1024
ROUNDS = 12


@contextmanager
def engine(name: str, model: Path, address: str, *, is_on: bool = True, **shape: Any) -> Iterator[Engine]:
    """An engine; `is_on`: with PDX."""
    extra = {"load": "auto", "chunk_tokens": 64}
    with closing(Engine(name, model, address, Shape(extra=extra, **shape))) as made:
        if not is_on:
            made.pdx.scheduler.switch_off("as without PDX")
        yield made


def slowed(made: Engine) -> Callable[[], None]:
    """Its steps take 30 ms from now on, until what is returned is called."""
    start = made.runner.start

    def slowly(step: Any) -> Any:
        begun = time.monotonic()
        output = start(step)
        if step.total_num_scheduled_tokens:
            time.sleep(max(0.0, STEP_S - (time.monotonic() - begun)))
        return output

    made.runner.start = slowly  # type: ignore[method-assign]

    def end() -> None:
        made.runner.start = start  # type: ignore[method-assign]

    return end


def to_first_token(made: Engine, prompts: list[list[int]], beside: int) -> str:
    """Steps and milliseconds of each of these prompts, one after the other."""
    for number in range(beside):
        made.add(f"runs {number}", tokens(40, (made.name, number)), 2000)
    for _ in range(30):
        made.step()
    fast, steps, took_ms = slowed(made), [], []
    for number, prompt in enumerate(prompts):
        made.step()
        name, begun = f"asks {number}", time.monotonic()
        made.add(name, prompt, 2)
        steps.append(0)
        while not made.outputs[name]:
            made.step()
            steps[-1] += 1
        took_ms.append((time.monotonic() - begun) * 1000)
        made.run(name)
    fast()
    for number in range(beside):
        made.abort(f"runs {number}")
    made.run()
    spread = f"{statistics.median(steps):.0f} ({min(steps)} to {max(steps)})"
    return f"{spread:>11} steps {statistics.median(took_ms):5.0f} ms"


def of_latency(model: Path, address: str, beside: int, *, asynchronous: bool, is_on: bool) -> None:
    """Prints a row."""
    name = f"l {beside} {asynchronous} {is_on}"
    documents = [tokens(DOCUMENT + 1, (name, number)) for number in range(ROUNDS)]
    with engine(f"writes {name}", model, address) as writer:
        for number, document in enumerate(documents):
            writer.add(f"{number}", document, 1)
        writer.run()
    with engine(name, model, address, is_on=is_on, asynchronous=asynchronous, blocks=1200) as made:
        new = to_first_token(made, [tokens(200, (name, "new", number)) for number in range(ROUNDS)], beside)
        for number, document in enumerate(documents):
            made.add(f"begins {number}", document[: DOCUMENT - BLOCK + 1], 1)
        made.run()
        known = to_first_token(made, documents, beside)
    tell(f"{beside} run | {'async' if asynchronous else 'sync ':5} | {_with(is_on)} | {new} | {known}")


def of_burst(model: Path, address: str, count: int, *, is_on: bool) -> None:
    """Prints a row."""
    with engine(f"b {is_on}", model, address, is_on=is_on, seqs=4, budget=512) as made:
        for number in range(2):
            made.add(f"runs {number}", tokens(40, ("b", number)), 2000)
        for _ in range(30):
            made.step()
        for number in range(count):
            made.add(f"{number}", tokens(640, ("b", is_on, number)), 4)
        schedule, took_ms, most = made.scheduler.schedule, [], 0

        def timed() -> Any:
            begun = time.monotonic()
            planned = schedule()
            took_ms.append((time.monotonic() - begun) * 1000)
            return planned

        made.scheduler.schedule = timed
        slowed(made)
        for _ in range(100):
            made.step()
            waiting = [each for each in made.half._requests.values() if each.is_queued] if is_on else []
            most = max(most, sum(bool(each.node.grants) or each.node.asked is not None for each in waiting))
    tell(
        f"{count} at once | {_with(is_on)} | schedule(): median {statistics.median(took_ms):.2f} ms, mean "
        f"{statistics.fmean(took_ms):.2f}, most {max(took_ms):.1f} | {most} of those that wait have asked",
    )


def _with(is_on: bool) -> str:
    return "PDX    " if is_on else "without"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        address, model = f"ipc://{name}/node.sock", Path(name) / "model"
        make_model(model, layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, intermediate=64)
        node = NodeProcess(NodeConfig(address=address, arena_bytes=512 << 20)).wait_ready()
        tell("beside | scheduler | | new prompt of 200 tokens | 16 tokens more in the store than in vLLM's cache")
        for beside in (0, 4):
            for asynchronous in (False, True):
                for is_on in (False, True):
                    of_latency(model, address, beside, asynchronous=asynchronous, is_on=is_on)
        for is_on in (False, True):
            of_burst(model, address, 200, is_on=is_on)
        node.close()


if __name__ == "__main__":
    main()
