"""`pdx cache`: look after what is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pdx.cli.options import FOLDER
from pdx.cli.tables import size
from pdx.errors import TierError

MAX_LINES = 20


@click.group()
def cache() -> None:
    """Look after the chunks that are kept on disks."""


@cache.command()
@click.argument("folder", type=FOLDER)
@click.option("--remove", is_flag=True, help="Remove the files that are not what they were.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(folder: Path, remove: bool, as_json: bool) -> None:
    """Read all chunks in FOLDER, which --disk names, and compare their digests. A node may use it meanwhile.

    Ends with status 1 where a file that is not what was written is there still. A node finds such a file, too, when it
    would load it.
    """
    from pdx.store.disk.scrub import num_files, scrub

    wrong: list[str] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress:
        task = progress.add_task("verifying", total=num_files(folder))

        def on_file(error: TierError | None) -> None:
            progress.advance(task)
            if error is not None and error.kind != "foreign":
                wrong.append(str(error))

        report = scrub(folder, on_file, remove=remove)
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        for line in wrong[:MAX_LINES]:
            click.echo(line)
        if len(wrong) > MAX_LINES:
            click.echo(f"and {len(wrong) - MAX_LINES:,} more")
        bad = ", ".join(f"{count:,} {kind}" for kind, count in report.bad.items()) or "0 bad"
        others = f", {report.foreign:,} files that no node wrote" if report.foreign else ""
        click.echo(f"{report.good:,} chunks are good ({size(report.nbytes)}), {bad}{others}")
    if report.left:
        sys.exit(1)
