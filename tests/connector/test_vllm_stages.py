"""Pipelines: which layers each stage has, as vLLM deals them out, and the layouts that follow."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import pickle
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from node_harness import NodeThread

from pdx.errors import ConfigError, LayoutError
from pdx.memory.layout import CacheGroups

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.utils import get_pp_indices
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker, generate_scheduler_kv_cache_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
    from vllm_bed import configs as configs_of
    from vllm_bed import inside, place_worker

    from pdx.vllm import connector, releases, stages
    from pdx.vllm.releases import moves_groups

if not moves_groups():
    pytest.skip("this vLLM shows no blocks of several groups", allow_module_level=True)

LAYERS = 8


def _spec(heads: int, window: int = 0) -> Any:
    shape = {"block_size": 16, "num_kv_heads": heads, "head_size": 64, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)


FULL = (range(LAYERS),)
HYBRID = (range(3, LAYERS, 4), (0, 2, 5), (1, 4, 6))  # full attention in two layers, and windows in two groups


class Engine:
    """Starts as an engine of vLLM does, as far as the connector sees of it, and ends: `groups` are its halves' cache
    groups."""

    def __init__(
        self,
        folder: Path,
        node: str,
        stack: contextlib.ExitStack,
        monkeypatch: pytest.MonkeyPatch,
        size: int = 1,
        setting: Any = 0,
        *,
        ranks: int = 1,
        layers: Sequence[Sequence[int]] = FULL,
        partition: str | None = None,
        of_draft: str | None = None,
        **extra: Any,
    ) -> None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition) if partition else None
        ends = [get_pp_indices(LAYERS, stage, size) for stage in range(size)]
        whole = [
            KVCacheGroupSpec([f"model.layers.{n}.attn" for n in of_group], _spec(4 // ranks, 64 * (at > 0)))
            for at, of_group in enumerate(layers)
        ]
        specs = [{f"model.layers.{n}.attn": whole[0].kv_cache_spec for n in range(*each)} for each in ends]
        config = configs_of(folder, [], pipeline=size, ranks=ranks, hash_block_size=16)[0]
        config.model_config.get_total_num_hidden_layers = lambda: LAYERS
        config.kv_transfer_config = SimpleNamespace(
            kv_connector="PdxConnector", engine_id=secrets.token_hex(4), kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"stages": setting, "node": node, "start_node": False, **extra},
        )  # fmt: skip
        caches = [self._cache(_project_kv_cache_groups_to_worker(whole, each)) for each in specs]
        caches[-1].kv_cache_groups[0].layer_names.extend([of_draft] if of_draft else [])
        self.workers: dict[tuple[int, int], CacheGroups] = {}
        told = {}
        for stage, rank in itertools.product(range(size), range(ranks)):
            names = [name for group in caches[stage].kv_cache_groups for name in group.layer_names]
            layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH"))
            context = dict.fromkeys(names, layer)
            config.compilation_config = SimpleNamespace(static_forward_context=context)
            place_worker(monkeypatch, rank, stage)
            half = Registered(config, KVConnectorRole.WORKER, caches[stage])
            stack.callback(half.shutdown)
            half.register_kv_caches(dict.fromkeys(reversed(names)))
            half.check()
            self.workers[stage, rank] = half.groups
            told[stage, rank] = pickle.loads(pickle.dumps(half.get_handshake_metadata()))  # noqa: S301  as vLLM does
        scheduler = connector.PdxConnector(
            config, KVConnectorRole.SCHEDULER, self._cache(generate_scheduler_kv_cache_config(caches).kv_cache_groups)
        )
        stack.callback(scheduler.shutdown)
        scheduler.set_xfer_handshake_metadata_pp_aware(told)
        self.groups = scheduler.groups
        assert scheduler.get_loaded_kv_cache_group_ids(None) == tuple(range(len(layers)))

    def _cache(self, groups: Any) -> Any:
        return SimpleNamespace(
            kv_cache_groups=groups,
            num_blocks=1,
            hash_block_size=16,
            kv_cache_layout="LBHNC",
            hisparse_host_num_blocks=0,
        )


class Registered(connector.PdxConnector):
    """Whose worker half is told of its caches, and registers none."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told = Mock()

    @property
    def worker(self) -> Any:
        return self.told

    def check(self) -> None:
        """Each layer is told with its group, in the order in which that has them."""
        [(caches, _, group_of, _)] = [each.args for each in self.told.register.mock_calls]
        layers: list[list[int]] = [[] for _ in self.groups]
        for name in caches:
            layers[group_of[name]].append(int(name.split(".")[2]))
        if self.groups.stages:  # whatever the order is in which vLLM tells of them
            assert [tuple(each) for each in layers] == [layout.layers for layout in self.groups]


