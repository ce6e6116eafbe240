"""Where the time of requests went, as a table for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table

from pdx.bench.breakdown.records import Parts, Request, Result

PARTS = ("queue", "prefill", "gather", "wire", "scatter", "first_decode", "rest")
HIDES = 0.05  # ms; less than this is not shown as hidden

Key = tuple[int, int, str]  # prompt tokens, concurrency, system


def parts_table(result: Result) -> Table:
    """Exposed milliseconds of each part, medians over requests; behind +, what ran beside something else."""
    title = "where the time went, from arrival to the decode engine's first token (exposed ms, + hidden ms)"
    table = Table(title=title, title_justify="left")
    _heads(table)
    for name in PARTS:
        table.add_column(name.replace("_", "\n"), justify="right")
    table.add_column("in all", justify="right")
    for key, requests in _grouped(result):
        known = [request.parts for request in requests if request.parts is not None]
        if known:
            cells = [_part(known, name) for name in PARTS]
            whole = statistics.median(sum(getattr(parts, name).exposed_ms for name in PARTS) for parts in known)
            table.add_row(*_row_head(key, len(known)), *cells, _number(whole))
    return table


def _part(known: Sequence[Parts], name: str) -> str:
    exposed = statistics.median(getattr(parts, name).exposed_ms for parts in known)
    hidden = statistics.median(getattr(parts, name).hidden_ms for parts in known)
    return _number(exposed) + (f" + {_number(hidden)}" if hidden >= HIDES else "")


def _heads(table: Table) -> None:
    table.add_column("tokens", justify="right")
    table.add_column("at once", justify="right")
    table.add_column("system")
    table.add_column("requests", justify="right")


def _row_head(key: Key, count: int) -> tuple[str, str, str, str]:
    tokens, concurrency, system = key
    return f"{tokens:,}", str(concurrency), system, str(count)


def _grouped(result: Result) -> Iterable[tuple[Key, list[Request]]]:
    """Requests by kind: shorter prompts first, systems in the result's order."""
    places = {name: place for place, name in enumerate(result.systems)}
    grouped: dict[Key, list[Request]] = {}
    for request in result.requests:
        grouped.setdefault((request.prompt_tokens, request.concurrency, request.system), []).append(request)
    return sorted(grouped.items(), key=lambda item: (*item[0][:2], places.get(item[0][2], len(places))))


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
