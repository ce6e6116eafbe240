"""Which layers of an engine are a draft model's, and the layouts that follow."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm_bed import configs, group, model_of

    from pdx.memory.layout import CacheGroups
    from pdx.vllm.identity import drafter_identity, drafts_of, layouts_of
    from pdx.vllm.releases import moves_groups

if not moves_groups():
    pytest.skip("this vLLM shows no blocks of several groups", allow_module_level=True)

OWN = ("model.layers.0.attn", "model.layers.1.attn")
AMONG_OWN = [(*OWN, "model.layers.2.attn")]
APART = [OWN, ("draft_model.model.layers.0.attn",)]


class SlidingWindowSpec(SimpleNamespace):
    """As vLLM's."""


def engine(folder: Path, names: Any = (OWN,), kinds: Any = (), **changes: Any) -> tuple[Any, Any]:
    """Its configurations. `names`: of the layers of each of vLLM's groups; `kinds`: of these, by default full."""
    groups = [group() for _ in names]
    for made, of_group, other in zip(groups, names, kinds or groups, strict=True):
        made.layer_names = list(of_group)
        made.kv_cache_spec = other.kv_cache_spec
    config, cache = configs(folder, groups, **changes)
    config.model_config = SimpleNamespace(get_total_num_hidden_layers=lambda: len(OWN))
    config.speculative_config = SimpleNamespace(draft_model_config=None)
    return config, cache


def layouts(made: tuple[Any, Any], drafter: str = "a drafter") -> tuple[CacheGroups, CacheGroups | None]:
    own = layouts_of(*made, 256, model="m")
    return own, drafts_of(*made, own, drafter=drafter)


@pytest.mark.parametrize(("names", "table"), [(AMONG_OWN, 0), (APART, 1)], ids=["among the model's", "apart"])
def test_the_model_has_the_keys_that_it_has_without_a_draft_model(folder: Path, names: Any, table: int) -> None:
    alone, none = layouts(engine(folder))
    own, drafts = layouts(engine(folder, names))
    assert none is None
    assert drafts is not None
    assert own.fingerprint() == alone.fingerprint()
    assert own.is_single
    assert not drafts.is_single
    assert [(each.num_layers, each.drafter) for each in drafts] == [(1, "a drafter")]
    [place] = drafts.places
    assert place.table == table
    assert place.number not in own.by_number
    assert own.num_tables == drafts.num_tables == len(names), "who tracks a request is given all of vLLM's tables"


def test_another_draft_model_has_other_keys(folder: Path) -> None:
    found = [layouts(engine(folder, AMONG_OWN), name)[1] for name in ("one", "two", "one")]
    assert [each and each.fingerprint() for each in found].count(found[0] and found[0].fingerprint()) == 2


def test_layers_of_several_groups_have_keys_of_their_own(folder: Path) -> None:
    names = [(*OWN, "draft_model.model.layers.0.attn"), ("draft_model.model.layers.1.attn",)]
    drafts = layouts(engine(folder, names))[1]
    assert drafts is not None
    assert len({each.fingerprint() for each in drafts}) == 2
    assert len({place.number for place in drafts.places}) == 2


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (group(SlidingWindowSpec, sliding_window=64), {}, "SlidingWindowSpec of 1 layers"),
        (None, {"pipeline": 2}, "the engine has a pipeline"),
    ],
)
def test_what_is_not_shared_of_a_draft_model_is_said_and_costs_the_model_nothing(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
    changes: dict[str, Any],
    words: str,
) -> None:
    with caplog.at_level(logging.WARNING, "pdx"):
        own, drafts = layouts(engine(folder, APART, (group(), kind or group()), **changes))
    assert drafts is None
    assert own.fingerprint() == layouts(engine(folder))[0].fingerprint()
    assert f"the KV of the draft model is not shared, and after a load it drafts worse: {words}" in caplog.text


def test_pages_that_have_to_be_zeroed_are_not_shared(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, cache = engine(folder, AMONG_OWN)
    cache.needs_kv_cache_zeroing = True
    assert layouts((config, cache))[1] is None
    assert "blocks have to be zeroed before their first use" in caplog.text


def test_a_drafter_is_named_by_its_weights_and_by_what_it_does_with_them(folder: Path) -> None:
    config, model = engine(folder)[0], model_of(folder)
    config.load_config = SimpleNamespace(load_format="auto")

    def named(**told: Any) -> str:
        said = {"method": "eagle", "draft_model_config": model_of(folder), "target_model_config": model, **told}
        config.speculative_config = SimpleNamespace(**said)
        return drafter_identity(config)

    told = [
        {},
        {"method": "eagle3"},
        {"draft_model_config": model_of(folder, dtype="float32")},
        {"kv_cache_dtype": "fp8"},
    ]
    told += [{"attention_backend": "FLASH"}, {"draft_load_config": SimpleNamespace(load_format="dummy")}]
    assert len({named(**each) for each in told}) == len(told)
    assert named(method="ngram", draft_model_config=model) == "", "it has no layers"
    config.speculative_config = None
    assert drafter_identity(config) == ""
