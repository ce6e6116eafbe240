"""What is taken from vLLM: the model's identity, the layout, the hash of a tail, the configuration; what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.engine.request import parse_params
from pdx.errors import ConfigError, LayoutError, ProtocolError
from pdx.memory.layout import KvLayout
from pdx.wire.messages import EngineFacts

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    from pdx.vllm import connector
    from pdx.vllm.connector import _checked_config, tail_hash
    from pdx.vllm.facts import facts_of
    from pdx.vllm.identity import layout_of, model_identity

# ---- the model's identity -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from pdx.testing.tiny_llama import make_model

    make_model(tmp_path / "model", layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32)
    return tmp_path / "model"


def model_of(folder: Path, **changes: Any) -> Any:
    config = json.loads((folder / "config.json").read_text())
    fields = {
        "model": str(folder), "revision": None, "dtype": "bfloat16", "quantization": None, "seed": 0,
        "hf_config": SimpleNamespace(to_dict=lambda: config), "max_model_len": 4096, "generation_config": "auto",
        "override_generation_config": {}, "get_diff_sampling_param": dict, "logits_processors": None, **changes,
    }  # fmt: skip
    return SimpleNamespace(**fields)


def test_identity_is_that_of_the_weights_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert model_identity(model_of(folder), "auto") == model_identity(model_of(copy), "auto")


def test_identity_changes_with_the_weights(folder: Path, tmp_path: Path) -> None:
    from pdx.testing.tiny_llama import make_model

    make_model(tmp_path / "tuned", layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32, seed=1)
    assert model_identity(model_of(folder), "auto") != model_identity(model_of(tmp_path / "tuned"), "auto")


@pytest.mark.parametrize(
    "change", [{"dtype": "float32"}, {"quantization": "fp8"}, {"hf_config": SimpleNamespace(to_dict=lambda: {"a": 1})}]
)
def test_identity_changes_with_what_changes_the_cache(folder: Path, change: dict[str, Any]) -> None:
    assert model_identity(model_of(folder), "auto") != model_identity(model_of(folder, **change), "auto")


def test_identity_of_dummy_weights_is_their_seed(folder: Path) -> None:
    assert model_identity(model_of(folder), "dummy") != model_identity(model_of(folder, seed=1), "dummy")
    assert model_identity(model_of(folder), "auto") == model_identity(model_of(folder, seed=1), "auto")


def test_identity_with_long_rope_is_that_of_the_models_length(folder: Path) -> None:
    """vLLM turns the keys by other factors where `--max-model-len` exceeds what the model was trained on."""
    config = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": "longrope"}})
    short, long = (
        model_identity(model_of(folder, hf_config=config, max_model_len=length), "auto") for length in (4096, 131072)
    )
    assert short != long


def test_identity_of_a_hub_model_is_its_revision() -> None:
    config = SimpleNamespace(to_dict=dict, _commit_hash="abc")
    hub = SimpleNamespace(model="org/name", revision=None, dtype="x", quantization=None, seed=0, hf_config=config)
    moved = SimpleNamespace(**{**vars(hub), "revision": "def"})
    assert model_identity(hub, "auto") != model_identity(moved, "auto")


# ---- layouts --------------------------------------------------------------------------------


class FullAttentionSpec(SimpleNamespace):
    """Named like vLLM's, because the name is what is looked at."""


class SlidingWindowSpec(SimpleNamespace):
    """Named like vLLM's."""


def group(kind: type[SimpleNamespace] = FullAttentionSpec, **changes: Any) -> Any:
    import torch

    spec = kind(block_size=128, page_size_bytes=1 << 16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16, **changes)
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])


def configs(folder: Path, groups: list[Any], **changes: Any) -> tuple[Any, Any]:
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=changes.get("pipeline", 1), world_size=1),
        model_config=model_of(folder),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=changes.get("hashing", "sha256"), cache_dtype=changes.get("cache_dtype", "auto")
        ),
        load_config=SimpleNamespace(load_format="auto"),
        attention_config=SimpleNamespace(backend=None),
    )
    cache = SimpleNamespace(
        kv_cache_groups=groups, hash_block_size=changes.get("hash_block_size", 128), kv_cache_layout="LBHNC"
    )
    return vllm_config, cache


