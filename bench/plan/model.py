"""`pdx plan` as values: engines to start, whether disaggregation helps, what prefill hides, and when to load KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import msgspec

from pdx.bench.plan.fleet import (
    Link,
    Service,
    Slo,
    Workload,
    disaggregated,
    mixed,
    transfer,
)
from pdx.bench.plan.machines import INF, Engine
from pdx.bench.plan.transfer import Crossover, load_s, loads_from
from pdx.bench.plan.units import show_time

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
MOST = 1024  # upper bound for engines of one kind
QUIET = 1e-9  # requests per second: so few that none waits for another


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the size of a deployment depends on."""

    engine: Engine
    work: Workload
    slo: Slo
    link: Link
    request_s: float

    def split(self, prefillers: int, decoders: int) -> Service:
        counts = {"prefillers": prefillers, "decoders": decoders}
        return disaggregated(self.engine, self.work, self.slo, self.link, **counts, request_s=self.request_s)

    def mixed(self, engines: int, chunk: int) -> Service:
        return mixed(self.engine, self.work, self.slo, engines=engines, chunk=chunk, request_s=self.request_s)

    def at_rate(self, rate: float) -> Case:
        return msgspec.structs.replace(self, work=msgspec.structs.replace(self.work, rate=rate))


def smallest_split(case: Case) -> Service | None:
    """The fewest prefillers that keep TTFT and the fewest decoders that keep ITL, which are independent."""
    prefillers = _fewest(lambda count: "prefill" not in _insufficient_roles(case.split(count, MOST)))
    decoders = _fewest(lambda count: "decode" not in _insufficient_roles(case.split(MOST, count)))
    return case.split(prefillers, decoders) if prefillers and decoders else None


def smallest_mixed(case: Case) -> Service | None:
    """The fewest engines over all chunk sizes; among equals, the service furthest within the SLO."""
    counts = {chunk: _fewest(partial(_is_kept, case, chunk)) for chunk in CHUNKS}
    found = [case.mixed(count, chunk) for chunk, count in counts.items() if count]
    return min(found, key=lambda service: (service.gpus, _strain(service, case.slo)), default=None)


