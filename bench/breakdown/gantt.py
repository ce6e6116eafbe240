"""One request layer by layer: when each layer was computed, gathered, sent and scattered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.breakdown.records import Result, Span, Trace
from pdx.bench.harness import plot_style as style
from pdx.bench.harness.plot_style import PART_COLOURS, Sheet

LANES = {"prefill": (0.0, 1.0), "gather": (0.04, 0.34), "wire": (0.36, 0.66), "scatter": (0.68, 0.98)}  # in a layer
LAYER_IN = 0.16
PANEL_IN = (1.9, 4.2)  # at least, at most
MARKS_IN = 0.95  # above axes, for the names of moments
SLANT = 32
PREFILL_END, RUNNABLE = "prefill_end", "runnable"
MAIN_MARKS = ("received", PREFILL_END, RUNNABLE, "decode_first", "first_token")
BEFORE_SHARE = 0.5  # of what the zoom shows behind prefill's end
BEHIND_MS = 10.0  # that is at least so much
TICK_LAYERS = 12


def draw(result: Result, trace: Trace, path: Path) -> Path | None:
    """None: it has no spans."""
    if not trace.spans:
        return None
    layers = max(span.first_layer + span.num_layers for span in trace.spans)
    height = min(max(LAYER_IN * layers, PANEL_IN[0]), PANEL_IN[1])
    sheet = Sheet([height, height], left=0.75, right=1.1, above=MARKS_IN, below=0.42, head=0.12)
    sheet.title(_title(trace), "each row is a layer, vertical lines are moments; the lower picture is the yellow part")
    sheet.legend({lane: PART_COLOURS[lane] for lane in LANES if any(span.lane == lane for span in trace.spans)})
    end = max([span.end_ms for span in trace.spans] + [trace.marks.get(name, 0.0) for name in MAIN_MARKS])
    centre = trace.marks.get(PREFILL_END, max((s.end_ms for s in trace.spans if s.lane == "prefill"), default=0.0))
    axes = sheet.axes(0)
    _panel(axes, trace.spans, layers, (0.0, end * 1.02))
    main = {name: at for name, at in trace.marks.items() if name in MAIN_MARKS}
    _mark(axes, {name: (at, style.ms(at)) for name, at in main.items()}, sheet.panel_width, height)
    axes.set_xlabel("ms since the request arrived", fontsize=style.SMALL_PT, labelpad=1)
    zoomed = _window(centre, end)
    axes.axvspan(*zoomed, color="#FFE9A8", alpha=0.55, linewidth=0, zorder=0)
    axes = sheet.axes(1)
    axes.set_facecolor("#FFFCF2")
    shifted = [msgspec.structs.replace(s, start_ms=s.start_ms - centre, end_ms=s.end_ms - centre) for s in trace.spans]
    _panel(axes, shifted, layers, (zoomed[0] - centre, zoomed[1] - centre))
    inside = {name: at - centre for name, at in trace.marks.items() if zoomed[0] <= at <= zoomed[1]}
    _mark(axes, {name: (at, f"{at:+.1f}") for name, at in inside.items()}, sheet.panel_width, height)
    axes.set_xlabel("ms since the end of prefill", fontsize=style.SMALL_PT, labelpad=1)
    moved = sum(span.nbytes for span in trace.spans if span.lane == "gather")
    note = f"One request: {len(trace.spans):,} spans" + (f", {moved / 1e6:,.0f} MB gathered" if moved else "")
    sheet.footnote(style.small_print(result, note))
    return sheet.save(path)


def _title(trace: Trace) -> str:
    head = f"{trace.system}, one request of {trace.prompt_tokens:,} tokens"
    if {PREFILL_END, RUNNABLE} <= trace.marks.keys():
        handoff = trace.marks[RUNNABLE] - trace.marks[PREFILL_END]
        return f"{head}: {style.ms(handoff)} ms from prefill's end until the decode engine may run"
    return f"{head}, layer by layer"


def _window(centre: float, end: float) -> tuple[float, float]:
    """From a while before the end of prefill to the end of everything that is shown."""
    behind = max(end - centre, BEHIND_MS)
    return max(0.0, centre - BEFORE_SHARE * behind), centre + behind * 1.06


def _panel(axes: Any, spans: Sequence[Span], layers: int, window: tuple[float, float]) -> None:
    from matplotlib.collections import PolyCollection

    low, high = window
    thinnest = (high - low) / 1000  # a pixel, so that nothing is too short to be seen
    for lane, (top, bottom) in LANES.items():
        boxes = []
        for span in spans:
            if span.lane == lane and span.end_ms >= low and span.start_ms <= high:
                left, right = max(span.start_ms, low), min(max(span.end_ms, span.start_ms + thinnest), high)
                y0, y1 = span.first_layer + top, span.first_layer + span.num_layers - 1 + bottom
                boxes.append([(left, y0), (right, y0), (right, y1), (left, y1)])
        edge = "white" if lane == "prefill" else "none"
        axes.add_collection(PolyCollection(boxes, facecolor=PART_COLOURS[lane], edgecolor=edge, linewidth=0.4))
    axes.set_xlim(low, high)
    axes.set_ylim(layers, 0)
    step = max(1, -(-layers // TICK_LAYERS))
    ticks = range(0, layers, step)
    axes.set_yticks([layer + 0.5 for layer in ticks], [str(layer) for layer in ticks])
    axes.set_ylabel("layer", fontsize=style.SMALL_PT)


def _mark(axes: Any, marks: Mapping[str, tuple[float, str]], width_in: float, height_in: float) -> None:
    """Lines through the axes at (place, how it is written), and above them the names, moved apart."""
    low, high = axes.get_xlim()
    names = sorted(marks, key=lambda name: marks[name])
    gap = (high - low) * 0.26 / width_in
    places = style.spread([marks[name][0] for name in names], gap, low, high)
    transform = axes.get_xaxis_transform()
    top = 1 + 0.14 / height_in
    for name, place in zip(names, places, strict=True):
        at, number = marks[name]
        colour = "#B00020" if name in (PREFILL_END, RUNNABLE) else "#555555"
        axes.axvline(at, color=colour, linewidth=1.0)
        axes.plot((at, place), (1.0, top), color=colour, linewidth=0.7, transform=transform, clip_on=False)
        text = f"{name.replace('_', ' ')} {number}"
        settings = {"rotation": SLANT, "rotation_mode": "anchor", "fontsize": 7.5, "color": colour}
        axes.text(place, top + 0.02 / height_in, text, transform=transform, **settings)
