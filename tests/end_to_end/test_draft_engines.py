"""Speculative decoding in real engines, through PDX: the tokens are those of plain vLLM, and as many of them were
drafts, behind a load from memory or a disk and behind a handoff. A draft model's KV that is missing costs drafts only.

The draft models of these tests are right nearly always, as long as they see all of the prompt (`draft_models`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import draft_models
import pytest
from forge import Engine, Forge, attached_to
from node_harness import MIB, NodeProcess

from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(400)]

CHUNK = 64  # tokens
LENGTHS = (640, 500, 350)  # of prompts; the last chunk of each answer is whole some steps before its end
COUNT = 120  # tokens generated
WITHIN = 0.02


class Plain(NamedTuple):
    """What vLLM without PDX does. `rate`: see `rate_of`."""

    tokens: list[list[int]]
    rate: float


class Method(NamedTuple):
    model: Path
    prompts: list[list[int]]
    config: dict[str, Any]  # of vLLM's speculative decoding
    plain: Plain

    @property
    def has_cache(self) -> bool:
        return self.config["method"] != "ngram"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    return {"target": draft_models.target(folder), "eagle": draft_models.eagle(folder)}


@pytest.fixture(scope="module")
def tokens(forge: Forge, models: dict[str, Path]) -> list[int]:
    """Such as the model likes, so that n-grams of the prompt come again in the answer."""
    with forge.engine(models["target"]) as engine:
        return engine.generate([random.Random(4).randrange(256) for _ in range(9)], max(LENGTHS))[0]


@pytest.fixture(scope="module", params=["ngram", "eagle", "draft_model"])
def method(forge: Forge, models: dict[str, Path], tokens: list[int], request: pytest.FixtureRequest) -> Method:
    model, name = models["target"], request.param
    told = {
        "ngram": {"prompt_lookup_max": 2, "prompt_lookup_min": 1},
        "eagle": {"model": str(models["eagle"])},
        "draft_model": {"model": str(model)},
    }
    prompts = [[number, *tokens[: length - 1]] for number, length in enumerate(LENGTHS)]
    config = {"method": name, "num_speculative_tokens": 3, **told[name]}
    with forge.engine(model) as engine:
        right = [engine.generate(prompt, COUNT)[0] for prompt in prompts]
    with forge.engine(model, speculative_config=config) as engine:
        assert [engine.generate(prompt, COUNT)[0] for prompt in prompts] == right
        rate = rate_of(engine)
    assert rate > (0.6 if name != "ngram" else 0.05), "most that can be is three of four"
    return Method(model, prompts, config, Plain(right, rate))


def rate_of(engine: Engine, count: int = COUNT) -> float:
    """Of all generated tokens, how many are drafts that were accepted. Not of all drafts: where one token is left to
    compute of a prompt, as behind a hit in its own cache, vLLM counts drafts in that step which nobody has made."""
    drafted, accepted = engine.drafted()
    assert drafted >= len(LENGTHS) * count / 4
    return accepted / (len(LENGTHS) * count)


def check_found(engine: Engine, method: Method) -> float:
    """All whole chunks are; returns the rate."""
    for prompt, right in zip(method.prompts, method.plain.tokens, strict=True):
        found, cached = engine.generate(prompt, COUNT)
        assert found == right
        assert cached >= (len(prompt) - 1) // CHUNK * CHUNK
    return rate_of(engine)


def test_what_one_engine_saved_another_drafts_on_from_memory_and_from_a_disk(
    forge: Forge, place: Path, start_node: Callable[..., NodeProcess], method: Method
) -> None:
    """On a disk as in vllm#55503: what is generated with drafts that are accepted and refused is saved, too."""
    disk = {"arena_bytes": 64 * MIB, "disks": [str(place / "disk")], "disk_reserve_bytes": 0}
    node = start_node(**disk)
    config, told = attached_to(node.address, chunk_tokens=CHUNK, load="always"), {"speculative_config": method.config}
    with forge.engine(method.model, config, **told) as engine:
        assert [engine.generate(prompt, COUNT)[0] for prompt in method.prompts] == method.plain.tokens
        node.wait_at_rest()
    with forge.engine(method.model, config, **told) as engine:
        assert check_found(engine, method) == pytest.approx(method.plain.rate, abs=WITHIN)
    chunks = sum((length + COUNT - 1) // CHUNK for length in LENGTHS)
    files = chunks * (1 + method.has_cache)
    wait_until(lambda: node.counter("disk_stored") >= files, "they are on the disk")
    node.wait_at_rest()
    node.kill()
    node = start_node(**disk)
    wait_until(lambda: node.status().tiers[0].chunks >= files, "they are counted")
    with forge.engine(method.model, config, **told) as engine:
        for prompt, right in zip(method.prompts, method.plain.tokens, strict=True):
            _, cached = engine.generate([*prompt, *right], 1)
            assert cached >= (len(prompt) + COUNT - 1) // CHUNK * CHUNK
        engine.reset()
        assert check_found(engine, method) == pytest.approx(method.plain.rate, abs=WITHIN)
    assert node.counter("disk_loaded") >= files
    assert not node.degraded("drafts_missing")


def test_an_engine_drafts_as_well_on_what_another_one_has_prefilled(
    forge: Forge, start_node: Callable[..., NodeProcess], method: Method
) -> None:
    node = start_node(arena_bytes=64 * MIB)
    config, told = attached_to(node.address, chunk_tokens=CHUNK, load="always"), {"speculative_config": method.config}
    with contextlib.ExitStack() as undo:
        prefill, decode = (undo.enter_context(forge.engine(method.model, config, **told)) for _ in range(2))
        for number, (prompt, right) in enumerate(zip(method.prompts, method.plain.tokens, strict=True)):
            name = {"transfer_id": f"transfer-with-drafts-{number}"}
            first = prefill.generate_all([prompt], 1, transfers=[{"do_remote_decode": True, **name}])[0].tokens
            reads = {"do_remote_prefill": True, **name, "prefill_tokens": len(prompt)}
            [answer] = decode.generate_all([prompt + first], COUNT - 1, transfers=[reads])
            assert first + answer.tokens == right
            assert answer.cached >= len(prompt)
        assert rate_of(decode, COUNT - 1) == pytest.approx(method.plain.rate, abs=WITHIN)
    node.wait_at_rest()
    assert not node.degraded("drafts_missing")


def test_an_engine_without_a_draft_model_shares_what_is_not_of_that(
    forge: Forge, start_node: Callable[..., NodeProcess], method: Method
) -> None:
    """The control of the other tests, too: what is drafted on pages that nobody has filled is wrong."""
    node = start_node(arena_bytes=64 * MIB)
    config = attached_to(node.address, chunk_tokens=CHUNK, load="always")
    with forge.engine(method.model, config) as engine:
        assert [engine.generate(prompt, COUNT)[0] for prompt in method.prompts] == method.plain.tokens
        node.wait_at_rest()
    with forge.engine(method.model, config, speculative_config=method.config) as engine:
        rate = check_found(engine, method)
    if method.has_cache:
        assert rate < method.plain.rate - 0.1
        wait_until(lambda: node.degraded("drafts_missing") == len(LENGTHS), "it is counted")
    else:
        assert rate == pytest.approx(method.plain.rate, abs=WITHIN)
