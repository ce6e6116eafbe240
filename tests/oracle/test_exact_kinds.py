"""The toy is a model of vLLM, kind by kind: its pages lie as vLLM's do, and its tokens depend on exactly what its
layers look at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exact_engine import tokens
from exact_kinds import EVERY_DAY, KINDS, Pages, cache_config
from exact_model import answer
from exact_runner import NoWorker, Runner
from vllm.v1 import kv_cache_interface

# The oracle itself is tried with each kind where it may have changed; with a connector it is tried each day.
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in EVERY_DAY else pytest.mark.long) for kind in KINDS]
)


@each_kind
def test_layers_see_their_pages_as_vllms_own_do(kind: str) -> None:
    pages, config = Pages(KINDS[kind], 10), cache_config(KINDS[kind], 10)
    layout = kv_cache_interface.KVCacheLayout[config.kv_cache_layout]
    for group, placed in zip(config.kv_cache_groups, config.kv_cache_tensors, strict=True):
        raw = torch.zeros(placed.size, dtype=torch.int8)
        views = kv_cache_interface.create_kv_cache_views(raw, group.kv_cache_spec, 10, layout, placed)
        for layer, view in zip(placed.layers, views, strict=True):
            found = pages.tensors[0][layer]
            assert (found.shape, found.stride(), found.dtype) == (view.shape, view.stride(), view.dtype)
            assert found.data_ptr() - pages.raw.ctypes.data == view.data_ptr() - raw.data_ptr()


def step(start: int, prompt: list[int], blocks: list[list[int]]) -> Any:
    """Of one request alone, `start`: 0 its prompt, else one more token."""
    new = SimpleNamespace(
        req_id="a", prompt_token_ids=prompt, block_ids=blocks, num_computed_tokens=0, mm_features=[], lora_request=None
    )
    cached = {"req_ids": ["a"], "resumed_req_ids": set(), "num_computed_tokens": [start], "new_block_ids": [None]}
    nobody = {"req_ids": [], "resumed_req_ids": set(), "num_computed_tokens": [], "new_block_ids": []}
    count = 1 if start else len(prompt)
    return SimpleNamespace(
        scheduled_new_reqs=[] if start else [new],
        scheduled_cached_reqs=SimpleNamespace(**(cached if start else nobody), num_output_tokens=[1], all_token_ids={}),
        num_scheduled_tokens={"a": count},
        total_num_scheduled_tokens=count,
        **{"finished_req_ids": set(), "preempted_req_ids": None, "scheduled_spec_decode_tokens": {}},
        **{"free_encoder_mm_hashes": [], "scheduled_encoder_inputs": {}, "kv_connector_metadata": None},
    )


@each_kind
def test_the_next_token_depends_on_each_byte_of_the_pages_that_it_needs_and_on_no_other(kind: str) -> None:
    """Of tokens at the edges of what each layer looks at, and some others."""
    prompt, groups = tokens(300, "bytes"), KINDS[kind].groups
    length = len(prompt)
    runner = Runner([[NoWorker()]], KINDS[kind], num_blocks=80)
    blocks = [list(range(number * 20 + 1, number * 20 + 20)) for number in range(len(groups))]
    first = runner.execute(step(0, prompt, blocks)).sampled_token_ids[0]
    right = answer(prompt, 2, KINDS[kind].mixers)
    buffer = runner.pages.raw.view(np.uint8)  # [rows, blocks, bytes]
    before, rng = buffer.copy(), np.random.default_rng(7)

    def next_token(row: int, block: int, byte: int) -> int:
        buffer[row, block, byte] ^= 1 + rng.integers(255)
        state = runner.states["a"]
        state.tokens[:] = prompt + first
        found = runner.execute(step(length, prompt, blocks)).sampled_token_ids[0]
        buffer[:] = before
        return int(found[0])

    for number, group in enumerate(groups):
        for row in range(len(group.layers)):
            if group.is_state:
                slots = range(len(blocks[number]))
                needed = {slot: slot == (length - 1) // group.block for slot in slots}
                places = [(slot, int(rng.integers(group.page_words * 8)), needed[slot]) for slot in slots]
            else:
                edge, size = group.mixer.first(length), group.words * 8 // group.heads
                seen = {0, max(0, edge - 1), edge, length - 1, *rng.integers(length, size=12).tolist()}
                heads = {at: int(rng.integers(group.heads)) * group.block for at in seen}
                offsets = {at: (heads[at] + at % group.block) * size + int(rng.integers(size)) for at in seen}
                places = [(at // group.block, offsets[at], at >= edge) for at in seen]
            for slot, byte, is_needed in places:
                token = next_token(row, blocks[number][slot], byte)
                assert (token != right[1]) == is_needed, (group, row, slot, byte)
