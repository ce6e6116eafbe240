"""A job on the terminal: a bar as long as it runs, its end, and Ctrl-C, which cancels it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.progress import TextColumn, TimeRemainingColumn

from pdx.cli.tables import progress, size, to_json
from pdx.telemetry.faults import printable

if TYPE_CHECKING:
    from pdx.client.controller import Controller
    from pdx.client.results import Job

INTERRUPTED = 130  # the exit status of what SIGINT has ended
_LOOK_S = 0.25  # between two looks at a job, and whether Ctrl-C was pressed


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
    return {**msgspec.structs.asdict(job.status), "instance": job.instance}


def echo(jobs: list[Job], *, as_json: bool) -> None:
    """What became of jobs, a line each."""
    for job in jobs:
        click.echo(to_json(as_object(job)) if as_json else _line(job))


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
