"""Plain vLLM with each family of models: what tests of its cache with PDX rest on.

Tokens are the same each time and after a hit in vLLM's own cache, and they are others when a cache group is cleared.
So where they are the same with PDX, each group was restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from families import FAMILIES, Group
from family_prompts import CASES, COUNT, TEXT
from forge import Engine, Forge
from real_models import text_of, tokens_of

import pdx

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(300)]


# vLLM has no prefix cache of its own for latent attention on CPUs.
UNCACHED = ("deepseek_v2",)


def own_hit(family: str, length: int) -> int:
    """What vLLM finds in its own cache of a prompt that it has computed: whole blocks, and never its last token."""
    block = max(group.block for group in FAMILIES[family].groups)
    return 0 if family in UNCACHED else (length - 1) // block * block


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(forge: Forge, family: str) -> Iterator[Engine]:
    with forge.engine(family) as engine:
        yield engine


def test_vllm_makes_these_groups_of_it(engine: Engine, family: str) -> None:
    assert engine.groups == list(FAMILIES[family].groups)


def test_a_hit_in_vllms_own_cache_gives_the_same_tokens_as_a_cold_run(engine: Engine, family: str) -> None:
    for length in CASES[family]:
        engine.reset()
        cold, found = engine.generate(TEXT[:length], COUNT)
        assert found == 0
        assert len(set(cold)) > COUNT // 2, f"the answer to {length} tokens repeats itself: {cold}"
        assert engine.generate(TEXT[:length], COUNT) == (cold, own_hit(family, length)), length


def test_several_requests_at_once_answer_as_one_alone(engine: Engine, family: str) -> None:
    if not FAMILIES[family].is_exact:
        pytest.skip("its tokens change with the batch")
    prompts = [TEXT[:700], TEXT[100:400], TEXT[300:633]]
    alone = []
    for prompt in prompts:
        engine.reset()
        alone.append(engine.generate(prompt, COUNT)[0])
    engine.reset()
    assert [answer.tokens for answer in engine.generate_all(prompts, COUNT)] == alone


def test_tokens_depend_on_what_is_far_away(engine: Engine) -> None:
    # Out of every window, and within the reach of all layers' windows together.
    other = TEXT[:300] + TEXT[1300:1332] + TEXT[332:700]
    engine.reset()
    assert engine.generate(TEXT[:700], COUNT)[0] != engine.generate(other, COUNT)[0]


def test_tokens_depend_on_each_cache_group(engine: Engine, family: str) -> None:
    if family in UNCACHED:
        pytest.skip("no prefix cache whose blocks could be cleared")
    right, _ = engine.generate(TEXT[:700], COUNT)
    for group in range(len(engine.groups)):
        engine.reset()
        engine.generate(TEXT[:700], 1)
        assert engine.clear(group)
        tokens, found = engine.generate(TEXT[:700], COUNT)
        assert found == own_hit(family, 700)
        assert tokens != right, group


def test_without_pdx_latent_attention_differs_behind_a_token_that_was_computed_alone(forge: Forge) -> None:
    """With vLLM's own rotary embedding for CPUs; so would an answer behind a hit of all tokens but the last. Where this
    test fails, `families` needs the option no more that goes without it, and docs/vllm.md no more to advise it."""
    for options, is_right in (({"compilation_config": {}}, False), ({}, True)):
        with forge.engine("deepseek_v2", **options) as engine:
            same = []
            for number in range(6):
                prompt = [number, *TEXT[:199]]
                first, *rest = engine.generate(prompt, COUNT)[0]
                same.append(engine.generate([*prompt, first], COUNT - 1)[0] == rest)
            assert all(same) == is_right, same


@pytest.mark.timeout(600)
def test_a_model_with_real_weights_behaves_as_the_tiny_ones_do(forge: Forge, gemma: Path) -> None:
    with forge.engine(gemma) as engine:
        windows, full = Group("SlidingWindowSpec", 3, 32, 512), Group("FullAttentionSpec", 3, 32)
        assert sorted(engine.groups) == [full, *[windows] * 5]

        question = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
        assert text_of(gemma, engine.generate(tokens_of(gemma, question), 2)[0]) == " Rome."

        readme = tokens_of(gemma, Path(pdx.__file__).parent.parent.joinpath("README.md").read_text())[:700]
        cold, _ = engine.generate(readme, COUNT)
        assert engine.generate(readme, COUNT) == (cold, 672)
        for group in range(len(engine.groups)):
            engine.reset()
            engine.generate(readme, 1)
            assert engine.clear(group)
            assert engine.generate(readme, COUNT)[0] != cold, group
