"""Models of every kind of cache group through PDX, token for token as plain vLLM: what one engine has saved another one
finds, in memory, on disk and in a remote store, when the node has been killed or has evicted it, beside requests that
are aborted and preempted, and from another node while it prefills.

`test_families` shows what makes these tests sharp: with any one of its groups cleared, an engine's tokens are others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from families import FAMILIES, STEP
from family_prompts import CASES, COUNT, TEXT
from forge import Engine, Forge, attached_to
from host import is_storing
from node_harness import MIB, NodeProcess
from peers_harness import Cluster
from remote_bed import made

from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

CHUNK = 64  # tokens; of blocks that are longer as many
LONGEST, LONG, AT_ONCE = 1280, 110, 8  # tokens, those generated, and requests, where there are few blocks
ABORTS = {0: 1, 3: 3, 5: 10, 6: 40}  # which of them, after so many steps


def each_family(every_day: str) -> pytest.MarkDecorator:
    """All families, of which `make test` has one, or none."""
    return pytest.mark.parametrize(
        "family", [name if name == every_day else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
    )


def prompts_of(family: str) -> list[list[int]]:
    """Of all its lengths; none begins as another one does."""
    return [[number, *TEXT[: length - 1]] for number, length in enumerate(CASES[family])]


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
        assert engine.generate(prompt, COUNT)[0] == tokens, "its own hit"


def blocks_of(family: str, tokens: int, step: int = 0) -> int:
    """That a request has, of all groups, while it computes so many of its tokens at once."""
    total = 0
    for group in FAMILIES[family].groups:
        reach = step + (1 if group.spec == "MambaSpec" else group.reach or tokens)
        total += -(-min(tokens, reach) // group.block) + (tokens > reach)
    return total


def prompts_that_fill(family: str) -> list[list[int]]:
    """More than run at once; each has a block that its answer soon goes beyond."""
    length = 2 * max(CHUNK, *(group.block for group in FAMILIES[family].groups)) - 6
    return [[200 + number, *TEXT[: length - 1]] for number in range(AT_ONCE + len(ABORTS))]


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
def test_what_memory_has_evicted_is_found_in_a_remote_store_beside_aborts_and_preemption(
    forge: Forge, tmp_path: Path, start_node: Callable[..., NodeProcess], family: str
) -> None:
    prompts, filling = prompts_of(family), prompts_that_fill(family)
    few = max(blocks_of(family, LONGEST, STEP), AT_ONCE * blocks_of(family, len(filling[0]))) + 1
    with forge.engine(family) as engine:
        plain = [engine.generate(prompt, COUNT)[0] for prompt in prompts]
        right = [engine.generate(prompt, LONG)[0] for prompt in filling]
    with contextlib.ExitStack() as undo:
        store = made("redis", tmp_path / "redis").start()
        undo.callback(store.kill)
        node = start_node(arena_bytes=64 * MIB, remote=store.url, remote_s=20.0, remote_lookup_s=20.0)
        config = attached_to(node.address, chunk_tokens=CHUNK, load="always")
        longest = {"max_model_len": LONGEST}  # Llama 4's keys depend on it
        with forge.engine(family, config, **longest) as engine:
            assert [engine.generate(prompt, COUNT)[0] for prompt in prompts] == plain
            for prompt in filling[::2]:
                engine.generate(prompt, 1)
        node.forget()
        options = {"num_gpu_blocks_override": few, "max_num_seqs": AT_ONCE, **longest}
        engine = undo.enter_context(forge.engine(family, config, **options))
        engine.load_whatever_it_costs()
        check_found(engine, family, prompts, plain)
        loaded = node.counter("remote_loaded")
        assert loaded
        node.forget()
        engine.reset()
        answers, preempted = engine.storm(filling, LONG, ABORTS, preempt_at=30)
        assert preempted
        assert node.counter("remote_loaded") > loaded
        if FAMILIES[family].is_exact:
            assert answers == [None if number in ABORTS else tokens for number, tokens in enumerate(right)]
        node.wait_at_rest()
        node.forget()
        engine.reset()
        check_found(engine, family, prompts, plain)
        check_that_each_group_matters(node, engine, family)


def check_that_each_group_matters(node: NodeProcess, engine: Engine, family: str) -> None:
    """The control of all that is found: with zeros in the place of one group's chunks tokens are others. A hit of 576
    tokens ends within a part of chunked local attention."""
    for group in range(len(engine.groups)):
        prompt = [250 - group, *TEXT[:599]]
        right, _ = engine.generate(prompt, COUNT)
        node.wait_at_rest()
        engine.reset()
        engine.spoil(group)
        tokens, cached = engine.generate(prompt, COUNT)
        engine.spoil(-1)
        assert cached >= 544
        assert tokens != right, (family, group)


@each_family("")
@pytest.mark.parametrize(
    "is_same_node", [pytest.param(True, marks=pytest.mark.long, id="one node"), pytest.param(False, id="two nodes")]
)
def test_a_prompt_that_one_engine_prefills_another_goes_on_with(
    forge: Forge, place: Path, family: str, is_same_node: bool
) -> None:
    """The decode leg has the first token, so that all of the prompt is found; or samples it. Prefill of a model with
    states stops before the prompt's last token, which here is one that the plain engine, too, has computed alone: in
    bfloat16 a state has other bits behind a token that is computed with others."""
    prompts = prompts_of(family)
    plain = plain_answers(forge, family, prompts)
    where = {"decode_node": "b"}, {"prefill_node": "a"}
    with contextlib.closing(Cluster(place, "a" if is_same_node else "ab", arena_bytes=64 * MIB)) as cluster:
        cluster.start(*cluster.names)
        configs = [attached_to(cluster.address(name), chunk_tokens=CHUNK) for name in ("a", cluster.names[-1])]
        with forge.engine(family, configs[0]) as prefill, forge.engine(family, configs[1]) as decode:
            has_states = "MambaSpec" in {group.spec for group in FAMILIES[family].groups}
            if has_states:
                prompts = [prompt + tokens[:1] for prompt, tokens in zip(prompts, plain, strict=True)]
                plain = [tokens[1:] for tokens in plain]
            for number, (prompt, tokens) in enumerate(zip(prompts, plain, strict=True)):
                name = {"transfer_id": f"transfer-{family.replace('_', '-')}-{number:04}"}
                writes = {"do_remote_decode": True, **name, **({} if is_same_node else where[0])}
                reads = {"do_remote_prefill": True, **name, "prefill_tokens": len(prompt)}
                reads |= {} if is_same_node else where[1]
                first = prefill.generate_all([prompt], 1, transfers=[writes])[0].tokens
                assert has_states or first == tokens[:1]
                given = 0 if has_states else number % 2
                [answer] = decode.generate_all([prompt + first[:given]], len(tokens) - given, transfers=[reads])
                assert first[:given] + answer.tokens == tokens, len(prompt)
                assert answer.cached >= len(prompt) - 1 + given, len(prompt)
