"""`pdx parity`: sends the same requests to a plain engine and to a proxy, and prints where their answers differ."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from pdx.cli.options import Sectioned, option
from pdx.errors import ConfigError

INTERRUPTED = 130
_SECONDS = click.FloatRange(0.0, 3600.0, min_open=True)
_OF_CLIENTS = ("OPENAI_", "ANTHROPIC_")  # environment variables that client libraries read
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(cls=Sectioned)
@click.argument("plain")
@click.argument("url", required=False)
@option("--record", metavar="FILE", type=_FILE, help="Keep what PLAIN answers; FILE then stands for PLAIN.")
@option("--json", "as_json", metavar="FILE", type=_FILE, help="Write all that was found, with whole answers.")
@option("--requests", metavar="N", default=500, type=click.IntRange(1, 100_000), help="How many.", section="Requests")
@option("--seed", metavar="N", default=0, help="Which of all that there are, and their texts.", section="Requests")
@option("--only", metavar="TEXT", default="", help="Of all, those with this in their names.", section="Requests")
@option("--model", help="The model's name. [default: PLAIN's first one]", section="Requests")
@option("--timeout", metavar="SECONDS", default=60.0, type=_SECONDS, help="For a whole answer.", section="Requests")
@option("--concurrency", metavar="N", default=1, type=click.IntRange(1, 64), help="At once.", section="Requests")
@option("--key", default="", envvar="PDX_PARITY_KEY", help="For `Authorization: Bearer`.", section="Requests")
def parity(
    plain: str,
    url: str | None,
    record: Path | None,
    as_json: Path | None,
    requests: int,
    seed: int,
    only: str,
    model: str | None,
    timeout: float,
    concurrency: int,
    key: str,
) -> None:
    """Send several hundred requests to PLAIN, an engine, and to URL, a proxy in front of such engines, and print where
    their answers differ.

    Covers all endpoints, whole and streamed; valid, odd and malformed requests; clients that disconnect; the clients of
    OpenAI and Anthropic, if installed. PLAIN gets every request twice: where it differs from itself, only the form is
    compared. PLAIN may be a file written by --record: then the two need not run at the same time.

    Exit status 1: an answer differs, and no listed reason covers the difference.
    """
    import asyncio

    from rich.console import Console

    from pdx.bench.harness import interrupts
    from pdx.bench.parity import report, run
    from pdx.bench.parity.asking import connected
    from pdx.bench.parity.records import Recording
    from pdx.cli.tables import progress

    if url is None and record is None:
        raise ConfigError("name a URL to compare with PLAIN, or a file by --record")
    for name in [each for each in os.environ if each.startswith(_OF_CLIENTS)]:
        del os.environ[name]  # keys and headers meant for other servers
    console = Console(highlight=False, markup=False)
    bar = progress(hidden=not sys.stderr.isatty())
    task = bar.add_task("starting", total=None)

    def on_done(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)

    async def recorded() -> Recording:
        if "://" not in plain:
            return Recording.read(Path(plain))
        async with connected(plain.rstrip("/"), timeout_s=timeout, key=key) as (server,):
            name, length = await run.facts(server, model or "")
            cases, unasked = run.pick_cases(name, length, seed=seed, count=requests, only=only)
            made = Recording(url=server.url, model=name, seed=seed, asked=[], unasked=unasked)
            await run.record(server, cases, made, concurrency=concurrency, on_done=on_done)
        return made

    async def compared(recording: Recording, address: str) -> list[run.Verdict]:
        async with connected(address, timeout_s=timeout, key=key) as (server,):
            await run.facts(server, recording.model)
            asked = [each for each in recording.asked if only in each.case.name]
            return await run.compare(server, asked, concurrency=concurrency, on_done=on_done)

    try:
        with bar:
            recording = interrupts.run(recorded(), runner=asyncio.run)
            if record is not None:
                recording.write(record)
            verdicts = interrupts.run(compared(recording, url.rstrip("/"))) if url is not None else []
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if url is None:
        console.print(f"{len(recording.asked)} cases are recorded in {record}", soft_wrap=True)
        return
    report.show(console, recording, verdicts, url.rstrip("/"))
    if as_json is not None:
        report.write(as_json, recording, verdicts, url.rstrip("/"))
    sys.exit(1 if any(each.differences for each in verdicts) else 0)
