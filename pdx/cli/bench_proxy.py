"""`pdx bench proxy`: what `pdx proxy` adds to latencies, and the CPU time that it takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdx.cli.options import NAMES, Counts

if TYPE_CHECKING:
    from pdx.bench.proxy.load import Row
    from pdx.bench.proxy.run import ProxyRun

INTERRUPTED = 130  # as a shell shows SIGINT
WIDTH = 150  # of tables that are not on a terminal
MODES = ("forward", "sampled")


@click.command()
@click.option(
    "--requests",
    default=48,
    show_default=True,
    type=click.IntRange(1),
    help="Of each kind, each way; more where four turns at the concurrency need more.",
)
@click.option("--concurrency", default="1,8,64", show_default=True, type=Counts(), help="Requests at once.")
@click.option("--prompt-tokens", default="1000", show_default=True, type=Counts(least=8), help="Lengths of prompts.")
@click.option(
    "--tokens",
    default="4,32",
    show_default=True,
    type=Counts(least=2),
    help="Generated for each request; from two lengths the cost of a token follows.",
)
@click.option("--modes", default=",".join(MODES), show_default=True, type=NAMES, help="Of the proxy.")
@click.option(
    "--first-ms", default=20.0, show_default=True, type=click.FloatRange(0), help="An engine's time to a first token."
)
@click.option(
    "--pace-ms", default=10.0, show_default=True, type=click.FloatRange(0), help="An engine's time between tokens."
)
@click.option(
    "--out",
    default="pdx-bench",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for proxy.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON in place of the tables.")
def proxy(
    requests: int,
    concurrency: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    tokens: tuple[int, ...],
    modes: tuple[str, ...],
    first_ms: float,
    pace_ms: float,
    out: Path,
    as_json: bool,
) -> None:
    """Ask stand-in engines directly and through `pdx proxy`, in turns.

    The engines compute nothing and answer at a fixed pace, so that what is added is the proxy and the HTTP of a second
    leg: to the first token, between tokens, and in CPU time. All requests are streamed. No node is needed.

    Ctrl-C ends it and keeps what was measured (exit status 130).
    """
    from pdx.bench.harness.interrupts import Steps
    from pdx.bench.harness.report import ResultFile
    from pdx.bench.proxy.run import ProxyRun, Settings
    from pdx.bench.proxy.stage import stage
    from pdx.bench.proxy.stand_in_engine import Pace

    _check(modes, concurrency=concurrency, prompt_tokens=prompt_tokens, tokens=tokens)
    run = ProxyRun(Settings(modes, concurrency, prompt_tokens, tokens, requests, Pace(first_ms, pace_ms)))
    file = ResultFile(out, "proxy", "the proxy beside its engines asked directly, stand-in engines")
    run.on_more = lambda: file.write(run.figures(), run.details())
    try:
        run.on_more()
    except OSError as error:
        raise click.ClickException(f"--out {out}: {error}") from error
    try:
        with Steps(run.steps) as steps, stage(run.settings.pace) as actors:
            run.measure(actors, steps)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    text = file.write(run.figures(), run.details())
    if as_json:
        click.echo(text, nl=False)
    else:
        show(run, Console(width=None if sys.stdout.isatty() else WIDTH))
        click.echo(f"kept in {file.path}")
    if steps.was_interrupted:
        sys.exit(INTERRUPTED)
    if run.has_nothing:
        raise click.ClickException("nothing was measured: " + "; ".join(f"{k}: {v}" for k, v in run.failed.items()))


def _check(modes: tuple[str, ...], **lists: tuple[int, ...]) -> None:
    """:raises click.BadParameter: a mode that there is not, or an empty list."""
    for mode in modes:
        if mode not in MODES:
            raise click.BadParameter(f"{mode!r} is no mode; there are {', '.join(MODES)}", param_hint="'--modes'")
    for name, values in {"modes": modes, **lists}.items():
        if not values:
            raise click.BadParameter("at least one is needed", param_hint=f"'--{name.replace('_', '-')}'")


def show(run: ProxyRun, console: Console) -> None:
    """Tables of what was measured, and of what failed."""
    if run.rows:
        pace = run.settings.pace
        words = f"first token after {pace.first_ms:g} ms, one more each {pace.pace_ms:g} ms"
        console.print(_latencies(run.rows, f"what the proxy adds, ms, p50 / p99 (stand-in engines: {words})"))
    if run.saturated:
        console.print(_rates(run.saturated))
    if costs := list(run.costs()):
        table = _table(
            "CPU time of the proxy, of the rows above (tokens that come together cost less)",
            ("mode", "prompt"),
            ("ms per request", "µs per token"),
        )
        for each in costs:
            times = (f"{each.cpu_ms_per_request:.2f}", f"{each.cpu_us_per_token:.1f}")
            table.add_row(each.mode, f"{each.prompt_tokens:,}", *times)
        console.print(table)
    if run.failed:
        table = Table(title="failed", title_justify="left", show_header=False)
        for name, why in run.failed.items():
            table.add_row(Text(name), Text(why))
        console.print(table)
    if any(row.is_machine_full for row in run.rows):
        console.print("* all cores of this machine were busy: latencies are the machine's, not the proxy's")
    if not run.is_complete:
        console.print("ended early: what was measured until then")


def _latencies(rows: list[Row], title: str) -> Table:
    columns = ("TTFT", "between tokens", "TTFT directly", "through it", "CPU ms/request")
    table = _table(title, ("mode", "at once", "tokens"), columns)
    for row in rows:
        table.add_row(
            row.mode,
            f"{row.concurrency}{' *' if row.is_machine_full else ''}",
            f"{row.prompt_tokens:,} + {row.tokens}",
            f"{row.added_ttft_p50_ms:+.2f} / {row.added_ttft_p99_ms:+.2f}",
            f"{row.added_itl_p50_ms:+.2f} / {row.added_itl_p99_ms:+.2f}",
            f"{row.direct.ttft.p50_ms:.2f} / {row.direct.ttft.p99_ms:.2f}",
            f"{row.proxy.ttft.p50_ms:.2f} / {row.proxy.ttft.p99_ms:.2f}",
            f"{row.cpu_ms:.2f}",
        )
    return table


def _rates(rows: list[Row]) -> Table:
    columns = ("requests/s", "directly", "CPU ms/request", "proxy", "client", "engines", "all")
    title = "engines that answer at once; cores that were busy"
    table = _table(title, ("mode", "at once", "tokens"), columns)
    for row in rows:
        way = row.proxy
        cores = (way.proxy_cores, way.client_cores, way.engine_cores, way.machine_cores)
        table.add_row(
            row.mode,
            str(row.concurrency),
            f"{row.prompt_tokens:,} + {row.tokens}",
            f"{way.requests_per_s:,.1f}",
            f"{row.direct.requests_per_s:,.1f}",
            f"{row.cpu_ms:.2f}",
            *(f"{each:.2f}" for each in cores),
        )
    return table


def _table(title: str, names: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in names:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", overflow="fold")
    return table
