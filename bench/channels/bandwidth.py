"""GB/s of each channel over the size of a message, and how long one message takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdx.bench.harness import plot_style as style
from pdx.bench.harness.plot_style import CHANNELS, Look, Sheet
from pdx.cli.tables import size

if TYPE_CHECKING:
    from pdx.bench.channels.measure import Row

PANEL_IN = 2.7
LABEL_IN = 1.15
MEMCPY = "memcpy"
OTHERS = ("#D55E00", "#56B4E9", "#8A6D00", "#000000")  # for channels of other packages


def draw(rows: Sequence[Row], path: Path, machine: Mapping[str, Any], note: str = "") -> Path | None:
    """None: there are no rows. Ours solid, the technology called directly dashed, memcpy dotted."""
    if not rows:
        return None
    depths = sorted({row.in_flight for row in rows if row.scheme != MEMCPY}) or [1]
    sheet = Sheet([PANEL_IN] * len(depths), columns=2, left=0.6, right=LABEL_IN, between=LABEL_IN + 0.6, head=0.28)
    sheet.title(
        "How fast each channel moves messages from one process to another",
        "left: GB/s of bytes sent · right: µs from the end of one message to the next one's, both axes logarithmic",
    )
    looks = _looks(rows)
    has_raw = any(row.raw_gb_s is not None for row in rows)
    sheet.legend({}, extra=_handles(has_raw=has_raw, has_memcpy=any(row.scheme == MEMCPY for row in rows)))
    for index, depth in enumerate(depths):
        words = "one message in flight" if depth == 1 else f"{depth} messages in flight"
        found = _of(rows, depth)
        axes = sheet.axes(index, 0)
        _rates(axes, found, looks)
        axes.set_title(f"GB/s, {words}", fontsize=9.5, loc="left", weight="bold")
        axes = sheet.axes(index, 1)
        _times(axes, found, looks)
        axes.set_title(f"µs per message, {words}", fontsize=9.5, loc="left", weight="bold")
    sheet.footnote(". ".join(part for part in (note, style.on_machine(machine)) if part))
    return sheet.save(path)


def _of(rows: Sequence[Row], depth: int) -> dict[str, list[Row]]:
    """By channel, with memcpy, which has nothing in flight; sizes ascend."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda each: each.nbytes):
        if row.in_flight == depth or row.scheme == MEMCPY:
            found.setdefault(row.scheme, []).append(row)
    return found


def _rates(axes: Any, found: Mapping[str, Sequence[Row]], looks: Mapping[str, Look]) -> None:
    highest = max(max(row.gb_s, row.raw_gb_s or 0.0) for rows in found.values() for row in rows)
    _sizes(axes, found)
    style.axis_from_zero(axes, y=highest)
    labels = []
    for scheme, rows in found.items():
        look = looks[scheme]
        sizes = [row.nbytes for row in rows]
        settings = {"color": look.colour, "linewidth": 1.7, "markersize": 4.5, "clip_on": False}
        axes.plot(sizes, [row.gb_s for row in rows], linestyle=look.dashes, marker=look.marker, **settings)
        raw = [(row.nbytes, row.raw_gb_s) for row in rows if row.raw_gb_s is not None]
        if raw:
            axes.plot(*zip(*raw, strict=True), color=look.colour, linewidth=1.0, linestyle="--", alpha=0.75)
        labels.append((rows[-1].gb_s, f"{scheme}  {rows[-1].gb_s:.2f}", look.colour))
    style.end_labels(axes, labels, PANEL_IN)


def _times(axes: Any, found: Mapping[str, Sequence[Row]], looks: Mapping[str, Look]) -> None:
    _sizes(axes, found)
    axes.set_yscale("log")
    for scheme, rows in found.items():
        look = looks[scheme]
        times = [row.us_per_message for row in rows]
        settings = {"color": look.colour, "linewidth": 1.7, "markersize": 4.5, "clip_on": False}
        axes.plot([row.nbytes for row in rows], times, linestyle=look.dashes, marker=look.marker, **settings)
    times = [row.us_per_message for rows in found.values() for row in rows]
    axes.set_ylim(10.0 ** math.floor(math.log10(min(times))), 10.0 ** math.ceil(math.log10(max(times) * 1.01)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.grid(axis="y", color=style.FAINT, linewidth=0.6)
    first = min(row.nbytes for rows in found.values() for row in rows)
    ranked = sorted((rows[0].us_per_message, scheme) for scheme, rows in found.items() if rows[0].nbytes == first)
    labels = [(f"{scheme}  {style.ms(time_us)}", looks[scheme].colour) for time_us, scheme in ranked]
    style.ranking(axes, [(f"µs at {size_text(first)}:", style.INK), *labels], PANEL_IN)


def _sizes(axes: Any, found: Mapping[str, Sequence[Row]]) -> None:
    sizes = sorted({row.nbytes for rows in found.values() for row in rows})
    axes.set_xscale("log", base=2)
    shown = sizes[:: -(-len(sizes) // 7)]
    axes.set_xticks(shown, [size_text(nbytes) for nbytes in shown])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 2 if len(sizes) == 1 else sizes[0] / 1.2, sizes[-1])
    axes.set_xlabel("bytes in a message", fontsize=style.SMALL_PT, labelpad=1)


def size_text(nbytes: int) -> str:
    """With a binary unit, without a zero behind the point."""
    return size(nbytes).replace(".0 ", " ")


def _looks(rows: Sequence[Row]) -> dict[str, Look]:
    others = [scheme for scheme in dict.fromkeys(row.scheme for row in rows) if scheme not in CHANNELS]
    return CHANNELS | {scheme: Look(OTHERS[i % len(OTHERS)], "-", "x") for i, scheme in enumerate(others)}


def _handles(*, has_raw: bool, has_memcpy: bool) -> list[Any]:
    from matplotlib.lines import Line2D

    kinds = [("PDX's channel", "-", 1.7, style.INK)]
    kinds += [("the technology called directly", "--", 1.0, style.INK)] if has_raw else []
    kinds += [("memcpy by one thread", ":", 1.7, CHANNELS[MEMCPY].colour)] if has_memcpy else []
    return [
        Line2D([], [], linestyle=dashes, linewidth=width, color=colour, label=label)
        for label, dashes, width, colour in kinds
    ]
