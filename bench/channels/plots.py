"""GB/s of each channel by message size, and the duration of one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdx.bench.harness.plot_style import Sheet, on_machine, powers_of_two
from pdx.cli.tables import size

if TYPE_CHECKING:
    from pdx.bench.channels.measure import Row

MEMCPY = "memcpy"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#8C3A6B", "#D55E00", "#56B4E9", "#000000")


def draw(rows: Sequence[Row], path: Path, machine: Mapping[str, Any], note: str = "") -> Path | None:
    """None: there are no rows. Channels are solid lines, technologies called directly dashed."""
    if not rows:
        return None
    depths = sorted({row.in_flight for row in rows if row.scheme != MEMCPY}) or [1]
    title = "How fast each channel moves messages between processes; dashed: the technology called directly"
    sheet = Sheet(title, [2.7] * len(depths), columns=2)
    colours = dict(zip(dict.fromkeys(row.scheme for row in rows), COLOURS * len(rows), strict=False))
    for index, depth in enumerate(depths):
        words = "one message in flight" if depth == 1 else f"{depth} messages in flight"
        rates = sheet.ax(index, 0, f"GB/s, {words}", "bytes in a message")
        times = sheet.ax(index, 1, f"µs per message, {words}", "bytes in a message")
        for scheme, colour in colours.items():
            own = [
                row
                for row in rows
                if row.scheme == scheme and row.in_flight in (depth, 1 if scheme == MEMCPY else depth)
            ]
            own.sort(key=lambda row: row.nbytes)
            sizes = [row.nbytes for row in own]
            style = {"color": colour, "linestyle": ":" if scheme == MEMCPY else "-", "marker": "o", "markersize": 3}
            if own:
                rates.plot(sizes, [row.gb_s for row in own], label=f"{scheme}: {own[-1].gb_s:.2f}", **style)
                times.plot(sizes, [row.us_per_message for row in own], **style)
            if raw := [(row.nbytes, row.raw_gb_s) for row in own if row.raw_gb_s is not None]:
                rates.plot(*zip(*raw, strict=True), color=colour, linewidth=1.0, linestyle="--")
        times.set_yscale("log")
        rates.set_ylim(bottom=0)
        for axes in (rates, times):
            powers_of_two(axes, {row.nbytes for row in rows}, size_text)
    return sheet.save(path, ". ".join(filter(None, (note, on_machine(machine)))))


def size_text(nbytes: int) -> str:
    """A size with a binary unit, without a trailing zero."""
    return size(nbytes).replace(".0 ", " ")
