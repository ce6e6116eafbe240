"""The connector on each release of vLLM: what it accepts and refuses, its hooks, what its halves tell each other."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_harness import NodeThread

from pdx.engine.params import TransferParams, parse_params
from pdx.engine.plan import WorkerNews
from pdx.errors import ConfigError, ProtocolError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from content_bed import BLOCK, add_input, engine, left_out, request_of
    from vllm.config import ModelConfig, ParallelConfig, set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
        SupportsHMA,
        supports_hma,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
    from vllm_bed import inside, model_at, model_of, models_at, transfer_config

    from pdx.vllm import connector, releases
    from pdx.vllm.connector import _checked_config

pytestmark = pytest.mark.usefixtures("seeded")


def caches() -> dict[str, Any]:
    """Of the layers of `group`, in one block."""
    import torch

    return {f"layers.{number}": torch.zeros(1, 4, 128, 64, dtype=torch.bfloat16) for number in range(2)}


# ---- the releases of vLLM --------------------------------------------------------------------
#
# What follows is held against vLLM's own classes, of the release that is installed; `make releases` has these tests run
# on the sources of each release that PDX supports.


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ((0, 27), "is too old: PDX is tested with 0.28 to 0.33"),
        ((0, 28), "PYTHONHASHSEED=0 for all engines"),  # else they find nothing
        *((each, 'is not known to PDX: .* or set "any_release": true') for each in ((0, 34), (1, 0), (0, 0))),
    ],
)
def test_releases_that_are_not_known_or_find_nothing_are_refused(
    halves: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, release: tuple[int, int], words: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(releases, "RELEASE", release)
    with pytest.raises(ConfigError, match=words):
        halves(KVConnectorRole.WORKER)
    if "any_release" not in words:
        with pytest.raises(ConfigError, match=words):
            releases.check_release(any_release=True)


def test_releases_that_are_known_start_in_silence_and_newer_ones_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    for release in ((0, 28), (0, 33), (0, 34), (1, 0), (0, 0)):
        monkeypatch.setattr(releases, "RELEASE", release)
        releases.check_release(any_release=True)
        told.append((releases.release_name(), len(caplog.messages)))
    assert told == [("0.28", 0), ("0.33", 0), ("0.34", 1), ("1.0", 2), (releases.__version__, 3)]
    assert "is not known to PDX: PDX is tested with 0.28 to 0.33" in caplog.messages[-1]


def test_the_order_of_a_page_is_what_the_workers_say_where_only_they_know(
    halves: Callable[..., Any], node_here: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 0.28, whose `KVCacheConfig` does not have it: two orders under one name would be wrong tokens."""
    monkeypatch.setattr(releases, "RELEASE", (0, 28))
    backends = "vllm.v1.attention.backends.utils.get_kv_cache_layout"
    found = []
    for order in ("HND", "NHD"):
        monkeypatch.setattr(backends, lambda order=order: order, raising=False)
        with set_current_vllm_config(SimpleNamespace(kv_transfer_config=transfer_config(kv_connector="PdxConnector"))):
            worker = halves(KVConnectorRole.WORKER, chosen=("B", "B"), has_order=False, engine=order)
        worker.register_kv_caches(caches())
        scheduler = halves(KVConnectorRole.SCHEDULER, has_order=False, engine=order)
        scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
        found.append(model_at(node_here, order).shape)
    assert [(shape["order"], shape["backend"]) for shape in found] == [("HND", "B"), ("NHD", "B")]
    with (
        set_current_vllm_config(inside("recompute")),
        pytest.raises(ConfigError, match=r"inside another connector needs vLLM 0\.29"),
    ):
        halves(KVConnectorRole.WORKER, has_order=False)


