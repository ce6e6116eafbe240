"""What it is worth that an engine, or something beside it, has seen a prompt before: figures and a table.

Of a `records.Result`; arithmetic only. Times are to the first token at the client. Ratios are taken inside a round,
request by request, and given as the median over rounds, because the speed of a shared machine drifts. Requests whose
tokens were not found where their kind says are counted, and are in no other figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping

from rich.table import Table

from pdx.bench.breakdown.records import Again, Kind, Result
from pdx.bench.harness.report import Figure, at_least, plain

OURS = "pdx-both"
ALONE = "plain"
TITLES = {
    Kind.COLD: "TTFT, nobody has seen the prompt",
    Kind.OWN: "TTFT, its own prefix cache has the prompt",
    Kind.HIT: "TTFT, what it keeps has the document",
    Kind.LOST: "TTFT, nothing has the document any more",
}

Times = dict[int, float]  # ms by round


def figures(result: Result) -> list[Figure]:
    """All of them, shorter prompts first; none without a system that keeps something."""
    found = []
    for tokens in sorted({each.prompt_tokens for each in result.again}):
        times = _times(each for each in result.again if each.prompt_tokens == tokens)
        found += [*_own(result, tokens, times), *_gains(tokens, times), *_between(tokens, times)]
    return [*found, *_checks(result)]


def table(result: Result) -> Table:
    """The same medians, a row for each system and length."""
    shown = Table(title="prompts that were seen before, ms to the first token", title_justify="left")
    for name in ("tokens", "system", "requests", "cold", "own\ncache", "hit", "tokens of it\nfound", "cold /\nhit"):
        shown.add_column(name, justify="left" if name == "system" else "right")
    for tokens in sorted({each.prompt_tokens for each in result.again}):
        times = _times(each for each in result.again if each.prompt_tokens == tokens)
        for system in _systems(result):
            kinds = {kind: times.get((system, kind), {}) for kind in Kind}
            last = kinds[Kind.HIT] or kinds[Kind.LOST]
            hits = [each.found for each in result.again if _is(each, system, tokens, (Kind.HIT, Kind.LOST))]
            ratios = _ratios(kinds[Kind.COLD], last)
            shown.add_row(
                *(f"{tokens:,}", system, str(len(last))),
                *(_number(each.values()) for each in (kinds[Kind.COLD], kinds[Kind.OWN], last)),
                f"{statistics.median(found.external for found in hits):,.0f}" if hits else "-",
                f"{statistics.median(ratios):.1f}" if ratios else "-",
            )
    return shown


def _own(result: Result, tokens: int, times: Mapping[tuple[str, Kind], Times]) -> Iterator[Figure]:
    """What each system was measured to do."""
    for system in _systems(result):
        for kind in Kind:
            values = times.get((system, kind), {}).values()
            if values:
                yield plain(
                    f"{_head(tokens)} {system}: {TITLES[kind]}", statistics.median(values), "ms", _spread(values)
                )
        hits = [each.found.external for each in result.again if _is(each, system, tokens, (Kind.HIT,))]
        if hits:
            name = f"{_head(tokens)} {system}: tokens found by what it keeps"
            yield plain(name, statistics.median(hits), "", f"{min(hits):,.0f} to {max(hits):,.0f}")


def _gains(tokens: int, times: Mapping[tuple[str, Kind], Times]) -> Iterator[Figure]:
    """Of each system: how many times shorter a hit is than a cold prompt, and how much longer than its own cache."""
    for system, kind in times:
        if kind is Kind.HIT:
            hits = times[system, kind]
            cold, own = times.get((system, Kind.COLD), {}), times.get((system, Kind.OWN), {})
            yield from _ratio(f"{_head(tokens)} {system}: cold / hit", _ratios(cold, hits))
            yield from _ratio(f"{_head(tokens)} {system}: hit / own prefix cache", _ratios(hits, own))


def _between(tokens: int, times: Mapping[tuple[str, Kind], Times]) -> Iterator[Figure]:
    """Ours against each other system: a hit, and what keeping costs a cold prompt."""
    for (system, kind), values in times.items():
        if kind is Kind.COLD and system != ALONE:
            ratios = _ratios(values, times.get((ALONE, Kind.COLD), {}))
            yield from _ratio(f"{_head(tokens)} cold, {system} / {ALONE}", ratios)
        if kind in (Kind.HIT, Kind.LOST) and system != OURS:
            ratios = _ratios(values, times.get((OURS, Kind.HIT), {}))
            what = "hit" if kind is Kind.HIT else "computed again / hit"
            yield from _ratio(f"{_head(tokens)} {what}, {system} / {OURS}", ratios)


def _checks(result: Result) -> Iterator[Figure]:
    """What must hold of every request."""
    meant = [each.is_as_meant for each in result.again]
    same = [each.is_same for each in result.again if each.is_same is not None]
    for name, checked in (
        ("requests whose tokens were found where they should be", meant),
        ("answers to prompts that were seen before, the same as computed", same),
    ):
        if checked:
            yield at_least(name, sum(checked) / len(checked), "", 1.0, f"{sum(checked)} of {len(checked)}")


def _times(again: Iterable[Again]) -> dict[tuple[str, Kind], Times]:
    """Of the requests that are what they are meant to be; systems and kinds in the order in which they were asked."""
    times: dict[tuple[str, Kind], Times] = {}
    for each in again:
        if each.is_as_meant:
            times.setdefault((each.system, each.kind), {})[each.round] = each.ttft_ms
    return times


def _systems(result: Result) -> list[str]:
    asked = {each.system for each in result.again}
    return [name for name in result.systems if name in asked] + sorted(asked - result.systems.keys())


def _is(each: Again, system: str, tokens: int, kinds: Iterable[Kind]) -> bool:
    return each.is_as_meant and (each.system, each.prompt_tokens) == (system, tokens) and each.kind in kinds


def _ratios(above: Times, below: Times) -> list[float]:
    return [above[round_] / below[round_] for round_ in sorted(above.keys() & below.keys())]


def _ratio(name: str, values: list[float]) -> Iterator[Figure]:
    if values:
        yield plain(name, statistics.median(values), "×", f"median of {len(values)}; {_spread(values)}")


def _head(tokens: int) -> str:
    return f"{tokens:,} tokens, seen before:"


def _number(values: Iterable[float]) -> str:
    known = list(values)
    return f"{statistics.median(known):,.0f}" if known else "-"


def _spread(values: Iterable[float]) -> str:
    known = list(values)
    return f"{min(known):,.2f} to {max(known):,.2f}"
