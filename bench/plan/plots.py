"""`plan.png` and `crossover.png`: a plan to be read at a glance. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdx.bench.harness.plot_style import Sheet, powers_of_two
from pdx.bench.plan.fleet import Request
from pdx.bench.plan.model import Plan
from pdx.bench.plan.tables import PARTS, asked
from pdx.bench.plan.units import show_time

COLOURS = ("#999999", "#F0E442", "#CC79A7", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#E69F00")


def draw(plan: Plan, folder: Path) -> list[Path]:
    """Both, into `folder`; what there is nothing to show of stays out.

    :raises ConfigError: matplotlib is not installed.
    """
    return [_draw_plan(plan, folder / "plan.png"), _draw_crossover(plan, folder / "crossover.png")]


def _draw_plan(plan: Plan, path: Path) -> Path:
    sheet = Sheet(f"{plan.verdict.headline}\n{asked(plan)}", [2.4, 3.2], columns=2)
    service = plan.same_split or plan.split
    if service is not None and service.request is not None and service.is_stable:
        words = f"{service.prefillers} prefill, {service.decoders} decode engines ({service.gpus} GPUs)"
        _parts(sheet.at(0, 0, f"A mean request: {words}", "ms since the request came"), service.request, 0)
        gap = show_time(service.request.second_gap_s)
        _parts(sheet.at(0, 1, f"First to second token: {gap}", "ms since the first token"), service.request, 4)
    axes = sheet.at(1, 0, "What hides behind prefill, layer by layer", "prompt tokens", "% of KV there at its end")
    for speed in sorted({row.wire_bytes_s for row in plan.hiding}):
        rows = [row for row in plan.hiding if row.wire_bytes_s == speed]
        label = f"{speed * 8 / 1e9:,.4g} Gbps{' (this link)' if speed == plan.case.link.wire_bytes_s else ''}"
        axes.plot([row.tokens for row in rows], [row.share * 100 for row in rows], marker="o", label=label)
    powers_of_two(axes, {row.tokens for row in plan.hiding}, _tokens)
    axes = sheet.at(1, 1, "GPUs that keep the SLO", "requests per second", "GPUs")
    for name, gpus in (
        ("disaggregated", [point.split_gpus for point in plan.curve]),
        ("mixed", [point.mixed_gpus for point in plan.curve]),
    ):
        known = [(point.rate, count) for point, count in zip(plan.curve, gpus, strict=True) if count]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", label=name)
    axes.axvline(plan.case.work.rate, color="#555555", linestyle=":")
    return sheet.save(path, f"{plan.hardware}. A model, not a measurement: docs/plan.md")


def _parts(axes: Any, request: Request, first: int) -> None:
    """One bar below the other, each where it runs; what is hidden lies behind the first token."""
    left = 0.0
    parts = list(zip(PARTS.items(), COLOURS, strict=True))[first:]
    for row, ((field, _), colour) in enumerate(parts):
        width = getattr(request, field) * 1e3
        axes.barh(row, width, left=left, color=colour)
        axes.text(left + width, row, f" {show_time(width / 1e3)}", va="center", fontsize=8)
        left += width
    if not first:
        hidden = {"facecolor": "white", "edgecolor": "#D55E00", "hatch": "////", "label": "transfer behind prefill"}
        at = request.ttft_s * 1e3
        axes.barh(3.5, request.wire_hidden_s * 1e3, left=at - request.wire_hidden_s * 1e3, height=0.2, **hidden)
        axes.axvline(at, color="k")
    axes.set_yticks(range(len(parts)), [name for (_, name), _ in parts])
    axes.invert_yaxis()
    axes.set_xlim(0, left * 1.25)


def _draw_crossover(plan: Plan, path: Path) -> Path:
    """Times over the prompt's length for each link, and what loading takes of the time to compute."""
    sheet = Sheet("Load a prompt's KV, or compute it again?", [4.0], columns=2)
    times = sheet.at(0, 0, "Time", "prompt tokens", "ms")
    ratios = sheet.at(0, 1, "Loading as a share of computing; below 1: load", "prompt tokens")
    lengths = [row.tokens for row in plan.loading]
    times.plot(
        lengths, [row.prefill_s * 1e3 for row in plan.loading], color="k", linewidth=3, label="compute (prefill)"
    )
    for number, found in enumerate(plan.crossovers):
        loads = [row.load_s[number] for row in plan.loading]
        words = f"faster from {found.load_from:,} tokens on" if found.load_from else "never faster"
        times.plot(lengths, [each * 1e3 for each in loads], label=f"load at {found.bytes_s * 8 / 1e9:g} Gbps: {words}")
        ratios.plot(lengths, [each / row.prefill_s for each, row in zip(loads, plan.loading, strict=True)], marker="o")
    times.set_yscale("log")
    ratios.axhline(1, color="k")
    for axes in (times, ratios):
        powers_of_two(axes, lengths, _tokens)
    return sheet.save(path, plan.hardware)


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
