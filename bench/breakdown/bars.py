"""Where the time of a request goes, one bar for each system and prompt length; and the same without prefill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdx.bench.breakdown.records import Part, Request, Result
from pdx.bench.harness import plot_style as style
from pdx.bench.harness.plot_style import PART_COLOURS, PART_TITLES, Sheet

BAR_IN = 0.5  # of height for one system
INSIDE = dict.fromkeys(("wire", "rest", "first_decode"), "white")  # numbers on dark colours
BEFORE = ("queue", "prefill")  # what the right-hand axes leave out
ALLOWED, EXTRA_MS = 1.3, 15.0
WIDE_ENOUGH_IN = 0.42  # for a number inside
NEAR = 0.1  # a copy counts for a prompt if its size differs by no more than this


def draw(result: Result, path: Path) -> Path | None:
    """None: no request that was alone has parts."""
    found = medians(result.requests)
    if not found:
        return None
    lengths = sorted({tokens for _, tokens in found})
    rows = {tokens: style.in_order([system for system, each in found if each == tokens]) for tokens in lengths}
    sheet = Sheet(
        [BAR_IN * len(rows[tokens]) for tokens in lengths], columns=2, left=1.15, right=0.2, between=0.35, head=0.28
    )
    sheet.title(
        "Where a request's time goes, from its arrival to the decode engine's first token",
        "left: all of it · right: the handoff, without queue and prefill · hatched: ran beside prefill, nobody waited",
    )
    sheet.legend({PART_TITLES[part]: PART_COLOURS[part] for part in PART_TITLES}, extra=_more_handles())
    kv_bytes = int(result.model.get("kv_bytes_per_token") or 0)
    for row, tokens in enumerate(lengths):
        parts = [found[system, tokens] for system in rows[tokens]]
        left, right = sheet.axes(row, 0), sheet.axes(row, 1)
        _bars(left, parts, list(PART_TITLES), sheet.panel_width)
        _bars(right, parts, [part for part in PART_TITLES if part not in BEFORE], sheet.panel_width, hidden=True)
        left.set_yticks(range(len(parts)), rows[tokens], fontsize=style.TEXT_PT)
        right.set_yticks([])
        size = f" ({tokens * kv_bytes / 1e6:,.0f} MB of KV)" if kv_bytes else ""
        left.set_title(f"{tokens:,} tokens{size}", fontsize=10, loc="left", weight="bold")
        bound = _allowed(right, copy_ms(result, tokens * kv_bytes))
        right.set_title(f"without queue and prefill{bound}", fontsize=10, loc="left", weight="bold")
    counts = Counter((each.system, each.prompt_tokens) for each in _alone(result.requests))
    note = f"Each part's median, n = {_span(counts.values())} for each bar, one request at a time"
    sheet.footnote(style.small_print(result, note))
    return sheet.save(path)


def medians(requests: Sequence[Request]) -> dict[tuple[str, int], dict[str, Part]]:
    """By system and prompt length: each part's median, of requests that had everything for themselves."""
    grouped: dict[tuple[str, int], list[Request]] = {}
    for request in _alone(requests):
        grouped.setdefault((request.system, request.prompt_tokens), []).append(request)
    return {
        key: {
            part: Part(
                style.median(getattr(each.parts, part).total_ms for each in group),
                style.median(getattr(each.parts, part).exposed_ms for each in group),
            )
            for part in PART_TITLES
        }
        for key, group in grouped.items()
    }


def copy_ms(result: Result, nbytes: int) -> float | None:
    """The median memcpy of about so many bytes."""
    times = [each.copy_ms for each in result.copies if nbytes and abs(each.nbytes - nbytes) <= NEAR * nbytes]
    return style.median(times) if times else None


def _alone(requests: Sequence[Request]) -> list[Request]:
    return [each for each in requests if each.concurrency == 1 and each.parts is not None]


def _span(counts: Collection[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _bars(
    axes: Any, rows: Sequence[Mapping[str, Part]], names: Sequence[str], width_in: float, *, hidden: bool = False
) -> None:
    """One line for each of `rows`; with `hidden`, a thin hatched line of what was hidden below it."""
    totals = [sum(parts[name].exposed_ms for name in names) for parts in rows]
    behind = [sum(parts[name].hidden_ms for name in names) if hidden else 0.0 for parts in rows]
    longest = max([*totals, *behind]) or 1.0
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, longest * (1.62 if hidden else 1.25))
    ms_per_in = axes.get_xlim()[1] / width_in
    for row, parts in enumerate(rows):
        at = 0.0
        place, height = (row - 0.1, 0.46) if hidden else (row, 0.6)
        for name in names:
            value = parts[name].exposed_ms
            axes.barh(place, value, left=at, height=height, color=PART_COLOURS[name])
            if value / ms_per_in >= WIDE_ENOUGH_IN and value < totals[row]:
                settings = {"ha": "center", "va": "center", "fontsize": 7.5, "color": INSIDE.get(name, style.INK)}
                axes.text(at + value / 2, place, style.ms(value), **settings)
            at += value
        pad = ms_per_in * 0.06
        total = f"{style.ms(at)} ms"
        axes.text(at + pad, place, total, va="center", fontsize=style.TEXT_PT, weight="bold", path_effects=_halo())
        if hidden:
            _hidden(axes, row + 0.28, parts, names, pad)
    axes.set_xlabel("ms", fontsize=style.SMALL_PT, labelpad=1)
    axes.grid(axis="x", color=style.FAINT, linewidth=0.6)
    axes.tick_params(axis="y", length=0)


def _hidden(axes: Any, place: float, parts: Mapping[str, Part], names: Sequence[str], pad: float) -> None:
    at, shares = 0.0, []
    for name in names:
        part = parts[name]
        if part.total_ms and part.hidden_ms / part.total_ms >= 0.005:
            axes.barh(
                place,
                part.hidden_ms,
                left=at,
                height=0.22,
                facecolor="white",
                edgecolor=PART_COLOURS[name],
                hatch="//////",
                linewidth=0.8,
            )
            at += part.hidden_ms
            shares.append(f"{part.hidden_ms / part.total_ms:.0%} of {PART_TITLES[name]}")
    if shares:
        text = f"hidden: {', '.join(shares)}"
        axes.text(at + pad, place, text, va="center", fontsize=7.5, color="#444444", path_effects=_halo())


def _halo() -> list[Any]:
    """Keeps a text readable where a line runs through it."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def _allowed(axes: Any, copy: float | None) -> str:
    """Draw the bound; what a title says of it."""
    if copy is None:
        return ""
    bound = ALLOWED * copy + EXTRA_MS
    low, high = axes.get_xlim()
    axes.set_xlim(low, max(high, bound * 1.15))
    axes.axvline(bound, color=style.INK, linestyle="--", linewidth=1.1)
    return f" (dashed: {style.ms(bound)} ms)"


def _more_handles() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    hatched = Patch(facecolor="white", edgecolor=PART_COLOURS["wire"], hatch="//////", label="hidden")
    line = Line2D(
        [], [], color=style.INK, linestyle="--", linewidth=1.1, label="1.3 memcpy + 15 ms, the goal before first decode"
    )
    return [hatched, line]
