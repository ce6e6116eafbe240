"""Models of every kind of cache group through PDX, token for token as plain vLLM: what one engine has saved another one
finds, in memory and on disk, when the node has been killed, and from another node while it prefills.

`test_families` shows what makes these tests sharp: with any one of its groups cleared, an engine's tokens are others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from families import FAMILIES
from forge import Engine, Forge, attached_to
from node_harness import MIB, NodeProcess
from peers_harness import Cluster
from test_families import CASES, COUNT, TEXT

import pdx
from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

CHUNK = 64  # tokens; of blocks that are longer as many


def each_family(every_day: str) -> pytest.MarkDecorator:
    """All families, of which `make test` has one, or none."""
    return pytest.mark.parametrize(
        "family", [name if name == every_day else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
    )


def prompts_of(family: str) -> list[list[int]]:
    """Of all its lengths; none begins as another one does."""
    return [[number, *TEXT[: length - 1]] for number, length in enumerate(CASES[family])]


def is_storing(node: NodeProcess) -> bool:
    """Whether a chunk is on its way to the disk."""
    with pdx.connect(node.address) as client:
        [disk] = client.status().tiers
        return bool(disk.copies)


def plain_answers(forge: Forge, family: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    with forge.engine(family) as engine:
        return [engine.generate(prompt, COUNT)[0] for prompt in prompts]


def check_found(engine: Engine, family: str, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> None:
    """The same tokens, and nothing but what is behind the last whole chunk was computed."""
    chunk = max(CHUNK, *(group.block for group in FAMILIES[family].groups))
    for prompt, tokens in zip(prompts, plain, strict=True):
        found, cached = engine.generate(prompt, COUNT)
        assert found == tokens, len(prompt)
        assert cached >= (len(prompt) - 1) // chunk * chunk, len(prompt)


@each_family("gptoss")
def test_what_one_engine_saved_another_finds_in_memory_and_on_disk(
    forge: Forge, place: Path, start_node: Callable[..., NodeProcess], family: str
) -> None:
    prompts = prompts_of(family)
    plain = plain_answers(forge, family, prompts)
    node = start_node(arena_bytes=64 * MIB, disks=[str(place / "disk")], disk_reserve_bytes=0)
    config = attached_to(node.address, chunk_tokens=CHUNK)
    with forge.engine(family, config) as engine:
        assert [engine.generate(prompt, COUNT)[0] for prompt in prompts] == plain
    with forge.engine(family, config) as engine:
        check_found(engine, family, prompts, plain)
    wait_until(lambda: not is_storing(node), "all of it is on the disk")
    node.kill()
    node = start_node(arena_bytes=64 * MIB, disks=[str(place / "disk")], disk_reserve_bytes=0)
    with forge.engine(family, config) as engine:
        check_found(engine, family, prompts, plain)


@each_family("")
@pytest.mark.parametrize(
    "is_same_node", [pytest.param(True, marks=pytest.mark.long, id="one node"), pytest.param(False, id="two nodes")]
)
def test_a_prompt_that_one_engine_prefills_another_goes_on_with(
    forge: Forge, place: Path, family: str, is_same_node: bool
) -> None:
    """The decode leg has the first token, so that all of the prompt is found; or samples it again, for which a state
    after the last token is of no use."""
    prompts = prompts_of(family)
    plain = plain_answers(forge, family, prompts)
    where = {"decode_node": "b"}, {"prefill_node": "a"}
    with contextlib.closing(Cluster(place, "a" if is_same_node else "ab", arena_bytes=64 * MIB)) as cluster:
        cluster.start(*cluster.names)
        configs = [attached_to(cluster.address(name), chunk_tokens=CHUNK) for name in ("a", cluster.names[-1])]
        with forge.engine(family, configs[0]) as prefill, forge.engine(family, configs[1]) as decode:
            for number, (prompt, tokens) in enumerate(zip(prompts, plain, strict=True)):
                name = {"transfer_id": f"transfer-{family.replace('_', '-')}-{number:04}"}
                writes = {"do_remote_decode": True, **name, **({} if is_same_node else where[0])}
                reads = {"do_remote_prefill": True, **name, "prefill_tokens": len(prompt)}
                reads |= {} if is_same_node else where[1]
                first = prefill.generate_all([prompt], 1, transfers=[writes])[0].tokens
                assert first == tokens[:1]
                given = number % 2
                [answer] = decode.generate_all([prompt + first[:given]], COUNT - given, transfers=[reads])
                assert first[:given] + answer.tokens == tokens, len(prompt)
                least = len(prompt) - 1 + given
                if not given and "MambaSpec" in {group.spec for group in FAMILIES[family].groups}:
                    chunk = max(CHUNK, *(group.block for group in FAMILIES[family].groups))
                    least = (len(prompt) - 1) // chunk * chunk
                assert answer.cached >= least, len(prompt)
