"""A `records.Result` as two tables for a terminal: what the client saw, and where the time went."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table

from pdx.bench.breakdown.records import Parts, Request, Result

PARTS = ("queue", "prefill", "gather", "wire", "scatter", "first_decode", "rest")
HIDES = 0.05  # ms; less than this is not shown as hidden

Key = tuple[int, int, str]  # prompt tokens, concurrency, system


def client_table(result: Result) -> Table:
    """What a client saw of each system: medians over requests; between tokens, the mean and the longest silence."""
    table = Table(title="as the client sees it (ms)", title_justify="left")
    _heads(table)
    numbers = ("first token", "worst", "between\ntokens", "worst", "whole\nanswer", "decoder's\nfirst token")
    for name in (*numbers, "MB moved", "of them at\nprefill's end", "same\nanswers"):
        table.add_column(name, justify="right")
    for key, requests in _grouped(result):
        ttfts = [request.ttft_ms for request in requests]
        gaps = [gap for request in requests for gap in request.itl_ms]
        per_token = [found for request in requests if (found := request.mean_itl_ms) is not None]
        firsts = [request.decode_first_ms for request in requests if request.decode_first_ms is not None]
        shares = [request.hidden_share for request in requests if request.hidden_share is not None]
        compared = [request.is_same for request in requests if request.is_same is not None]
        moved = statistics.median(request.moved_bytes for request in requests) / 1e6
        table.add_row(
            *_row_head(key, len(requests)),
            _number(statistics.median(ttfts)),
            _number(max(ttfts)),
            _number(statistics.fmean(per_token)) if per_token else "-",
            _number(max(gaps)) if gaps else "-",
            _number(statistics.median(request.e2e_ms for request in requests)),
            _number(statistics.median(firsts)) if firsts else "-",
            _number(moved) if moved else "-",
            f"{statistics.median(shares):.0%}" if shares else "-",
            "-" if not compared else "all" if all(compared) else f"{sum(compared)} of {len(compared)}",
        )
    return table


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
