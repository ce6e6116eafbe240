"""A key is content: chunks are shared only where every input that reaches the model is equal, whatever it is called."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import itertools
import os
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdx.engine.plan import NO_EPOCH, LoadPlan, SavePlan, StepPlan
from pdx.engine.request_keys import RequestKeys
from pdx.memory.layout import CacheGroups, KvLayout

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request, StreamingUpdate

    from pdx.vllm import adapters as adapters_module
    from pdx.vllm.adapters import AdapterDigests, Claim, LoadedAdapters, adapter_of, watch
    from pdx.vllm.connector import PdxWorkerNews
    from pdx.vllm.content import Content

BLOCK, CHUNK, PROMPT = 16, 64, 152  # two chunks, a block and a half
LAYOUT = KvLayout(
    model="m", dtype="float32", num_layers=2, num_heads=1, head_dim=8, block_tokens=BLOCK, page_bytes=1024,
    chunk_tokens=CHUNK, order="LBHNC", backend="x", isa="", num_shards=1, hashing="sha256", release="0.32",
)  # fmt: skip
numbers = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def _root() -> None:
    kv_cache_utils.init_none_hash(sha256)


def engine(**changes: Any) -> Content:
    """The names that one engine gives."""
    lora = SimpleNamespace(lora_dtype="bfloat16", enable_tower_connector_lora=False)
    return Content(SimpleNamespace(**{"model_config": SimpleNamespace(), "lora_config": lora, **changes}))


def picture(content: Any, name: str, offset: int = 20, **more: Any) -> MultiModalFeatureSpec:
    """As a processor has made it of a picture, under vLLM's or a client's name."""
    data = {"pixel_values": content if isinstance(content, torch.Tensor | None) else torch.tensor([content, 7.0])}
    data["grid"] = torch.tensor([1, 2, 2])
    item = MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in {**data, **more}.items()
        }
    )
    return MultiModalFeatureSpec(item, "image", name, PlaceholderRange(offset=offset, length=8), mm_hash=name)


def request_of(tokens: list[int] | None = None, sampling: Any = None, **inputs: Any) -> Any:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    sampling = None if "pooling_params" in inputs else sampling or SamplingParams(max_tokens=1)
    pooling = inputs.pop("pooling_params", None)
    prompt = tokens or list(range(PROMPT))
    return Request(f"r{next(numbers)}", prompt, sampling, pooling, block_hasher=hasher, **inputs)


def loaded(worker: LoadedAdapters, lora: LoRARequest, content: Content | None = None) -> bool:
    """The worker loads the adapter, and tells of it; whether requests were hashed by other weights."""
    worker.load(lambda request: None, lora)
    return content is not None and content.heard(worker.take_news())


def tell(content: Content, lora: LoRARequest | None) -> None:
    """Workers have loaded the adapter, if they had told nothing of it."""
    if lora is not None and left_out(content, request := request_of(lora_request=lora)) == "untold_adapter":
        loaded(LoadedAdapters(), lora, content)
    elif lora is not None:
        content.forget(request.request_id)


def keys_of(content: Content, request: Any, codec: str = "") -> list[bytes]:
    """Of its two chunks, and of its tail in a transfer. Workers have told what they have loaded."""
    tell(content, request.lora_request)
    assert content.name_inputs(request, True) is None
    assert content.keep_apart(request, codec)
    keys = RequestKeys(request, CacheGroups.of(LAYOUT), LAYOUT.fingerprint())
    tail = keys.tail(content.tail, len(request.all_token_ids), "t" * 20)
    assert tail is not None
    return [*keys.leading(2), tail[0]]


def left_out(content: Content, request: Any) -> str | None:
    """Why nothing of it is saved or found; None: it takes part."""
    why = content.name_inputs(request, True)
    return why.reason if why is not None else None


def make_adapter(folder: Path, weights: str, config: str = "{}") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_text(weights)
    return str(folder)


# ---- the property ----------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What reaches the model of a request, and what that is called, which does not."""

    last: int  # token of the second chunk
    pictures: tuple[float | None, float | None]  # in the first chunk, in the second
    adapter: str
    salt: str | None
    codec: str
    called: tuple[str, str]
    place: str
    name: str
    number: int

    def up_to(self, chunk: int) -> tuple[object, ...]:
        shown = (self.pictures[0],) if chunk == 0 else (self.last, *self.pictures)
        return (chunk, shown, self.adapter, self.salt, self.codec)


