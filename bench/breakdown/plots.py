"""Pictures of a breakdown: where requests' time went, what clients saw, and one request layer by layer."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdx.bench.breakdown.figures import COPIES, EXTRA_MS
from pdx.bench.breakdown.records import Part, Request, Result, Trace
from pdx.bench.harness.plot_style import PARTS, Sheet, line_styles, on_machine, require_matplotlib

BEFORE = ("queue", "prefill")  # left out of the right-hand bars
LANES = {"prefill": 0.02, "gather": 0.06, "wire": 0.37, "scatter": 0.68}  # offsets; all but prefill are 0.3 high
MARKS = ("received", "prefill_end", "runnable", "decode_first", "first_token")
NEAR = 0.1  # a copy counts for a prompt if its size differs by at most this share
Values = Callable[[Request], list[float]]


def draw_all(result: Result, folder: Path) -> list[Path]:
    """Draw the pictures that `result` has data for as PNG files in `folder`, replacing files with the same names.

    :raises ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    drawn = [
        draw_bars(result, folder / "breakdown.png"),
        draw_shares(result, folder / "ttft-cdf.png", "Time to first token", lambda each: [each.ttft_ms]),
        draw_shares(result, folder / "itl-cdf.png", "Time between events with tokens", lambda each: each.itl_ms),
        draw_load(result, folder / "concurrency.png"),
    ]
    for trace in result.traces:
        system = re.sub(r"[^A-Za-z0-9_.-]", "-", trace.system)
        drawn.append(draw_timeline(result, trace, folder / f"timeline-{system}-{trace.prompt_tokens}.png"))
    return [path for path in drawn if path is not None]


def note(result: Result, what: str) -> str:
    """The note below a picture: what its numbers depend on. `what`: how many requests, and how they were aggregated."""
    stopped = "" if result.is_complete else "INTERRUPTED: only what was measured until then. "
    model = [str(result.model[key]) for key in ("name", "dtype") if result.model.get(key)]
    if kv_bytes := result.model.get("kv_bytes_per_token"):
        model.append(f"{kv_bytes / 1024:g} KiB of KV per token")
    return ". ".join(filter(None, (f"{stopped}{what}", ", ".join(model), on_machine(result.machine))))


def medians(requests: Sequence[Request]) -> dict[tuple[str, int], dict[str, Part]]:
    """By system and prompt length: each part's median over the requests that ran alone."""
    grouped: dict[tuple[str, int], list[Any]] = {}
    for each in requests:
        if each.concurrency == 1 and each.parts is not None:
            grouped.setdefault((each.system, each.prompt_tokens), []).append(each.parts)

    def median(group: list[Any], part: str, kind: str) -> float:
        return float(statistics.median(getattr(getattr(each, part), kind) for each in group))

    return {
        key: {part: Part(median(group, part, "total_ms"), median(group, part, "exposed_ms")) for part in PARTS}
        for key, group in grouped.items()
    }


def copy_ms(result: Result, nbytes: int) -> float | None:
    """The median time of a memcpy of about `nbytes`; None: not measured."""
    times = [each.copy_ms for each in result.copies if nbytes and abs(each.nbytes - nbytes) <= NEAR * nbytes]
    return statistics.median(times) if times else None


def draw_bars(result: Result, path: Path) -> Path | None:
    """One bar per system and prompt length, with and without queue and prefill. None: no lone request has parts."""
    found = medians(result.requests)
    if not found:
        return None
    lengths = sorted({tokens for _, tokens in found})
    rows = {each: [name for name in line_styles({s for s, t in found if t == each})] for each in lengths}
    title = "Where a request's time goes, to the decode engine's first token; hatched: beside prefill, nobody waited"
    sheet = Sheet(title, [0.5 * len(rows[tokens]) + 0.3 for tokens in lengths], columns=2)
    kv_bytes = int(result.model.get("kv_bytes_per_token") or 0)
    for row, tokens in enumerate(lengths):
        size = f" ({tokens * kv_bytes / 1e6:,.0f} MB of KV)" if kv_bytes else ""
        for column, names in enumerate((list(PARTS), [part for part in PARTS if part not in BEFORE])):
            axes = sheet.ax(row, column, "without queue and prefill" if column else f"{tokens:,} tokens{size}", "ms")
            for place, system in enumerate(rows[tokens]):
                _bar(axes, place, found[system, tokens], names, has_hidden=column == 1)
            axes.set_yticks(range(len(rows[tokens])), rows[tokens])
            axes.invert_yaxis()
        copy = copy_ms(result, tokens * kv_bytes)
        if copy is not None:
            label = f"{COPIES} memcpy + {EXTRA_MS:g} ms"
            axes.axvline(COPIES * copy + EXTRA_MS, color="k", linestyle="--", label=label)
    counts = sum(each.concurrency == 1 and each.parts is not None for each in result.requests)
    footnote = note(result, f"Each part's median of {counts:,} requests, one at a time")
    return sheet.save(path, footnote, one_legend=True)


def _bar(axes: Any, place: int, parts: dict[str, Part], names: Sequence[str], *, has_hidden: bool) -> None:
    at = behind = 0.0
    for name in names:
        label = name.replace("_", " ") if place == 0 else None
        axes.barh(place, parts[name].exposed_ms, left=at, height=0.5, color=PARTS[name], label=label)
        at += parts[name].exposed_ms
        if has_hidden and parts[name].hidden_ms:
            own = {"facecolor": "white", "edgecolor": PARTS[name], "hatch": "//////"}
            axes.barh(place + 0.36, parts[name].hidden_ms, left=behind, height=0.2, **own)
            behind += parts[name].hidden_ms
    axes.text(at, place, f" {at:,.0f} ms", va="center", fontsize=8, weight="bold")
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.2 * at, 1.2 * behind, 1e-3))


