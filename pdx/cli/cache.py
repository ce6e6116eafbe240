"""`pdx cache`: look up, move, pin, clear and verify chunks in the tiers of nodes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from rich.console import Console, RenderableType
from rich.progress import TextColumn, TimeRemainingColumn
from rich.text import Text

from pdx.cli.cache_options import choosing, controller, dry_run, prompt, reaching, starting
from pdx.cli.options import option
from pdx.cli.tables import duration, progress, size, table, to_json
from pdx.client.results import ALL, Job, Place
from pdx.errors import SelectionError, TierError
from pdx.telemetry.faults import printable
from pdx.wire.messages import Refused
from pdx.wire.verbs import Effect

if TYPE_CHECKING:
    from pdx.client.controller import Controller

_T = TypeVar("_T")
_INTERRUPTED = 130  # exit status of a command ended by SIGINT
_LOOK_S = 0.25  # between two checks of a job, and for Ctrl-C
# Consecutive times an engine must report no requests: it reports once a second, and some may be on their way.
_IDLE = 13
_MAX_LINES = 20  # of corrupt files


@click.group()
def cache() -> None:
    """Look after the chunks that nodes keep, and drain engines.

    \b
    A prompt is named by --ids, --text, --file or --request.
    A PLACE is written NODE/TIER: alpha/host, alpha/gpu, alpha/disk, alpha/remote;
    NODE alone is any of its tiers, and * stands for all nodes.
    """


# ---- looking ------------------------------------------------------------------------------------


@cache.command()
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@choosing
@reaching
def lookup(nodes: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """How many of the prompt's tokens are in each tier?"""
    whose = prompt(**options)
    with controller(**options) as made:
        found = made.find(whose, nodes)
    if as_json:
        click.echo(to_json({"tokens": found.tokens, **msgspec.structs.asdict(found)}))
    else:
        unit = "tokens" if found.chunk_tokens else "chunks"
        asked = found.tokens or found.chunks
        rows = []
        for node, tiers in found.tiers.items():
            for tier, count in tiers.items():
                pinned = found.pinned.get(node, {}).get(tier, 0)
                late = "has not answered yet" if tier in found.asking.get(node, ()) else ""
                rows.append((node, tier, f"{count:,}", f"{pinned:,}" if pinned else "", late))
        columns = ("node", "tier", f">{unit}", ">pinned", "")
        _show(table(f"of {asked:,} {unit} in whole chunks", columns, rows))
    _complain(found.errors)


