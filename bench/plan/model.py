"""`pdx plan` as values: what to start, whether disaggregation helps, what hides, when to load instead of computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pdx.bench.plan.engine import Engine
from pdx.bench.plan.fleet import Service, transfer
from pdx.bench.plan.size import (
    Case,
    best_mixed,
    best_split,
    most_rate,
    never,
    never_mixed,
    smallest_mixed,
    smallest_split,
)
from pdx.bench.plan.transfer import (
    LONGEST,
    Crossover,
    break_even_bytes_s,
    crossover,
    layered_load_s,
    load_s,
    perfect_buffer_bytes,
)
from pdx.bench.plan.units import show_bytes, show_time
from pdx.bench.plan.workload import Link

KIND = "pdx-plan"
VERSION = 1
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
RATES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # times the rate that was asked for
SPEEDS = (1 / 64, 1 / 32, 1 / 8, 1.0)  # times the link's
ABOUT = 1.05  # ratios below this are no difference


class Verdict(msgspec.Struct, frozen=True):
    """Whether to disaggregate."""

    helps: Literal["yes", "no", "even", "impossible"]
    headline: str
    reasons: list[str]


class Hiding(msgspec.Struct, frozen=True):
    """What hides of one prompt's transfer at one speed of the wire."""

    tokens: int
    wire_bytes_s: float
    share: float  # of the bytes, those that are there when prefill ends
    exposed_s: float
    wire_s: float
    prefill_s: float


class Loading(msgspec.Struct, frozen=True):
    """Load or compute: one prompt length. `break_even_bytes_s`: None where the latency of a load alone is longer."""

    tokens: int
    prefill_s: float
    load_s: list[float]  # at each speed of `Plan.crossovers`
    break_even_bytes_s: float | None