def test_layout_of_full_attention(folder: Path) -> None:
    layout = layout_of(*configs(folder, [group()]), 256, model="m")
    assert (layout.num_layers, layout.blocks_per_chunk, layout.chunk_bytes) == (2, 2, 2 * 2 << 16)
    assert layout.isa, "on a CPU the instruction set decides how pages are packed"


@pytest.mark.parametrize(
    ("groups", "changes", "words"),
    [
        ([group(), group(SlidingWindowSpec)], {}, "hybrid model with 2 KV cache groups"),
        ([group(SlidingWindowSpec)], {}, "SlidingWindowSpec"),
        ([group()], {"pipeline": 2}, "pipeline_parallel_size 2"),
        ([group()], {"hash_block_size": 16}, "block hashes of 16 tokens"),
        ([group(non_causal=True)], {}, "non-causal attention"),
    ],
)
def test_layouts_that_pdx_does_not_move_are_refused(
    folder: Path, groups: list[Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        layout_of(*configs(folder, groups, **changes), 256, model="m")


def test_cache_formats_that_are_stored_alike_are_different_layouts(folder: Path) -> None:
    auto, fp8 = (
        layout_of(*configs(folder, [group()], cache_dtype=dtype), 256, model="m") for dtype in ("auto", "bfloat16")
    )
    assert auto.fingerprint() != fp8.fingerprint()


def test_chunks_that_are_no_multiple_of_blocks_are_refused(folder: Path) -> None:
    with pytest.raises(LayoutError, match="chunk_tokens 100 is not a multiple"):
        layout_of(*configs(folder, [group()]), 100, model="m")


def test_block_hashes_that_can_be_made_to_collide_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'xxhash' can be made to collide"):
        layout_of(*configs(folder, [group()], hashing="xxhash"), 256, model="m")


# ---- the connector's configuration ----------------------------------------------------------


def transfer_config(**changes: Any) -> Any:
    good = {"kv_connector_extra_config": {}, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return SimpleNamespace(**{**good, **changes})


def test_good_configuration_is_taken() -> None:
    assert _checked_config(transfer_config(kv_connector_extra_config={"chunk_tokens": 512})).chunk_tokens == 512


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_role": "kv_producer"}, "kv_role is 'kv_producer'"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy is 'fail'"),
        ({"kv_connector_extra_config": {"chunk_size": 256}}, "chunk_size.*chunk_tokens"),
        ({"kv_connector_extra_config": {"chunk_tokens": "many"}}, "chunk_tokens"),
        ({"kv_connector_extra_config": {"lease_s": -1}}, "lease_s"),
    ],
)
def test_bad_configuration_is_refused_with_what_to_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _checked_config(transfer_config(**changes))


# ---- what the proxy must know ---------------------------------------------------------------


def facts(folder: Path, **flags: Any) -> EngineFacts:
    """Of vLLM's own configuration."""
    return facts_of(SimpleNamespace(model_config=ModelConfig(model=str(folder), **flags), watermark_config=None))


@pytest.mark.parametrize(
    ("flags", "cap", "looks_back"),
    [
        ({}, 0, False),
        ({"override_generation_config": {"presence_penalty": 1.0, "max_new_tokens": 7}}, 7, True),
        ({"override_generation_config": {"frequency_penalty": -0.5}}, 0, True),
        ({"override_generation_config": {"presence_penalty": 0, "temperature": 0.3}}, 0, False),
        ({"override_generation_config": {"repetition_penalty": 1.5}}, 0, False),
        ({"logits_processors": ["some.module:Processor"]}, 0, True),
    ],
)
def test_what_a_command_line_adds_to_every_request(
    folder: Path, flags: dict[str, Any], cap: int, looks_back: bool
) -> None:
    assert facts(folder, max_model_len=512, **flags) == EngineFacts(512, cap, looks_back)


