"""Figures of a run: throughput at equal TTFT, hits by source, and times. Arithmetic only.

Ratios are taken within a repeat, because the speed of a shared machine drifts; their median over repeats is reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy

from pdx.bench.harness.report import Figure, at_least, plain
from pdx.bench.reuse.records import ALONE, BURST, FIRST, KNOWN, Point, Result
from pdx.bench.reuse.systems import SOURCES, Source
from pdx.bench.reuse.workload import load_title

ORACLE = "recompute"  # the system whose answers are right; all others are compared with it if it is measured
OURS = ("pdx-both", "pdx-both-128", "pdx-both-disk", "pdx-central", "pdx-central-128")
BEST_OWN = "own-cache"
PERCENTILES = (50, 90)
BOTH_HELD = "of the highest loads: both held the target"
NEARLY = 0.9  # of the tokens that could be found


@dataclass(frozen=True, slots=True)
class Reached:
    """Requests per second within a target. `is_least`: the target held at the highest load that was measured."""

    per_s: float
    is_least: bool


def reached(curve: Sequence[tuple[float, float]], target_ms: float) -> Reached | None:
    """Requests per second within the target, from (requests per second, ms) by rising load; None: the first one misses.

    The first load that misses the target ends the search; between it and the load before, times are assumed to grow
    exponentially. A higher load that answers fewer requests does not lower the result.
    """
    met: tuple[float, float] | None = None
    for per_s, ms in curve:
        if ms <= target_ms:
            met = (per_s if met is None else max(per_s, met[0]), ms)
            continue
        if met is None:
            return None
        share = math.log(target_ms / met[1]) / math.log(ms / met[1])
        return Reached(met[0] + share * max(0.0, per_s - met[0]), is_least=False)
    return None if met is None else Reached(met[0], is_least=True)


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` percent do not exceed, interpolated linearly; 0 without values."""
    return float(numpy.percentile(list(values) or [0.0], share))


def ttft(point: Point, share: float) -> float:
    """Milliseconds to the first token that `share` percent of the requests do not exceed."""
    return percentile((each.ttft_ms for each in point.asked), share)


def itl(point: Point, share: float) -> float:
    """Milliseconds between two tokens of a request that `share` percent of all gaps do not exceed."""
    return percentile((gap for each in point.asked for gap in each.itl_ms), share)


def curve(result: Result, system: str, workload: str, repeat: int, share: float) -> list[tuple[float, float]]:
    """(answered requests per second, TTFT in ms) of each load except `ALONE`, by rising load."""
    points = [
        point
        for point in result.points
        if (point.system, point.workload, point.repeat) == (system, workload, repeat) and point.load not in ALONE
    ]
    points.sort(key=lambda point: math.inf if point.rate is None else point.rate)
    return [(point.requests_per_s, ttft(point, share)) for point in points]


def targets_ms(result: Result, workload: str, repeat: int) -> list[tuple[float, float]]:
    """(times, ms) of each target: this multiple of the median TTFT of a new prompt by itself.

    It is the TTFT of the reference, because other systems may spend time on saving KV.
    """
    base = [p for p in result.points if _matches(p, reference(result.points), workload, FIRST) and p.repeat == repeat]
    alone_ms = percentile((each.ttft_ms for point in base for each in point.asked if each.turn == 0), 50)
    return [(times, times * alone_ms) for times in result.settings["targets"]] if base else []


def reference(points: Sequence[Point]) -> str:
    """The system whose answers all others are compared with: the one that computes everything, else the first one."""
    measured = dict.fromkeys(point.system for point in points)
    return ORACLE if ORACLE in measured or not measured else next(iter(measured))


def figures(result: Result) -> list[Figure]:
    found: list[Figure] = []
    for workload in result.settings["workloads"]:
        found += [*_at_targets(result, workload), *_times(result, workload), *_sources(result, workload)]
    return [*found, *_checks(result)]


def systems_of(result: Result) -> list[str]:
    """The systems with measurements, in the order of the result."""
    measured = {point.system for point in result.points}
    return [name for name in result.systems if name in measured]


def repeats_of(result: Result) -> list[int]:
    return sorted({point.repeat for point in result.points})


def _at_targets(result: Result, workload: str) -> Iterator[Figure]:
    """Requests per second at equal TTFT, and ratios of PDX's systems to their rivals. Notes count the repeats in which
    a target was missed, because the median of the others alone looks too good."""
    for index, times in enumerate(result.settings["targets"]):
        for share in PERCENTILES:
            name = f"{workload}, TTFT p{share} within {times:g} × computing alone"
            reach: dict[str, dict[int, Reached | None]] = {}
            for system in systems_of(result):
                for repeat in repeats_of(result):
                    targets = targets_ms(result, workload, repeat)
                    points = curve(result, system, workload, repeat, share)
                    if targets and points:
                        reach.setdefault(system, {})[repeat] = reached(points, targets[index][1])
            for system, each in reach.items():
                met = [one for one in each.values() if one is not None]
                values = [one.per_s for one in met]
                least = "at least: " if any(one.is_least for one in met) else ""
                notes = [f"{least}{_spread(values)}"] if met else []
                if len(met) < len(each):
                    notes.append(f"not even at the lowest load in {len(each) - len(met)} of {len(each)} repeats")
                yield plain(f"{name}: {system}", statistics.median(values or [0.0]), "requests/s", "; ".join(notes))
            for ours in OURS:
                for other in reach:
                    if ours in reach and _is_rival(ours, other):
                        yield from _reach_ratio(f"{name}: {ours} / {other}", ours, reach[ours], other, reach[other])


