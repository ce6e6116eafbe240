"""`plan.png` and `crossover.png`: a plan to be read at a glance. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdx.bench.plan.fleet import Request, Service
from pdx.bench.plan.model import Hiding, Plan
from pdx.bench.plan.tables import asked
from pdx.bench.plan.units import show_time
from pdx.errors import ConfigError
from pdx.extras import install

# Okabe and Ito's colours, which colour-blind readers tell apart.
SPLIT, MIXED, LIMIT = "#0072B2", "#D55E00", "#555555"
PARTS = (
    ("HTTP, tokenizer", "request_s", "#999999"),
    ("queue", "queue_s", "#F0E442"),
    ("load of what is reused", "load_s", "#CC79A7"),
    ("prefill", "prefill_s", "#0072B2"),
    ("wire, not hidden", "wire_s", "#D55E00"),
    ("answer, request, lookup", "control_s", "#56B4E9"),
    ("scatter", "scatter_s", "#009E73"),
    ("first decode", "first_decode_s", "#E69F00"),
)
LINES = ("#CC79A7", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#56B4E9")


def pyplot() -> Any:
    """matplotlib without a window.

    :raises ConfigError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: {install('bench')}, or leave out --out") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(plan: Plan, folder: Path) -> list[Path]:
    """Both, into `folder`; what there is nothing to show of stays out."""
    paths = [folder / "plan.png", folder / "crossover.png"]
    _draw_plan(plan, paths[0])
    _draw_crossover(plan, paths[1])
    return paths


def _draw_plan(plan: Plan, path: Path) -> None:
    figure = pyplot().figure(figsize=(13, 9.4))
    above = figure.add_gridspec(1, 2, width_ratios=[1.85, 1], left=0.03, right=0.98, top=0.87, bottom=0.62, wspace=0.42)
    below = figure.add_gridspec(1, 2, left=0.06, right=0.98, top=0.51, bottom=0.125, wspace=0.16)
    request, handoff = (figure.add_subplot(cell) for cell in above)
    hiding, curve = (figure.add_subplot(cell) for cell in below)
    figure.suptitle(plan.verdict.headline, fontsize=15, fontweight="bold", x=0.025, ha="left")
    figure.text(0.025, 0.945, _wrap(asked(plan)), fontsize=10, va="top")
    service = plan.same_split or plan.split
    if service is None or service.request is None or not service.is_stable:
        _nothing(request, "no disaggregated deployment keeps this SLO")
        handoff.set_axis_off()
    else:
        _request(request, service, service.request)
        _handoff(handoff, service.request)
    _hiding(hiding, plan)
    _curve(curve, plan)
    foot = _wrap(plan.hardware + ". A model, not a measurement: docs/plan.md")
    figure.text(0.025, 0.012, foot, fontsize=8, color=LIMIT)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def _request(axis: Any, service: Service, request: Request) -> None:
    """The parts up to the second token; what is hidden lies below them, where it runs."""
    left = 0.0
    total = request.total_s * 1e3
    for name, field, colour in PARTS:
        width = getattr(request, field) * 1e3
        axis.barh(1, width, left=left, color=colour, height=0.62)
        if width > 0.09 * total:
            axis.text(left + width / 2, 1, f"{name}\n{width:,.0f} ms", ha="center", va="center", color=_ink(colour))
        left += width
    first = request.ttft_s * 1e3
    hidden = request.wire_hidden_s * 1e3
    axis.barh(0.35, hidden, left=first - hidden, color="w", edgecolor="#D55E00", hatch="////", height=0.4)
    words = f"{show_time(request.wire_hidden_s)} of transfer hide behind prefill  "
    axis.text(first - hidden, 0.35, words, va="center", ha="right", fontsize=10)
    axis.axvline(first, ymax=0.88, color="k", linewidth=1.2)
    axis.text(first, 1.43, f"first token {show_time(request.ttft_s)}", ha="right", fontsize=10)
    axis.set(ylim=(0, 1.6), yticks=[], xlim=(0, total * 1.01), xlabel="ms since the request came")
    axis.set_title(_title(service), loc="left", fontsize=11)
    _plain(axis)


def _handoff(axis: Any, request: Request) -> None:
    """The same from the first token on, one bar below the other."""
    parts = PARTS[4:]
    left = 0.0
    for row, (_, field, colour) in enumerate(parts):
        width = getattr(request, field) * 1e3
        axis.barh(row, width, left=left, color=colour, height=0.7)
        axis.text(left + width, row, f" {show_time(width / 1e3)}", va="center", fontsize=10)
        left += width
    axis.set_yticks(range(len(parts)), [name for name, _, _ in parts])
    axis.invert_yaxis()
    axis.set(xlim=(0, left * 1.25), xlabel="ms since the first token")
    axis.set_title(f"First to second token: {show_time(request.second_gap_s)}", loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)


def _ink(colour: str) -> str:
    return "w" if colour in ("#0072B2", "#D55E00", "#009E73") else "k"


def _title(service: Service) -> str:
    return (
        f"A mean request to its second token: {service.prefillers} prefill, {service.decoders} decode engines "
        f"({service.gpus} GPUs)"
    )


