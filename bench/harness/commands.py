"""`pdx bench proxy` and `transfer`: their options, and how a bench of several steps runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pdx.bench.harness.interrupts import Interrupts, Steps
from pdx.bench.harness.lists import BYTE_SIZES, NAMES, comma_separated, counts
from pdx.bench.harness.report import Figure, ResultFile, console, show_figures
from pdx.cli.node import check_channels
from pdx.cli.options import FOLDER, option
from pdx.cli.tables import table
from pdx.config import parse_bytes
from pdx.errors import ChannelBroken, ConfigError, PdxError
from pdx.extras import install
from pdx.transports.registry import schemes

if TYPE_CHECKING:
    from pdx.bench.channels.measure import Row

INTERRUPTED = 130  # as a shell reports SIGINT
MODES = ("forward", "sampled")
_json = option("--json", "as_json", is_flag=True, help="Print the JSON in place of the tables.")


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a bench: returns figures, and may add to the run's details. If a step of a `group` fails, the rest of
    the group is skipped."""

    name: str
    call: Callable[[], Iterable[Figure]]
    group: str = ""


@dataclass(slots=True)
class Run:
    """What was measured so far, saved to a file whenever there is more. `missing`: what was not measured, and why."""

    file: ResultFile
    details: dict[str, Any]
    missing: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    is_complete: bool = False

    def save(self) -> str:
        """Save the current state. :raises OSError: the file cannot be written."""
        more = {"missing": self.missing, "is_complete": self.is_complete}
        details: dict[str, Any] = msgspec.to_builtins({**self.details, **more})
        return self.file.write(self.figures, details)

    def carry_out(self, steps: Sequence[Step], *, as_json: bool) -> None:
        """Run all steps and show the results. A failed step is named, and the others continue.

        Exits with a status other than 0 if it was interrupted or measured nothing.
        """
        try:
            self.save()
        except OSError as error:
            raise click.ClickException(f"--out {self.file.path.parent}: {error}") from error
        failed = set()
        with Steps(len(steps)) as bar:
            for step in steps:
                bar.step(step.name)
                if step.group and step.group in failed:
                    continue
                try:
                    self.figures += step.call()
                except (PdxError, RuntimeError, OSError) as error:
                    failed.add(step.group)
                    self.missing[step.group or step.name] = f"{type(error).__name__}: {error}"
                    bar.say(f"not measured: {step.name}: {error}")
                self.save()
        self.is_complete = not bar.was_interrupted
        text = self.save()
        if as_json:
            click.echo(text, nl=False)
        else:
            if self.figures:
                show_figures(self.file.title, self.figures)
            if self.missing:
                console.print(table("not measured", ("name", "why"), self.missing.items(), header=False))
            if not self.is_complete:
                console.print("ended early: what was measured until then")
            click.echo(f"kept in {self.file.path}")
        if bar.was_interrupted:
            sys.exit(INTERRUPTED)
        if not self.figures:
            lost = "; ".join(f"{name}: {why}" for name, why in self.missing.items())
            raise click.ClickException(f"nothing was measured: {lost}")