def _reach_ratio(
    name: str, ours: str, above: dict[int, Reached | None], other: str, below: dict[int, Reached | None]
) -> Iterator[Figure]:
    """Over the repeats in which both met the target. A system that held it at the highest load may reach more."""
    pairs = {at: (above[at], below[at]) for at in sorted(above.keys() & below.keys())}
    met = {at: (one, two) for at, (one, two) in pairs.items() if one is not None and two is not None}
    is_least = any(one.is_least for one, _ in met.values()), any(two.is_least for _, two in met.values())
    bound = {(True, False): "at least", (False, True): "at most", (True, True): BOTH_HELD}.get(is_least)
    notes = [bound] if bound else []
    for side, system in enumerate((ours, other)):
        if missed := sum(pair[side] is None for pair in pairs.values()):
            notes.append(f"without {missed} repeats in which {system} missed the target")
    yield from _ratio(
        name,
        {at: one.per_s for at, (one, _) in met.items()},
        {at: two.per_s for at, (_, two) in met.items()},
        notes=notes,
    )


def _times(result: Result, workload: str) -> Iterator[Figure]:
    for system in systems_of(result):
        for load in dict.fromkeys(p.load for p in result.points if (p.system, p.workload) == (system, workload)):
            points = [point for point in result.points if _matches(point, system, workload, load)]
            head = f"{workload}, {system}, {load_title(load)}"
            per_s = [point.requests_per_s for point in points]
            yield plain(f"{head}: answered", statistics.median(per_s), "requests/s", _spread(per_s))
            for name, of in (("TTFT", ttft), ("ITL", itl)):
                for share in (50, 90, 99):
                    values = [of(point, share) for point in points]
                    yield plain(f"{head}: {name} p{share}", statistics.median(values), "ms", _spread(values))
    for ours in OURS:
        for other in systems_of(result):
            if _is_rival(ours, other):
                ratios = [
                    _by_repeat(result, each, workload, BURST, lambda p: p.requests_per_s) for each in (ours, other)
                ]
                yield from _ratio(f"{workload}, all at once: answered per second, {ours} / {other}", *ratios)
                times = [_by_repeat(result, each, workload, KNOWN, lambda p: ttft(p, 50)) for each in (other, ours)]
                yield from _ratio(f"{workload}, {load_title(KNOWN)}: TTFT p50, {other} / {ours}", *times)


def _sources(result: Result, workload: str) -> Iterator[Figure]:
    for system in systems_of(result):
        points = [p for p in result.points if (p.system, p.workload) == (system, workload) and p.load not in ALONE]
        if not points:
            continue
        prompt = sum(point.found.prompt for point in points)
        for source in ("local", "external", "computed"):
            share = sum(getattr(point.found, source) for point in points) / prompt
            yield plain(f"{workload}, {system}: tokens of prompts {SHARES[source]}", share, "")


SHARES = {"local": "in its own cache", "external": "by what keeps KV", "computed": "computed"}


def _checks(result: Result) -> Iterator[Figure]:
    same = [each.is_same for point in result.points for each in point.asked if each.is_same is not None]
    if same:
        yield at_least(
            "answers that are those of the reference", sum(same) / len(same), "", 1.0, f"{sum(same)} of {len(same)}"
        )
    passed = [found_as_expected(result, point) for point in result.points if point.load != FIRST]
    if passed:
        note = f"{sum(passed)} of {len(passed)}"
        yield at_least("loads whose tokens were found where they should be", sum(passed) / len(passed), "", 1.0, note)


def found_as_expected(result: Result, point: Point) -> bool:
    """Whether tokens were found where the system should have them, and nearly all known ones if it can hold them."""
    local, external = point.found.local, point.found.external
    source = SOURCES[point.system]
    if source is Source.NOWHERE:
        return local == external == 0
    if source is Source.OWN:
        return external == 0 and (point.system != BEST_OWN or local >= NEARLY * known_tokens(result, point))
    return external > 0 and local + external >= NEARLY * known_tokens(result, point)


def known_tokens(result: Result, point: Point) -> float:
    """Tokens of all prompts that were seen before, in whole blocks."""
    block = int(result.model["block_tokens"])
    if point.workload == "documents":
        return len(point.asked) * (int(result.settings["tokens"]) // block * block)
    # The session's previous prompt; the answer to it does not count, because it may not be stored yet.
    before = {(each.session, each.turn + 1): each.prompt_tokens for each in point.asked}
    return sum(before.get((each.session, each.turn), 0) // block * block for each in point.asked)


def _is_rival(ours: str, other: str) -> bool:
    """Whether to compare the two: systems with a store for all hosts with each other, systems without likewise, and all
    with `ORACLE` and `BEST_OWN`, the bounds on both sides. PDX's systems are not compared with each other."""
    if other in OURS:
        return False
    return other in (ORACLE, BEST_OWN) or ("central" in ours) == ("central" in other)


def _matches(point: Point, system: str, workload: str, load: str) -> bool:
    return (point.system, point.workload, point.load) == (system, workload, load)


def _by_repeat(result: Result, system: str, workload: str, load: str, of: Callable[[Point], float]) -> dict[int, float]:
    return {point.repeat: of(point) for point in result.points if _matches(point, system, workload, load)}


def _ratio(
    name: str, above: dict[int, float], below: dict[int, float], *, notes: Sequence[str] = ()
) -> Iterator[Figure]:
    ratios = [above[repeat] / below[repeat] for repeat in sorted(above.keys() & below.keys())]
    if ratios:
        yield plain(
            name, statistics.median(ratios), "×", "; ".join((f"median of {len(ratios)}", _spread(ratios), *notes))
        )


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):,.2f} to {max(values):,.2f}"