def test_how_blocks_are_hashed_and_adapters_loaded_is_where_pdx_steps_in() -> None:
    """Without these nothing of a request with media or an adapter is saved."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.request import Request

    assert "self._block_hasher(self)" in inspect.getsource(Request.update_block_hashes)
    assert list(inspect.signature(WorkerLoRAManager._load_adapter).parameters) == ["self", "lora_request"]
    assert {"lora_int_id", "lora_name", "lora_path", "load_inplace"} <= set(LoRARequest.__struct_fields__)
    assert isinstance(ModelConfig.is_prefix_caching_supported, property)


@pytest.mark.usefixtures("hash_root")
def test_a_streaming_session_takes_part_where_vllm_forgets_the_hash_of_the_token_that_it_discards() -> None:
    """Elsewhere what comes in its place would be saved under the name of that token."""
    request = request_of(list(range(BLOCK - 1)), resumable=True)
    request.num_computed_tokens = BLOCK - 1
    request.append_output_token_ids(7)
    add_input(request, [8] * BLOCK)
    is_right = request.block_hashes == request_of(list(request.all_token_ids)).block_hashes
    assert releases.trims_session_hashes() == is_right
    assert left_out(engine(), request_of(resumable=True)) == (None if is_right else "unnamed_inputs")


def test_every_hook_that_pdx_overrides_is_one_of_vllms_and_none_is_left_open() -> None:
    """A hook that vLLM has renamed is never called. Hooks of newer releases than the installed one are named here."""
    since = {
        "get_transfer_results": (0, 30), "get_loaded_kv_cache_group_ids": (0, 32),
        "get_external_cache_hit_sources": (0, 32), "unregister_kv_caches": (0, 33), "restore_kv_caches": (0, 33),
    }  # fmt: skip
    newer = {name for name, release in since.items() if release > releases.RELEASE}
    own = {name for name in vars(connector.PdxConnector) if not name.startswith("_")} - {"scheduler", "worker"}
    assert own - {*dir(KVConnectorBase_V1), *dir(SupportsHMA)} == newer
    assert not connector.PdxConnector.__abstractmethods__
    assert supports_hma(connector.PdxConnector) == releases.moves_groups()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("sleep", 1), ["unregister", "sleep"]),
        (("discard", ("kv_cache",)), ["unregister", "discard"]),
        (("discard", ("runtime",)), ["discard"]),
        (("wake_up", None), ["wake_up", "restore"]),
        (("wake_up", ["weights"]), ["wake_up"]),
        (("wake_up", ["kv_cache"]), ["wake_up", "restore"]),
    ],
    ids=str,
)
def test_the_connector_hears_of_sleep_before_memory_goes_and_of_waking_when_it_is_back(
    folder: Path,
    halves: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    call: tuple[str, Any],
    told: list[str],
) -> None:
    """vLLM's workers tell of it since 0.33; before, PDX steps in where an engine may sleep."""
    from vllm.v1.worker.gpu_worker import Worker

    name, argument = call
    own, calls = getattr(Worker, name, None), list[str]()
    if own is None:
        pytest.skip(f"vLLM's worker has no {name} in this release")

    class Heard(connector.PdxConnector):
        worker = Mock(unregister=lambda: calls.append("unregister"), restore=lambda: calls.append("restore"))

    for each in {"sleep", "discard", "wake_up"} & vars(Worker).keys():
        monkeypatch.setattr(Worker, each, lambda self, _, each=each: calls.append(each))
    made = halves(KVConnectorRole.WORKER, model=model_of(folder, enable_sleep_mode=True), kind=Heard)
    releases.tell_of_sleep(made)  # as another one in this process would
    getattr(Worker, name)(Mock(), argument)
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        assert list(inspect.signature(own).parameters) == ["self", {"sleep": "level"}.get(name, "tags")]
        assert calls == told
        return
    assert calls == [name], "vLLM tells of it by itself"
    hook = "restore_kv_caches" if name == "wake_up" else "unregister_kv_caches"
    assert f"get_kv_transfer_group().{hook}()" in inspect.getsource(own)
    getattr(made, hook)()
    assert calls == [name, hook.partition("_")[0]]
    assert made.supports_sleep_mode(None)


# ---- the connector's configuration ----------------------------------------------------------


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


