"""The smallest deployment that keeps the SLO, the best one of a given size, and why there is none. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from pdx.bench.plan.engine import INF, Engine
from pdx.bench.plan.fleet import (
    MixedSteps,
    Service,
    disaggregated,
    max_batch,
    mixed,
    prefill_line,
)
from pdx.bench.plan.units import show_bytes, show_time
from pdx.bench.plan.workload import Link, Slo, Workload

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
MOST = 1024  # engines of one kind


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """All that a deployment's size depends on."""

    engine: Engine
    work: Workload
    slo: Slo
    link: Link
    request_s: float

    def split(self, prefillers: int, decoders: int) -> Service:
        """Disaggregated."""
        counts = {"prefillers": prefillers, "decoders": decoders}
        return disaggregated(self.engine, self.work, self.slo, self.link, **counts, request_s=self.request_s)

    def mixed(self, engines: int, chunk: int) -> Service:
        """Not disaggregated."""
        return mixed(self.engine, self.work, self.slo, engines=engines, chunk=chunk, request_s=self.request_s)

    def at(self, rate: float) -> Case:
        """The same with another rate."""
        return msgspec.structs.replace(self, work=msgspec.structs.replace(self.work, rate=rate))


def smallest_split(case: Case) -> Service | None:
    """The fewest prefillers that keep TTFT and the fewest decoders that keep ITL: neither depends on the other."""
    prefillers = _fewest(lambda count: "prefill" not in _short(case.split(count, MOST)))
    decoders = _fewest(lambda count: "decode" not in _short(case.split(MOST, count)))
    return case.split(prefillers, decoders) if prefillers and decoders else None


def smallest_mixed(case: Case) -> Service | None:
    """The fewest engines, with the chunk size that needs the fewest; of those, the one furthest within the SLO."""
    found = []
    for chunk in CHUNKS:
        count = _fewest(partial(_is_kept, case, chunk))
        if count:
            found.append(case.mixed(count, chunk))
    return min(found, key=lambda service: (service.gpus, _strain(service, case.slo)), default=None)


def best_split(case: Case, engines: int) -> Service | None:
    """Of all splits of so many engines, the one that comes closest to the SLO or is furthest within it."""
    splits = (case.split(prefillers, engines - prefillers) for prefillers in _splits(engines))
    return _best(splits, case.slo)


def best_mixed(case: Case, engines: int) -> Service | None:
    """The same of all chunk sizes."""
    return _best((case.mixed(engines, chunk) for chunk in CHUNKS), case.slo)


def most_rate(case: Case, serves: Callable[[Case], bool]) -> float:
    """The highest rate that a deployment still serves (requests per second); 0 where it serves none."""
    low, high = 0.0, 1e-3
    while serves(case.at(high)) and high < 1e6:
        low, high = high, high * 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if serves(case.at(middle)) else (low, middle)
    return low


def never(case: Case) -> list[str]:
    """Why no number of prefillers and decoders keeps the SLO; empty: some number does."""
    engine, work, slo = case.engine, case.work, case.slo
    found = []
    quiet = case.at(1e-9)
    alone = quiet.split(1, 1)
    line = prefill_line(engine, quiet.work, 1)
    if alone.ttft_high_s > slo.ttft_s:
        found.append(
            f"TTFT: without any queue a prompt takes {show_time(alone.ttft_high_s)} at p{slo.share * 100:g}, "
            f"{show_time(line.service_s)} of it prefill on average; the SLO is {show_time(slo.ttft_s)}. "
            "Faster or more GPUs per engine (--tp), or reuse (--reuse), would help; more engines would not"
        )
    step_s = engine.step_s(1, work.context)
    if step_s > slo.itl_s:
        read = engine.shapes.touched_params(1) * engine.shapes.weight_bytes
        found.append(
            f"ITL: one request alone takes {show_time(step_s)} per token, because each step reads {show_bytes(read)} "
            f"of weights; the SLO is {show_time(slo.itl_s)}. More GPUs per engine (--tp) or smaller weights would help"
        )
    elif alone.itl_high_s > slo.itl_s:
        found.append(
            f"ITL: with {work.output_tokens} tokens of output the handoff is one of too few gaps between tokens to be "
            f"left out of p{slo.share * 100:g}: {show_time(alone.itl_high_s)}; the SLO is {show_time(slo.itl_s)}"
        )
    if max_batch(engine, work) < 1:
        found.append("memory: the KV of one request does not fit beside the weights")
    return found


def never_mixed(case: Case) -> str:
    """What keeps mixed engines from the SLO at any number."""
    work, slo, engine = case.work, case.slo, case.engine
    quiet = case.at(1e-9)
    fitting = []
    for chunk in CHUNKS:
        step_s = MixedSteps(engine, work, 0.0, chunk).at(1).with_chunk_s
        ttft_s = quiet.mixed(1, chunk).ttft_high_s
        fitting.append((chunk, step_s, ttft_s))
    chunk, step_s, ttft_s = min(fitting, key=lambda row: max(row[1] / slo.itl_s, row[2] / slo.ttft_s))
    return (
        f"on mixed engines prompts interrupt decoding: the best chunk size, {chunk:,} tokens, makes a step "
        f"{show_time(step_s)} long and a lone prompt's TTFT {show_time(ttft_s)}"
    )


def _is_kept(case: Case, chunk: int, engines: int) -> bool:
    return case.mixed(engines, chunk).is_kept


def _short(service: Service) -> set[str]:
    """The kinds of engines of which there are too few."""
    return {limit.part for limit in service.limits}


def _fewest(is_enough: Callable[[int], bool]) -> int | None:
    """The smallest count up to MOST; more is never worse."""
    if not is_enough(MOST):
        return None
    low, high = 0, 1
    while not is_enough(high):
        low, high = high, min(MOST, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _splits(engines: int) -> Iterator[int]:
    """All, or so many that they are a percent apart."""
    step = max(1, engines // 100)
    yield from range(1, engines, step)


def _best(services: Iterator[Service], slo: Slo) -> Service | None:
    known = [service for service in services if _strain(service, slo) < INF]
    return min(known, key=lambda service: _strain(service, slo), default=None)


def _strain(service: Service, slo: Slo) -> float:
    """At most 1 where the SLO is kept."""
    return max(service.ttft_high_s / slo.ttft_s, service.itl_high_s / slo.itl_s)
