"""What each kind of KV changes in the tokens that follow, sample by sample, and figures over all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from pdx.bench.harness.report import Figure, at_least, at_most, plain
from pdx.bench.quality.kinds import APART, Exact, Kind
from pdx.bench.quality.model import Model
from pdx.bench.quality.texts import Sample

RECOVERED: dict[str, Callable[..., Figure]] = {
    "blended": partial(at_least, bound=0.6),
    "blended-at-random": partial(at_most, bound=0.25),
    "blended-whole": partial(at_least, bound=0.99),
}
RESAMPLES = 4000  # of a confidence interval


@dataclass(frozen=True, slots=True)
class Row:
    """One sample with one kind. `loss`: nats per following token, whose exponential is the perplexity;
    `divergence`: the Kullback-Leibler divergence of exact KV from this kind, nats per token; `agreement`: share of
    positions with the same most likely token."""

    kind: str
    text: str
    context_tokens: int
    exact_loss: float
    loss: float
    divergence: float
    agreement: float


def judge(model: Model, sample: Sample, kinds: Mapping[str, Kind]) -> Iterator[Row]:
    """One row for each kind."""
    right = torch.tensor(sample.following[1:])[:, None]

    def loss(scores: Tensor) -> float:
        return -float(scores.gather(1, right).mean())

    known: dict[Exact, tuple[Tensor, Tensor]] = {}
    for name, kind in kinds.items():
        if kind.exact not in known:
            kv = kind.exact(model, sample)
            known[kind.exact] = kv, model.scores(kv, sample.following)
        kv, exact = known[kind.exact]
        made = model.scores(kind.make(model, sample, kv), sample.following)
        divergence = float((exact.exp() * (exact - made)).sum(-1).mean())
        agreement = float((exact.argmax(-1) == made.argmax(-1)).float().mean())
        yield Row(name, sample.name, len(sample.context), loss(exact), loss(made), divergence, agreement)


def figures(rows: Sequence[Row], kinds: Mapping[str, Kind]) -> Iterator[Figure]:
    """Means over samples with 95 % intervals. A promise is met if the worse end of the interval meets it."""
    yield from recovered(rows)
    for name, kind in kinds.items():
        mine = [row for row in rows if row.kind == name]
        if not mine:
            continue
        promise = kind.promise
        ratio = _interval([row.loss - row.exact_loss for row in mine])
        yield _figure(f"{name}: perplexity, exact = 1", map(math.exp, ratio), promise and promise.perplexity)
        divergence = _interval([1000 * row.divergence for row in mine])
        yield _figure(f"{name}: divergence, nats in 1,000 tokens", divergence, promise and promise.divergence)
        agreement = _interval([row.agreement for row in mine])
        yield _figure(f"{name}: same most likely token", agreement, promise and promise.agreement, is_least=True)


def recovered(rows: Sequence[Row]) -> Iterator[Figure]:
    """For each blended kind, the share that it recovers of the loss, in nats, of documents computed apart."""
    lost = {row.text: row.loss - row.exact_loss for row in rows if row.kind == APART}
    for name in {row.kind: None for row in rows} if lost else ():
        if name.startswith("blended"):
            pairs = [(lost[row.text], row.loss - row.exact_loss) for row in rows if row.kind == name]
            value, low, high = _interval(pairs, lambda drawn: 1 - drawn[..., 1].sum(-1) / drawn[..., 0].sum(-1))
            figure = RECOVERED.get(name, plain)
            yield figure(f"{name}: of the loss recovered", value, "", note=_range(low, high))


def _interval(samples: Sequence[Any], of: Callable[[Any], Any] = lambda drawn: drawn.mean(-1)) -> list[float]:
    """A statistic of the samples, by default their mean, and both ends of its interval by resampling (bootstrap)."""
    known = numpy.array(samples)
    drawn = of(numpy.random.default_rng(0).choice(known, (RESAMPLES, len(known))))
    return [float(of(known)), *map(float, numpy.quantile(drawn, (0.025, 0.975)))]


def _range(low: float, high: float) -> str:
    return f"95 %: {low:.4g} to {high:.4g}"


def _figure(name: str, interval: Iterable[float], bound: float | None, *, is_least: bool = False) -> Figure:
    value, low, high = interval
    note = _range(low, high)
    if bound is None:
        return Figure(name, round(value, 5), "", note=note)
    is_met = low >= bound if is_least else high <= bound
    return Figure(name, round(value, 5), "", f"{'≥' if is_least else '≤'} {bound:g}", is_met, note)