# ---- hooks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
def test_the_hooks_of_micro_batches_are_left_out(halves: Callable[..., Any], is_split: bool) -> None:
    """A layer of a step that is computed in several parts is complete behind its last part, and nobody says which it
    is: `wait_for_save` gathers what no hook was called for."""
    assert isinstance(ParallelConfig.use_ubatching, property)
    called: list[str] = []

    class Heard(connector.PdxConnector):
        worker = SimpleNamespace(save_layer=called.append, end_forward=lambda: called.append("end"))

    made = halves(KVConnectorRole.WORKER, is_split=is_split, kind=Heard)
    made.save_kv_layer("layers.0", None, None)
    made.wait_for_save()
    assert called == (["end"] if is_split else ["layers.0", "end"])


# ---- what only the workers know, and only the outer connector ---------------------------------


def shake_hands(halves: Callable[..., Any], *ranks: tuple[str, ...], flag: Any = None, **more: Any) -> None:
    """An engine starts: the workers register their caches, and the scheduler half hears of what they say."""
    told = {}
    for rank, chosen in enumerate(ranks):
        worker = halves(KVConnectorRole.WORKER, rank=rank, ranks=len(ranks), chosen=chosen, flag=flag, **more)
        worker.register_kv_caches(caches())
        told[0, rank] = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))  # noqa: S301  as vLLM does
    scheduler = halves(KVConnectorRole.SCHEDULER, ranks=len(ranks), flag=flag, **more)
    scheduler.set_xfer_handshake_metadata_pp_aware(told)


def test_the_attention_backend_is_the_one_that_vllm_has_chosen(
    halves: Callable[..., Any], node_here: NodeThread
) -> None:
    """Who names it and who leaves the choice to vLLM share; two kinds of GPU that choose otherwise do not."""
    flash, other = "FLASH_ATTN", "FLASHINFER"
    shake_hands(halves, (flash, flash), engine="a")
    shake_hands(halves, (flash, flash), flag=AttentionBackendEnum.FLASH_ATTN, engine="b")
    shake_hands(halves, (other, other), engine="c")
    shake_hands(halves, (flash, other), engine="d")
    shake_hands(halves, (flash, flash), (other, other), engine="e")
    found = models_at(node_here)
    backends = {name: model.shape["backend"] for name, model in found.items()}
    assert backends == {"a": flash, "b": flash, "c": other, "d": f"{other}+{flash}", "e": f"{other}+{flash}"}
    assert found["a"].layout == found["b"].layout != found["c"].layout


def leg_without_a_name() -> Request:
    """As a router made for NIXL sends the prefill leg of a transfer."""
    extra = {"kv_transfer_params": {"do_remote_decode": True}}
    return Request("leg", [1, 2, 3], SamplingParams(max_tokens=1, extra_args=extra), None)


def test_an_engine_has_its_node_when_it_has_started(
    halves: Callable[..., Any], address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As far as there is one: the first request comes at once, and would be answered without it."""
    told = {(0, 0): connector.PdxHandshake("FLASH_ATTN", "LBHNC", [])}
    monkeypatch.setattr(connector, "ATTACH_S", 0.3)
    half = halves(KVConnectorRole.SCHEDULER, node=address)
    started = time.monotonic()
    half.set_xfer_handshake_metadata_pp_aware(told)
    assert time.monotonic() - started > 0.2, "there is none"
    monkeypatch.setattr(connector, "ATTACH_S", 1000.0)
    half = halves(KVConnectorRole.SCHEDULER)
    half.set_xfer_handshake_metadata_pp_aware(told)
    half.on_new_request(leg_without_a_name())
    assert "transfer_id" not in caplog.text, "its answer would name one"
    nested = halves(KVConnectorRole.SCHEDULER, node=address)
    nested.set_xfer_handshake_metadata_pp_aware({})  # inside another connector it is a request that would wait
    nested.on_new_request(leg_without_a_name())
    assert "a leg without a transfer_id" in caplog.text, "two answers would end the engine"


def test_the_other_children_of_a_connector_get_nothing_that_they_do_not_know(
    halves: Callable[..., Any], node_here: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend is what the command line says then, and what others have told is left alone. What becomes of loads
    that fail is for the outer one to say."""
    with (
        set_current_vllm_config(inside("fail")),
        pytest.raises(ConfigError, match="kv_load_failure_policy is 'fail' for MultiConnector"),
    ):
        halves(KVConnectorRole.WORKER)
    monkeypatch.setattr(releases, "RELEASE", releases.NEWEST)  # 0.28 is refused there
    with set_current_vllm_config(inside("recompute")):
        worker = halves(KVConnectorRole.WORKER, chosen=("FLASH_ATTN", "FLASH_ATTN"))
    worker.register_kv_caches(caches())
    assert worker.get_handshake_metadata() is None
    for engine, flag in (("", None), ("FLASHINFER", AttentionBackendEnum.FLASHINFER)):
        scheduler = halves(KVConnectorRole.SCHEDULER, flag=flag, engine=engine)
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(of="another connector")})
        assert model_at(node_here, engine).shape["backend"] == engine


