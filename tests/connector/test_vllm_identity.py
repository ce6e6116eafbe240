"""What an engine is called: its model's identity, the facts that a proxy must know, the keys of its chunks."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_harness import NodeThread

from pdx.memory.form import apart_salt, form_of, lossy_fingerprint
from pdx.memory.keys import chunk_key
from pdx.memory.layout import KvLayout
from pdx.wire.messages import EngineFacts
from pdx.wire.tokens import chunk_keys
from pdx.wire.verbs import Model

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm.config import ModelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP
    from vllm_bed import configured, model_at, model_of

    from pdx.vllm import releases
    from pdx.vllm.identity import facts_of, model_identity, naming_of, why_unnamed

pytestmark = pytest.mark.usefixtures("seeded")

# ---- the model's identity -------------------------------------------------------------------


def test_identity_is_that_of_what_makes_the_cache_and_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    from pdx.bench.harness.tiny_llama import make_model

    copy, tuned = tmp_path / "elsewhere", tmp_path / "tuned"
    shutil.copytree(folder, copy)
    make_model(tuned, layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32, seed=1)
    # With long rope vLLM turns the keys by other factors where `--max-model-len` exceeds what the model was trained on.
    rope = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": "longrope"}})
    others = [
        model_of(tuned),
        model_of(folder, dtype="float32"),
        model_of(folder, quantization="fp8"),
        model_of(folder, hf_config=SimpleNamespace(to_dict=lambda: {"a": 1})),
        *(model_of(folder, hf_config=rope, max_model_len=length) for length in (4096, 131072)),
    ]
    own = model_identity(model_of(folder), "auto")
    assert model_identity(model_of(copy), "auto") == own
    assert len({own, *(model_identity(other, "auto") for other in others)}) == 1 + len(others)


def test_an_engines_own_settings_that_change_what_a_model_computes_are_part_of_its_identity(folder: Path) -> None:
    """vLLM has one name for all that is quantized when it is loaded. Llama 4 scales queries if its way of generating
    says so, or by `--max-model-len`. Of a video only those tokens are seen that a method has left."""
    scales = SimpleNamespace(to_dict=lambda: {"text_config": {"attn_temperature_tuning": True}})
    media = [{}, {"video_pruning_rate": 0.5, "video_pruning_method": "evs"}, {"mm_encoder_attn_dtype": "fp8"}]
    media.append({**media[1], "video_pruning_method": "vidcom2"})

    def llama4(length: int = 4096, override: Any = None, own: Any = None) -> Any:
        said = {"override_generation_config": override or {}, "try_get_generation_config": lambda: own or {}}
        return model_of(folder, hf_config=scales, max_model_len=length, **said)

    yes, no = ({"attn_temperature_tuning": each} for each in (True, False))
    engines = [
        *(model_of(folder, quantization_config=each) for each in ({"linear": "mxfp8"}, {"ignore": ["a"]})),
        model_of(folder, model_class_overrides={"LlamaForCausalLM": "ours:Llama"}),
        *(model_of(folder, multimodal_config=SimpleNamespace(**each)) for each in media),
        *(llama4(), llama4(65536), llama4(override=yes), llama4(override=no)),
    ]
    found = [model_identity(each, "auto") for each in engines]
    assert len(set(found)) == len(found)
    assert model_identity(llama4(own=yes), "auto") == model_identity(llama4(override=yes, own=no), "auto") in found
    for setting in ({"quantization_config": None}, {"model_class_overrides": {}}, {"multimodal_config": None}):
        assert model_identity(model_of(folder, **setting), "auto") == model_identity(model_of(folder), "auto")


def hub_model(revision: str | None, commit: str | None) -> Any:
    """As vLLM has it of a repository whose configuration was read at this commit."""
    config = SimpleNamespace(to_dict=dict, _commit_hash=commit)
    return SimpleNamespace(
        model="org/name", revision=revision, dtype="x", quantization=None, seed=0, hf_config=config, max_model_len=1
    )


def test_identity_of_a_hub_model_is_its_commit_whatever_led_there() -> None:
    """A branch that moves is another model, and one commit is one, by a branch, a tag, its number or none of them."""
    old, new = "a" * 40, "b" * 40
    by_name = [model_identity(hub_model(name, old), "auto") for name in (None, "main", "v1", old)]
    assert len(set(by_name)) == 1
    assert model_identity(hub_model(old, None), "auto") == by_name[0]
    assert model_identity(hub_model("main", new), "auto") not in by_name


UNNAMED = {
    "a branch alone": (hub_model("main", None), "auto"),
    "no revision": (hub_model(None, None), "auto"),
    "an object store": (
        SimpleNamespace(**vars(hub_model(None, None)) | {"model_weights": "s3://b/m"}),
        "runai_streamer",
    ),
    "weights from elsewhere": (hub_model(None, "a" * 40), "tensorizer"),
    "a loader that nobody knows": (hub_model(None, "a" * 40), "of a plugin"),
}


@pytest.mark.parametrize("case", [*UNNAMED, "a folder without weights", "scales of the first prompt"])
def test_weights_without_a_content_are_named_for_one_life(
    folder: Path, halves: Callable[..., Any], node_here: NodeThread, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """Two engines share nothing, and each says so once."""
    model, load_format = UNNAMED.get(case, (model_of(folder), "auto"))
    cache = SimpleNamespace(calculate_kv_scales=case == "scales of the first prompt")
    if case == "a folder without weights":
        for file in folder.glob("*.safetensors"):
            file.rename(file.with_suffix(".tensors"))
    assert why_unnamed(model, load_format, cache)
    if not cache.calculate_kv_scales:
        assert model_identity(model, load_format) != model_identity(model, load_format)
    engines = [f"{case} {number}" for number in range(2)]
    for engine in engines:
        more = {"model": model, "load_format": load_format, "cache": cache, "engine": engine}
        halves(KVConnectorRole.SCHEDULER, **more).set_xfer_handshake_metadata({})
    found = [model_at(node_here, engine) for engine in engines]
    assert found[0].shape["model"] != found[1].shape["model"]
    assert caplog.text.count("chunks of this engine are found by no other one") == 2


def test_weights_of_a_folder_a_commit_or_a_seed_are_named_by_content(folder: Path) -> None:
    cache = SimpleNamespace()
    for model, load_format in ((model_of(folder), "auto"), (hub_model("main", "a" * 40), "safetensors")):
        assert not why_unnamed(model, load_format, cache)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert not why_unnamed(model_of(folder), "dummy", cache)
    assert model_identity(model_of(folder), "dummy") == model_identity(model_of(folder), "dummy")


# ---- what the proxy must know ---------------------------------------------------------------


def facts(folder: Path, **flags: Any) -> EngineFacts:
    """Of vLLM's own configuration."""
    return facts_of(SimpleNamespace(model_config=ModelConfig(model=str(folder), **flags), watermark_config=None))


