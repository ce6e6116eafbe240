"""`pdx bench store`, `pdx bench proxy` and `pdx bench transfer`: what is asked for, and how it is shown."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import RenderableType

from pdx.bench.harness.lists import BYTE_SIZES, NAMES, counts, listed
from pdx.bench.harness.report import console
from pdx.cli.node import check_channels
from pdx.cli.options import FOLDER, option
from pdx.cli.tables import size, table
from pdx.config import parse_bytes
from pdx.errors import ConfigError
from pdx.extras import install
from pdx.transports.registry import schemes

if TYPE_CHECKING:
    from pdx.bench.channels.trial import Told
    from pdx.bench.harness.interrupts import Steps
    from pdx.bench.harness.timing import Spread
    from pdx.bench.proxy.run import ProxyRun, Row, Way
    from pdx.bench.store.run import StoreRun

INTERRUPTED = 130  # as a shell shows SIGINT
MODES = ("forward", "sampled")
_json = option("--json", "as_json", is_flag=True, help="Print the JSON in place of the tables.")


@click.command()
@option("--sizes", default="1MiB,4MiB,16MiB", type=BYTE_SIZES, help="Of a chunk.")
@option("--chunks", default=8, type=click.IntRange(1, 10_000), help="Chunks in a round.")
@option("--rounds", default=7, type=click.IntRange(1, 10_000), help="Rounds that count.")
@option("--tiers", default="", type=NAMES, help="host, gpu, disk, remote, and channels to another node. [all]")
@option("--index", default="10000,100000", type=counts(), help='Chunks in the index; "": none.')
@option("--questions", default=2000, type=click.IntRange(1), help="Lookups in each index.")
@option("--out", default="pdx-bench", type=FOLDER, help="Folder for store.json.")
@_json
def store(out: Path, as_json: bool, **settings: Any) -> None:
    """Store chunks and read them again, in every tier that there is here.

    A chunk is gathered from an engine's pages and scattered to such pages again: in the host arena of the engine's own
    node, on its GPU, and in another node over each channel. Beside it runs one memcpy of as many bytes. Then lookups in
    a full index. Tiers that cannot be measured are named with the reason.

    Ctrl-C ends it and keeps what was measured (exit status 130).
    """
    if importlib.util.find_spec("torch") is None:
        raise click.ClickException(f"pdx bench store copies with PyTorch: {install('torch')}")
    from pdx.bench.store.run import Settings, StoreRun, default_tiers

    run = StoreRun(Settings(**{**settings, "tiers": settings["tiers"] or tuple(default_tiers())}))
    run.begin()
    title = f"tiers of the chunk store, median of {run.settings.rounds} rounds"
    _carry_out(run, run.measure, out, "store", title, _of_store, run.missing, as_json=as_json)


@click.command()
@option(
    "--requests",
    default=48,
    type=click.IntRange(1),
    help="Of each kind, each way; more where four turns at the concurrency need more.",
)
@option("--concurrency", default="1,8,64", type=counts(), help="Requests at once.")
@option("--prompt-tokens", default="1000", type=counts(least=8), help="Lengths of prompts.")
@option(
    "--tokens",
    default="4,32",
    type=counts(least=2),
    help="Generated for each request; from two lengths the cost of a token follows.",
)
@option("--modes", default=",".join(MODES), type=NAMES, help="Of the proxy.")
@option("--first-ms", default=60.0, type=click.FloatRange(0), help="An engine's time to a first token.")
@option("--pace-ms", default=10.0, type=click.FloatRange(0), help="An engine's time between tokens.")
@option(
    "--intake-ms",
    default=30.0,
    type=click.FloatRange(0),
    help="A decode engine's time to read a chat, before it can go on with its KV.",
)
@option(
    "--before",
    default=None,
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    metavar="CHECKOUT",
    help="Measure that checkout's proxy, too, in turns with this one.",
)
@option("--out", default="pdx-bench", type=FOLDER, help="Folder for proxy.json.")
@_json
def proxy(first_ms: float, pace_ms: float, intake_ms: float, out: Path, as_json: bool, **settings: Any) -> None:
    """Ask stand-in engines directly and through `pdx proxy`, in turns.

    The engines compute nothing and answer at a fixed pace, so that what is added is the proxy and the HTTP of a second
    leg: to the first token, between tokens, and in CPU time. What is exposed is the time between prefill's end and the
    first token. All requests are streamed: completions in mode forward, chats in mode sampled. No node is needed.

    Ctrl-C ends it and keeps what was measured (exit status 130).
    """
    from pdx.bench.proxy.run import ProxyRun, Settings
    from pdx.bench.proxy.stage import stage
    from pdx.bench.proxy.stand_in_engine import Pace

    for mode in settings["modes"]:
        if mode not in MODES:
            raise click.BadParameter(f"{mode!r} is no mode; there are {', '.join(MODES)}", param_hint="'--modes'")
    for name, values in settings.items():
        if values == ():
            raise click.BadParameter("at least one is needed", param_hint=f"'--{name.replace('_', '-')}'")
    run = ProxyRun(Settings(**settings, pace=Pace(first_ms, pace_ms, intake_ms)))

    def measure(steps: Steps) -> None:
        try:
            with stage(run.settings.pace, run.settings.before) as actors:
                run.measure(actors, steps)
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error

    title = "the proxy beside its engines asked directly, stand-in engines"
    _carry_out(run, measure, out, "proxy", title, _of_proxy, run.failed, as_json=as_json)


def _carry_out(
    run: Any,
    measure: Callable[[Steps], None],
    out: Path,
    name: str,
    title: str,
    shown: Callable[[Any], Iterator[RenderableType]],
    lost: dict[str, str],
    *,
    as_json: bool,
) -> None:
    """Measure, keep in a file whatever there is of it at any time, and show it; `lost`: what was not measured, and why.

    Ends this process with a status other than 0 where that was interrupted or gave nothing.
    """
    from pdx.bench.harness.interrupts import Steps
    from pdx.bench.harness.report import ResultFile

    file = ResultFile(out, name, title)
    run.on_more = lambda: file.write(run.figures(), run.details())
    try:
        run.on_more()
    except OSError as error:
        raise click.ClickException(f"--out {out}: {error}") from error
    with Steps(run.steps) as steps:
        measure(steps)
    text = file.write(run.figures(), run.details())
    if as_json:
        click.echo(text, nl=False)
    else:
        for each in shown(run):
            console.print(each)
        if not run.is_complete:
            console.print("ended early: what was measured until then")
        click.echo(f"kept in {file.path}")
    if steps.was_interrupted:
        sys.exit(INTERRUPTED)
    if run.has_nothing:
        raise click.ClickException("nothing was measured: " + "; ".join(f"{k}: {v}" for k, v in lost.items()))


def _of_store(run: StoreRun) -> Iterator[RenderableType]:
    """Tables of what was measured, and of what was not."""
    from pdx.bench.store.tiers import PROMPT_KEYS, title

    if run.rows:
        words = (
            f"GB/s of {run.settings.chunks} chunks, median of {run.settings.rounds} rounds; ms of one chunk, p50 / p99"
        )
        names = (">chunk", ">memcpy", ">write", ">of memcpy", ">read", ">of memcpy", ">store one", ">find one")
        rows = []
        for row in run.rows:
            rates = (row.memcpy_gb_s, row.write_gb_s, row.write_ratio, row.read_gb_s, row.read_ratio)
            numbers = (f"{rate:.2f}" for rate in rates)
            rows.append((title(row.tier), size(row.chunk_bytes), *numbers, _spread(row.store), _spread(row.hit)))
        yield table(f"tiers: {words}", ("tier", *names), rows)
    if run.index:
        words = f"{run.settings.questions:,} questions of one client; ms, p50 / p99"
        found = [
            (f"{each.chunks:,}", f"{each.lookups_per_s:,.0f}")
            + tuple(_spread(spread) for spread in (each.hit, each.miss, each.prompt, each.ping))
            for each in run.index
        ]
        columns = (">chunks", ">lookups/s", ">hit", ">miss", f">{PROMPT_KEYS} at once", ">ping")
        yield table(f"lookups: {words}", columns, found)
    if run.missing:
        yield table("not measured", ("name", "why"), run.missing.items(), header=False)


def _spread(spread: Spread) -> str:
    return f"{spread.p50_ms:.2f} / {spread.p99_ms:.2f}"


def _of_proxy(run: ProxyRun) -> Iterator[RenderableType]:
    """Tables of what was measured, and of what failed."""
    if run.rows:
        pace = run.settings.pace
        words = (
            f"first token after {pace.first_ms:g} ms, one more each {pace.pace_ms:g} ms, intake {pace.intake_ms:g} ms"
        )
        title = f"what the proxy adds, ms, p50 / p99 (stand-in engines: {words})"
        columns = (">TTFT", ">between tokens", ">TTFT directly", ">through it", ">exposed", ">CPU ms/request")
        lines = [line for row in run.rows for line in _by_front(row, _latencies)]
        yield table(title, ("mode", "at once", "tokens", *columns), lines)
    if run.saturated:
        rates = (">requests/s", ">directly", ">CPU ms/request", ">proxy", ">client", ">engines", ">all")
        title = "engines that answer at once; cores that were busy"
        lines = [line for row in run.saturated for line in _by_front(row, _rates)]
        yield table(title, ("mode", "at once", "tokens", *rates), lines)
    if costs := list(run.costs()):
        yield table(
            "CPU time of the proxy, of the rows above (tokens that come together cost less)",
            ("mode", "prompt", ">ms per request", ">µs per token"),
            [
                (each.mode, f"{each.prompt_tokens:,}", f"{each.cpu_ms_per_request:.2f}", f"{each.cpu_us_per_token:.1f}")
                for each in costs
            ],
        )
    if run.failed:
        yield table("failed", ("name", "why"), run.failed.items(), header=False)
    if any(row.is_machine_full for row in run.rows):
        yield "* all cores of this machine were busy: latencies are the machine's, not the proxy's"


def _by_front(row: Row, line: Callable[[Row, Way, str], tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The row's line, and below it the one of the other checkout's proxy."""
    yield line(row, row.proxy, row.mode)
    if row.before is not None:
        yield line(row, row.before, f"{row.mode}, before")