def draw_shares(result: Result, path: Path, title: str, values: Values) -> Path | None:
    """The distribution of the values that clients see, per prompt length and concurrency. None: there are no values."""
    points = sorted({(each.prompt_tokens, each.concurrency) for each in result.requests if values(each)})
    if not points:
        return None
    lengths, loads = (sorted({point[index] for point in points}) for index in (0, 1))
    sheet = Sheet(f"{title}, as the client sees it: share of values up to x", [2.6] * len(lengths), columns=len(loads))
    styles = line_styles({each.system for each in result.requests})
    for tokens, concurrency in points:
        title = f"{tokens:,} tokens, {concurrency} at once" if concurrency > 1 else f"{tokens:,} tokens, alone"
        axes = sheet.ax(lengths.index(tokens), loads.index(concurrency), title, "ms")
        for system, style in styles.items():
            key = (system, tokens, concurrency)
            mine = [r for r in result.requests if (r.system, r.prompt_tokens, r.concurrency) == key]
            ordered = sorted(value for each in mine for value in values(each))
            if ordered:
                shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
                label = f"{system}: {statistics.median(ordered):,.3g} ms"
                axes.step([0.0, *ordered], [0.0, *shares], where="post", label=label, **style)
    return sheet.save(path, note(result, f"{len(result.requests)} requests; medians beside the names"))


def draw_load(result: Result, path: Path) -> Path | None:
    """Mean TTFT and ITL by concurrency, per prompt length. None: there are no requests."""
    lengths = sorted({each.prompt_tokens for each in result.requests})
    if not lengths:
        return None
    sheet = Sheet("Latency while more requests run at the same time", [2.4] * len(lengths), columns=2)
    styles = line_styles({each.system for each in result.requests})
    kinds: tuple[tuple[str, Callable[[Request], float | None]], ...] = (
        ("mean TTFT", lambda each: each.ttft_ms),
        ("mean ITL", lambda each: each.mean_itl_ms),
    )
    for row, tokens in enumerate(lengths):
        for column, (name, value) in enumerate(kinds):
            axes = sheet.ax(row, column, f"{tokens:,} tokens: {name}", "requests at the same time", "ms")
            for system, style in styles.items():
                means: dict[int, list[float]] = {}
                for each in result.requests:
                    if (each.system, each.prompt_tokens) == (system, tokens) and (found := value(each)) is not None:
                        means.setdefault(each.concurrency, []).append(found)
                if means:
                    loads = sorted(means)
                    ys = [statistics.fmean(means[load]) for load in loads]
                    axes.plot([str(load) for load in loads], ys, marker="o", label=system, **style)
            axes.set_ylim(bottom=0)
    return sheet.save(path, note(result, f"Means over {len(result.requests)} requests of all systems"))


def draw_timeline(result: Result, trace: Trace, path: Path) -> Path | None:
    """One request layer by layer, as a whole and around the end of prefill. None: it has no spans."""
    if not trace.spans:
        return None
    layers = max(span.first_layer + span.num_layers for span in trace.spans)
    title = f"{trace.system}, one request of {trace.prompt_tokens:,} tokens, layer by layer"
    if {"prefill_end", "runnable"} <= trace.marks.keys():
        handoff = trace.marks["runnable"] - trace.marks["prefill_end"]
        title += f": {handoff:,.1f} ms from prefill's end until the decode engine may run"
    height = min(max(0.16 * layers, 1.9), 4.2)
    sheet = Sheet(title, [height, height])
    end = max([span.end_ms for span in trace.spans] + [trace.marks.get(name, 0.0) for name in MARKS])
    centre = trace.marks.get("prefill_end", max((s.end_ms for s in trace.spans if s.lane == "prefill"), default=0.0))
    behind = max(end - centre, 10.0)
    for row, window in enumerate(((0.0, end * 1.02), (max(0.0, centre - behind / 2), centre + behind * 1.06))):
        axes = sheet.ax(row, 0, "around the end of prefill" if row else "", "ms since the request arrived", "layer")
        for lane, top in LANES.items():
            mine = [span for span in trace.spans if span.lane == lane]
            thinnest = (window[1] - window[0]) / 1000  # a pixel, so that every span is visible
            axes.barh(
                [span.first_layer + top for span in mine],
                [max(span.end_ms - span.start_ms, thinnest) for span in mine],
                left=[span.start_ms for span in mine],
                height=[span.num_layers - 1 + (0.96 if lane == "prefill" else 0.3) for span in mine],
                align="edge",
                color=PARTS[lane],
                label=lane if mine else None,
            )
        for name in MARKS if row == 0 else trace.marks:
            if window[0] <= trace.marks.get(name, -1.0) <= window[1]:
                at = trace.marks[name]
                axes.axvline(at, color="#B00020" if name in ("prefill_end", "runnable") else "#555555", linewidth=1)
                axes.text(
                    at, 1.01, name.replace("_", " "), rotation=32, fontsize=7, transform=axes.get_xaxis_transform()
                )
        axes.set_xlim(*window)
        axes.set_ylim(layers, 0)
    return sheet.save(path, note(result, f"One request: {len(trace.spans):,} spans"))