CALLED = st.sampled_from(["renderer0-mm-0-image-0", "renderer0-mm-1-image-0", "uuid", "0" * 64])
INPUTS = st.builds(
    Inputs,
    last=st.sampled_from([1, 2]),
    pictures=st.tuples(*[st.sampled_from([None, 1.0, 2.0])] * 2),
    adapter=st.sampled_from(["", "Monday", "Tuesday"]),
    salt=st.sampled_from([None, "a", "b"]),
    codec=st.sampled_from(["", "", "fp8:bf16:1x2x3x4x5"]),
    called=st.tuples(CALLED, CALLED),
    place=st.sampled_from(["here", "there"]),
    name=st.sampled_from(["sql", "chat"]),
    number=st.integers(1, 2),
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of each content in two folders each."""
    folder = tmp_path_factory.mktemp("adapters")
    for weights in ("Monday", "Tuesday"):
        for place in ("here", "there"):
            make_adapter(folder / place / weights, weights)
    return folder


def keys_of_inputs(inputs: Inputs, places: Path) -> list[bytes]:
    shown = zip(inputs.pictures, inputs.called, (20, 90), strict=True)
    media = [picture(content, name, offset) for content, name, offset in shown if content is not None]
    lora = None
    if inputs.adapter:
        lora = LoRARequest(inputs.name, inputs.number, str(places / inputs.place / inputs.adapter))
    tokens = [*range(CHUNK + 1), inputs.last, *range(CHUNK + 2, PROMPT)]
    request = request_of(tokens, mm_features=media, lora_request=lora, cache_salt=inputs.salt)
    return keys_of(engine(), request, inputs.codec)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(one=INPUTS, data=st.data())
def test_two_requests_share_a_chunk_only_where_all_that_reaches_the_model_is_equal(
    places: Path, one: Inputs, data: st.DataObject
) -> None:
    """Of two engines, that have drawn each their own. What is equal is shared, whatever it is called and wherever it
    lies; and the tail of a transfer like the chunks."""
    changed = data.draw(st.sets(st.sampled_from(Inputs._fields)))
    other = data.draw(INPUTS)
    two = one._replace(**{field: getattr(other, field) for field in changed})
    found = zip(keys_of_inputs(one, places), keys_of_inputs(two, places), strict=True)
    for chunk, (key, other_key) in enumerate(found):
        assert (key == other_key) == (one.up_to(chunk)[1:] == two.up_to(chunk)[1:])


# ---- media -----------------------------------------------------------------------------------


def test_two_pictures_that_a_client_or_a_counter_calls_alike_share_nothing_behind_them() -> None:
    """Not in one engine either, nor in vLLM's own caches of blocks and of encoder outputs."""
    content = engine()
    one, two, again = (request_of(mm_features=[picture(pixel, "same name")]) for pixel in (1.0, 2.0, 1.0))
    raw = list(one.block_hashes)
    keys = [keys_of(content, request) for request in (one, two, again)]
    assert keys[0] == keys[2]
    assert not set(keys[0]) & set(keys[1])
    assert [one.block_hashes[0], raw[0]] == [raw[0], two.block_hashes[0]], "in front of it they are alike"
    assert not set(one.block_hashes[1:]) & set(two.block_hashes[1:])
    names = [request.mm_features[0].identifier for request in (one, two, again)]
    assert names[0] == names[2] != names[1]
    assert one.mm_features[0].mm_hash == "same name", "by which vLLM's cache of processed media goes"


def test_a_word_of_a_client_is_no_name_of_content() -> None:
    """Not even the very name that the content of another has in this engine, should it have come out."""
    content, victim = engine(), request_of(mm_features=[picture(1.0, "a")])
    keys = keys_of(content, victim)
    own = str(victim.mm_features[0].identifier)
    keys_of(engine(), abroad := request_of(mm_features=[picture(1.0, "a")]))
    assert abroad.mm_features[0].identifier != own, "who knows the picture does not know its name here"
    for word in ("a", own, own[-64:]):
        hostile, hidden = (request_of(mm_features=[picture(2.0, word)]) for _ in range(2))
        assert not set(keys_of(content, hostile)) & set(keys)
        assert hostile.mm_features[0].identifier != own
        hidden.mm_features[0].data = None
        assert content.name_inputs(hidden, True) is not None
        assert not set(hidden.block_hashes[1:]) & set(victim.block_hashes)


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(picture(1.0, "a", address=4096), id="in memory of the workers"),
        pytest.param(picture(1.0, "a", thing=object()), id="of a kind that nobody knows"),
        pytest.param(picture(1.0, "a", thing=numpy.array([object()])), id="an array of objects"),
        pytest.param(
            MultiModalFeatureSpec(None, "image", "a", PlaceholderRange(offset=20, length=8)), id="nothing here"
        ),
    ],
)
def test_media_whose_content_is_not_here_are_neither_saved_nor_found(feature: Any) -> None:
    request = request_of(mm_features=[picture(1.0, "b", offset=2), feature])
    before = list(request.block_hashes)
    assert left_out(engine(), request) == "unnamed_media"
    assert request.block_hashes == before, "vLLM's own cache is its own affair"


