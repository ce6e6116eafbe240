"""A job on the terminal: a bar as long as it runs, its end, and Ctrl-C, which cancels it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pdx.cli.tables import size
from pdx.telemetry.faults import printable

if TYPE_CHECKING:
    from pdx.client.controller import Controller
    from pdx.client.results import Job

INTERRUPTED = 130  # the exit status of what SIGINT has ended


class _Stopped(Exception):
    """Somebody has pressed Ctrl-C."""


def finish(cache: Controller, start: Callable[[], Job], *, detach: bool, as_json: bool) -> None:
    """Start a job, wait for it and say what became of it; a plan, and one that is not waited for, is only told.

    Ctrl-C cancels it, from its start on. Ends with status 1 where it has failed or was cancelled elsewhere.
    """
    with _interrupts() as pressed:
        job = start()
        if job.name and not detach:
            job = _followed(cache, job, pressed, as_json=as_json)
    if detach and job.name and not as_json:
        click.echo(job.name)
        return
    echo([job], as_json=as_json)
    if job.status.state in ("failed", "cancelled"):
        raise SystemExit(INTERRUPTED if pressed else 1)


def _followed(cache: Controller, job: Job, pressed: list[int], *, as_json: bool) -> Job:
    """The job when it is over; cancelled where Ctrl-C was `pressed`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[moved]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress:
        task = progress.add_task(job.status.verb, total=job.status.chunks, moved="")

        def on_progress(now: Job) -> None:
            status = now.status
            progress.update(task, completed=status.chunks_done, total=status.chunks, moved=size(status.bytes_done))
            if pressed:
                raise _Stopped

        try:
            return cache.wait(job, on_progress)
        except _Stopped:
            return cache.cancel(job)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Holds something once Ctrl-C was pressed; the second time it interrupts as ever."""
    pressed: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def as_object(job: Job) -> dict[str, Any]:
    """A job as plain data."""
    status = {name: getattr(job.status, name) for name in job.status.__struct_fields__}
    return {**status, "job": job.name, "instance": job.instance}


def echo(jobs: list[Job], *, as_json: bool) -> None:
    """What became of jobs, a line each."""
    for job in jobs:
        click.echo(_json(as_object(job)) if as_json else _line(job))


def _json(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


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
