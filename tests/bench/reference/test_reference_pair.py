"""Prefill in one process, decode in another: the tokens of one engine alone, and the prompt is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_harness import NodeProcess
from reference_prompts import CHUNK, SETTINGS, SHAPES, connector_to, prompt_of

from pdx.bench.reference.pair import NODES, EngineProcess, hand_over, legs
from pdx.config import NodeConfig, listen_address

LENGTHS = (3 * CHUNK + 11, 2 * CHUNK, 5)
NEW_TOKENS = 12

pytestmark = pytest.mark.long


def open_engine(process: EngineProcess, node: NodeProcess | None = None, **settings: Any) -> None:
    """A tiny engine in `process`, attached to `node` where one is given."""
    connector = msgspec.to_builtins(connector_to(node.address)) if node is not None else None
    process.do("open", shapes=asdict(SHAPES), connector=connector, **{**SETTINGS, **settings})


def alone(process: EngineProcess, prompts: list[list[int]]) -> list[list[int]]:
    """What one engine generates without a node."""
    open_engine(process)
    requests = [{"name": str(at), "prompt": prompt, "max_tokens": NEW_TOKENS} for at, prompt in enumerate(prompts)]
    return [answer["output"] for answer in process.do("run", requests=requests)]


def taken(answers: list[dict[str, Any]], name: str) -> list[int]:
    return [answer[name] for answer in answers]


@pytest.fixture
def two_nodes(place: Path, start_node: Callable[..., NodeProcess]) -> list[NodeProcess]:
    """Two nodes linked by tcp."""
    roster = place / "roster.toml"
    addresses = {name: f"ipc://{place}/{name}.sock" for name in NODES}
    listens = {name: listen_address(NodeConfig(address=address)) for name, address in addresses.items()}
    roster.write_text("".join(f'[nodes.{name}]\naddress = "{listen}"\n' for name, listen in listens.items()))
    roster.chmod(0o600)
    return [
        start_node(address=address, name=name, roster=str(roster), channels=["tcp"])
        for name, address in addresses.items()
    ]


@pytest.fixture(params=["one node", "two nodes"])
def nodes(request: pytest.FixtureRequest) -> list[NodeProcess]:
    """The nodes of the prefill and of the decode engine."""
    if request.param == "two nodes":
        return request.getfixturevalue("two_nodes")
    return [request.getfixturevalue("node")] * 2


@pytest.fixture
def engines(processes: list[EngineProcess], nodes: list[NodeProcess]) -> Any:
    """Both processes; after the test they have no engine."""
    yield processes
    for process in processes:
        process.do("close")


@pytest.mark.parametrize(("mode", "order"), [("forward", "LBNHC"), ("sampled", "LBHNC")])
def test_the_decoder_gives_the_tokens_of_one_engine(
    engines: list[EngineProcess], nodes: list[NodeProcess], mode: str, order: str
) -> None:
    """Three prompts at once, with and without a tail; also for a decoder that waits while the prompt is computed."""
    for process, node in zip(engines, nodes, strict=True):
        open_engine(process, node, order=order)
    prompts = [prompt_of(seed, length) for seed, length in enumerate(LENGTHS)]
    names = NODES if nodes[0] is not nodes[1] else ("", "")
    pairs = [legs(prompt, NEW_TOKENS, names) for prompt in prompts]
    prefilled, decoded = hand_over(engines[0], engines[1], pairs, mode=mode)
    assert taken(prefilled, "computed_prompt_tokens") == list(LENGTHS)
    assert taken(decoded, "loaded_tokens") == list(LENGTHS)
    assert taken(decoded, "computed_prompt_tokens") == [1] * len(LENGTHS)
    assert [answer["output"] for answer in decoded] == alone(engines[0], prompts)


@pytest.mark.parametrize("nodes", ["one node"], indirect=True)
@pytest.mark.parametrize("is_prefilled", [False, True])
def test_the_node_is_killed_and_the_decoder_computes(
    engines: list[EngineProcess], nodes: list[NodeProcess], start_node: Callable[..., NodeProcess], is_prefilled: bool
) -> None:
    """In the middle of the prefill, or between the legs."""
    for process, node in zip(engines, nodes, strict=True):
        open_engine(process, node)
    prompt = prompt_of(9, LENGTHS[0])
    prefill, decode = legs(prompt, NEW_TOKENS)
    engines[0].do("begin", requests=[prefill])
    if is_prefilled:
        engines[0].do("run")
    nodes[0].kill()
    (prefilled,) = engines[0].do("run") or [None]
    (decoded,) = engines[1].do("run", requests=[decode])
    assert decoded["computed_prompt_tokens"] == len(prompt)
    assert decoded["loaded_tokens"] == 0
    assert [decoded["output"]] == alone(engines[0], [prompt])
    if not is_prefilled:
        assert prefilled["output"] == decoded["output"][:1]
        assert prefilled["computed_prompt_tokens"] == len(prompt)
    start_node()  # cleans up
