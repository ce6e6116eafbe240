"""The reference engine on a GPU: prefill in one process and decode in another give the tokens of one engine alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("xxhash")
pytest.importorskip("zmq")

from node_harness import NodeProcess  # noqa: E402

from pdx.bench.reference.engine import ReferenceEngine  # noqa: E402
from pdx.bench.reference.model import Shapes  # noqa: E402
from pdx.bench.reference.pair import NODES, EngineProcess, hand_over, legs, nodes_for  # noqa: E402
from pdx.config import ConnectorConfig  # noqa: E402
from pdx.cuda.gpu import Gpu  # noqa: E402
from pdx.cuda.memory import num_mapped  # noqa: E402
from pdx.testing.waiting import wait_until  # noqa: E402

pytestmark = pytest.mark.serial
MIB = 1 << 20
SHAPES = Shapes(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=331)
CHUNK = 64
PIECE = 128
SETTINGS: dict[str, Any] = {"device": "cuda", "num_blocks": 256, "piece_tokens": PIECE, "exact": True}
PROMPTS = [[random.Random(seed).randrange(SHAPES.vocab) for _ in range(5 * CHUNK + 21)] for seed in range(3)]
DECODED = 24
SLACK = 48 * MIB
GPU_NODE = {"gpu": "0", "arena_bytes": 64 * MIB}
HOST_NODE = {"arena_bytes": 64 * MIB}
Alone = dict[bool, list[list[int]]]  # by whether graphs are used


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    """Two engine processes in which each test opens what it needs."""
    started = [EngineProcess() for _ in range(2)]
    yield started
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def alone(processes: list[EngineProcess]) -> Alone:
    """What one engine generates without a node, one prompt at a time; by whether it uses graphs."""
    found = {}
    for graphs in (False, True):
        processes[0].do("open", shapes=asdict(SHAPES), seed=1, graphs=graphs, **SETTINGS)
        requests = [{"name": str(at), "prompt": prompt, "max_tokens": DECODED} for at, prompt in enumerate(PROMPTS)]
        found[graphs] = [processes[0].do("run", requests=[request])[0]["output"] for request in requests]
        assert len({tuple(output) for output in found[graphs]}) == len(PROMPTS), (
            "the output does not tell prompts apart"
        )
    processes[0].do("close")
    return found


def fresh_prompt() -> list[int]:
    """One that nobody has seen."""
    source = random.SystemRandom()
    return [source.randrange(SHAPES.vocab) for _ in range(2 * CHUNK)]


def until_they_reach_the_arena(processes: list[EngineProcess], names: tuple[str, str]) -> None:
    """It is mapped, or page-locked, in the background; until then nothing is saved or loaded."""

    def loads() -> bool:
        _, [decoded] = hand_over(*processes, [legs(fresh_prompt(), 2, names)])
        return bool(decoded["loaded_tokens"])

    wait_until(loads, timeout_s=60.0, what="a first prompt was handed over")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["forward", "sampled"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    ("channel", "settings"),
    [("", GPU_NODE), ("cuda_ipc", GPU_NODE), ("", HOST_NODE)],
    ids=["one GPU node", "two GPU nodes", "one host node"],
)
def test_two_processes_give_the_tokens_of_one(
    cuda: Gpu,
    processes: list[EngineProcess],
    alone: Alone,
    channel: str,
    settings: dict[str, Any],
    graphs: bool,
    mode: str,
) -> None:
    """One prompt at a time, because graphs compute those that decode together, which rounds differently."""
    names = NODES if channel else ("", "")
    with nodes_for(channel, settings) as addresses:
        for process, address, role in zip(processes, addresses, ("prefill", "decode"), strict=True):
            connector = {"node": address, "start_node": False, "role": role, "chunk_tokens": CHUNK}
            own = {"connector": connector, "name": role, "graphs": graphs}
            process.do("open", shapes=asdict(SHAPES), seed=1, **own, **SETTINGS)
        until_they_reach_the_arena(processes, names)
        for prompt, expected in zip(PROMPTS, alone[graphs], strict=True):
            [prefilled], [decoded] = hand_over(*processes, [legs(prompt, DECODED, names)], mode=mode)
            assert decoded["output"] == expected
            assert prefilled["computed_prompt_tokens"] == len(prompt)
            assert decoded["loaded_tokens"] >= len(prompt) - 1
            assert decoded["computed_prompt_tokens"] <= 1
        for process in processes:
            process.do("close")


@pytest.fixture
def gpu_node(cuda: Gpu, start_node: Callable[..., NodeProcess]) -> Iterator[NodeProcess]:
    """A node on the GPU."""
    node = start_node(**GPU_NODE)
    yield node
    if node.process.poll() is not None:
        start_node()  # clears away what a killed one has left


def output_of(engine: ReferenceEngine, name: str, prompt: list[int]) -> list[int]:
    request = engine.add(name, prompt, DECODED)
    engine.run()
    return request.output


def sealed(node: NodeProcess) -> int:
    return node.status().chunks.get("sealed", 0)


def save(engine: ReferenceEngine, node: NodeProcess, prompt: list[int]) -> list[int]:
    """Compute it, and wait until its chunks are in the store; the output."""
    before = sealed(node)
    output = output_of(engine, "first", prompt)
    wait_until(lambda: sealed(node) >= before + len(prompt) // CHUNK, timeout_s=10.0, what="saved")
    return output


@pytest.fixture
def engine(gpu_node: NodeProcess) -> Iterator[ReferenceEngine]:
    """An engine of this process, attached to it."""
    connector = ConnectorConfig(node=gpu_node.address, start_node=False, chunk_tokens=CHUNK)
    made = ReferenceEngine(SHAPES, 1, connector=connector, **SETTINGS)
    try:
        wait_until(
            lambda: output_of(made, "warm", fresh_prompt()) and sealed(gpu_node),
            timeout_s=60.0,
            what="a first chunk is saved",
        )
        yield made
    finally:
        made.close()
        torch.cuda.synchronize()


def test_what_was_saved_is_loaded(engine: ReferenceEngine, gpu_node: NodeProcess, alone: Alone) -> None:
    assert save(engine, gpu_node, PROMPTS[0]) == alone[False][0]
    again = engine.add("again", PROMPTS[0], DECODED)
    engine.run()
    assert again.output == alone[False][0]
    assert again.stats.loaded_tokens == len(PROMPTS[0]) // 16 * 16  # all whole blocks: the last chunk is a tail


def test_the_node_is_killed_while_pages_are_gathered(
    engine: ReferenceEngine, gpu_node: NodeProcess, alone: Alone
) -> None:
    hooks = iter(range(1 << 30))
    save = engine.worker.save_layer

    def save_layer(name: str) -> None:
        if next(hooks) == SHAPES.layers + 1:  # in the second step, between two layers, with gathers under way
            torch.cuda._sleep(50_000_000)
            gpu_node.kill()
        save(name)

    engine.worker.save_layer = save_layer  # type: ignore[method-assign]
    assert output_of(engine, "r", PROMPTS[1]) == alone[False][1]
    engine.close()
    wait_until(lambda: num_mapped() == 0, timeout_s=10.0, what="nothing stays mapped")


def test_the_node_is_killed_while_pages_are_scattered(
    engine: ReferenceEngine, gpu_node: NodeProcess, alone: Alone
) -> None:
    """With memory that outlives the node what was loaded is good; else the blocks are recomputed."""
    assert save(engine, gpu_node, PROMPTS[2]) == alone[False][2]
    begin = engine.worker.begin

    def begin_and_kill(plan: Any) -> None:
        if plan.loads:
            torch.cuda._sleep(200_000_000)  # the load is behind this
        begin(plan)
        if plan.loads:
            gpu_node.kill()

    engine.worker.begin = begin_and_kill  # type: ignore[method-assign]
    assert output_of(engine, "again", PROMPTS[2]) == alone[False][2]
    engine.close()
    wait_until(lambda: num_mapped() == 0, timeout_s=10.0, what="nothing stays mapped")


def test_the_gpu_has_its_memory_back_behind_a_killed_engine(cuda: Gpu, gpu_node: NodeProcess) -> None:
    free = cuda.free_bytes()
    process = EngineProcess()
    connector = {"node": gpu_node.address, "start_node": False, "chunk_tokens": CHUNK}
    process.do("open", shapes=asdict(SHAPES), seed=1, connector=connector, **SETTINGS)
    process.do("run", requests=[{"name": "r", "prompt": PROMPTS[0], "max_tokens": DECODED}])
    process.send("run", requests=[{"name": "s", "prompt": PROMPTS[1], "max_tokens": DECODED}])
    process._child.process.kill()
    process.close()
    wait_until(
        lambda: all(each.kind == "client" for each in gpu_node.status().attached), timeout_s=10.0, what="the node knows"
    )
    wait_until(lambda: cuda.free_bytes() >= free - SLACK, timeout_s=20.0, what="its memory and its mapping are gone")
    status = gpu_node.status()
    assert status.mapped == 1
    assert status.chunks.get("filling", 0) == 0