HAS_PENALTIES = releases.RELEASE >= (0, 31)  # before it they are no defaults, whatever the command line says


OWN_CONFIG = {"frequency_penalty": 0.5, "max_new_tokens": 9, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("has_own", "flags", "cap", "looks_back"),
    [
        (False, {}, 0, False),
        (False, {"override_generation_config": {"presence_penalty": 1.0, "max_new_tokens": 7}}, 7, HAS_PENALTIES),
        (False, {"override_generation_config": {"frequency_penalty": -0.5}}, 0, HAS_PENALTIES),
        (False, {"override_generation_config": {"presence_penalty": 0, "repetition_penalty": 1.5}}, 0, False),
        (False, {"logits_processors": ["some.module:Processor"]}, 0, True),
        (True, {}, 0, HAS_PENALTIES),  # the model's own cap is for chats that ask for none
        (True, {"generation_config": "vllm"}, 0, False),
        (True, {"generation_config": "FOLDER"}, 9, HAS_PENALTIES),
        (True, {"generation_config": "FOLDER", "override_generation_config": {"frequency_penalty": 0.0}}, 9, False),
        (True, {"override_generation_config": {"max_new_tokens": 5}}, 5, HAS_PENALTIES),
    ],
)
def test_what_a_command_line_and_a_models_own_configuration_add_to_every_request(
    folder: Path, has_own: bool, flags: dict[str, Any], cap: int, looks_back: bool
) -> None:
    if has_own:
        (folder / "generation_config.json").write_text(json.dumps(OWN_CONFIG))
    if flags.get("generation_config") == "FOLDER":
        flags = {**flags, "generation_config": str(folder)}
    assert facts(folder, max_model_len=512, **flags) == EngineFacts(512, cap, looks_back)