@click.command()
@option("--requests", default=48, type=click.IntRange(1), help="Of each kind, each way, or more for the concurrency.")
@option("--concurrency", default="1,8,64", type=counts(), help="Requests at once.")
@option("--prompt-tokens", default="1000", type=counts(least=8), help="Lengths of prompts.")
@option(
    "--tokens", default="4,32", type=counts(least=2), help="Generated for each request; two lengths give a token's."
)
@option("--modes", default=",".join(MODES), type=NAMES, help="Of the proxy.")
@option("--first-ms", default=60.0, type=click.FloatRange(0), help="An engine's time to a first token.")
@option("--pace-ms", default=10.0, type=click.FloatRange(0), help="An engine's time between tokens.")
@option("--intake-ms", default=30.0, type=click.FloatRange(0), help="A decode engine's time to read a chat.")
@option("--out", default="pdx-bench", type=FOLDER, help="Folder for proxy.json.")
@_json
def proxy(out: Path, as_json: bool, **settings: Any) -> None:
    """Query stand-in engines directly and through `pdx proxy`, alternately.

    The engines compute nothing and answer at a fixed pace, so the difference is the proxy's and the second leg's HTTP:
    to the first token, between tokens, and in CPU time. Also measured is the time between prefill's end and the first
    token. All requests are streamed: completions in mode forward, chats in mode sampled. No node is needed.

    Ctrl-C stops it and keeps what was measured (exit status 130).
    """
    from pdx.bench.proxy.run import steps_of
    from pdx.bench.proxy.stage import stage
    from pdx.bench.proxy.stand_in_engine import Pace

    for mode in settings["modes"]:
        if mode not in MODES:
            raise click.BadParameter(f"{mode!r} is no mode; there are {', '.join(MODES)}", param_hint="'--modes'")
    for name, values in settings.items():
        if values == ():
            raise click.BadParameter("at least one is needed", param_hint=f"'--{name.replace('_', '-')}'")
    pace = Pace(*(settings.pop(name) for name in ("first_ms", "pace_ms", "intake_ms")))
    title = (
        f"the proxy beside its engines asked directly; they answer after {pace.first_ms:g} ms, "
        f"{pace.pace_ms:g} ms a token, intake {pace.intake_ms:g} ms"
    )
    run = Run(ResultFile(out, "proxy", title), {"settings": settings, "rows": []})
    try:
        with Interrupts(), stage(pace) as actors:
            run.carry_out(steps_of(run, actors, **settings), as_json=as_json)
    except (PdxError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _depth(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ConfigError(f"{word!r} is not a number of messages; write for example --in-flight 1,8") from None


@click.command()
@option("--channel", "channels", multiple=True, metavar="NAME", help="Only this one; repeatable. [default: all]")
@option("--sizes", default="4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB", type=BYTE_SIZES, help="Bytes in a message.")
@option("--in-flight", default="1,8", type=comma_separated(_depth), help="Messages sent before one is over.")
@option("--repeats", default=7, type=click.IntRange(1, 1000), help="Rounds; medians are shown.")
@option("--raw/--no-raw", default=True, help="Call the technology underneath directly, too.")
@option("--memory", default="256MiB", metavar="SIZE", help="Each side walks through so much.")
@option("--out", default="pdx-bench/transfer", metavar="DIR", type=FOLDER, help="For transfer.json and transfer.png.")
@_json
def transfer(
    channels: tuple[str, ...],
    sizes: tuple[int, ...],
    in_flight: tuple[int, ...],
    repeats: int,
    raw: bool,
    memory: str,
    out: Path,
    as_json: bool,
) -> None:
    """Measure every channel between two processes of this machine, by message size, compared with memcpy.

    Both sides cycle through more memory than caches hold; first, all bytes are verified to arrive. A channel and the
    technology it uses are timed in the same rounds. Ctrl-C keeps what was measured (exit status 130).

    Exit status 1: nothing was measured, a channel failed, or a channel named with --channel was not measured.
    """
    check_channels(channels)
    try:
        from pdx.bench.channels import trial
        from pdx.bench.channels.measure import MEMCPY, goals
        from pdx.bench.channels.plots import draw
        from pdx.bench.harness.report import machine
    except ImportError as error:
        raise ConfigError(f"this bench needs more packages ({error}): {install('bench')}") from error
    chosen = trial.options(sizes, in_flight, repeats, has_raw=raw, ring=parse_bytes(memory))
    trial.check_room(chosen.ring)
    rows: list[Row] = []
    settings = {"repeats": repeats, "sizes": chosen.sizes, "in_flight": chosen.depths, "memory": chosen.ring}
    title = f"GB/s of each channel, median of {repeats} rounds"
    run = Run(ResultFile(out, "transfer", title), {"settings": settings, "rows": []})

    def measured(row: Row) -> Figure:
        rows.append(row)
        run.details["rows"].append(row)
        return trial.figure(row)

    broken: set[str] = set()

    def channel(name: str) -> Iterator[Figure]:
        try:
            yield from map(measured, trial.run(name, chosen))
        except ChannelBroken:
            broken.add(name)
            raise

    names = dict.fromkeys(channels or schemes())

    def picture(stopped: str = "") -> list[Figure]:
        draw(rows, out / "transfer.png", machine(), f"{stopped}Median of {repeats}; bytes compared once before")
        return []

    steps = [Step(name, partial(channel, name), name) for name in (MEMCPY, *names)]
    try:
        run.carry_out([*steps, Step("goals", lambda: goals(rows)), Step("picture", picture)], as_json=as_json)
    finally:
        if rows and not run.is_complete:
            with contextlib.suppress(ConfigError):  # without matplotlib
                picture("INTERRUPTED: only what was measured until then. ")
    has_failed = broken or run.missing.keys() & set(channels)
    sys.exit(1 if has_failed or not {row.scheme for row in rows} - {MEMCPY} else 0)
