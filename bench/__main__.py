"""All benches, one after the other, and docs/numbers.md from their results: `python -m pdx.bench`.

About fifteen minutes on two cores. A goal that is missed is shown, not an error; exit status 1: a bench did not run.
`python -m pdx.bench NAME…` runs some. With `--before CHECKOUT` each runs in turns with that checkout's, and what is
shown is each figure's ratio; no result is kept.
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

# By the name of its result, what `python -m` gets.
BENCHES = {
    "pages": "pdx.bench.store.pages",
    "node": "pdx.bench.node",
    "find": "pdx.bench.store.find",
    "scaling": "pdx.bench.node.scaling",
    "pushes": "pdx.bench.node.pushes",
    "channels": "pdx.bench.channels",
    "across": "pdx.bench.node.across",
    "stalls": "pdx.bench.proxy.stalls",
}
BREAKDOWN = "breakdown"
# `make bench` measures the handoff and what the connector costs by a short breakdown.
HANDOFF = "pdx bench breakdown --tokens 4000 --concurrency 1 --systems pdx,pdx-both,plain --rounds 5 --no-overhead"
# Their last results are shown, too: they need a GPU (`python -m pdx.bench.gpu`).
SHOWN = tuple(f"gpu-{section}" for section in SECTIONS)
NUMBERS = ROOT / "docs" / "numbers.md"
# Between these marks `fill_numbers` puts the figures that have a goal; the others are in the JSON files.
BEGIN, END = "<!-- filled by `make bench` from here -->\n", "<!-- to here -->\n"


def run(module: str, root: Path = ROOT) -> dict[str, float] | None:
    """The figures of one bench, in a process of its own; None where it failed."""
    console.rule(module if root == ROOT else f"{module} of {root}")
    env = os.environ if root == ROOT else {**os.environ, "PYTHONPATH": str(root)}
    last = ""
    command = [sys.executable, "-P", "-m", module]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        return None
    return {name: value for name, value in json.loads(last).items() if isinstance(value, (int, float))}


def run_handoff() -> bool:
    """Measure it, and keep its figures as the result `handoff`."""
    console.rule("handoff")
    out = ROOT / "pdx-bench" / "handoff"
    program, *options = HANDOFF.split()
    command = [sys.executable, "-P", "-m", f"{program}.cli.main", *options, "--out", str(out)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        return False
    shutil.copy(out / f"{BREAKDOWN}.json", RESULTS / "handoff.json")
    return True


def beside(names: list[str], before: Path, rounds: int) -> int:
    """Run each bench here and in that checkout in turns; show the median of each figure's ratio."""
    failed = 0
    for name in names:
        ratios: dict[str, list[float]] = defaultdict(list)
        for turn in range(rounds):
            roots = (before.resolve(), ROOT) if turn % 2 == 0 else (ROOT, before.resolve())
            found = {root: run(BENCHES[name], root) for root in roots}
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
    """One result as rows of the table of goals: what ran, then each figure that has a goal."""
    result = json.loads((RESULTS / f"{bench}.json").read_text())
    machine = result["machine"]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    lines = [
        f"| **`{_command(bench, result)}`**, {machine['date']}, {machine['cpus']}-core {machine['cpu']}{gpu} | | |"
    ]
    for figure in result["figures"]:
        if figure["goal"]:
            value = f"{figure['value']:,.3f} {figure['unit']}".strip()
            lines.append(
                f"| {figure['name']} | {value} | {figure['goal']}{'' if figure['is_met'] else ': **missed**'} |"
            )
    return lines


def _command(bench: str, result: dict[str, Any]) -> str:
    """What one types to measure it again."""
    if result["bench"] != BREAKDOWN:
        _, is_gpu, only = bench.partition("gpu-")
        return f"python -m pdx.bench.gpu --only {only}" if is_gpu else f"python -m {BENCHES[bench]}"
    asked = result["details"]["settings"]
    lists = " ".join(f"--{name} {','.join(map(str, asked[name]))}" for name in ("tokens", "concurrency", "systems"))
    overhead = "" if asked["overhead_pairs"] else " --no-overhead"
    return f"pdx bench breakdown {lists} --rounds {asked['rounds']} --max-engines {asked['max_engines']}{overhead}"


def fill_numbers() -> None:
    """Replace what stands between the marks."""
    head, _, rest = NUMBERS.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    shown = [name for name in (*BENCHES, "handoff", *SHOWN) if (RESULTS / f"{name}.json").exists()]
    lines = ["| figure | measured | goal |", "|---|---:|---|", *(row for name in shown for row in rows(name))]
    pictures = [f"\n![{name}](../bench/results/{name}.png)" for name in shown if (RESULTS / f"{name}.png").exists()]
    NUMBERS.write_text(f"{head}{BEGIN}\n" + "\n".join([*lines, *pictures]) + f"\n\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdx.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*BENCHES, 'handoff'))}")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="run each bench in turns with that checkout's")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each bench with --before")
    options = parser.parse_args()
    if unknown := set(options.names) - {*BENCHES, *([] if options.before else ["handoff"])}:
        parser.error(f"no such bench: {', '.join(sorted(unknown))}")
    names = options.names or [*BENCHES, "handoff"]
    if options.before:
        return beside([name for name in names if name in BENCHES], options.before, options.rounds)
    failed = [name for name in names if not (run_handoff() if name == "handoff" else run(BENCHES[name]))]
    fill_numbers()
    for name in failed:
        console.print(f"{name} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