@configured
def test_logits_processors_that_are_installed_and_watermarks_look_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = VllmConfig(model_config=ModelConfig(model=str(folder)))
    assert facts_of(plain) == EngineFacts(plain.model_config.max_model_len, 0, False)
    assert not [record for record in caplog.records if record.name.partition(".")[0] == "pdx"]
    plain.watermark_config = "of a key"
    assert facts_of(plain).looks_back
    plain.watermark_config = None
    assert not facts_of(plain).looks_back
    installed = tmp_path / "site" / "theirs-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{LOGITSPROCS_GROUP}]\ntheirs = their.module:Processor\n")
    monkeypatch.syspath_prepend(installed.parent)
    assert facts_of(plain).looks_back
    assert "their.module:Processor may look at the tokens" in caplog.messages[-1]


# ---- keys, as others make them --------------------------------------------------------------

BLOCK_TOKENS, PER_CHUNK = 4, 3


SALTS = st.none() | st.sampled_from(["cache_salt", "a", "é"]) | st.text(max_size=300)


def theirs(tokens: list[int], salt: str | None, algorithm: str) -> list[bytes]:
    """The block hashes of a request in vLLM, which has decoded the salt from what came over HTTP."""
    from vllm.utils.hashing import get_hash_fn_by_name

    request = SimpleNamespace(
        all_token_ids=tokens, num_tokens=len(tokens), block_hashes=[], lora_request=None, mm_features=[],
        cache_salt=salt.encode().decode() if salt is not None else None, prompt_embeds=None,
    )  # fmt: skip
    return kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, get_hash_fn_by_name(algorithm))(request)


LAYOUT = KvLayout(
    model="m", dtype="torch.bfloat16 as auto", num_layers=2, num_heads=2, head_dim=8, block_tokens=BLOCK_TOKENS,
    page_bytes=BLOCK_TOKENS * 2 * 8 * 2 * 2, chunk_tokens=BLOCK_TOKENS * PER_CHUNK, order="LBHNC", backend="CPU_ATTN",
    isa="", num_shards=1, hashing="sha256",
)  # fmt: skip


@given(
    st.lists(st.integers(0, 300_000) | st.sampled_from([23, 24, 255, 256, 65_535, 65_536]), min_size=12, max_size=80),
    SALTS,
    st.sampled_from(["sha256", "sha256_cbor"]),
    st.sampled_from([None, "0", "seed"]),
    st.sampled_from(["", "fp8", "int8"]),
)
def test_who_knows_the_tokens_makes_the_keys_that_the_engine_makes(
    tokens: list[int], salt: str | None, algorithm: str, seed: str | None, codec: str
) -> None:
    """Also those of a request with a lossy codec, which are nobody else's."""
    layout = msgspec.structs.replace(LAYOUT, hashing=algorithm)
    form = str(form_of(layout, codec)) if codec else ""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PYTHONHASHSEED") if seed is None else patched.setenv("PYTHONHASHSEED", seed)
        cache = SimpleNamespace(prefix_caching_hash_algo=algorithm)
        naming = naming_of(SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(get_vocab_size=lambda: 0)))
        hashes = theirs(tokens, apart_salt(form, salt or "") if form else salt, algorithm)
    model = Model("e", "", layout.fingerprint(), {**layout.described(), **naming})
    fingerprint = lossy_fingerprint(layout.fingerprint(), form) if form else layout.fingerprint()
    found = chunk_keys(model, tokens, salt or "", codec) if codec else chunk_keys(model, tokens, salt or "")
    assert found == [chunk_key(fingerprint, bytes(hashed)) for hashed in hashes[PER_CHUNK - 1 :: PER_CHUNK]]
    assert not codec or not set(found) & set(chunk_keys(model, tokens, salt or ""))