class Odd(torch.Tensor):
    """Whose bytes cannot be had."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("100% odd")


def odd_picture() -> Any:
    return picture(1.0, "odd", thing=torch.zeros(2).as_subclass(Odd))


class OddAdapter:
    """Which cannot be asked for all that vLLM says of adapters."""

    def __init__(self, path: str) -> None:
        self.lora_int_id, self.lora_name, self.lora_path = 1, "odd", path

    @property
    def is_3d_lora_weight(self) -> bool:
        raise RuntimeError("100% odd")


def test_a_request_that_cannot_be_named_is_left_out_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its inputs raise. vLLM finds it as it has made it, and goes on with it."""

    def broken(*args: Any) -> str:
        raise RuntimeError("100% broken")

    content, lora = engine(), OddAdapter(make_adapter(tmp_path / "a", "w"))
    loaded(LoadedAdapters(), lora, content)
    for inputs, hashing in (
        ({"mm_features": [odd_picture()]}, None),
        ({"mm_features": [picture(1.0, "a"), odd_picture()]}, None),
        ({"lora_request": lora}, None),
        ({"mm_features": [picture(1.0, "a", PROMPT - 4)]}, broken),
    ):
        request, plain = request_of(**inputs), request_of(**inputs)
        with monkeypatch.context() as patched:
            patched.setattr(Request, "update_block_hashes", hashing or Request.update_block_hashes)
            why = content.name_inputs(request, True)
        assert why is not None
        assert why.reason == "naming_failed"
        assert "100%" in why.text % "r1"
        for each in (request, plain):
            each.append_output_token_ids(list(range(BLOCK)))
        assert request.block_hashes == plain.block_hashes
        assert not content.claims
    assert content.name_inputs(request_of(mm_features=[picture(1.0, "a")]), True) is None


def test_a_session_goes_on_with_media_that_cannot_be_named() -> None:
    """vLLM hashes them in a step of its own, where nothing catches what is raised."""
    content, request = engine(), request_of(list(range(BLOCK * 2)), resumable=True)
    assert content.name_inputs(request, True) is None
    request.mm_features.append(odd_picture())
    request.append_output_token_ids(list(range(BLOCK)))
    assert len(request.block_hashes) == 3