@pytest.mark.parametrize(
    ("source", "override", "cap", "looks_back"),
    [
        ("auto", {}, 0, True),  # the model's own cap is for chats that ask for none
        ("vllm", {}, 0, False),
        ("folder", {}, 9, True),
        ("folder", {"max_new_tokens": 5, "frequency_penalty": 0.0}, 5, False),
        ("auto", {"max_new_tokens": 5}, 5, True),
    ],
)
def test_what_a_models_own_generation_config_adds(
    folder: Path, source: str, override: dict[str, Any], cap: int, looks_back: bool
) -> None:
    own = {"frequency_penalty": 0.5, "max_new_tokens": 9, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps(own))
    where = str(folder) if source == "folder" else source
    found = facts(folder, max_model_len=512, generation_config=where, override_generation_config=override)
    assert found == EngineFacts(512, cap, looks_back)


def test_logits_processors_that_are_installed_and_watermarks_look_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = VllmConfig(model_config=ModelConfig(model=str(folder)))
    assert facts_of(plain) == EngineFacts(plain.model_config.max_model_len, 0, False)
    assert not [record for record in caplog.records if record.name == "pdx"]
    monkeypatch.setattr(plain, "watermark_config", "of a key")
    assert facts_of(plain).looks_back
    monkeypatch.setattr(plain, "watermark_config", None)
    installed = EntryPoint("theirs", "their.module:Processor", LOGITSPROCS_GROUP)
    monkeypatch.setattr("pdx.vllm.facts.entry_points", lambda group: [installed] if group == installed.group else [])
    assert facts_of(plain).looks_back
    assert "their.module:Processor may look at the tokens" in caplog.messages[-1]


def test_the_scheduler_half_tells_the_facts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(connector, "SchedulerHalf", lambda *given: told.append(given[-1]))
    connector_of(folder, KVConnectorRole.SCHEDULER).set_xfer_handshake_metadata({})
    assert told == [EngineFacts(4096, 0, False)]


# ---- hooks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
def test_the_hooks_of_micro_batches_are_left_out(monkeypatch: pytest.MonkeyPatch, is_split: bool) -> None:
    """A layer of a step that is computed in several parts is complete behind its last part, and nobody says which it
    is: `wait_for_save` gathers what no hook was called for."""
    assert isinstance(ParallelConfig.use_ubatching, property)
    called: list[str] = []
    worker = SimpleNamespace(save_layer=called.append, end_forward=lambda: called.append("end"))
    monkeypatch.setattr(connector, "WorkerHalf", lambda *_: worker)
    monkeypatch.setattr(connector, "layout_of", lambda *_, **__: None)
    monkeypatch.setattr(connector, "_rank", lambda: 0)
    config = SimpleNamespace(
        kv_transfer_config=transfer_config(engine_id="e"),
        parallel_config=SimpleNamespace(use_ubatching=is_split),
    )
    made = connector.PdxConnector(config, KVConnectorRole.WORKER, SimpleNamespace(num_blocks=1))
    made.save_kv_layer("layers.0", None, None)
    made.wait_for_save()
    assert called == (["end"] if is_split else ["layers.0", "end"])


# ---- what only the workers know, and only the outer connector ---------------------------------


def connector_of(folder: Path, role: KVConnectorRole, *, flag: Any = None, chosen: tuple[str, ...] = ()) -> Any:
    """A half of the connector of an engine whose layers have the `chosen` backends; `flag`: --attention-backend."""
    config, cache = configs(folder, [group()])
    config.kv_transfer_config = transfer_config(engine_id="e", kv_connector="PdxConnector")
    config.attention_config.backend = flag
    names = cache.kv_cache_groups[0].layer_names
    config.compilation_config = SimpleNamespace(
        static_forward_context={
            name: SimpleNamespace(get_attn_backend=lambda kind=kind: SimpleNamespace(get_name=lambda: kind))
            for name, kind in zip(names, chosen, strict=False)
        }
    )
    cache.num_blocks = 1
    return connector.PdxConnector(config, role, cache)


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[KvLayout]:
    """Those of the scheduler halves that were made. Workers are made, too, and do nothing."""
    made: list[KvLayout] = []
    monkeypatch.setattr(connector, "SchedulerHalf", lambda _config, layout, *_: made.append(layout))
    monkeypatch.setattr(connector, "WorkerHalf", lambda *_: SimpleNamespace(register=lambda *_: None))
    monkeypatch.setattr(connector, "_rank", lambda: 0)
    return made


