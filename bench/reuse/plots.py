"""One picture of a run: TTFT over answered requests for each workload, and where tokens were found."""

from __future__ import annotations

from pathlib import Path

from pdx.bench.harness.plot_style import Sheet, looks, on_machine
from pdx.bench.reuse.figures import PERCENTILES, SHARES, curve, repeats_of, systems_of, targets_ms
from pdx.bench.reuse.records import FIRST, Result

SOURCE_COLOURS = {"local": "#009E73", "external": "#56B4E9", "computed": "#C7C7C7"}


def draw(result: Result, path: Path) -> Path | None:
    """None: nothing was measured at any load."""
    loaded = [point for point in result.points if point.load != FIRST]
    styles = looks({point.system for point in loaded} & set(systems_of(result)))
    workloads = [each for each in result.settings["workloads"] if any(p.workload == each for p in result.points)]
    if not styles:
        return None
    title = "Reuse under load: time to the first token, and requests that were answered"
    sheet = Sheet(title, [2.8] * len(workloads) + [0.3 * len(styles) + 0.4], columns=2)
    last = repeats_of(result)[-1]
    for row, workload in enumerate(workloads):
        for column, share in enumerate(PERCENTILES):
            axes = sheet.at(row, column, f"{workload}: TTFT p{share}", "answered requests per second", "ms")
            for system, style in styles.items():
                for repeat in repeats_of(result):
                    if points := curve(result, system, workload, repeat, share):
                        label = system if repeat == last else None
                        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, **style)
            for times, ms in targets_ms(result, workload, last):
                axes.axhline(ms, color="#999999", linestyle=":")
                axes.annotate(f"{times:g} × computing alone", (0, ms), fontsize=7, color="#777777")
            axes.set_xlim(left=0)
            axes.set_yscale("log")
    for column, workload in enumerate(workloads[:2]):
        axes = sheet.at(len(workloads), column, f"{workload}: where tokens were found", "")
        for row, system in enumerate(styles):
            found = [p.found for p in loaded if (p.system, p.workload) == (system, workload)]
            prompt, at = sum(each.prompt for each in found), 0.0
            for source, colour in SOURCE_COLOURS.items():
                part = sum(getattr(each, source) for each in found) / prompt if prompt else 0.0
                axes.barh(row, part, left=at, height=0.7, color=colour, label=None if row else SHARES[source])
                at += part
        axes.set_yticks(range(len(styles)), list(styles))
        axes.invert_yaxis()
    requests = sum(len(point.asked) for point in result.points)
    stopped = "" if result.is_complete else "INTERRUPTED. "
    model = f"{result.model['name']}, {int(result.model['kv_bytes_per_token']) / 1024:g} KiB of KV per token"
    note = f"{stopped}{requests:,} requests, repeats: {len(repeats_of(result))}. {model}. {on_machine(result.machine)}"
    return sheet.save(path, note)