def test_a_worker_half_that_is_off_switches_the_scheduler_half_off(halves: Callable[..., Any]) -> None:
    worker = halves(KVConnectorRole.WORKER)
    assert worker.build_connector_worker_meta() is None
    worker.worker.switch_off("of a test")
    told = worker.build_connector_worker_meta()
    scheduler = halves(KVConnectorRole.SCHEDULER)
    for meta in (None, told.aggregate(told)):
        assert not scheduler.scheduler.is_off
        output = SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=None, invalid_block_ids=set())
        scheduler.update_connector_output(output)
    assert scheduler.scheduler.is_off
    assert scheduler.has_pending_push_work(), "the other workers must hear of it"
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    assert worker.build_connector_worker_meta() is None
    assert not scheduler.has_pending_push_work()


@pytest.mark.skipif(
    not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"),
    reason="what a worker that fails has told is lost before vLLM 0.33",
)
def test_what_a_worker_has_told_in_a_step_that_failed_is_told_in_the_next_one() -> None:
    def told(step: int) -> Any:
        meta = connector.PdxWorkerNews([WorkerNews(step=step)], is_off=False, adapters={})
        return KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}, kv_connector_worker_meta=meta)

    aggregator = KVOutputAggregator(2)
    aggregator.ft_defer_kv_connector_outputs([told(7), None])
    outputs = [SimpleNamespace(kv_connector_output=each) for each in (None, told(8))]
    found = aggregator.aggregate(outputs).kv_connector_output
    assert (found.finished_recving, found.failed_recving) == ({"a"}, {"a"})
    assert [each.step for each in found.kv_connector_worker_meta.news] == [7, 8], "the scheduler half takes the oldest"


def test_every_load_is_asynchronous_and_what_failed_is_known_before_the_news_of_workers(
    halves: Callable[..., Any],
) -> None:
    news = [WorkerNews(["a"]), WorkerNews(["a"])]

    class Standing(connector.PdxConnector):
        scheduler = Mock(matched_tokens=lambda request, local: 256)
        worker = Mock(has_news=False, take_news=Mock(side_effect=[*news, None]))

    scheduler, worker = (halves(role, kind=Standing) for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER))
    assert scheduler.get_num_new_matched_tokens(SimpleNamespace(request_id="a"), 0) == (256, True)
    told = worker.build_connector_worker_meta().aggregate(worker.build_connector_worker_meta())
    assert worker.build_connector_worker_meta() is None, "a step that changes nothing is not told of"
    told = pickle.loads(pickle.dumps(told))  # as it comes from the processes of several workers
    output = SimpleNamespace(kv_connector_worker_meta=told, finished_recving=None, invalid_block_ids={3})
    scheduler.update_connector_output(output)
    assert Standing.scheduler.method_calls == [call.not_loaded({3}), call.heard(news)], "what failed is known first"


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
    if parsed != TransferParams():
        assert parsed.do_remote_decode is not parsed.do_remote_prefill
        assert len(parsed.transfer_id or "") >= 16
        assert max(len(parsed.decode_node), len(parsed.prefill_node)) <= 256