def best_split(case: Case, engines: int) -> Service | None:
    """Of all splits of `engines` (from 200 on, a sample), the one closest to the SLO or furthest within it."""
    splits = range(1, engines, max(1, engines // 100))
    return _best((case.split(prefillers, engines - prefillers) for prefillers in splits), case.slo)


def best_mixed(case: Case, engines: int) -> Service | None:
    """The service of `engines` mixed engines with the best chunk size, by the same measure."""
    return _best((case.mixed(engines, chunk) for chunk in CHUNKS), case.slo)


def why_impossible(case: Case) -> list[str]:
    """Why no split keeps the SLO: what one prefiller and one decoder miss even with hardly any requests; else the
    load."""
    missed = _missed(case.at_rate(QUIET).split(1, 1))
    return missed or [f"{MOST:,} engines of a kind are too few for {case.work.rate:g} requests per second"]


def _missed(service: Service) -> list[str]:
    return [limit.text for limit in service.limits]


def _is_kept(case: Case, chunk: int, engines: int) -> bool:
    return case.mixed(engines, chunk).is_kept


def _insufficient_roles(service: Service) -> set[str]:
    """The kinds of engines that are too few."""
    return {limit.part for limit in service.limits}


def _fewest(is_enough: Callable[[int], bool]) -> int | None:
    """The smallest sufficient count up to MOST, if there is one; more engines must never be worse."""
    if not is_enough(MOST):
        return None
    low, high = 0, 1
    while not is_enough(high):
        low, high = high, min(MOST, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _best(services: Iterator[Service], slo: Slo) -> Service | None:
    known = [service for service in services if _strain(service, slo) < INF]
    return min(known, key=lambda service: _strain(service, slo), default=None)


def _strain(service: Service, slo: Slo) -> float:
    """The larger of TTFT and ITL relative to the SLO: at most 1 if the SLO is kept."""
    return max(service.ttft_high_s / slo.ttft_s, service.itl_high_s / slo.itl_s)


KIND = "pdx-plan"
VERSION = 1
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
ABOUT = 1.05  # ratios up to this count as equal


class Verdict(msgspec.Struct, frozen=True):
    """Whether to disaggregate."""

    helps: Literal["yes", "no", "even", "impossible"]
    headline: str
    reasons: list[str]


class Hiding(msgspec.Struct, frozen=True):
    """How much of one prompt's transfer hides behind prefill."""

    tokens: int
    share: float  # of the bytes, arrived when prefill ends
    exposed_s: float
    wire_s: float
    prefill_s: float


class Loading(msgspec.Struct, frozen=True):
    """Times to load and to compute a prompt of one length."""

    tokens: int
    prefill_s: float
    load_s: list[float]  # at each speed of `Plan.crossovers`


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `pdx plan` says. Infinite values are null in JSON."""

    kind: str = KIND
    version: int = VERSION
    case: Case
    hardware: str
    verdict: Verdict
    split: Service | None  # the smallest that keeps the SLO, or the one asked for
    mixed: Service | None
    same_split: Service | None  # the best with the same number of engines
    same_mixed: Service | None
    hiding: list[Hiding]
    crossovers: list[Crossover]
    loading: list[Loading]


def make(
    case: Case,
    *,
    hardware: str,
    links: Sequence[float],
    prefillers: int = 0,
    decoders: int = 0,
) -> Plan:
    """Make a plan. `links`: speeds (bytes/s) for loading KV. `prefillers`, `decoders`: judge these; 0: choose them."""
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
        hiding=[_hiding(case, tokens) for tokens in LENGTHS],
        crossovers=[Crossover(speed, loads_from(case.engine.prefill_s, token_bytes, speed)) for speed in links],
        loading=[
            Loading(tokens, case.engine.prefill_s(tokens), [load_s(tokens, token_bytes, speed) for speed in links])
            for tokens in LENGTHS
        ],
    )


def judge(
    case: Case, split: Service | None, mixed: Service | None, same_split: Service | None, same_mixed: Service | None
) -> Verdict:
    """Compare the deployments that keep the SLO by their GPUs, then by latency with equally many engines."""
    reasons = _remarks(case, same_split, same_mixed)
    if split and not split.is_kept:
        headline = f"No: {split.prefillers} prefill and {split.decoders} decode engines do not keep the SLO."
        return Verdict("no", headline, _missed(split) + reasons)
    if split is None and mixed is None:
        return Verdict("impossible", "Nothing keeps this SLO on this hardware.", why_impossible(case))
    if mixed is None:
        assert split is not None
        headline = f"Yes: {_gpus(split)} the SLO disaggregated; mixed engines do not, whatever their number."
        return Verdict("yes", headline, reasons)
    if split is None:
        headline = f"No: {_gpus(mixed)} the SLO without disaggregation; with it none do."
        return Verdict("no", headline, why_impossible(case))
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
        return Verdict("yes", f"Yes: {start}, and disaggregation shortens {_improvements(ttft, itl)}.", reasons)
    if ttft <= ABOUT and itl <= ABOUT:
        return Verdict("no", f"No: {start}, and disaggregation shortens nothing.", reasons)
    headline = f"It depends: {start}; disaggregation trades {'TTFT for ITL' if itl > ttft else 'ITL for TTFT'}."
    return Verdict("even", headline, reasons)


def _gpus(service: Service) -> str:
    return "1 GPU keeps" if service.gpus == 1 else f"{service.gpus} GPUs keep"


def _improvements(ttft: float, itl: float) -> str:
    parts = [f"{name} {ratio:.2f} times" for name, ratio in (("TTFT", ttft), ("ITL", itl)) if ratio > ABOUT]
    return " and ".join(parts)


def _remarks(case: Case, split: Service | None, mixed: Service | None) -> list[str]:
    """Explanations of the comparison, with numbers."""
    found = []
    if split and mixed:
        high = f"p{case.slo.share * 100:g}"
        found.append(
            f"with {split.prefillers + split.decoders} engines either way: TTFT {high} {show_time(split.ttft_high_s)} "
            f"disaggregated, {show_time(mixed.ttft_high_s)} mixed; ITL {high} {show_time(split.itl_high_s)} and "
            f"{show_time(mixed.itl_high_s)}; longest gap {show_time(split.longest_gap_s)}, once per request "
            f"at the handoff, and {show_time(mixed.longest_gap_s)} at every chunk of somebody's prompt"
        )
    prompt_s = case.engine.prefill_s(case.work.new_tokens)
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
    work, engine = case.work, case.engine
    if not work.reuse:
        return found
    saved_s = engine.prefill_s(work.input_tokens) - engine.prefill_s(work.new_tokens, work.reused_tokens)
    reused, load_s = work.reused_tokens, work.load_s(engine.kv_token_bytes)
    verb = "pays" if load_s < saved_s else "does not shorten TTFT"
    found.append(
        f"reuse {verb}: {reused:,} tokens load in {show_time(load_s)} and save {show_time(saved_s)} of prefill"
    )
    return found


def _hiding(case: Case, tokens: int) -> Hiding:
    kv_overlap = transfer(case.engine, case.link, tokens)
    return Hiding(tokens, kv_overlap.hidden_bytes_share, kv_overlap.exposed_s, kv_overlap.wire_s, kv_overlap.prefill_s)