def test_with_an_encoder_elsewhere_no_media_are_named() -> None:
    content = engine(ec_transfer_config=object())
    assert left_out(content, request_of(mm_features=[picture(1.0, "a")])) == "unnamed_media"
    assert left_out(content, request_of()) is None


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]])),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)),
        ([torch.tensor([1]), torch.tensor([2])], [torch.tensor([1, 2])]),
        (numpy.zeros(2, numpy.int8), numpy.zeros(2, numpy.uint8)),
        (1, True),
        ("1", 1),
    ],
)
def test_processed_inputs_have_one_digest_each(one: Any, two: Any) -> None:
    keys = [keys_of(engine(), request_of(mm_features=[picture(1.0, "a", more=each)])) for each in (one, two, one)]
    assert keys[0] == keys[2]
    assert not set(keys[0]) & set(keys[1])


def test_what_is_a_placeholder_and_what_kind_of_media_it_is_are_part_of_the_content() -> None:
    found = []
    for modality, embed in (("image", None), ("video", None), ("image", torch.tensor([True] * 7 + [False]))):
        feature = picture(1.0, "a")
        feature.modality, feature.mm_position = modality, PlaceholderRange(offset=20, length=8, is_embed=embed)
        found.append(keys_of(engine(), request_of(mm_features=[feature]))[0])
    assert len(set(found)) == 3


def references() -> int:
    """Weak ones, of this process."""
    gc.collect()
    return sum(isinstance(each, weakref.ReferenceType) for each in gc.get_objects())


def test_media_that_are_processed_once_are_digested_once_and_forgotten_with_their_last_request() -> None:
    """vLLM's cache gives the same object to each request with the same picture."""
    read = []

    class Counted(torch.Tensor):
        """Notes when somebody wants its bytes."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read.extend(["read"] if func is torch.Tensor.detach else [])
            return super().__torch_function__(func, types, args, kwargs)

    content = engine()

    def ask(item: Any) -> str:
        feature = MultiModalFeatureSpec(item, "image", "a", PlaceholderRange(offset=20, length=8))
        assert content.name_inputs(request_of(mm_features=[feature]), True) is None
        return feature.identifier

    item = picture(1.0, "a", thing=torch.zeros(2).as_subclass(Counted)).data
    names = [ask(item)]
    before = references()
    names += [ask(item) for _ in range(3)]
    assert (len(set(names)), read) == (1, ["read"])
    assert references() == before
    for _ in range(3):
        ask(picture(2.0, "a").data)
    assert references() == before


@pytest.mark.parametrize("first", [[], [1.0]], ids=["text first", "a picture first"])
def test_media_that_a_session_adds_are_named_or_found_by_nobody(first: list[float]) -> None:
    """vLLM appends them to the request itself and hashes its new blocks: no hook tells of it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def session(added: Any) -> Any:
        content, media = engine(), [picture(pixel, "a", 2) for pixel in first]
        request = request_of(list(range(BLOCK * 2)), resumable=True, mm_features=media)
        assert content.name_inputs(request, True) is None
        update = StreamingUpdate([added], list(range(BLOCK * 3)), 1, 0.0, SamplingParams(max_tokens=1))
        stub = SimpleNamespace(hash_block_size=BLOCK, log_stats=False, num_waiting_for_streaming_input=0)
        Scheduler._update_request_as_session(stub, request, update)
        assert len(request.block_hashes) >= 2
        return [bytes(each) for each in request.block_hashes]

    hidden = MultiModalFeatureSpec(None, "image", "same", PlaceholderRange(offset=0, length=8))
    known = [session(picture(pixel, "same", 0)) for pixel in (2.0, 2.0, 3.0)]
    assert known[0] == known[1] != known[2]
    assert session(hidden)[1:] != session(hidden)[1:]


