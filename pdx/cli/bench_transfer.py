"""`pdx bench transfer`: how fast each channel moves messages on this machine, by their size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pdx.cli.node import check_channels
from pdx.config import parse_bytes
from pdx.errors import ConfigError
from pdx.transports.registry import INSIDE_ONE_PROCESS, schemes

if TYPE_CHECKING:
    from pdx.bench.channels.trial import Told

SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"
INTERRUPTED = 130


@click.command()
@click.option("--channel", "channels", multiple=True, metavar="NAME", help="Only this one; repeatable. [default: all]")
@click.option("--sizes", default=SIZES, show_default=True, metavar="SIZE,…", help="Bytes in a message.")
@click.option("--in-flight", default="1,8", show_default=True, metavar="N,…", help="Messages sent before one is over.")
@click.option(
    "--repeats", default=7, show_default=True, type=click.IntRange(1, 1000), help="Rounds; medians are shown."
)
@click.option("--raw/--no-raw", default=True, show_default=True, help="Call the technology underneath directly, too.")
@click.option("--memory", default="256MiB", show_default=True, metavar="SIZE", help="Each side walks through so much.")
@click.option(
    "--out",
    default="pdx-bench/transfer",
    show_default=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="For transfer.json and transfer.png.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def transfer(
    channels: tuple[str, ...],
    sizes: str,
    in_flight: str,
    repeats: int,
    raw: bool,
    memory: str,
    out: Path,
    as_json: bool,
) -> None:
    """Measure every channel between two processes of this machine, by message size, beside memcpy.

    Both sides walk through more memory than caches hold; that all bytes arrive is seen first. A channel and the
    technology under it are timed in the same rounds. Ctrl-C keeps what was measured (exit status 130).

    Exit status 1: nothing was measured, a channel broke, or one that was named with --channel is not there.
    """
    check_channels(channels)
    try:
        from pdx.bench.channels import transfer as bench
        from pdx.bench.channels.trial import check_room
        from pdx.bench.harness.interrupts import Interrupts
    except ImportError as error:
        raise ConfigError(f"this bench needs more packages ({error}): pip install 'pdx-transport[bench]'") from error
    depths = [_number(word) for word in in_flight.split(",")]
    wanted = [parse_bytes(word) for word in sizes.split(",")]
    chosen = bench.options(wanted, depths, repeats, has_raw=raw, ring=parse_bytes(memory))
    check_room(chosen.ring)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    names = dict.fromkeys(channels or (name for name in schemes() if name not in INSIDE_ONE_PROCESS))
    teller = Teller()
    run = bench.Run(list(names), chosen, out / "transfer.json", teller.tell)
    try:
        with Interrupts(), teller.shown(run.steps):
            run.measure()
    except KeyboardInterrupt:
        run.save()
    try:
        picture = run.draw(out / "transfer.png")
    except ConfigError as error:
        picture = None
        click.echo(f"no picture: {error}", err=True)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(run.result), indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 150, highlight=False).print(bench.view(run.result))
    click.echo(f"written: {out / 'transfer.json'}{f', {picture}' if picture else ''}", err=True)
    if not run.result.is_complete:
        click.echo("interrupted; what was measured until then is kept", err=True)
        sys.exit(INTERRUPTED)
    is_missing = any(name in run.result.not_run for name in channels)
    sys.exit(0 if run.result.is_well and not is_missing else 1)


class Teller:
    """Progress on standard error: a bar on a terminal, a line for each measured case elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def shown(self, steps: int) -> Progress:
        """A context in which it is on the screen."""
        self._task = self._bar.add_task("the first channel starts", total=steps)
        return self._bar

    def tell(self, scheme: str, message: Told) -> None:
        """What has just been measured, or could not be."""
        from pdx.bench.channels.bandwidth import size_text
        from pdx.bench.channels.trial import Failed

        assert self._task is not None
        if isinstance(message, Failed):
            text = f"{scheme}: not measured: {message.missing.why}"
            self._console.print(Text(text, style="yellow"), soft_wrap=True)
        else:
            row = message.row
            raw = "" if row.raw_gb_s is None else f", directly {row.raw_gb_s:.3f}"
            text = f"{scheme}, {size_text(row.nbytes)}, {row.in_flight} in flight: {row.gb_s:.3f} GB/s{raw}"
            self._bar.update(self._task, advance=1, description=text)
            if not self._console.is_terminal:
                self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ConfigError(f"{word!r} is not a number of messages; write for example --in-flight 1,8") from None
