"""A key is content: chunks are shared only where every input that reaches the model is equal, whatever it is called."""

from __future__ import annotations

import gc
import importlib.util
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
from steps import calls_run

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from content_bed import (
        BLOCK,
        CHUNK,
        PROMPT,
        add_input,
        engine,
        keys_of,
        left_out,
        loaded,
        make_adapter,
        picture,
        request_of,
    )
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from pdx.vllm import releases
    from pdx.vllm.adapters import LoadedAdapters
    from pdx.vllm.content import Content

pytestmark = pytest.mark.usefixtures("hash_root")

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

    def session(added: Any) -> Any:
        content, media = engine(), [picture(pixel, "a", 2) for pixel in first]
        request = request_of(list(range(BLOCK * 2)), resumable=True, mm_features=media)
        assert content.name_inputs(request, True) is None
        add_input(request, list(range(BLOCK * 3)), added)
        assert len(request.block_hashes) >= 2
        return [bytes(each) for each in request.block_hashes]

    hidden = MultiModalFeatureSpec(None, "image", "same", PlaceholderRange(offset=0, length=8))
    known = [session(picture(pixel, "same", 0)) for pixel in (2.0, 2.0, 3.0)]
    assert known[0] == known[1] != known[2]
    assert session(hidden)[1:] != session(hidden)[1:]


def test_media_of_a_realtime_session_are_named_once_and_before_they_are_encoded() -> None:
    """Each input is a token and its sound. vLLM's encoder cache frees sound by the name that it has by then."""
    request = request_of(list(range(BLOCK)), resumable=True)
    assert engine().name_inputs(request, True) is None
    request.num_computed_tokens, names = BLOCK, list[str]()
    with calls_run() as calls:
        for sound in range(BLOCK * 5 // 2):
            request.append_output_token_ids(9)  # for which the next input is taken
            add_input(request, [7], feature := picture(float(sound), f"sound {sound}", 0))
            names.append(feature.identifier)
            request.num_computed_tokens += 1
    assert [each.identifier for each in request.mm_features] == names
    assert len(request.block_hashes) == 3
    named = {name: count for (_, name), count in calls.items() if name == "_Media.name"}
    assert named == {"_Media.name": len(names)}


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


def test_a_prompt_that_mixes_tokens_and_embeddings_is_left_out() -> None:
    """vLLM hashes an embedding as the token 0 with that row, and the token 0 beside that row alike."""
    rows = torch.ones(PROMPT, 8)
    assert left_out(engine(), request_of(prompt_embeds=rows)) is None
    mixed = request_of(prompt_embeds=rows, prompt_is_token_ids=[False, *[True] * (PROMPT - 1)])
    assert left_out(engine(), mixed) == "unnamed_inputs"


@pytest.mark.parametrize(
    "wrong", [{"resumable": True}, {"prompt_is_token_ids": [False, *[True] * (PROMPT - 1)]}], ids=["session", "mixed"]
)
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_what_vllm_hashes_wrongly_is_not_lent_to_others_by_its_own_cache(
    wrong: dict[str, Any], prompt_logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would save it under their own keys. Who wants every token computed puts its blocks there, too."""
    monkeypatch.setattr(releases, "RELEASE", (0, 31))  # which has both
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs)
    request, other = (
        request_of([0] * PROMPT, sampling, prompt_embeds=torch.ones(PROMPT, 8), **each) for each in (wrong, {})
    )
    assert left_out(engine(), request) == "unnamed_inputs"
    assert set(request.block_hashes).isdisjoint(other.block_hashes)


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
