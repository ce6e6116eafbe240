"""An adapter is known by the weights that the workers have loaded, whatever it is called and wherever it lies."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdx.engine.plan import NO_EPOCH, LoadPlan, SavePlan, StepPlan

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from content_bed import (
        engine,
        keys_of,
        left_out,
        loaded,
        make_adapter,
        picture,
        request_of,
        tell,
    )
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.sampling_params import SamplingParams

    from pdx.vllm import adapters as adapters_module
    from pdx.vllm.adapters import AdapterDigests, Claim, LoadedAdapters, adapter_of, watch
    from pdx.vllm.connector import PdxWorkerNews
    from pdx.vllm.content import Content

pytestmark = pytest.mark.usefixtures("hash_root")


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


@pytest.mark.parametrize(("prompt_logprobs", "why"), [(None, "unnamed_adapter"), (0, "")])
def test_an_adapters_name_is_no_salt_in_vllms_own_cache(prompt_logprobs: int | None, why: str) -> None:
    """Before 0.31 vLLM hashes both alike: requests with the salt would save what the adapter has computed."""
    lora, content = sql("/no/such/adapter"), engine()
    tell(content, lora)
    request = request_of(sampling=SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs), lora_request=lora)
    salted = request_of(cache_salt=lora.lora_name)
    assert left_out(content, request) == why
    assert left_out(content, salted) is None
    assert set(request.block_hashes).isdisjoint(salted.block_hashes)


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
