"""`pdx plan` in the terminal, the verdict first, then what it rests on; and as `plan.png` and `crossover.png`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdx.bench.harness.plot_style import Sheet, powers_of_two
from pdx.bench.plan.fleet import Request, Service
from pdx.bench.plan.model import Plan
from pdx.bench.plan.units import show_bytes, show_rate, show_time

# Of a mean request, in their order.
PARTS = {
    "request_s": "HTTP, tokenizer",
    "queue_s": "queue",
    "load_s": "load what is reused",
    "prefill_s": "prefill → first token",
    "wire_s": "wire, not hidden",
    "control_s": "answer, decode request, lookup",
    "scatter_s": "scatter",
    "first_decode_s": "first decode → second token",
}
BARS = ("#999999", "#F0E442", "#CC79A7", "#0072B2", "#D55E00", "#56B4E9", "#009E73", "#E69F00")
_COLOURS = {"yes": "bold green", "no": "bold yellow", "even": "bold cyan", "impossible": "bold red"}


def show(plan: Plan, console: Console) -> None:
    """All of it."""
    console.print(f"{plan.hardware}", highlight=False)
    console.print(asked(plan), highlight=False)
    console.print(Text(plan.verdict.headline, style=_COLOURS[plan.verdict.helps]))
    for reason in plan.verdict.reasons:
        console.print(f"  - {reason}", highlight=False)
    if plan.split or plan.mixed:
        console.print(services(plan))
    if (service := plan.same_split or plan.split) and service.request:
        console.print(request(service))
    console.print(hiding(plan))
    console.print(crossovers(plan))


def asked(plan: Plan) -> str:
    """The workload and the SLO in a line."""
    work, slo = plan.case.work, plan.case.slo
    varied = f" (varying by {work.input_variation:g})" if work.input_variation else ""
    reused = f", {work.reuse:.0%} of it reused" if work.reuse else ""
    return (
        f"{work.rate:g} requests/s, {work.input_tokens:,} tokens in{varied}{reused}, {work.output_tokens:,} out; SLO: "
        f"TTFT {show_time(slo.ttft_s)}, ITL {show_time(slo.itl_s)} at p{slo.share * 100:g}"
    )


def services(plan: Plan) -> Table:
    """Disaggregated and mixed beside each other."""
    found = {
        "disaggregated": plan.split,
        "mixed": plan.mixed,
        "disaggregated,\nas many": plan.same_split if plan.same_split != plan.split else None,
        "mixed,\nas many": plan.same_mixed if plan.same_mixed != plan.mixed else None,
    }
    known = {name: service for name, service in found.items() if service}
    table = Table(title="what keeps the SLO, and the best of as many engines", title_justify="left")
    table.add_column("")
    for name in known:
        table.add_column(name, justify="right")
    high = f"p{plan.case.slo.share * 100:g}"
    rows: tuple[tuple[str, Callable[[Service], str]], ...] = (
        ("engines", _engines),
        ("GPUs", lambda service: str(service.gpus)),
        ("prompt tokens per step", lambda service: f"{service.chunk:,}"),
        ("time with prefill", lambda service: f"{service.prefill_utilisation:.0%}"),
        ("batch", lambda service: f"{service.decode_batch:,.1f}"),
        ("room for", lambda service: f"{service.decode_batch_most:,.0f}"),
        ("TTFT, mean", lambda service: show_time(service.ttft_s)),
        (f"TTFT, {high}", lambda service: show_time(service.ttft_high_s)),
        ("ITL, mean", lambda service: show_time(service.itl_s)),
        (f"ITL, {high}", lambda service: show_time(service.itl_high_s)),
        ("longest gap", lambda service: show_time(service.longest_gap_s)),
        ("SLO", lambda service: "kept" if service.is_kept else "missed"),
    )
    for name, cell in rows:
        table.add_row(name, *(cell(service) for service in known.values()))
    return table


def _engines(service: Service) -> str:
    return f"{service.prefillers} P + {service.decoders} D" if service.decoders else str(service.prefillers)


def request(service: Service) -> Table:
    """Where one request's time goes."""
    table = Table(title="a mean request, disaggregated: to its second token", title_justify="left")
    for name in ("part", "time", "share"):
        table.add_column(name, justify="left" if name == "part" else "right")
    found = service.request
    assert found is not None
    for field, name in PARTS.items():
        seconds: float = getattr(found, field)
        if seconds or name != "load what is reused":
            table.add_row(name, show_time(seconds), f"{seconds / found.total_s:.1%}")
    table.add_row("wire, hidden behind prefill", show_time(found.wire_hidden_s), "", style="dim")
    return table


def hiding(plan: Plan) -> Table:
    """At the link's own speed."""
    speed = plan.case.link.wire_bytes_s
    table = Table(title=f"what hides behind prefill, at {show_rate(speed)} per engine", title_justify="left")
    for name in ("prompt tokens", "KV", "prefill", "wire", "hidden", "exposed"):
        table.add_column(name, justify="right")
    for row in plan.hiding:
        if row.wire_bytes_s == speed:
            nbytes = show_bytes(row.wire_s * speed)
            times = (show_time(row.prefill_s), show_time(row.wire_s))
            table.add_row(f"{row.tokens:,}", nbytes, *times, f"{row.share:.1%}", show_time(row.exposed_s))
    return table


def crossovers(plan: Plan) -> Table:
    """Load or compute, for each speed."""
    lengths = (1024, 8192, 32_768)
    table = Table(title="load a prompt's KV, or compute it again? (time to load / to compute)", title_justify="left")
    table.add_column("as achieved", justify="right")
    table.add_column("loading is faster")
    for tokens in lengths:
        table.add_column(f"{tokens:,}", justify="right")
    for number, found in enumerate(plan.crossovers):
        rows = [row for row in plan.loading if row.tokens in lengths]
        ratios = [f"{row.load_s[number] / row.prefill_s:.2f}" for row in rows]
        gbps = f"{found.bytes_s * 8 / 1e9:,.4g} Gbps"
        table.add_row(gbps, _when(found.load_from, found.turns, found.longest), *ratios)
    return table


def _when(load_from: int | None, turns: list[int], longest: int) -> str:
    if load_from == 1:
        return "always"
    short = f", and below {turns[0]:,}" if len(turns) > (load_from is not None) else ""
    if load_from is None:
        return f"not up to {longest:,} tokens" if not turns else f"only below {turns[0]:,} tokens"
    return f"from {load_from:,} tokens on{short}"


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
    parts = list(zip(PARTS.items(), BARS, strict=True))[first:]
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