def shake_hands(folder: Path, *ranks: tuple[str, ...], flag: Any = None) -> None:
    """An engine starts: the workers register their caches, and the scheduler half hears of what they say."""
    told = {}
    for rank, chosen in enumerate(ranks):
        worker = connector_of(folder, KVConnectorRole.WORKER, flag=flag, chosen=chosen)
        worker.register_kv_caches({})
        told[0, rank] = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))  # noqa: S301  as vLLM does
    connector_of(folder, KVConnectorRole.SCHEDULER, flag=flag).set_xfer_handshake_metadata_pp_aware(told)


def test_the_attention_backend_is_the_one_that_vllm_has_chosen(folder: Path, layouts: list[KvLayout]) -> None:
    """Who names it and who leaves the choice to vLLM share; two kinds of GPU that choose otherwise do not."""
    shake_hands(folder, ("FLASH_ATTN", "FLASH_ATTN"))
    shake_hands(folder, ("FLASH_ATTN", "FLASH_ATTN"), flag=AttentionBackendEnum.FLASH_ATTN)
    shake_hands(folder, ("FLASHINFER", "FLASHINFER"))
    shake_hands(folder, ("FLASH_ATTN", "FLASHINFER"))
    shake_hands(folder, ("FLASH_ATTN", "FLASH_ATTN"), ("FLASHINFER", "FLASHINFER"))
    assert [layout.backend for layout in layouts] == [
        "FLASH_ATTN", "FLASH_ATTN", "FLASHINFER", "FLASHINFER+FLASH_ATTN", "FLASHINFER+FLASH_ATTN"
    ]  # fmt: skip
    assert layouts[0].fingerprint() == layouts[1].fingerprint() != layouts[2].fingerprint()


def inside(policy: str) -> Any:
    outer = SimpleNamespace(kv_connector="MultiConnector", kv_load_failure_policy=policy)
    return SimpleNamespace(kv_transfer_config=outer)


