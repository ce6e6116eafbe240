"""All benches, one after the other, and docs/numbers.md from their results: `python -m pdx.bench`.

About fifteen minutes on two cores. A goal that is missed is shown, not an error; exit status 1: a bench did not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from pdx.bench.gpu.__main__ import SECTIONS
from pdx.bench.harness.places import RESULTS, ROOT
from pdx.bench.harness.report import at_least, console, publish

BENCHES = ("pages", "node", "scaling", "pushes", "handoff", "overhead", "channels", "paged", "across", "digests")
# A result is named as its program is, but for the room that the program is in.
ROOMS = {
    **dict.fromkeys(("pages",), "store"),
    **dict.fromkeys(("scaling", "pushes", "handoff", "overhead", "across", "digests", "flood"), "node"),
    **dict.fromkeys(("paged", "idle"), "channels"),
}
# Their last results are shown: one takes as long as one wants, some need a GPU (`python -m pdx.bench.gpu`), and the
# last are of `pdx bench breakdown`, copied from its --out.
SHOWN = (
    "idle",
    "flood",
    "flood-proxy",
    "proxy_cost",
    "proxy_faults",
    *(f"gpu-{section}" for section in SECTIONS),
    *("breakdown", "breakdown-8000", "breakdown-yield"),
    *("reuse-lmcache", "reuse-plain"),
)
NUMBERS = ROOT / "docs" / "numbers.md"
BEGIN, END = "<!-- filled by `make bench` from here -->\n", "<!-- to here -->\n"
PAGES_GOAL = 0.8
BREAKDOWN = "breakdown"


def module_of(bench: str) -> str:
    """What `python -m` gets to measure it."""
    room, _, rest = bench.partition("_")
    if rest:
        return f"pdx.bench.{room}.{rest}"
    return ".".join(["pdx.bench", *([ROOMS[bench]] if bench in ROOMS else []), bench])


def run(bench: str) -> str | None:
    """Run one bench in a process of its own; its last line, None where it failed."""
    module = module_of(bench)
    console.rule(module)
    command = [sys.executable, "-m", module]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return None if process.returncode else last


def publish_pages(last: str) -> None:
    """The slowest case of each operation, on one thread and on two."""
    rows: list[dict[str, Any]] = json.loads(last)["rows"]
    figures = []
    for operation in ("gather", "scatter"):
        for threads in (1, 2):
            cases = [row for row in rows if row["operation"] == operation and row["threads"] == threads]
            slowest = min(cases, key=lambda row: row["ratio"])
            note = f"{slowest['page_kib']} KiB pages, {slowest['order']}: {slowest['gb_s']} GB/s"
            name = (
                f"{operation}, {threads} thread{'s' * (threads > 1)}, slowest of {len(cases)}: share of memcpy's rate"
            )
            figures.append(at_least(name, slowest["ratio"], "", PAGES_GOAL, note))
    publish("pages", "gather and scatter of KV pages of 16 to 128 KiB", figures, {"rows": rows})


def table(bench: str) -> str:
    """One result as Markdown."""
    result = json.loads((RESULTS / f"{bench}.json").read_text())
    machine = result["machine"]
    versions = {**machine["versions"], **machine.get("gpu_versions", {})}
    for facts in (result.get("details") or {}).get("systems", {}).values() if result["bench"] == BREAKDOWN else ():
        versions |= facts["versions"]
    picture = RESULTS / f"{bench}.png"
    lines = [
        f"### {_title(result)}",
        "",
        *([f"![{result['title']}](../bench/results/{picture.name})", ""] if picture.exists() else []),
        f"`{_command(bench, result)}`, {machine['date']}, {machine['cpus']}-core {machine['cpu']}, "
        f"{machine.get('gpu', 'no GPU')}, Python {machine['python']}, "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}; "
        f"load at the end {machine['load_at_end']}.",
        "",
        "| figure | measured | goal | met | note |",
        "|---|---:|---|---|---|",
    ]
    for figure in result["figures"]:
        met = {None: "", True: "yes", False: "**no**"}[figure["is_met"]]
        measured = f"{figure['value']:,.3f} {figure['unit']}".strip()
        lines.append(f"| {figure['name']} | {measured} | {figure['goal']} | {met} | {figure['note']} |")
    return "\n".join([*lines, *_left_out(result), ""])


def _title(result: dict[str, Any]) -> str:
    """Of several breakdowns, each has its own."""
    title = str(result["title"])
    if result["bench"] != BREAKDOWN:
        return title
    asked = result["details"]["settings"]
    tokens = ", ".join(f"{each:,}" for each in asked["tokens"])
    return f"{title}: {tokens} tokens; {', '.join(asked['systems'])}"


def _command(bench: str, result: dict[str, Any]) -> str:
    """What one types to measure it again."""
    if result["bench"] != BREAKDOWN:
        name, _, only = bench.partition("-")
        return f"python -m {module_of(name)}" + (f" --only {only}" if only else "")
    asked = result["details"]["settings"]
    lists = " ".join(f"--{name} {','.join(map(str, asked[name]))}" for name in ("tokens", "concurrency", "systems"))
    overhead = "" if asked["overhead_pairs"] else " --no-overhead"
    return f"pdx bench breakdown {lists} --rounds {asked['rounds']} --max-engines {asked['max_engines']}{overhead}"


def _left_out(result: dict[str, Any]) -> list[str]:
    """What a breakdown says nothing about, below its table."""
    if result["bench"] != BREAKDOWN:
        return []
    details = result["details"]
    lines = [f"{name} did not run, or not to the end: {why}" for name, why in details["not_run"].items()]
    lines += [f"no goal checked: {line}" for line in details["missing"]]
    return ["", *(f"- {line}" for line in lines)] if lines else []


def fill_numbers() -> None:
    """Replace what stands between the marks."""
    head, _, rest = NUMBERS.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    tables = "\n".join(table(bench) for bench in (*BENCHES, *SHOWN) if (RESULTS / f"{bench}.json").exists())
    NUMBERS.write_text(f"{head}{BEGIN}\n{tables}\n{END}{tail}")


def main() -> int:
    failed = []
    for bench in BENCHES:
        last = run(bench)
        if last is None:
            failed.append(bench)
        elif bench == "pages":
            publish_pages(last)
    fill_numbers()
    for bench in failed:
        console.print(f"{module_of(bench)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
