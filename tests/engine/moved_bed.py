"""An engine whose keys carry their positions, and what is right of tokens that it loads at other ones."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import toy_engine
from toy_engine import BLOCK, LAYERS, Request, ToyEngine

from pdx.engine.turning import Turning
from pdx.kernels.turned import PageElements
from pdx.memory.rope import Rope

DIM = 8
PAGE = BLOCK * 2 * DIM * 4
ROPE = Rope((1.0, 0.3, 0.07, 0.001))
_TOKENS, _ELEMENTS = np.arange(BLOCK) * 2 * DIM, np.arange(DIM)
TURNING = Turning(ROPE, PageElements(1, BLOCK * 2 * DIM, _TOKENS, _ELEMENTS, _TOKENS, _ELEMENTS + DIM), torch.float32)
SHAPE = {"dtype": "torch.float32", "head_dim": DIM}
MOVED = {"pdx_hints": {"version": 1, "reuse": "moved"}}


@lru_cache(1 << 16)
def drawn(*what: object) -> np.ndarray[Any, Any]:
    digest = hashlib.shake_128(repr(what).encode()).digest(DIM * 2)
    return np.frombuffer(digest, np.int16).astype(np.float64) / 4096


def key_of(token: int, layer: int, position: int) -> np.ndarray[Any, Any]:
    plain, out = drawn("key", token, layer), np.empty(DIM)
    for (first, second), angle in zip(ROPE.pairs(), ROPE.angles(position), strict=True):
        out[first] = plain[first] * np.cos(angle) - plain[second] * np.sin(angle)
        out[second] = plain[second] * np.cos(angle) + plain[first] * np.sin(angle)
    return out.astype(np.float32)


def kv_bytes(tokens: list[int], layer: int, head: int, weights: str = "", page_bytes: int = PAGE) -> torch.Tensor:
    """What a page has of the last of `tokens`."""
    value = drawn("value", tokens[-1], layer)
    value = np.concatenate([value[: DIM // 2], drawn("behind", tuple(tokens), layer)[DIM // 2 :]])
    found = np.concatenate([key_of(tokens[-1], layer, len(tokens) - 1), value.astype(np.float32)])
    return torch.from_numpy(found.view(np.uint8).copy())


@pytest.fixture(autouse=True)
def positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_engine, "kv_bytes", kv_bytes)


def tokens(seed: object, count: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(50_000) for _ in range(count)]


def check_moved(engine: ToyEngine, request: Request, end: int, rank: int = 0, head: int = 0) -> int:
    """Keys of tokens [0, end) are those of their positions, and values of their tokens. How many of the tokens are
    exact, in what they hold of those before them, too."""
    exact = 0
    for position in range(end):
        page = engine.caches[rank][:, request.block_ids[position // BLOCK], head, position % BLOCK]
        floats = page.contiguous().view(torch.float32).numpy()
        wanted = [
            kv_bytes(request.all_token_ids[: position + 1], layer, 0).numpy().view(np.float32)
            for layer in range(LAYERS)
        ]
        for layer in range(LAYERS):
            own = DIM + DIM // 2
            np.testing.assert_allclose(floats[layer, :own], wanted[layer][:own], atol=2e-4, err_msg=f"token {position}")
        exact += all((floats[layer, own:] == wanted[layer][own:]).all() for layer in range(LAYERS))
    return exact
