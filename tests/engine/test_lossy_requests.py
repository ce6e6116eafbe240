"""A request may let its chunks be stored with a loss: no other one ever gets a byte of them, and it gets no other's.

The pages of the toy engine are bytes without a sense, so that whatever went through a lossy codec is another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from node_harness import MIB, NodeThread
from remote_bed import made
from toy_engine import BLOCK, CHUNK, LAYERS, Request, ToyEngine, kv_bytes, layout, tokens

from pdx.errors import LayoutError
from pdx.memory.form import Form, form_of
from pdx.store.codecs.codec import codec_of
from pdx.testing.waiting import wait_until

HEADS, DIM = 2, 128
PAGE = BLOCK * HEADS * 2 * DIM * 2
SHAPE = {"dtype": "torch.bfloat16", "num_heads": HEADS, "head_dim": DIM}
FORM = Form("int8", "bf16", (1, HEADS, BLOCK, 2, DIM))
CHUNKS = 3
LENGTH = CHUNKS * CHUNK + 2


def engine_of(node: NodeThread, stack: ExitStack, **settings: Any) -> ToyEngine:
    return stack.enter_context(ToyEngine(node.address, **{"page_bytes": PAGE, "shape": SHAPE, **settings}))


def coded_by(codec: str) -> dict[str, Any]:
    """The parameters of a request that lets its chunks be stored so."""
    return {"pdx_hints": {"version": 1, "codec": codec}}


def lossy_page(tokens_: list[int], end: int, layer: int, form: Form = FORM) -> torch.Tensor:
    """The page of tokens [end - BLOCK, end) when it was stored and loaded."""
    exact = torch.cat([kv_bytes(tokens_[: at + 1], layer, 0, "", PAGE) for at in range(end - BLOCK, end)])
    codec, small, back = codec_of(str(form)), bytearray(PAGE), bytearray(PAGE)
    codec.decode(memoryview(small)[: codec.encode(memoryview(exact.numpy()), memoryview(small))], memoryview(back))
    return torch.frombuffer(back, dtype=torch.uint8)


def check_lossy(engine: ToyEngine, prompt: list[int], count: int = CHUNKS * CHUNK) -> None:
    """So many tokens of a request for a lossy codec are found, and went through it once."""
    request = engine.save(prompt, coded_by("int8"))
    assert request.loaded == count
    for layer in range(LAYERS):
        for end in range(BLOCK, count + 1, BLOCK):
            page = engine.caches[0][layer, request.block_ids[end // BLOCK - 1]].flatten()
            assert torch.equal(page, lossy_page(prompt, end, layer)), f"layer {layer}, token {end}"
    engine.finish(request)


def coded(place: Path) -> list[int]:
    """Bytes of the files of encoded chunks."""
    return [path.stat().st_size for path in place.glob("*/*.chunk") if path.name.count("-") == 4]


def test_exact_and_lossy_chunks_of_one_prompt_never_meet(
    start_here: Callable[..., NodeThread], place: Path, stack: ExitStack
) -> None:
    settings = {"arena_bytes": 2 * MIB, "disks": [str(place / "disk")]}
    node = start_here(**settings)
    engine = engine_of(node, stack)
    prompt = tokens(1, LENGTH)
    assert engine.run(prompt, coded_by("int8")) == 0
    assert engine.run(prompt) == 0, "not by memory"
    assert engine.run(prompt, coded_by("fp8")) == 0, "nor of another codec"
    node.wait_stored(3 * CHUNKS)
    assert engine.run(prompt, coded_by("int8")) == CHUNKS * CHUNK, "in memory they are as they were"
    sizes = coded(place / "disk")
    assert len(sizes) == 2 * CHUNKS
    assert max(sizes) < 4096 + LAYERS * CHUNK // BLOCK * PAGE * 0.51
    node.forget()
    for _ in range(2):
        assert engine.run(prompt) == CHUNKS * CHUNK, "exact ones come back as they were"
        check_lossy(engine, prompt)
        node.close()
        node = start_here(**settings)
        wait_until(lambda node=node: node.status().tiers[0].chunks == 3 * CHUNKS, what="the index is read")
        engine = engine_of(node, stack)


def test_a_part_of_a_lossy_chunk_is_no_hit_of_an_exact_request(
    start_here: Callable[..., NodeThread], place: Path, stack: ExitStack
) -> None:
    node = start_here(arena_bytes=2 * MIB, disks=[str(place / "disk")])
    engine = engine_of(node, stack)
    prompts = [tokens(seed, LENGTH) for seed in (1, 2)]
    for prompt in prompts:
        engine.run(prompt, coded_by("int8"))
    node.wait_stored(2 * CHUNKS)
    for prompt, is_below in zip(prompts, (False, True), strict=True):
        if is_below:
            node.forget()
        alike = [*prompt[: CHUNK + 2 * BLOCK], *tokens(3, LENGTH)]
        assert engine.run(alike) == 0
        found = engine.save(alike, coded_by("int8"))
        assert found.loaded == CHUNK + 2 * BLOCK
        engine.finish(found)


def test_what_came_with_a_loss_goes_on_as_it_came_and_nothing_is_lost_a_second_time(
    start_here: Callable[..., NodeThread], place: Path, stack: ExitStack
) -> None:
    redis = made("redis", place / "redis").start()
    stack.callback(redis.kill)
    common = {"arena_bytes": MIB, "remote": redis.url, "remote_lookup_s": 20.0}
    nodes = [
        start_here(address=f"ipc://{place}/{at}.sock", **common, disks=[str(place / f"disk-{at}")]) for at in range(2)
    ]
    for node in nodes:
        wait_until(lambda node=node: node.status().tiers[1].state == "ok", what="the store answers")
    first, second = (engine_of(node, stack) for node in nodes)
    prompt = tokens(1, LENGTH)
    first.run(prompt, coded_by("int8"))
    nodes[0].wait_stored(2 * CHUNKS)
    assert second.run(prompt) == 0, "the other node's lossy chunks are no hit of exact requests"
    nodes[1].wait_stored(2 * CHUNKS)
    check_lossy(second, prompt)
    wait_until(lambda: len(coded(place / "disk-1")) == CHUNKS, what="they are stored on its disk with the same loss")
    redis.kill()
    nodes[1].forget()
    check_lossy(second, prompt)
    assert second.run(prompt) == CHUNKS * CHUNK


@pytest.mark.parametrize(
    ("codec", "settings"),
    [
        ("int8", {"keeps_apart": False}),
        ("int8", {"shape": {**SHAPE, "dtype": "torch.uint8 as fp8"}}),
        ("int8", {"shape": {**SHAPE, "order": ""}}),
    ],
    ids=str,
)
def test_who_cannot_have_the_codec_is_told_and_is_exact(
    start_here: Callable[..., NodeThread],
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    codec: Any,
    settings: dict[str, Any],
) -> None:
    node = start_here()
    engine = engine_of(node, stack, **settings)
    prompt = tokens(1, LENGTH)
    assert engine.run(prompt, coded_by(codec)) == 0
    wait_until(lambda: node.status().chunks.get("sealed", 0) >= CHUNKS, what="they are sealed")
    assert engine.run(prompt) == CHUNKS * CHUNK, "its chunks are those of exact requests"
    assert any("is stored exactly" in record.message for record in caplog.records)
    wait_until(lambda: node.degraded("codec_refused") == 1, what="it is counted")


def test_a_request_that_has_blocks_of_the_engines_own_cache_is_exact(
    start_here: Callable[..., NodeThread], stack: ExitStack
) -> None:
    """They may be those of exact requests, and what is computed behind them goes to these."""
    node = start_here()
    engine = engine_of(node, stack)
    request = Request("late", tokens(1, LENGTH), coded_by("int8"))
    assert engine.match(request, local=CHUNK) == 0
    assert engine.finish(request)["pdx_hints"]["codec"].startswith("refused")


# ---- forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (1, HEADS, BLOCK, 2, DIM)),
        ({"order": "LBNHC"}, (BLOCK, HEADS, 1, 2, DIM)),
        ({"backend": "CPU_ATTN", "isa": "amx", "dtype": "torch.bfloat16 as auto"}, (1, HEADS, 1, 2, BLOCK * DIM)),
        ({"num_heads": 1, "head_dim": 4 * DIM}, (1, 1, BLOCK, 1, 4 * DIM)),  # as with latent attention
        ({"dtype": "torch.float16 as float16"}, (1, HEADS, BLOCK, 2, DIM)),
    ],
)
def test_a_layout_says_where_heads_are(changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    form = form_of(layout(**{**SHAPE, "page_bytes": PAGE, **changes}), "fp8")
    assert form.shape == shape
    assert form.page_bytes == PAGE


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "torch.uint8 as fp8"},
        {"dtype": "torch.float64"},
        {"order": "LHBNC"},
        {"order": ""},
        {"isa": "amx"},
        {"head_dim": 96},
    ],
    ids=str,
)
def test_a_layout_that_does_not_say_it_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        form_of(layout(**{**SHAPE, "page_bytes": PAGE, **changes}), "fp8")