def test_the_failure_policy_of_the_connector_around_it_is_the_one_that_counts(
    folder: Path, layouts: list[KvLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "get_current_vllm_config_or_none", lambda: inside("fail"))
    with pytest.raises(ConfigError, match="kv_load_failure_policy is 'fail' for MultiConnector"):
        connector_of(folder, KVConnectorRole.WORKER)


def test_the_other_children_of_a_connector_get_nothing_that_they_do_not_know(
    folder: Path, layouts: list[KvLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend is what the command line says then, and what others have told is left alone."""
    monkeypatch.setattr(connector, "get_current_vllm_config_or_none", lambda: inside("recompute"))
    worker = connector_of(folder, KVConnectorRole.WORKER, chosen=("FLASH_ATTN", "FLASH_ATTN"))
    worker.register_kv_caches({})
    assert worker.get_handshake_metadata() is None
    for flag in (None, AttentionBackendEnum.FLASHINFER):
        scheduler = connector_of(folder, KVConnectorRole.SCHEDULER, flag=flag)
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(of="another connector")})
    assert [layout.backend for layout in layouts] == ["", "FLASHINFER"]


def test_a_worker_half_that_is_off_switches_the_scheduler_half_off(
    folder: Path, layouts: list[KvLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "WorkerHalf", Mock())
    monkeypatch.setattr(connector, "SchedulerHalf", Mock())
    worker = connector_of(folder, KVConnectorRole.WORKER)
    assert worker.build_connector_worker_meta() is None
    worker.worker.switch_off("of a test")
    told = worker.build_connector_worker_meta()
    scheduler = connector_of(folder, KVConnectorRole.SCHEDULER)
    for meta in (None, told.aggregate(told)):
        assert not scheduler.scheduler.is_off
        output = SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=None, invalid_block_ids=set())
        scheduler.update_connector_output(output)
    assert scheduler.scheduler.is_off
    assert scheduler.has_pending_push_work(), "the other workers must hear of it"
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    assert worker.build_connector_worker_meta() is None
    assert not scheduler.has_pending_push_work()


# ---- the log ----------------------------------------------------------------------------------


def test_an_engine_shows_what_pdx_logs_from_the_level_of_its_own_log_on() -> None:
    """In a process of its own, whose root logger has no handler, as in an engine."""
    program = """
import logging
from pdx.vllm.connector import _join_log
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
_join_log()
configure_logging(LoggingConfig())
logging.getLogger("pdx").info("PDX is attached")
logging.getLogger("pdx").debug("not shown")
"""
    own = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}  # a bench may have set another one here
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=True, env=own)
    assert "PDX is attached" in done.stdout + done.stderr
    assert "not shown" not in done.stdout + done.stderr


# ---- a request's claims ---------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
claims = st.dictionaries(
    st.sampled_from(
        [
            "do_remote_prefill",
            "do_remote_decode",
            "transfer_id",
            "prefill_tokens",
            "decode_node",
            "prefill_node",
            "remote_prefill_cached_tokens",  # for vLLM
            "other",
        ]
    ),
    anything,
)


@given(anything | claims)
def test_params_are_taken_or_refused_and_nothing_else(params: Any) -> None:
    try:
        parsed = parse_params(params)
    except ProtocolError:
        return
    if parsed is not None:
        assert parsed.do_remote_decode is not parsed.do_remote_prefill
        assert len(parsed.transfer_id or "") >= 16
        assert max(len(parsed.decode_node), len(parsed.prefill_node)) <= 256


# ---- tails ----------------------------------------------------------------------------------


def vllm_request(tokens: list[int], **changes: Any) -> Any:
    fields = {
        "all_token_ids": tokens, "lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None,
        **changes,
    }  # fmt: skip
    return SimpleNamespace(**fields)


def picture(name: str, offset: int) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=4))


@pytest.fixture(autouse=True)
def seeded_hashes() -> None:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256_cbor)


TOKENS = list(range(40))
VARIANTS: dict[str, Any] = {
    "plain": vllm_request(TOKENS),
    "other tokens": vllm_request([*TOKENS[:-1], 99]),
    "lora": vllm_request(TOKENS, lora_request=SimpleNamespace(lora_name="a", lora_path="/a", lora_int_id=1)),
    "other lora": vllm_request(TOKENS, lora_request=SimpleNamespace(lora_name="b", lora_path="/b", lora_int_id=2)),
    "salt": vllm_request(TOKENS, cache_salt="one"),
    "other salt": vllm_request(TOKENS, cache_salt="two"),
    "picture": vllm_request(TOKENS, mm_features=[picture("p", 8)]),
    "other picture": vllm_request(TOKENS, mm_features=[picture("q", 8)]),
    "picture elsewhere": vllm_request(TOKENS, mm_features=[picture("p", 9)]),
}


def test_adapter_salt_and_pictures_are_part_of_a_tails_hash() -> None:
    hashes = {name: tail_hash(request, None, 0, 40) for name, request in VARIANTS.items()}
    assert len(set(hashes.values())) == len(VARIANTS)


def test_what_comes_before_is_part_of_a_tails_hash() -> None:
    request = VARIANTS["plain"]
    assert tail_hash(request, b"a" * 32, 16, 40) != tail_hash(request, b"b" * 32, 16, 40)
    assert tail_hash(request, b"a" * 32, 16, 40) != tail_hash(request, b"a" * 32, 16, 39)


def test_what_vllm_says_of_caches_loads_and_new_requests_reaches_the_scheduler_half(
    folder: Path, layouts: list[KvLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Mock()
    monkeypatch.setattr(connector, "SchedulerHalf", Mock(return_value=half))
    scheduler = connector_of(folder, KVConnectorRole.SCHEDULER)
    assert scheduler.reset_cache() is True
    scheduler.on_new_request("request")
    output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"a"}, invalid_block_ids={1, 2})
    scheduler.update_connector_output(output)
    assert half.mock_calls == [call.reset(), call.arrived("request"), call.not_loaded({1, 2}), call.loaded("a")]