class RatePoint(msgspec.Struct, frozen=True):
    """GPUs that keep the SLO; None: no number does."""

    rate: float
    split_gpus: int | None
    mixed_gpus: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `pdx plan` says. Infinite values are null in JSON."""

    kind: str = KIND
    version: int = VERSION
    case: Case
    hardware: str
    verdict: Verdict
    split: Service | None  # the smallest that keeps the SLO, or the one that was asked for
    mixed: Service | None
    same_split: Service | None  # the best of the same number of engines
    same_mixed: Service | None
    split_rate: float | None  # the highest that `split` serves within the SLO
    hiding: list[Hiding]
    crossovers: list[Crossover]
    loading: list[Loading]
    curve: list[RatePoint]


def make(
    case: Case,
    *,
    hardware: str,
    links: Sequence[float],
    prefillers: int = 0,
    decoders: int = 0,
    with_curve: bool = True,
) -> Plan:
    """`links`: speeds (bytes/s) at which KV might be loaded. `prefillers`, `decoders`: judge these, do not choose."""
    fixed = case.split(prefillers, decoders) if prefillers and decoders else None
    split, mixed = fixed or smallest_split(case), smallest_mixed(case)
    chosen = fixed or min((found for found in (split, mixed) if found), key=lambda found: found.gpus, default=None)
    engines = max(2, chosen.prefillers + chosen.decoders) if chosen else 0
    same_split = fixed or (best_split(case, engines) if engines else None)
    same_mixed = best_mixed(case, engines) if engines else None
    token_bytes = case.engine.kv_token_bytes
    return Plan(
        case=case,
        hardware=hardware,
        verdict=judge(case, split, mixed, same_split, same_mixed),
        split=split,
        mixed=mixed,
        same_split=same_split,
        same_mixed=same_mixed,
        split_rate=_most_rate(case, split) if split else None,
        hiding=[_hiding(case, tokens, speed) for speed in SPEEDS for tokens in LENGTHS],
        crossovers=[crossover(case.engine.prefill_s, token_bytes, speed) for speed in links],
        loading=[_loading(case.engine, tokens, links) for tokens in LENGTHS if tokens <= LONGEST],
        curve=[_rate_point(case.at(case.work.rate * times)) for times in RATES] if with_curve else [],
    )


def judge(
    case: Case, split: Service | None, mixed: Service | None, same_split: Service | None, same_mixed: Service | None
) -> Verdict:
    """Compare what keeps the SLO, first by its GPUs, then by the latency of as many engines of either kind."""
    reasons = _remarks(case, same_split, same_mixed)
    if split and not split.is_kept:
        headline = f"No: {split.prefillers} prefill and {split.decoders} decode engines do not keep the SLO."
        return Verdict("no", headline, [limit.text for limit in split.limits] + reasons)
    if split is None and mixed is None:
        return Verdict("impossible", "Nothing keeps this SLO on this hardware.", never(case))
    if mixed is None:
        assert split is not None
        headline = f"Yes: {_gpus(split)} the SLO disaggregated; mixed engines do not, whatever their number."
        return Verdict("yes", headline, [never_mixed(case), *reasons])
    if split is None:
        headline = f"No: {_gpus(mixed)} the SLO without disaggregation; with it none do."
        return Verdict("no", headline, never(case))
    if split.gpus != mixed.gpus:
        return _by_size(split, mixed, reasons)
    return _by_latency(split, same_split or split, same_mixed or mixed, reasons)


def _by_size(split: Service, mixed: Service, reasons: list[str]) -> Verdict:
    if split.gpus < mixed.gpus:
        headline = f"Yes: {_gpus(split)} the SLO instead of {mixed.gpus} with mixed engines."
        return Verdict("yes", headline, reasons)
    headline = f"No: {_gpus(mixed)} the SLO without disaggregation, {split.gpus} with it."
    if mixed.prefillers == 1:
        reasons.insert(0, "the load is low: one engine carries it, and two roles need at least two")
    return Verdict("no", headline, reasons)


def _by_latency(split: Service, same_split: Service, same_mixed: Service, reasons: list[str]) -> Verdict:
    ttft, itl = same_mixed.ttft_high_s / same_split.ttft_high_s, same_mixed.itl_high_s / same_split.itl_high_s
    start = f"the same {split.gpus} GPUs keep the SLO either way"
    if ttft >= 1 / ABOUT and itl >= 1 / ABOUT and max(ttft, itl) > ABOUT:
        return Verdict("yes", f"Yes: {start}, and disaggregation shortens {_what(ttft, itl)}.", reasons)
    if ttft <= ABOUT and itl <= ABOUT:
        return Verdict("no", f"No: {start}, and disaggregation shortens nothing.", reasons)
    headline = f"It depends: {start}; disaggregation trades {'TTFT for ITL' if itl > ttft else 'ITL for TTFT'}."
    return Verdict("even", headline, reasons)


def _gpus(service: Service) -> str:
    return "1 GPU keeps" if service.gpus == 1 else f"{service.gpus} GPUs keep"


def _what(ttft: float, itl: float) -> str:
    parts = [f"{name} {ratio:.2f} times" for name, ratio in (("TTFT", ttft), ("ITL", itl)) if ratio > ABOUT]
    return " and ".join(parts)


def _remarks(case: Case, split: Service | None, mixed: Service | None) -> list[str]:
    """What explains the comparison, with numbers."""
    found = []
    if split and mixed:
        high = f"p{case.slo.share * 100:g}"
        found.append(
            f"with {split.prefillers + split.decoders} engines either way: TTFT {high} {show_time(split.ttft_high_s)} "
            f"disaggregated, {show_time(mixed.ttft_high_s)} mixed; ITL {high} {show_time(split.itl_high_s)} and "
            f"{show_time(mixed.itl_high_s)}; longest gap {show_time(split.longest_gap_s)}, once per request "
            f"at the handoff, and {show_time(mixed.longest_gap_s)} at every chunk of somebody's prompt"
        )
    prompt_s = case.engine.prefill_s(case.work.input_tokens - case.work.reused(case.work.input_tokens))
    if prompt_s < case.slo.itl_s:
        found.append(
            f"prompts are short: one is computed in {show_time(prompt_s)}, within the {show_time(case.slo.itl_s)} that "
            "may pass between two tokens, so there is hardly any interference to avoid"
        )
    if split and split.overlap and split.overlap.is_wire_bound:
        found.append(
            f"the link is slower than prefill: {show_time(split.overlap.wire_s)} of wire against "
            f"{show_time(split.overlap.prefill_s)}, so {show_time(split.overlap.exposed_s)} cannot hide"
        )
    if case.work.reuse:
        found += _reuse_remark(case)
    return found


def _reuse_remark(case: Case) -> list[str]:
    work, engine = case.work, case.engine
    reused = work.reused(work.input_tokens)
    saved_s = engine.prefill_s(work.input_tokens) - engine.prefill_s(work.input_tokens - reused, reused)
    load_s = work.load_s(work.input_tokens, engine.kv_token_bytes)
    verb = "pays" if load_s < saved_s else "does not shorten TTFT"
    rest_s = engine.prefill_s(work.input_tokens - reused, reused)
    layered_s = layered_load_s(load_s, rest_s, engine.shapes.layers)
    buffer = perfect_buffer_bytes(load_s, rest_s, work.reuse_bytes_s)
    ahead = f", or nothing with {show_bytes(buffer)} read ahead" if buffer else ""
    return [
        f"reuse {verb}: {reused:,} tokens load in {show_time(load_s)} and save {show_time(saved_s)} of prefill; layer "
        f"by layer, beside the prefill of the rest, a load would cost {show_time(layered_s - rest_s)}{ahead}"
    ]


def _most_rate(case: Case, split: Service) -> float:
    return most_rate(case, lambda other: other.split(split.prefillers, split.decoders).is_kept)


def _hiding(case: Case, tokens: int, times: float) -> Hiding:
    link = case.link
    faster = Link(
        wire_bytes_s=link.wire_bytes_s * times,
        scatter_bytes_s=link.scatter_bytes_s,
        control_s=link.control_s,
        latency_s=link.latency_s,
    )
    work = msgspec.structs.replace(case.work, reuse=0.0)
    way = transfer(case.engine, faster, work, tokens)
    return Hiding(tokens, faster.wire_bytes_s, way.hidden_bytes_share, way.exposed_s, way.wire_s, way.prefill_s)


def _loading(engine: Engine, tokens: int, links: Sequence[float]) -> Loading:
    loads = [load_s(tokens, engine.kv_token_bytes, speed) for speed in links]
    even = break_even_bytes_s(engine.prefill_s, engine.kv_token_bytes, tokens)
    return Loading(tokens, engine.prefill_s(tokens), loads, None if even == float("inf") else even)


def _rate_point(case: Case) -> RatePoint:
    split, mixed = smallest_split(case), smallest_mixed(case)
    return RatePoint(case.work.rate, split.gpus if split else None, mixed.gpus if mixed else None)
