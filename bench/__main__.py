"""Runs all benches one after the other and updates docs/numbers.md from their results: `python -m pdx.bench`.

Takes about fifteen minutes on two cores. A missed goal is shown but is not an error; exit status 1 means that a bench
failed. `python -m pdx.bench NAME…` runs only the named benches. With `--before CHECKOUT`, each bench alternates with
the same bench of that checkout, and the ratio of each figure is shown; docs/numbers.md stays unchanged, and
`bench/results` holds this checkout's last run of each bench.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table

from pdx.bench.gpu.__main__ import SECTIONS
from pdx.bench.harness.report import RESULTS, ROOT, console

# The command of each bench, by the name of its result. `handoff` also measures the connector's overhead.
BENCHES = {
    "pages": "python -m pdx.bench.store.pages",
    "node": "python -m pdx.bench.node",
    "channels": "pdx bench transfer",
    "across": "python -m pdx.bench.node.across",
    "stalls": "python -m pdx.bench.proxy.stalls",
    "workers": "python -m pdx.bench.proxy.workers",
    "quality": "pdx bench quality",
    "handoff": "pdx bench breakdown --tokens 4000 --concurrency 1 --systems pdx,pdx-both,plain --rounds 5",
}
# Run only when named: they take long.
NAMED = {"proxy": "pdx bench proxy", "traces": "python -m pdx.bench.proxy.traces"}
# Results that are also shown; they need a GPU (`python -m pdx.bench.gpu`).
SHOWN = tuple(f"gpu-{section}" for section in SECTIONS)
NUMBERS = ROOT / "docs" / "numbers.md"
# `fill_numbers` puts the figures that have a goal between these marks; the others are in the JSON files.
BEGIN, END = "<!-- filled by `make bench` from here -->\n", "<!-- to here -->\n"


def run(name: str, root: Path = ROOT) -> dict[str, float] | None:
    """Run one bench in a process of its own and return its figures; None if it failed."""
    console.rule(name if root == ROOT else f"{name} of {root}")
    env = os.environ if root == ROOT else {**os.environ, "PYTHONPATH": str(root)}
    last = ""
    program, *words = (BENCHES | NAMED)[name].split()
    out = ROOT / "pdx-bench" / name
    if program == "pdx":
        words = ["-m", "pdx.cli.main", *words, "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-P", *words], stdout=subprocess.PIPE, text=True, cwd=root, env=env
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        return None
    if program != "pdx":
        return {figure: value for figure, value in json.loads(last).items() if isinstance(value, (int, float))}
    written = out / f"{words[3]}.json"
    for file in (written, written.with_suffix(".png")) if root == ROOT else ():
        if file.exists():
            shutil.copy(file, RESULTS / f"{name}{file.suffix}")
    return {figure["name"]: figure["value"] for figure in json.loads(written.read_text())["figures"]}


def compare_checkouts(names: list[str], before: Path, rounds: int) -> int:
    """Alternate each bench between here and `before`; show each figure's median ratio. Returns 1 if a run failed."""
    failed = 0
    for name in names:
        ratios: dict[str, list[float]] = defaultdict(list)
        for turn in range(rounds):
            roots = (before.resolve(), ROOT) if turn % 2 == 0 else (ROOT, before.resolve())
            found = {root: run(name, root) for root in roots}
            here, there = found[ROOT], found[before.resolve()]
            if here is None or there is None:
                failed = 1
                continue
            for figure in here:
                if there.get(figure):
                    ratios[figure].append(here[figure] / there[figure])
        table = Table(title=f"{name}: here / {before}, median of {rounds} turns", title_justify="left")
        for column in ("figure", "ratio", "least", "most"):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for figure, each in ratios.items():
            table.add_row(figure, *(f"{value:.3f}" for value in (statistics.median(each), min(each), max(each))))
        console.print(table)
    return failed


def rows(bench: str) -> list[str]:
    """One result as a Markdown list: its command and, for each quantity, the missed goals or else the tightest one."""
    result = json.loads((RESULTS / f"{bench}.json").read_text())
    machine = result["machine"]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    measured: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for figure in result["figures"]:
        if figure["goal"]:
            measured[figure["name"].rpartition(": ")[2]].append(figure)
    head = f"**`{_command(bench, result)}`**, {machine['date']}, {machine['cpus']}-core {machine['cpu']}{gpu}:"
    lines = []
    for what, figures in measured.items():
        shown = [each for each in figures if not each["is_met"]] or [max(figures, key=_tightness)]
        others = f"; {len(figures) - len(shown)} more: met" if len(figures) > len(shown) else ""
        lines.append(f"- {what}: {'; '.join(map(_case, shown))}{others}")
    return [head, "", *lines, ""]


def _tightness(figure: dict[str, Any]) -> float:
    """How close a figure is to its goal, such as "≤ 50": 1 is at the goal, lower is better."""
    sign, goal = figure["goal"].split()
    value, goal = figure["value"], float(goal)
    return value / goal if sign == "≤" else goal / value if value else 0.0


def _case(figure: dict[str, Any]) -> str:
    case = figure["name"].rpartition(": ")[0]
    missed = "" if figure["is_met"] else ", **missed**"
    return f"{case} `{figure['value']:,.3f}` {figure['unit']}".strip() + f" ({figure['goal']}{missed})"


def _command(bench: str, result: dict[str, Any]) -> str:
    """The command that repeats the measurement."""
    if result["bench"] != "breakdown":
        _, is_gpu, only = bench.partition("gpu-")
        return f"python -m pdx.bench.gpu --only {only}" if is_gpu else BENCHES[bench]
    asked = result["details"]["settings"]
    lists = " ".join(f"--{name} {','.join(map(str, asked[name]))}" for name in ("tokens", "concurrency", "systems"))
    return f"pdx bench breakdown {lists} --rounds {asked['rounds']} --max-engines {asked['max_engines']}"


def fill_numbers() -> None:
    head, _, rest = NUMBERS.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    shown = [name for name in (*BENCHES, *SHOWN) if (RESULTS / f"{name}.json").exists()]
    lines = [row for name in shown for row in rows(name)]
    pictures = [f"\n![{name}](../bench/results/{name}.png)" for name in shown if (RESULTS / f"{name}.png").exists()]
    NUMBERS.write_text(f"{head}{BEGIN}\n" + "\n".join([*lines, *pictures]) + f"\n\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdx.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES | NAMED)}")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="run each bench in turns with that checkout's")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each bench with --before")
    options = parser.parse_args()
    if unknown := set(options.names) - (BENCHES | NAMED).keys():
        parser.error(f"no such bench: {', '.join(sorted(unknown))}")
    names = options.names or [name for name in BENCHES if not (options.before and name == "handoff")]
    if options.before:
        return compare_checkouts(names, options.before, options.rounds)
    failed = [name for name in names if not run(name)]
    fill_numbers()
    for name in failed:
        console.print(f"{name} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
