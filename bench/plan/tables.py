"""`pdx plan` in the terminal: the question and the verdict, then the tables behind it."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdx.bench.plan.fleet import Service
from pdx.bench.plan.model import Plan
from pdx.bench.plan.transfer import LONGEST
from pdx.bench.plan.units import show_bytes, show_rate, show_time

# Parts of a mean request, in order.
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
_COLOURS = {"yes": "bold green", "no": "bold yellow", "even": "bold cyan", "impossible": "bold red"}


def show(plan: Plan, console: Console) -> None:
    console.print(f"{plan.hardware}", highlight=False)
    console.print(workload_line(plan), highlight=False)
    console.print(Text(plan.verdict.headline, style=_COLOURS[plan.verdict.helps]))
    for reason in plan.verdict.reasons:
        console.print(f"  - {reason}", highlight=False)
    if plan.split or plan.mixed:
        console.print(services(plan))
    if (service := plan.same_split or plan.split) and service.request:
        console.print(request(service))
    console.print(hiding(plan))
    console.print(crossovers(plan))


def workload_line(plan: Plan) -> str:
    """The workload and the SLO on one line."""
    work, slo = plan.case.work, plan.case.slo
    reused = f", {work.reuse:.0%} of it reused" if work.reuse else ""
    return (
        f"{work.rate:g} requests/s, {work.input_tokens:,} tokens in{reused}, {work.output_tokens:,} out; SLO: "
        f"TTFT {show_time(slo.ttft_s)}, ITL {show_time(slo.itl_s)} at p{slo.share * 100:g}"
    )


def services(plan: Plan) -> Table:
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
        ("engines", lambda service: f"{service.prefillers} P + {service.decoders} D".removesuffix(" P + 0 D")),
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


def request(service: Service) -> Table:
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
    speed = plan.case.link.wire_bytes_s
    table = Table(title=f"what hides behind prefill, at {show_rate(speed)} per engine", title_justify="left")
    for name in ("prompt tokens", "KV", "prefill", "wire", "hidden", "exposed"):
        table.add_column(name, justify="right")
    for row in plan.hiding:
        nbytes = show_bytes(row.wire_s * speed)
        times = (show_time(row.prefill_s), show_time(row.wire_s))
        table.add_row(f"{row.tokens:,}", nbytes, *times, f"{row.share:.1%}", show_time(row.exposed_s))
    return table


def crossovers(plan: Plan) -> Table:
    """Whether to load or compute, for each link speed."""
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
        table.add_row(gbps, crossover_text(found.load_from), *ratios)
    return table


def crossover_text(load_from: int | None) -> str:
    """`Crossover.load_from` in words."""
    if load_from is None:
        return f"not up to {LONGEST:,} tokens"
    return "always" if load_from == 1 else f"from {load_from:,} tokens on"