@pytest.fixture
def engine(folder: Path, node_here: NodeThread) -> Any:
    def make(*args: Any, **named: Any) -> Engine:
        with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
            return Engine(folder, node_here.address, stack, patched, *args, **named)

    return make


def test_parts_are_as_vllm_deals_layers_out() -> None:
    for total, parts in itertools.product(range(1, 80), range(1, 9)):
        if parts <= total:
            found = [end - start for start, end in (get_pp_indices(total, at, parts) for at in range(parts))]
            assert stages.even(total, parts) == tuple(found)


@pytest.mark.parametrize("layers", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize(
    ("setting", "same"),
    [
        (2, [(1, 2), (2, 0), (2, 2), (2, "4,4")]),
        (4, [(1, 4), (2, 4), (4, 0), (1, "2,2,2,2")]),
        ("3,2,3", [(1, "3,2,3"), (3, 0, "3,2,3"), (2, "3,2,3", "5,3"), (2, "3,2,3", "3,5")]),
    ],
)
def test_engines_of_any_pipeline_have_one_layout_if_they_cut_alike(
    engine: Any, setting: Any, same: list[tuple[Any, ...]], layers: Any
) -> None:
    found = []
    for size, said, *partition in same:
        made = engine(size, said, layers=layers, partition=partition[0] if partition else None)
        found.append(made.groups)
        owned = [number for groups in made.workers.values() for number in groups.by_number]
        assert sorted(owned) == sorted(made.groups.by_number), "each group has one stage"
        assert {groups.is_part for groups in made.workers.values()} == {size > 1}
        for own in made.workers.values():
            for place, layout in zip(own.places, own, strict=True):
                at = made.groups.by_number[place.number]
                assert (made.groups.places[at], made.groups[at].layers) == (place, layout.layers)
    assert len({groups.fingerprint() for groups in found}) == 1
    assert sorted(number for layout in found[0] for number in layout.layers) == list(range(LAYERS))
    counts = setting if isinstance(setting, str) else ",".join(map(str, stages.even(LAYERS, setting)))
    assert found[0].described()["stages"] == counts


def test_a_model_whose_layers_are_not_cut_is_named_as_before(engine: Any) -> None:
    plain, one = engine().groups, engine(1, 1).groups
    assert plain.fingerprint() == one.fingerprint() == plain[0].fingerprint()
    assert (plain.is_single, plain[0].layers, plain.described().get("stages")) == (True, (), None)
    assert engine(1, 2).groups.fingerprint() != plain.fingerprint()


def test_pipelines_of_several_ranks_cut_heads_as_well(engine: Any) -> None:
    made = engine(2, 0, ranks=2)
    assert engine(1, 2, shards=2).groups.fingerprint() == made.groups.fingerprint()
    assert made.groups.num_shards == 2, "there are four workers, and two ranks"
    assert sorted(made.workers) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("size", "setting", "words"),
    [
        (2, 3, "stages 3,3,2, where the 2 stages of this engine's pipeline have 4,4 layers: .* set `stages` to 4,4 or"),
        (2, 1, "stages 8, where the 2 stages"),
        (1, "4,5", "stages '4,5', where the model has 8 layers: set `stages` to a number .* as in 4,4"),
        (1, 9, "stages '9', where the model has 8 layers"),
        (1, "many", "stages 'many', where"),
        (1, "8,0", "stages '8,0', where"),
        (1, -1, "stages '-1', where"),
    ],
)
def test_what_no_pipeline_can_have_is_refused(engine: Any, size: int, setting: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        engine(size, setting)


def test_a_draft_that_counts_its_layers_again_is_refused(engine: Any) -> None:
    """It is in the last stage, with the numbers of the first one's layers."""
    with pytest.raises(LayoutError, match="a layer with number 0 is in pipeline stage 1, and not in 0"):
        engine(2, of_draft="draft.layers.0.attn")


def test_pipelines_are_refused_where_pdx_cannot_move_several_groups(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "RELEASE", (0, 31))
    with pytest.raises(LayoutError, match="pipeline_parallel_size 2: PDX cuts layers with vLLM 0.32 or newer"):
        engine(2)
    with pytest.raises(LayoutError, match="stages 2: PDX cuts layers"):
        engine(1, 2)


def test_inside_another_connector_nobody_tells_of_the_other_stages(engine: Any) -> None:
    with (
        set_current_vllm_config(inside("recompute")),
        pytest.raises(ConfigError, match="inside another connector, .* its layers cut into 4,4"),
    ):
        engine(2)