# ---- adapters --------------------------------------------------------------------------------


def sql(path: str, number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest("sql", number, path, **more)


def lora_keys(content: Content, lora: LoRARequest) -> list[bytes]:
    request = request_of(lora_request=lora)
    keys = keys_of(content, request)
    assert content.claims[request.request_id].adapter == adapter_of(lora)
    content.forget(request.request_id)
    assert not content.claims
    return keys


def test_an_adapter_that_was_trained_again_is_another_one_at_the_same_path_and_the_old_one_elsewhere(
    tmp_path: Path,
) -> None:
    """Unloaded and loaded again, in a new engine, and where vLLM hashes names alone."""
    path = make_adapter(tmp_path / "a", "Monday")
    content, worker = engine(), LoadedAdapters()
    monday = lora_keys(content, sql(path))
    loaded(worker, sql(path), content)
    assert lora_keys(content, sql(path)) == monday
    make_adapter(tmp_path / "a", "Tuesday")
    loaded(worker, sql(path, 2))
    tuesday = lora_keys(content, sql(path, 2))
    content.heard(worker.take_news())
    assert lora_keys(content, sql(path, 2)) == tuesday == lora_keys(engine(), sql(path))
    assert not set(monday) & set(tuesday)
    elsewhere = make_adapter(tmp_path / "b", "Monday")
    assert lora_keys(engine(), sql(elsewhere, 7)) == monday
    assert not set(monday) & set(keys_of(content, request_of())), "nor the model's alone"


def test_files_that_are_replaced_and_not_loaded_change_nothing(tmp_path: Path) -> None:
    """What counts is what vLLM has loaded, but for an adapter that it loads for each step."""
    path = make_adapter(tmp_path / "a", "Monday")
    content, worker = engine(), LoadedAdapters()
    loaded(worker, sql(path), content)
    monday = lora_keys(content, sql(path))
    make_adapter(tmp_path / "a", "Tuesday")
    assert lora_keys(content, sql(path)) == monday
    assert lora_keys(content, sql(path, load_inplace=True)) != monday


def test_nobody_says_what_was_loaded_but_who_has_loaded_it(tmp_path: Path) -> None:
    """vLLM was told of the adapter, and its files were replaced before its first request: the KV of that is Monday's,
    and vLLM's own cache would give it to whoever has Tuesday's adapter. Likewise of a number that has another path."""
    path, other = make_adapter(tmp_path / "a", "Monday"), make_adapter(tmp_path / "b", "Tuesday")
    content, worker = engine(), LoadedAdapters()
    loaded(worker, sql(path))
    make_adapter(tmp_path / "a", "Tuesday")

    def is_left_out(lora: LoRARequest) -> bool:
        request = request_of(lora_request=lora)
        before = list(request.block_hashes)
        if (why := left_out(content, request)) is not None:
            assert why == "untold_adapter"
            assert not set(before) & set(request.block_hashes), "nor are they found under vLLM's name of the adapter"
        return why is not None

    assert is_left_out(sql(path))
    content.heard(worker.take_news())
    assert not is_left_out(sql(path))
    assert is_left_out(sql(other)), "vLLM goes by the number, and has Monday's"


def test_a_number_has_one_adapter(tmp_path: Path) -> None:
    worker, loras = LoadedAdapters(), [sql(make_adapter(tmp_path / name, name)) for name in "ab"]
    claims = {lora.lora_path[-1]: Claim(adapter_of(lora), AdapterDigests().of(lora.lora_path)) for lora in loras}
    for lora in loras:
        loaded(worker, lora)
    plan, lost = worker.checked(plan_of("a", "b"), claims)
    assert lost == 2
    assert [save.request_id for save in plan.saves] == ["b"]


def test_what_is_known_of_adapters_is_bounded_and_the_one_that_was_used_last_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "MAX_KNOWN", 2)
    monkeypatch.setattr("pdx.vllm.content.MAX_KNOWN", 2)
    content, worker = engine(), LoadedAdapters()
    loras = [sql(make_adapter(tmp_path / str(number), str(number)), number) for number in (1, 2, 3)]
    for lora in loras:
        assert not loaded(worker, lora, content)
        if lora is loras[1]:
            assert left_out(content, request := request_of(lora_request=loras[0])) is None
            assert worker.checked(plan_of(request.request_id), content.claims)[1] == 0
    for at, why, lost in ((1, "untold_adapter", 1), (0, None, 0), (2, None, 0)):
        lora = loras[at]
        assert left_out(content, request_of(lora_request=lora)) == why
        claim = Claim(adapter_of(lora), AdapterDigests().of(lora.lora_path))
        assert worker.checked(plan_of("a"), {"a": claim})[1] == lost


