"""`pdx cache verify FOLDER`: the files of a disk, without its node."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pdx.cli.tables import size
from pdx.errors import TierError

MAX_LINES = 20


def verify_folder(folder: Path, *, remove: bool, as_json: bool) -> None:
    """Read all chunks there and say what is wrong with them. Ends with status 1 where something is there still."""
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