def _hiding(axis: Any, plan: Plan) -> None:
    """The hidden share over the length of the prompt, at some speeds of the link."""
    speeds = sorted({row.wire_bytes_s for row in plan.hiding})
    for colour, speed in zip(LINES, speeds, strict=False):
        rows = [row for row in plan.hiding if row.wire_bytes_s == speed]
        is_own = speed == plan.case.link.wire_bytes_s
        name = f"{speed * 8 / 1e9:,.4g} Gbps" + (" (this link)" if is_own else "")
        axis.plot(
            [row.tokens for row in rows],
            [row.share * 100 for row in rows],
            color=colour,
            marker="o",
            markersize=4,
            linewidth=5 if is_own else 1.8,
            zorder=1 if is_own else 2,
            label=name,
        )
    axis.set_xscale("log", base=2)
    _tokens(axis, plan.hiding)
    axis.set(ylim=(0, 103), xlabel="prompt tokens", ylabel="% of the KV there when prefill ends")
    axis.set_title("What hides behind prefill, layer by layer", loc="left", fontsize=11)
    axis.legend(loc="best", fontsize=9, title="link, in effect")
    _plain(axis)


def _curve(axis: Any, plan: Plan) -> None:
    """GPUs over rate."""
    if not any(point.split_gpus or point.mixed_gpus for point in plan.curve):
        _nothing(axis, "no number of GPUs keeps this SLO")
        return
    for name, colour, style, gpus in (
        ("disaggregated", SPLIT, "-", [point.split_gpus for point in plan.curve]),
        ("mixed", MIXED, "--", [point.mixed_gpus for point in plan.curve]),
    ):
        known = [(point.rate, count) for point, count in zip(plan.curve, gpus, strict=True) if count]
        if known:
            rates, counts = zip(*known, strict=True)
            axis.plot(rates, counts, color=colour, linestyle=style, marker="o", markersize=5, linewidth=2, label=name)
        else:
            axis.plot([], [], color=colour, linestyle=style, label=f"{name}: no number does")
    rate = plan.case.work.rate
    axis.axvline(rate, color=LIMIT, linewidth=1)
    axis.text(
        rate, 0.985, f" asked: {rate:g}/s", transform=axis.get_xaxis_transform(), va="top", color=LIMIT, fontsize=9
    )
    axis.set(xlabel="requests per second", ylabel="GPUs")
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    axis.set_title("GPUs that keep the SLO", loc="left", fontsize=11)
    axis.legend(loc="lower right", fontsize=9)
    _plain(axis)


def _draw_crossover(plan: Plan, path: Path) -> None:
    """Times over the prompt's length for each link, and what loading takes of the time to compute."""
    figure, (times, ratios) = pyplot().subplots(1, 2, figsize=(13, 6.4))
    figure.suptitle("Load a prompt's KV, or compute it again?", fontsize=15, fontweight="bold", x=0.025, ha="left")
    lengths = [row.tokens for row in plan.loading]
    times.plot(
        lengths, [row.prefill_s * 1e3 for row in plan.loading], color="k", linewidth=3, label="compute (prefill)"
    )
    for colour, (number, found) in zip(LINES, enumerate(plan.crossovers), strict=False):
        loads = [row.load_s[number] for row in plan.loading]
        label = f"load at {found.bytes_s * 8 / 1e9:g} Gbps: {_where(found.load_from, found.longest)}"
        times.plot(lengths, [load * 1e3 for load in loads], color=colour, linewidth=2, label=label)
        shares = [load / row.prefill_s for load, row in zip(loads, plan.loading, strict=True)]
        ratios.plot(lengths, shares, color=colour, linewidth=2, marker="o", markersize=4)
        if found.load_from and found.load_from > 1:
            ratios.plot([found.load_from], [1], "o", color=colour, markersize=12, markeredgecolor="k", zorder=3)
    times.set_yscale("log")
    times.set(xlabel="prompt tokens", ylabel="ms")
    times.set_title("Time", loc="left", fontsize=11)
    times.legend(loc="lower right", fontsize=10)
    ratios.axhline(1, color="k", linewidth=3)
    ratios.axhspan(0, 1, color="#009E73", alpha=0.08)
    ratios.text(0.98, 0.985, "below the line: load", transform=ratios.transAxes, va="top", ha="right", color=LIMIT)
    ratios.set(xlabel="prompt tokens", ylabel="time to load / time to compute")
    ratios.set_ylim(0, max(1.25, ratios.get_ylim()[1]))
    ratios.set_title("Loading as a share of computing", loc="left", fontsize=11)
    for axis in (times, ratios):
        axis.set_xscale("log", base=2)
        _tokens(axis, plan.loading)
        axis.grid(visible=True, alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(0.025, 0.012, _wrap(plan.hardware), fontsize=8, color=LIMIT)
    figure.tight_layout(rect=(0.01, 0.05, 0.99, 0.97), w_pad=2.5)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def _where(load_from: int | None, longest: int) -> str:
    if load_from is None:
        return f"slower up to {longest:,} tokens"
    return "always faster" if load_from == 1 else f"faster from {load_from:,} tokens on"


def _tokens(axis: Any, rows: Sequence[Hiding] | Sequence[Any]) -> None:
    lengths = sorted({row.tokens for row in rows})
    axis.set_xticks(lengths, [f"{tokens // 1024}k" if tokens >= 1024 else str(tokens) for tokens in lengths])
    axis.minorticks_off()


def _plain(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_yscale() == "linear" and len(axis.get_yticks()):
        axis.grid(visible=True, axis="y", alpha=0.25)


def _nothing(axis: Any, why: str) -> None:
    axis.text(0.5, 0.5, why, ha="center", va="center", transform=axis.transAxes, fontsize=12, color=LIMIT)
    axis.set_axis_off()


def _wrap(text: str, width: int = 190) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