@cache.command("query-ip")
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@reaching
def query_ip(nodes: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Which nodes are there, and where?"""
    with controller(**options) as made:
        told, refused = _told(made.query_ip(nodes), as_json=as_json)
    if not as_json:
        _show(table("", ("node", "address"), told.items()))
    _complain(refused)


@cache.command()
@click.argument("node", default=ALL)
@reaching
def health(node: str, as_json: bool, **options: Any) -> None:
    """Are the nodes healthy? Exit status 1 if one is not."""
    with controller(**options) as made:
        found = made.health(node)
    if as_json:
        click.echo(
            to_json({name: {"is_well": not each.troubles, "troubles": each.troubles} for name, each in found.items()})
        )
    else:
        rows = [(name, each.state, "\n".join(each.troubles)) for name, each in found.items()]
        _show(table("", ("node", "is", "what is the matter"), rows))
    if any(each.troubles for each in found.values()):
        sys.exit(1)


@cache.command()
@click.argument("node", default=ALL)
@option("--session", default="", metavar="TEXT", help="Only sessions whose name contains this.")
@option("--model", default="", metavar="TEXT", help="Only models whose name contains this.")
@reaching
def ls(node: str, session: str, model: str, as_json: bool, **options: Any) -> None:
    """What is in memory, by model and by session?"""
    with controller(**options) as made:
        found = made.ls(node, session=session, model=model)
    told, refused = _told(found, as_json=as_json)
    for title, kind in (("models", "model"), ("sessions", "session")):
        rows = [
            (name, kept.name, f"{kept.chunks:,}", size(kept.nbytes))
            for name, listing in told.items()
            for kept in getattr(listing, title)
        ]
        if not as_json:
            _show(table(title, ("node", kind, ">chunks", ">bytes"), rows))
    if not as_json and (more := sum(listing.more for listing in told.values())):
        click.echo(f"and {more:,} more")
    _complain(refused)


# ---- changing -----------------------------------------------------------------------------------


@cache.command()
@click.argument("source")
@click.argument("target")
@option("--keep", is_flag=True, help="Copy: also keep them at the source.")
@starting
def move(
    source: str, target: str, keep: bool, dry_run: bool, detach: bool, as_json: bool, model: str, **options: Any
) -> None:
    """Move the prompt's chunks from SOURCE to TARGET. Ctrl-C cancels it."""
    whose = prompt(model=model, **options)
    with controller(**options) as made:
        start = partial(made.move, source, target, whose, keep=keep, dry_run=dry_run)
        _finish(made, start, detach=detach, as_json=as_json)


@cache.command()
@click.argument("place")
@option("--everything", is_flag=True, allow_from_autoenv=False, help="All chunks there, of any prompt.")
@starting
def clear(place: str, everything: bool, dry_run: bool, detach: bool, as_json: bool, **options: Any) -> None:
    """Delete the prompt's chunks in PLACE, pinned or not."""
    named = any(options[name] not in (None, "") for name in ("ids", "text", "file", "request"))
    if everything and named:
        raise SelectionError("--everything names all chunks: leave --ids, --text, --file and --request out")
    whose = None if everything else prompt(**options)
    at = Place.of(place)
    with controller(**options) as made:
        done = made.clear(whose, at.node, at.tier, everything=everything, dry_run=dry_run)
        jobs = [each for each in done.values() if isinstance(each, Job)]
        if len(jobs) == 1 == len(done):
            _finish(made, lambda: jobs[0], detach=detach, as_json=as_json)
            return
        over = [job if detach or not job.name else made.wait(job) for job in jobs]
        _echo(over, as_json=as_json)
    _effects({name: each for name, each in done.items() if not isinstance(each, Job)}, "forgotten", as_json=as_json)
    if any(job.status.state in ("failed", "cancelled") for job in over):
        sys.exit(1)


def _placing(name: str, done_is: str, text: str) -> None:
    @cache.command(name, help=text)
    @click.argument("place")
    @choosing
    @dry_run
    @reaching
    def command(place: str, dry_run: bool, as_json: bool, **options: Any) -> None:
        whose, at = prompt(**options), Place.of(place)
        with controller(**options) as made:
            done = getattr(made, name)(whose, at.node, at.tier, dry_run=dry_run)
        _effects(done, done_is, as_json=as_json)


_placing("pin", "pinned", "Keep the prompt's chunks in PLACE until they are unpinned there.")
_placing("unpin", "unpinned", "Take one pin off each of the prompt's chunks in PLACE.")
_placing("prefetch", "being loaded", "Load the prompt's chunks into memory: PLACE is a node, NODE/host or NODE/gpu.")


def _recoding(name: str, text: str, *words: str) -> None:
    """`words`: the arguments after PLACE."""

    def command(place: str, dry_run: bool, detach: bool, as_json: bool, **options: Any) -> None:
        whose, at = prompt(**options), Place.of(place, needs_tier=True)
        how = [options[word] for word in words]
        with controller(**options) as made:
            start = partial(getattr(made, name), whose, at.node, at.tier, *how, dry_run=dry_run)
            _finish(made, start, detach=detach, as_json=as_json)

    made = starting(command)
    for word in reversed(("place", *words)):
        made = click.argument(word)(made)
    cache.command(name, help=text)(made)


_recoding("compress", "Store the prompt's chunks in PLACE by the codec METHOD. Ctrl-C cancels it.", "method")
_recoding("decompress", "Store the prompt's chunks in PLACE as they are in memory. Ctrl-C cancels it.")


@cache.command()
@click.argument("place")
@option("--below", required=True, type=click.IntRange(1, 10), help="Only chunks of a lower priority than this.")
@option("--bytes", "nbytes", default="", metavar="SIZE", help="At most this much. [default: everything]")
@dry_run
@reaching
def evict(place: str, below: int, nbytes: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Evict chunks of low priority from memory, in the order of its policy. PLACE: a node, or one of its arenas."""
    from pdx.config import parse_bytes

    at = Place.of(place)
    most = parse_bytes(nbytes) if nbytes else 1 << 47
    with controller(**options) as made:
        done = made.evict(below, most, at.node, at.tier, dry_run=dry_run)
    _effects(done, "evicted", as_json=as_json)


@cache.command()
@click.argument("folder", type=click.Path(path_type=Path))
@option("--remove", is_flag=True, allow_from_autoenv=False, help="Remove corrupt files.")
@option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(folder: Path, remove: bool, as_json: bool) -> None:
    """Read all chunks of a disk on this host and check their digests.

    FOLDER is what --disk names; a node may be using it. Exit status 1 if a corrupt file is left. A node also detects
    such a file when it loads it.
    """
    from pdx.store.disk.scrub import num_files, scrub

    wrong: list[str] = []
    with progress(TimeRemainingColumn(), hidden=as_json) as shown:
        task = shown.add_task("verifying", total=num_files(folder))

        def on_file(error: TierError | None) -> None:
            shown.advance(task)
            if error is not None and error.kind != "foreign":
                wrong.append(str(error))

        report = scrub(folder, on_file, remove=remove)
    if as_json:
        click.echo(to_json(report))
    else:
        for line in wrong[:_MAX_LINES]:
            click.echo(line)
        if len(wrong) > _MAX_LINES:
            click.echo(f"and {len(wrong) - _MAX_LINES:,} more")
        bad = ", ".join(f"{count:,} {kind}" for kind, count in report.bad.items()) or "0 bad"
        others = f", {report.foreign:,} files that no node wrote" if report.foreign else ""
        click.echo(f"{report.good:,} chunks are good ({size(report.nbytes)}), {bad}{others}")
    if report.left:
        sys.exit(1)


# ---- engines ------------------------------------------------------------------------------------


@cache.command()
@click.argument("engine")
@option("--wait", "is_waited_for", is_flag=True, help="Wait until the engine has no requests left.")
@option("--undo", is_flag=True, help="Send it requests again.")
@reaching
def drain(engine: str, is_waited_for: bool, undo: bool, as_json: bool, **options: Any) -> None:
    """Send ENGINE, a URL or a name, no more requests while others can serve them; use it before you stop the engine."""
    with controller(**options) as made:
        told, _ = _split(made.drain(engine, undo=undo))
        idle = 0
        while is_waited_for and not undo and idle < _IDLE:
            time.sleep(_LOOK_S)
            told, _ = _split(made.drain(engine))
            idle = 0 if any(each.running for each in told.values()) else idle + 1
    if as_json:
        click.echo(to_json(told))
        return
    for node, each in told.items():
        is_what = "gets no more requests" if each.draining else "gets requests again"
        click.echo(printable(f"{each.engine} of node {node} {is_what}, and has {each.running:,}", 1024))


# ---- jobs ---------------------------------------------------------------------------------------


@cache.command()
@click.argument("node", default=ALL)
@reaching
def jobs(node: str, as_json: bool, **options: Any) -> None:
    """Which jobs are running, and which have ended?"""
    with controller(**options) as made:
        told, refused = _split(made.jobs(node))
    found = [job for listed in told.values() for job in listed]
    if as_json:
        click.echo(to_json([_as_object(job) for job in found]))
        _complain(refused)
        return
    for job in found:
        begun = f"begun {duration(job.status.age_s)} ago"
        _show(Text(f"{printable(job.name)}\n    {begun}, {_line(job)}"))
    _complain(refused)


@cache.command()
@click.argument("job")
@option("--wait", "is_waited_for", is_flag=True, help="Wait until the job ends; Ctrl-C cancels it.")
@reaching
def check(job: str, is_waited_for: bool, as_json: bool, **options: Any) -> None:
    """How is JOB doing? Exit status 1 if it failed or was cancelled."""
    with controller(**options) as made:
        if is_waited_for:
            _finish(made, partial(made.check_finish, job), detach=False, as_json=as_json)
            return
        found = made.check_finish(job)
    _echo([found], as_json=as_json)
    if found.status.state in ("failed", "cancelled"):
        sys.exit(1)


@cache.command()
@click.argument("job")
@reaching
def cancel(job: str, as_json: bool, **options: Any) -> None:
    """Cancel JOB: what it has done so far remains."""
    with controller(**options) as made:
        _echo([made.cancel(job)], as_json=as_json)


# ---- a job on the terminal: a bar as long as it runs, its end, and Ctrl-C, which cancels it -----


def _finish(cache: Controller, start: Callable[[], Job], *, detach: bool, as_json: bool) -> None:
    """Start a job, wait for it and report its outcome. A dry run or a detached job is only printed.

    Ctrl-C cancels it, from its start on. Exit status 1 if it failed or was cancelled elsewhere.
    """
    with _interrupts() as pressed:
        job = start()
        if job.name and not detach:
            job = _followed(cache, job, pressed, as_json=as_json)
    if detach and job.name and not as_json:
        click.echo(job.name)
        return
    _echo([job], as_json=as_json)
    if job.status.state in ("failed", "cancelled"):
        raise SystemExit(_INTERRUPTED if pressed else 1)


def _followed(cache: Controller, job: Job, pressed: list[int], *, as_json: bool) -> Job:
    """Wait for the job to end; cancel it once Ctrl-C was `pressed`."""
    columns = TextColumn("{task.fields[moved]}"), TimeRemainingColumn()
    with progress(*columns, hidden=as_json) as shown:
        task = shown.add_task(job.status.verb, total=job.status.chunks, moved="")
        while not job.is_over and not pressed:
            job = cache.wait(job, timeout_s=_LOOK_S)
            status = job.status
            shown.update(task, completed=status.chunks_done, total=status.chunks, moved=size(status.bytes_done))
    return job if job.is_over else cache.cancel(job)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that is non-empty once Ctrl-C was pressed; a second Ctrl-C interrupts as usual."""
    pressed: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _as_object(job: Job) -> dict[str, Any]:
    return {**msgspec.structs.asdict(job.status), "instance": job.instance}


def _echo(jobs: list[Job], *, as_json: bool) -> None:
    """Print the outcome of jobs, one line each."""
    for job in jobs:
        click.echo(to_json(_as_object(job)) if as_json else _line(job))


def _line(job: Job) -> str:
    status = job.status
    what = status.what or status.verb
    why = f": {status.why}" if status.why else ""
    if status.state == "planned":
        text = f"would {what} ({status.chunks:,} chunks, {size(status.nbytes)})"
    else:
        done = f"{status.chunks_done:,} of {status.chunks:,} chunks, {size(status.bytes_done)}, {status.seconds:.1f} s"
        text = f"{status.state}: {what}: {done}{why}"
        if status.state == "cancelled" and status.chunks_done:
            text += "; what was done before stays done"
    return printable(text, 4096)


# ---- showing ------------------------------------------------------------------------------------


def _show(what: RenderableType) -> None:
    Console().print(what)


def _split(found: Mapping[str, _T | Refused]) -> tuple[dict[str, _T], dict[str, str]]:
    refused = {name: each.text for name, each in found.items() if isinstance(each, Refused)}
    return {name: each for name, each in found.items() if not isinstance(each, Refused)}, refused


def _told(found: Mapping[str, _T | Refused], *, as_json: bool) -> tuple[dict[str, _T], dict[str, str]]:
    """Return the value, and print it if JSON is requested."""
    if as_json:
        click.echo(to_json(found))
    return _split(found)


def _effects(done: Mapping[str, Effect | Refused], what: str, *, as_json: bool) -> None:
    if not done:
        return
    told, refused = _told(done, as_json=as_json)
    if told and not as_json:
        is_plan = any(each.dry_run for each in told.values())
        rows = [
            (name, kept.name, f"{kept.chunks:,}", size(kept.nbytes))
            for name, each in told.items()
            for kept in each.tiers
        ]
        _show(table(f"would be {what}" if is_plan else what, ("node", "tier", ">chunks", ">bytes"), rows))
    _complain(refused)


def _complain(errors: Mapping[str, str]) -> None:
    """Print the errors of nodes; exit status 1 if there are any."""
    for name, text in errors.items():
        click.echo(f"{name}: {printable(text, 1024)}", err=True)
    if errors:
        sys.exit(1)
