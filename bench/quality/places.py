"""KV at positions other than where it was computed: of a history that was cut, and of documents computed apart.

The cut takes the first half of a context except its first tokens, which attention may rest on (sinks; Xiao et al.,
https://arxiv.org/abs/2309.17453). The documents of a context are its quarters, each computed as a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pdx.bench.quality.model import Model
from pdx.bench.quality.texts import Sample
from pdx.blend.layers import blended, most
from pdx.blend.pages import turned

SINK_TOKENS = 16  # one block of an engine on a GPU
DOCUMENTS = 4


def tokens_after_cut(sample: Sample, sink_tokens: int) -> list[int]:
    """The tokens of the context that a cut leaves."""
    return sample.context[:sink_tokens] + sample.context[len(sample.context) // 2 :]


def recomputed(sink_tokens: int) -> Callable[[Model, Sample], Tensor]:
    """Exact KV of the tokens that a cut leaves."""
    return lambda model, sample: model.kv(tokens_after_cut(sample, sink_tokens))


def moved(model: Model, sample: Sample, _exact: Tensor, *, sink_tokens: int, is_turned: bool = True) -> Tensor:
    """KV of the whole context without the part that is cut. Keys after it are turned to their new positions."""
    kv, cut = model.kv(sample.context), len(sample.context) // 2
    rest = kv[:, :, :, cut:]
    if is_turned:
        rest = turned(rest, model.rope, sink_tokens - cut)
    return torch.cat([kv[:, :, :, :sink_tokens], rest], dim=3)


def apart(model: Model, sample: Sample, _exact: Tensor) -> Tensor:
    """KV of documents computed alone, with keys turned to each document's place."""
    size = len(sample.context) // DOCUMENTS
    firsts = range(0, len(sample.context), size)
    return torch.cat([turned(model.kv(sample.context[at : at + size]), model.rope, at) for at in firsts], dim=3)


def blend(model: Model, sample: Sample, exact: Tensor, *, share: float, is_random: bool = False) -> Tensor:
    """KV of documents computed apart, with a share of the tokens recomputed."""
    known = len(sample.context) // DOCUMENTS
    select = partial(_random_tokens, torch.Generator().manual_seed(0)) if is_random else most
    return blended(model.causal, sample.context, apart(model, sample, exact), share, known=known, select=select)


def _random_tokens(draw: torch.Generator, deviations: Tensor, count: int) -> Tensor:
    """Indices of `count` random tokens, whatever their keys."""
    found = torch.flatten((deviations >= 0).nonzero())
    return found[torch.randperm(len(found), generator=draw)[:count]]
