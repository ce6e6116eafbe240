"""What clients see: how first tokens and the gaps between tokens are distributed, and how both grow with the load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdx.bench.breakdown.records import Request, Result
from pdx.bench.harness import plot_style as style
from pdx.bench.harness.plot_style import Sheet

PANEL_IN = 2.3
LABEL_IN = 1.45  # beside axes
COLUMNS = 3
TAIL = 0.99  # where the axis of a distribution ends: the slowest system's quantile
Values = Callable[[Request], list[float]]


def draw_ttft(result: Result, path: Path) -> Path | None:
    """Distribution of the time to the first token."""
    return _distributions(result, path, "Time to first token, as the client sees it", lambda each: [each.ttft_ms])


def draw_itl(result: Result, path: Path) -> Path | None:
    """Distribution of the gaps between events with tokens: a server that is late puts several tokens into one."""
    return _distributions(
        result, path, "Time between events with tokens, as the client sees it", lambda each: each.itl_ms
    )


def draw_load(result: Result, path: Path) -> Path | None:
    """Means over the number of requests at the same time."""
    lengths = sorted({each.prompt_tokens for each in result.requests})
    if not lengths:
        return None
    sheet = Sheet([PANEL_IN] * len(lengths), columns=2, left=0.75, right=LABEL_IN, between=LABEL_IN + 0.55)
    sheet.title(
        "Latency while more requests run at the same time", "left: mean time to first token · right: between tokens"
    )
    for row, tokens in enumerate(lengths):
        chosen = [each for each in result.requests if each.prompt_tokens == tokens]
        _means(sheet.axes(row, 0), chosen, lambda each: [each.ttft_ms])
        axes = sheet.axes(row, 1)
        _means(axes, chosen, lambda each: [] if each.mean_itl_ms is None else [each.mean_itl_ms])
        _caption(sheet.figure.axes[-2], f"{tokens:,} tokens: mean TTFT")
        _caption(axes, f"{tokens:,} tokens: mean ITL")
    sheet.footnote(style.small_print(result, f"Means over {len(result.requests)} requests of all systems"))
    return sheet.save(path)


def _distributions(result: Result, path: Path, title: str, values: Values) -> Path | None:
    points = sorted({(each.prompt_tokens, each.concurrency) for each in result.requests if values(each)})
    if not points:
        return None
    loads = sorted({concurrency for _, concurrency in points})
    columns = min(len(loads), COLUMNS) if len(loads) != 4 else 2
    places = _places(points, columns)
    height = max(PANEL_IN, 0.16 * (len({each.system for each in result.requests}) + 1))
    rows = 1 + max(row for row, _ in places)
    sheet = Sheet([height] * rows, columns=columns, left=0.65, right=LABEL_IN, between=LABEL_IN + 0.45)
    sheet.title(title, "share of values up to x; the numbers beside are medians, the fastest first")
    for (tokens, concurrency), place in zip(points, places, strict=True):
        axes = sheet.axes(*place)
        chosen = [each for each in result.requests if (each.prompt_tokens, each.concurrency) == (tokens, concurrency)]
        _curves(axes, chosen, values, height)
        _caption(axes, f"{tokens:,} tokens, {concurrency} at once" if concurrency > 1 else f"{tokens:,} tokens, alone")
    amount = sum(len(values(each)) for each in result.requests)
    note = f"{amount:,} values of {len(result.requests)} requests; axes end at the slowest system's {TAIL:.0%} quantile"
    sheet.footnote(style.small_print(result, note))
    return sheet.save(path)


def _places(points: Sequence[tuple[int, int]], columns: int) -> list[tuple[int, int]]:
    """Row and column of each panel: each prompt length begins a row, the same number of requests is in one column."""
    lengths, loads = (sorted({point[index] for point in points}) for index in (0, 1))
    rows = -(-len(loads) // columns)
    found = []
    for tokens, concurrency in points:
        row, column = divmod(loads.index(concurrency), columns)
        found.append((lengths.index(tokens) * rows + row, column))
    return found


def _curves(axes: Any, requests: Sequence[Request], values: Values, height_in: float) -> None:
    found = {
        system: sorted(value for each in requests if each.system == system for value in values(each))
        for system in style.in_order({each.system for each in requests})
    }
    found = {system: each for system, each in found.items() if each}
    style.axis_from_zero(axes, x=max(quantile(each, TAIL) for each in found.values()))
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.grid(axis="y", color=style.FAINT, linewidth=0.6)
    for system, ordered in found.items():
        look = style.look(system)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        xs, ys = [0.0, ordered[0], *ordered, axes.get_xlim()[1]], [0.0, 0.0, *shares, 1.0]
        axes.step(xs, ys, where="post", color=look.colour, linestyle=look.dashes, linewidth=1.6)
    axes.set_xlabel("ms", fontsize=style.SMALL_PT, labelpad=1)
    middles = {system: statistics.median(ordered) for system, ordered in found.items()}
    ranked = sorted(middles, key=lambda system: middles[system])
    labels = [(f"{system}  {style.ms(middles[system])}", style.look(system).colour) for system in ranked]
    style.ranking(axes, labels, height_in)


def _means(axes: Any, requests: Sequence[Request], values: Values) -> None:
    loads = sorted({each.concurrency for each in requests})
    lines = {}
    for system in style.in_order({each.system for each in requests}):
        points = []
        for index, load in enumerate(loads):
            chosen = [each for each in requests if (each.system, each.concurrency) == (system, load)]
            if found := [value for each in chosen for value in values(each)]:
                points.append((index, statistics.fmean(found)))
        if points:
            lines[system] = points
    highest = max((value for points in lines.values() for _, value in points), default=1.0)
    style.axis_from_zero(axes, y=highest)
    axes.set_xlim(-0.15 if len(loads) > 1 else -0.5, len(loads) - 1)
    axes.set_xticks(range(len(loads)), [str(load) for load in loads])
    axes.set_xlabel("requests at the same time", fontsize=style.SMALL_PT, labelpad=1)
    axes.set_ylabel("ms", fontsize=style.SMALL_PT)
    labels = []
    for system, points in lines.items():
        look = style.look(system)
        settings = {"linestyle": look.dashes, "marker": look.marker, "markersize": 4.5, "clip_on": False}
        axes.plot(*zip(*points, strict=True), color=look.colour, **settings)
        labels.append((points[-1][1], f"{system}  {style.ms(points[-1][1])}", look.colour))
    style.end_labels(axes, labels, PANEL_IN)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _caption(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=9.5, loc="left", weight="bold")