def test_configuration_data_type_and_format_of_an_adapter_are_part_of_it(tmp_path: Path) -> None:
    """And to which modules an engine applies it."""
    paths = [make_adapter(tmp_path / name, "w", config) for name, config in (("a", "{}"), ("b", '{"alpha": 2}'))]
    settings = [{"lora_dtype": "float32"}, *({"target_modules": each} for each in (["o_proj"], ["o_proj", "qkv_proj"]))]
    found = [lora_keys(engine(), sql(path))[0] for path in paths]
    for setting in settings:
        lora = SimpleNamespace(**{"lora_dtype": "bfloat16", "target_modules": None, **setting})
        found.append(lora_keys(engine(lora_config=lora), sql(paths[0]))[0])
    assert len(set(found)) == 5
    turned = SimpleNamespace(lora_dtype="bfloat16", target_modules=["qkv_proj", "o_proj"])
    assert lora_keys(engine(lora_config=turned), sql(paths[0]))[0] == found[-1]


@pytest.mark.parametrize("path", ["/no/such/adapter", "no/adapter", "not a name of anything"])
def test_an_adapter_that_cannot_be_read_is_neither_saved_nor_found(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    content = engine()
    tell(content, sql(path))
    assert left_out(content, request_of(lora_request=sql(path))) == "unnamed_adapter"


def test_an_adapter_of_a_hub_is_known_from_its_download_or_by_what_the_workers_have_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter(tmp_path / "snapshot", "Monday")
    asked = []

    def download(name: str, *, local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        return folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert lora_keys(engine(), sql("org/adapter")) == lora_keys(engine(), sql(folder))
    assert set(asked) == {("org/adapter", True)}
    content = engine()
    content.heard({adapter_of(sql("s3://a")): AdapterDigests().of(folder)})
    assert lora_keys(content, sql("s3://a")) == lora_keys(engine(), sql(folder))


def test_the_encoders_adapter_is_part_of_the_name_of_media(tmp_path: Path) -> None:
    """Where it has weights of the encoder, too: vLLM keeps its outputs under the adapter's name then."""
    towers = engine(lora_config=SimpleNamespace(lora_dtype="bfloat16", enable_tower_connector_lora=True))
    names = []
    for number, weights in enumerate(("Monday", "Tuesday"), 1):
        lora = sql(make_adapter(tmp_path / weights, weights), number)
        request = request_of(mm_features=[picture(1.0, "sql:a")], lora_request=lora)
        tell(towers, request.lora_request)
        assert towers.name_inputs(request, True) is None
        names.append(request.mm_features[0].identifier)
    assert names[0] != names[1]


def plan_of(*names: str) -> StepPlan:
    saves = [SavePlan(name, None, [], ends_transfer=False, bytes_before={}, num_tokens=1) for name in names]
    return StepPlan(1, saves, [LoadPlan.of(name, None, [], epoch=1) for name in names])


def test_a_worker_copies_nothing_for_an_adapter_that_is_not_the_one_it_has_loaded(tmp_path: Path) -> None:
    worker, path = LoadedAdapters(), make_adapter(tmp_path / "a", "Monday")
    digest = AdapterDigests().of(path)
    right, wrong = Claim(adapter_of(sql(path)), digest), Claim(adapter_of(sql(path)), "0" * 64)
    plan = plan_of("a", "b", "plain")
    first, lost = worker.checked(plan, {"a": right, "b": wrong})
    assert lost == 2
    assert [save.request_id for save in first.saves] == ["plain"]
    assert first.loads == plan.loads, "it will be loaded before its request computes"
    loaded(worker, sql(path))
    then, lost = worker.checked(plan, {"a": right, "b": wrong})
    assert lost == 2
    assert [save.request_id for save in then.saves] == ["a", "plain"]
    assert [load.epoch for load in then.loads] == [1, NO_EPOCH, 1]
    assert worker.checked(plan, {"a": right}) == (plan, 0)
    off = StepPlan(lost={})
    assert worker.checked(off, {"a": wrong}) == (off, 0)


def test_files_that_change_while_they_are_loaded_are_nobodys(tmp_path: Path) -> None:
    worker, path = LoadedAdapters(), make_adapter(tmp_path / "a", "Monday")
    worker.load(lambda request: make_adapter(tmp_path / "a", "Tuesday"), sql(path))
    assert worker.take_news() == {adapter_of(sql(path)): ""}
    assert worker.take_news() == {}

    def there_and_back(lora: LoRARequest) -> None:
        (tmp_path / "a").rename(tmp_path / "b")
        make_adapter(tmp_path / "a", "Tuesday")  # in other files

    worker.load(there_and_back, sql(path))
    assert worker.take_news() == {adapter_of(sql(path)): ""}
    content = engine()
    content.heard({adapter_of(sql(path)): ""})
    assert left_out(content, request_of(lora_request=sql(path))) == "unnamed_adapter"
    with pytest.raises(RuntimeError):
        worker.load(lambda request: (_ for _ in ()).throw(RuntimeError("of vLLM")), sql(path))
    assert worker.take_news() == {}
    claims = {"a": Claim(adapter_of(sql(path)), "")}
    assert worker.checked(plan_of("a"), claims)[1] == 0, "what could not be loaded has replaced nothing"


def test_workers_that_have_loaded_different_files_agree_on_none() -> None:
    one, two = adapter_of(sql("/a")), adapter_of(sql("/b"))
    ranks = [
        PdxWorkerNews([], is_off=False, adapters=each) for each in ({one: "x", two: "y"}, {one: "x", two: "z"}, {})
    ]
    told = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    assert isinstance(told, PdxWorkerNews)
    assert told.adapters == {one: "x", two: ""}


def test_vllms_loads_are_noted_once_for_each_engine_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def theirs(manager: Any, lora_request: Any) -> str:
        read.append(lora_request.lora_path)
        return "loaded"

    assert callable(WorkerLoRAManager._load_adapter)
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", theirs)
    workers = [LoadedAdapters(), LoadedAdapters()]
    for worker in workers:
        watch(worker)
    path = make_adapter(tmp_path / "a", "Monday")
    assert WorkerLoRAManager._load_adapter(SimpleNamespace(), sql(path)) == "loaded"
    assert read == [path]
    assert [worker.take_news() for worker in workers] == [{adapter_of(sql(path)): AdapterDigests().of(path)}] * 2


def test_files_are_read_again_only_where_they_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their times are set to afterwards, and while they are young each time; of many, the last ones."""
    reads: list[str] = []

    def digested(file: Any, name: str) -> Any:
        reads.extend([file.name] if "adapter_model" in file.name else [])
        return digest(file, name)

    digest, clock = hashlib.file_digest, [0]
    monkeypatch.setattr(hashlib, "file_digest", digested)
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    monkeypatch.setattr(adapters_module, "MAX_KNOWN", 2)
    digests, path = AdapterDigests(), make_adapter(tmp_path / "a", "Monday")
    file = tmp_path / "a" / "adapter_model.safetensors"
    monday = [digests.of(path), digests.of(path)]
    assert len(reads) == 2
    clock[0] = 1 << 62
    assert [digests.of(path), digests.of(path)] == monday
    assert len(reads) == 3
    others = [make_adapter(tmp_path / name, name) for name in "bc"]
    for each in (*others, *others, path):
        digests.of(each)
    assert len(reads) == 6
    times = file.stat()
    file.write_text("Moonay")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digests.of(path) != monday[0]
    file.unlink()
    assert digests.of(path) == ""


# ---- what is not reused at all ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "takes_part"),
    [
        (lambda: request_of(), True),
        (lambda: request_of(sampling=SamplingParams(max_tokens=1, logprobs=1)), True),
        (lambda: request_of(sampling=SamplingParams(max_tokens=1, prompt_logprobs=0)), False),
        (lambda: request_of(sampling=SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)), False),
        (lambda: request_of(pooling_params=PoolingParams(task="embed")), True),
        (lambda: request_of(pooling_params=PoolingParams(task="token_embed")), False),
        (lambda: request_of(pooling_params=PoolingParams(task="token_classify")), False),
        (lambda: request_of(pooling_params=PoolingParams(task="embed", skip_reading_prefix_cache=True)), False),
    ],
)
def test_requests_that_need_every_token_computed_are_left_out(request_: Any, takes_part: bool) -> None:
    """Whether vLLM itself takes that into account where a connector has found something, or ends over it."""
    assert left_out(engine(), request_()) == (None if takes_part else ""), "nothing is amiss"


def test_models_that_cannot_begin_behind_a_prefix_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    content = engine(model_config=SimpleNamespace(is_prefix_caching_supported=False))
    assert "nothing is saved or found for this model" in caplog.text
    assert left_out(content, request_of()) == ""


def test_a_request_that_vllm_has_looked_up_by_its_own_names_is_left_out() -> None:
    assert engine().name_inputs(request_of(), False) is None
    assert engine().name_inputs(request_of(mm_features=[picture(1.0, "a")]), False) is not None
    sampling = SamplingParams(max_tokens=1)
    bare = Request("bare", list(range(PROMPT)), sampling, None, mm_features=[picture(1.0, "a")], block_hasher=None)
    assert left_out(engine(), bare) == "unnamed_inputs"


# ---- requests that let chunks be stored with a loss --------------------------------------------


def apart(form: str, salt: str | None) -> Any:
    request = request_of(list(range(64)), cache_salt=salt)
    assert Content.keep_apart(request, form)
    return request


def test_vllms_own_cache_keeps_requests_apart_that_let_chunks_be_stored_with_a_loss() -> None:
    hashes = []
    for form in ("", "fp8:bf16:1x2x3x4x5", "int8:bf16:1x2x3x4x5"):
        for salt in (None, "a"):
            once, twice = apart(form, salt), apart(form, salt)
            assert len(once.block_hashes) == 4
            assert once.block_hashes == twice.block_hashes, "those of one form find each other's"
            assert (once.block_hashes == request_of(list(range(64)), cache_salt=salt).block_hashes) == (not form)
            hashes += once.block_hashes
            assert len({bytes(each) for each in hashes}) == len(hashes), "and nobody else's"
            for request in (once, twice):
                request.append_output_token_ids(list(range(16)))
            assert once.block_hashes == twice.block_hashes


@pytest.mark.parametrize("form", ["", "fp8:bf16:1x2x3x4x5"])
def test_no_clients_salt_finds_blocks_of_a_request_that_is_kept_apart(form: str) -> None:
    lossy = apart("fp8:bf16:1x2x3x4x5", "a")
    assert apart(form, lossy.cache_salt).block_hashes[0] != lossy.block_hashes[0]
