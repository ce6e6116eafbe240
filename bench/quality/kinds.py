"""The kinds of KV that are judged: for each, a function that makes it for a sample, and one for its exact counterpart.

KV of a codec goes through PDX's own encoder and decoder, as a tier stores it: the pages of each layer of each chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from pdx.bench.quality import places
from pdx.bench.quality.model import Model
from pdx.bench.quality.texts import Sample
from pdx.memory.form import MOVED_LOSS, PROMISED, Loss, LossyName, form_of
from pdx.memory.layout import KvLayout
from pdx.store.codecs.codec import codec_of, decode_slice, encode_slice

CHUNK_TOKENS = 256
INT4 = "int4"
APART = "apart"  # documents computed apart: blending recovers a share of what they lose
SHARE = 0.15
Exact = Callable[[Model, Sample], Tensor]
Make = Callable[[Model, Sample, Tensor], Tensor]  # the last argument is the result of `Exact`


def computed(model: Model, sample: Sample) -> Tensor:
    """Exact KV of the whole context."""
    return model.kv(sample.context)


@dataclass(frozen=True)
class Kind:
    """`make` makes KV of any number of tokens, at positions from 0 on; `exact` the KV to compare it with, once for all
    kinds that share it. A control has no promise."""

    about: str
    make: Make
    promise: Loss | None = None
    exact: Exact = computed


def kinds(block_tokens: int) -> dict[str, Kind]:
    """All kinds by name, for an engine with this block size."""
    scales = f"a scale per head and block of {block_tokens}"
    controls = {
        "bf16": Kind("control: rounded as in an engine's cache", lambda _, __, kv: kv.bfloat16().float()),
        INT4: Kind(f"control: 15 levels, {scales}; no codec of PDX", lambda _, __, kv: int4(kv, block_tokens)),
    }
    return controls | _places() | {name: _codec(name, block_tokens, scales) for name in get_args(LossyName)}


def _places() -> dict[str, Kind]:
    """Kinds of KV at other positions."""
    cut, no_sink = places.recomputed(places.SINK_TOKENS), places.recomputed(0)
    move = partial(places.moved, sink_tokens=places.SINK_TOKENS)
    return {
        "moved": Kind("half of the history cut, the rest moved up behind the first block", move, MOVED_LOSS, cut),
        "no-sink": Kind("control: the first block cut, too", partial(places.moved, sink_tokens=0), None, no_sink),
        "not-turned": Kind("control: moved, keys as they were", partial(move, is_turned=False), None, cut),
        APART: Kind("control: four documents computed apart", places.apart),
        "blended": Kind(f"these, {SHARE:.0%} of the tokens computed again", partial(places.blend, share=SHARE)),
        "blended-at-random": Kind("control: of any tokens", partial(places.blend, share=SHARE, is_random=True)),
        "blended-whole": Kind("control: of all tokens", partial(places.blend, share=1.0)),
    }


def _codec(name: str, block_tokens: int, scales: str) -> Kind:
    return Kind(f"{name}, {scales}", lambda _, __, kv: stored(kv, name, block_tokens), PROMISED[name])


def stored(kv: Tensor, codec: str, block_tokens: int) -> Tensor:
    """KV of an engine in bfloat16, as it comes back from a tier that keeps it in a lossy codec."""
    pages = _pages(kv, block_tokens)
    layers, blocks, heads, _, _, dim = pages.shape
    layout = KvLayout(
        model="",
        dtype="torch.bfloat16",
        num_layers=layers,
        num_heads=heads,
        head_dim=dim,
        block_tokens=block_tokens,
        page_bytes=pages[0, 0].numel() * pages.element_size(),
        chunk_tokens=CHUNK_TOKENS,
        order="LBHNC",
        backend="",
        isa="",
        num_shards=1,
        hashing="",
    )
    coder = codec_of(str(form_of(layout, codec)))
    for layer in pages:
        for chunk in layer.split(CHUNK_TOKENS // block_tokens):
            data = chunk.view(torch.uint8).reshape(-1).numpy().data
            encoded = memoryview(bytearray(len(data)))
            size = encode_slice(coder, data, encoded, _nothing)
            decode_slice(coder, encoded[:size], data, _nothing)
    return _tokens(pages)


def int4(kv: Tensor, block_tokens: int) -> Tensor:
    """KV rounded to four bits, which loses more than a codec may: the bench must be able to show that."""
    pages = _pages(kv, block_tokens)
    scales = pages.abs().amax(dim=(3, 5), keepdim=True) / 7
    return _tokens((pages / scales).round() * scales)


def _pages(kv: Tensor, block_tokens: int) -> Tensor:
    """A copy of whole chunks as pages in bfloat16: [layers, blocks, heads, tokens of a block, 2, dim]."""
    assert kv.shape[3] % CHUNK_TOKENS == 0
    return kv.unflatten(3, (-1, block_tokens)).permute(0, 3, 2, 4, 1, 5).bfloat16().contiguous()


def _tokens(pages: Tensor) -> Tensor:
    """The KV that these pages hold, in float32."""
    return pages.permute(0, 4, 2, 1, 3, 5).flatten(3, 4).float()


def _nothing() -> None:
    """No-op; before each piece, a tier lets other work go first."""
