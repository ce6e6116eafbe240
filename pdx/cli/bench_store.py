"""`pdx bench store`: the tiers of the chunk store, by speed and latency."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdx.cli.options import BYTE_SIZES, NAMES, Counts
from pdx.cli.status import size

if TYPE_CHECKING:
    from pdx.bench.harness.timing import Spread
    from pdx.bench.store.run import StoreRun

INTERRUPTED = 130  # as a shell shows SIGINT
WIDTH = 150  # of tables that are not on a terminal


@click.command()
@click.option("--sizes", default="1MiB,4MiB,16MiB", show_default=True, type=BYTE_SIZES, help="Of a chunk.")
@click.option("--chunks", default=8, show_default=True, type=click.IntRange(1, 10_000), help="Chunks in a round.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1, 10_000), help="Rounds that count.")
@click.option(
    "--tiers", default="", type=NAMES, help="host, gpu, disk, remote, and channels to another node (default: all)."
)
@click.option(
    "--index", default="10000,100000", show_default=True, type=Counts(), help='Chunks in the index; "": none.'
)
@click.option("--questions", default=2000, show_default=True, type=click.IntRange(1), help="Lookups in each index.")
@click.option(
    "--out",
    default="pdx-bench",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for store.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON in place of the tables.")
def store(
    sizes: tuple[int, ...],
    chunks: int,
    rounds: int,
    tiers: tuple[str, ...],
    index: tuple[int, ...],
    questions: int,
    out: Path,
    as_json: bool,
) -> None:
    """Store chunks and read them again, in every tier that there is here.

    A chunk is gathered from an engine's pages and scattered to such pages again: in the host arena of the engine's own
    node, on its GPU, and in another node over each channel. Beside it runs one memcpy of as many bytes. Then lookups in
    a full index. Tiers that cannot be measured are named with the reason.

    Ctrl-C ends it and keeps what was measured (exit status 130).
    """
    if importlib.util.find_spec("torch") is None:
        raise click.ClickException("pdx bench store copies with PyTorch: pip install 'pdx-transport[torch]'")
    from pdx.bench.harness.interrupts import Steps
    from pdx.bench.harness.report import ResultFile
    from pdx.bench.store.run import Settings, StoreRun, default_tiers

    run = StoreRun(Settings(tiers or tuple(default_tiers()), sizes, chunks, rounds, index, questions))
    run.begin()
    file = ResultFile(out, "store", f"tiers of the chunk store, median of {rounds} rounds")
    run.on_more = lambda: file.write(run.figures(), run.details())
    try:
        run.on_more()
    except OSError as error:
        raise click.ClickException(f"--out {out}: {error}") from error
    with Steps(run.steps) as steps:
        run.measure(steps)
    text = file.write(run.figures(), run.details())
    if as_json:
        click.echo(text, nl=False)
    else:
        show(run, Console(width=None if sys.stdout.isatty() else WIDTH))
        click.echo(f"kept in {file.path}")
    if steps.was_interrupted:
        sys.exit(INTERRUPTED)
    if run.has_nothing:
        raise click.ClickException("nothing was measured: " + "; ".join(f"{k}: {v}" for k, v in run.missing.items()))


def show(run: StoreRun, console: Console) -> None:
    """Tables of what was measured, and of what was not."""
    if run.rows:
        console.print(_tiers(run))
    if run.index:
        console.print(_index(run))
    if run.missing:
        table = Table(title="not measured", title_justify="left", show_header=False)
        for name, why in run.missing.items():
            table.add_row(Text(name), Text(why))
        console.print(table)
    if not run.is_complete:
        console.print("ended early: what was measured until then")


def _tiers(run: StoreRun) -> Table:
    from pdx.bench.store.tiers import title

    settings = run.settings
    words = f"GB/s of {settings.chunks} chunks, median of {settings.rounds} rounds; ms of one chunk, p50 / p99"
    table = Table(title=f"tiers: {words}", title_justify="left")
    table.add_column("tier", overflow="fold")
    for heading in ("chunk", "memcpy", "write", "of memcpy", "read", "of memcpy", "store one", "find one"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in run.rows:
        table.add_row(
            title(row.tier),
            size(row.chunk_bytes),
            f"{row.memcpy_gb_s:.2f}",
            f"{row.write_gb_s:.2f}",
            f"{row.write_ratio:.2f}",
            f"{row.read_gb_s:.2f}",
            f"{row.read_ratio:.2f}",
            _spread(row.store),
            _spread(row.hit),
        )
    return table


def _index(run: StoreRun) -> Table:
    from pdx.bench.store.lookups import PROMPT_KEYS

    words = f"{run.settings.questions:,} questions of one client; ms, p50 / p99"
    table = Table(title=f"lookups: {words}", title_justify="left")
    for heading in ("chunks", "lookups/s", "hit", "miss", f"{PROMPT_KEYS} at once", "ping"):
        table.add_column(heading, justify="right", overflow="fold")
    for each in run.index:
        times = (_spread(spread) for spread in (each.hit, each.miss, each.prompt, each.ping))
        table.add_row(f"{each.chunks:,}", f"{each.lookups_per_s:,.0f}", *times)
    return table


def _spread(spread: Spread) -> str:
    return f"{spread.p50_ms:.2f} / {spread.p99_ms:.2f}"