def _latencies(row: Row, way: Way, name: str) -> tuple[str, ...]:
    added = (
        f"{through.p50_ms - direct.p50_ms:+.2f} / {through.p99_ms - direct.p99_ms:+.2f}"
        for through, direct in ((way.ttft, row.direct.ttft), (way.itl, row.direct.itl))
    )
    return (
        name,
        f"{row.concurrency}{' *' if row.is_machine_full else ''}",
        f"{row.prompt_tokens:,} + {row.tokens}",
        *added,
        _spread(row.direct.ttft),
        _spread(way.ttft),
        "" if way.exposed is None else _spread(way.exposed),
        f"{way.cpu_ms:.2f}",
    )


def _rates(row: Row, way: Way, name: str) -> tuple[str, ...]:
    rates = (f"{way.requests_per_s:,.1f}", f"{row.direct.requests_per_s:,.1f}", f"{way.cpu_ms:.2f}")
    cores = (way.proxy_cores, way.client_cores, way.engine_cores, way.machine_cores)
    return name, str(row.concurrency), f"{row.prompt_tokens:,} + {row.tokens}", *rates, *(f"{n:.2f}" for n in cores)


def _depth(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ConfigError(f"{word!r} is not a number of messages; write for example --in-flight 1,8") from None


@click.command()
@option("--channel", "channels", multiple=True, metavar="NAME", help="Only this one; repeatable. [default: all]")
@option("--sizes", default="4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB", type=BYTE_SIZES, help="Bytes in a message.")
@option("--in-flight", default="1,8", type=listed(_depth), help="Messages sent before one is over.")
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
    """Measure every channel between two processes of this machine, by message size, beside memcpy.

    Both sides walk through more memory than caches hold; that all bytes arrive is seen first. A channel and the
    technology under it are timed in the same rounds. Ctrl-C keeps what was measured (exit status 130).

    Exit status 1: nothing was measured, a channel broke, or one that was named with --channel is not there.
    """
    check_channels(channels)
    try:
        from pdx.bench.channels import transfer as bench
        from pdx.bench.channels.trial import check_room
        from pdx.bench.harness.interrupts import Steps
    except ImportError as error:
        raise ConfigError(f"this bench needs more packages ({error}): {install('bench')}") from error
    chosen = bench.options(sizes, in_flight, repeats, has_raw=raw, ring=parse_bytes(memory))
    check_room(chosen.ring)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    names = dict.fromkeys(channels or schemes())
    run = bench.Run(list(names), chosen, out / "transfer.json", lambda scheme, message: _tell(steps, scheme, message))
    with Steps(run.steps) as steps:
        run.measure()
    if steps.was_interrupted:
        run.save()
    try:
        picture = run.draw(out / "transfer.png")
    except ConfigError as error:
        picture = None
        click.echo(f"no picture: {error}", err=True)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(run.result), indent=1))
    else:
        console.print(bench.view(run.result))
    click.echo(f"written: {out / 'transfer.json'}{f', {picture}' if picture else ''}", err=True)
    if not run.result.is_complete:
        click.echo("interrupted; what was measured until then is kept", err=True)
        sys.exit(INTERRUPTED)
    is_missing = any(name in run.result.not_run for name in channels)
    sys.exit(0 if run.result.is_well and not is_missing else 1)


def _tell(steps: Steps, scheme: str, message: Told) -> None:
    """Show what has just been measured, or could not be."""
    from pdx.bench.channels.bandwidth import size_text
    from pdx.bench.channels.trial import Failed

    if isinstance(message, Failed):
        steps.say(f"{scheme}: not measured: {message.missing.why}")
        return
    row = message.row
    raw = "" if row.raw_gb_s is None else f", directly {row.raw_gb_s:.3f}"
    steps.took(f"{scheme}, {size_text(row.nbytes)}, {row.in_flight} in flight: {row.gb_s:.3f} GB/s{raw}")
