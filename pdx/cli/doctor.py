"""`pdx doctor`: which channels work on this machine, how fast they are, why others do not work, and how to fix that."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from pdx.cli.loopback import Rate, Trial, memcpy
from pdx.cli.machine import SHM, Fact, FindingName, facts
from pdx.cli.node import check_channels
from pdx.cli.options import node_option, option
from pdx.cli.tables import table
from pdx.config import default_node
from pdx.errors import NodeUnavailable
from pdx.transports.registry import schemes
from pdx.wire.status import AttachedStatus

REGION_BYTES = 64 << 20
NAMED_S = 5.0  # time for a named node to answer …
LOOK_S = 1.0  # … and for this host's, if there is one
SMALL_REGION_BYTES = 4 << 20  # used if /dev/shm has no room for more
_LOOPBACK = "pdx.cli.loopback"
_EXPLAINED_IN = "PDX's documentation, on the page Troubleshooting"
_UNAVAILABLE = {
    "shm": FindingName.SHM_UNAVAILABLE,
    "cuda_ipc": FindingName.CUDA_IPC_UNAVAILABLE,
    "nixl": FindingName.NIXL_UNAVAILABLE,
    "ucx": FindingName.UCX_UNAVAILABLE,
}
_STATES = {
    "ok": Text("works", style="green"),
    "unavailable": Text("not here", style="yellow"),
    "broken": Text("broken", style="bold red"),
}


class Finding(msgspec.Struct, frozen=True):
    """The result for one channel; `finding` says what is wrong, if anything."""

    scheme: str
    trial: Trial
    finding: FindingName | None = None


class EngineFact(msgspec.Struct, frozen=True):
    """One engine attached to the node: its cache groups, how many shards its chunks have and what each of its workers
    writes of them, and which engine of the same model it cannot share chunks with, and why."""

    engine: str
    groups: list[str]
    shards: int
    workers: list[str]
    apart: str = ""
    finding: FindingName | None = None


class Report(msgspec.Struct, frozen=True):
    """The complete result. `is_well`: every requested channel works; without a request, every channel that seems to be
    available."""

    is_well: bool
    channels: list[Finding]
    memcpy: Rate
    machine: list[Fact]
    engines: list[EngineFact] = []  # of this host's node, if one answers


@click.command()
@option(
    "--channel", "channels", multiple=True, metavar="NAME", help="Test only this channel, which must work; repeatable."
)
@option("--json", "as_json", is_flag=True, help="One JSON object.")
@option("--timeout", default=30.0, metavar="SECONDS", help="Give up on a channel after this.")
@node_option
def doctor(channels: tuple[str, ...], as_json: bool, timeout: float, address: str | None) -> None:
    """Try every channel between nodes on this machine, with a real transfer between two processes.

    The engines that are attached to a node are listed, too: which cache groups and shards they have, and which of them
    cannot read each other's chunks.

    Exit status 1: a channel that was named with --channel does not work, one that is there is broken, or none works.
    """
    engines = engines_at(address)  # first, so that a wrong address is reported at once and not after half a minute
    report = examine(channels, timeout, Console(stderr=True, quiet=as_json or not sys.stderr.isatty()))
    report = msgspec.structs.replace(report, engines=engines)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        Console().print(view(report))
    sys.exit(0 if report.is_well else 1)


def examine(channels: Sequence[str], timeout_s: float, console: Console) -> Report:
    """Try `channels`, or all of them; one at a time, so that the measured rates are meaningful.

    :raises ConfigError: there is no channel of that name.
    """
    known = schemes()
    check_channels(channels)
    nbytes = _region_bytes()
    found = []
    with console.status("") as status:
        for scheme in channels or known:
            status.update(f"trying {scheme}")
            found.append(examine_channel(scheme, nbytes, timeout_s))
        status.update("looking at the machine")
        reference = memcpy(nbytes)
        machine = [*facts(_ucx_transports(timeout_s), os.environ), *_gpus(timeout_s)]
    bad = ("broken", "unavailable") if channels else ("broken",)
    is_well = any(each.trial.state == "ok" for each in found) and all(each.trial.state not in bad for each in found)
    return Report(is_well, found, reference, machine)


def examine_channel(scheme: str, nbytes: int, timeout_s: float) -> Finding:
    """Try a channel in separate processes, which do not outlive this call."""
    with tempfile.TemporaryDirectory(prefix="pdx-doctor-", dir=SHM) as name:
        folder = Path(name)
        command = [_LOOPBACK, "measure", scheme, name, str(nbytes)]
        with (folder / "errors").open("w+b") as errors:
            out, status = _run(command, timeout_s, errors.fileno())
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        if status is None:
            why = f"no end of the transfer within {timeout_s:g} s. {last}".strip()
            return Finding(scheme, Trial("broken", why, "raise --timeout?"), FindingName.CHANNEL_HANGS)
        if status:
            why = f"the process that tried it ended with status {status}: {last}"
            return Finding(scheme, Trial("broken", why), FindingName.CHANNEL_CRASHED)
        trial = msgspec.json.decode(out, type=Trial)
        return Finding(scheme, trial, _finding(scheme, trial))


def engines_at(address: str | None) -> list[EngineFact]:
    """The engines attached to a node: by default to that of this host, if it runs.

    :raises NodeUnavailable: no node answers at the given address.
    """
    from pdx.client.api import connect

    try:
        with connect(address or default_node(), NAMED_S if address else LOOK_S) as node:
            attached = node.status().attached
    except NodeUnavailable:
        if address:
            raise
        return []
    workers = sorted((one for one in attached if one.kind == "worker"), key=lambda one: (one.shard, one.pid))
    return [
        EngineFact(
            one.engine,
            one.groups,
            one.shards,
            [_writes(worker) for worker in workers if worker.engine == one.engine],
            one.unshared,
            FindingName.ENGINES_APART if one.unshared else None,
        )
        for one in attached
        if one.kind == "scheduler"
    ]


def _writes(worker: AttachedStatus) -> str:
    last = worker.shard + worker.shards - 1
    what = f"shards {worker.shard} to {last}" if worker.shards > 1 else f"shard {worker.shard}"
    return f"pid {worker.pid} {'writes' if worker.shards else 'reads'} {what}"


def _finding(scheme: str, trial: Trial) -> FindingName | None:
    if trial.state == "ok":
        return None
    if trial.state == "unavailable":
        return _UNAVAILABLE.get(scheme, FindingName.CHANNEL_UNAVAILABLE)
    return FindingName.CHANNEL_BROKEN if trial.provider else FindingName.CHANNEL_UNLOADABLE


def view(report: Report) -> RenderableType:
    tried = [
        (each.scheme, _STATES[each.trial.state], *_rate(each.trial.rate))
        + (_lines(each.trial.why, each.trial.fix, _see(each.finding)),)
        for each in report.channels
    ]
    tried.append(("memcpy", Text(), *_rate(report.memcpy), "one thread, no channel: to compare with"))
    columns = ("channel", "state", ">best\nGB/s", ">median\nGB/s", "what is wrong, and what would help")
    channels = table("channels", columns, tried)
    channels.columns[0].no_wrap = channels.columns[1].no_wrap = True
    facts_of = []
    for fact in report.machine:
        rest = _lines(fact.fix, _see(fact.finding))
        found = Text(fact.found, style="" if fact.is_ok else "yellow")
        facts_of.append((fact.name, found + Text(f"\n{rest}" if rest else "")))
    machine = table("machine", ("name", "found"), facts_of, header=False)
    named: Sequence[Finding | Fact | EngineFact] = (*report.channels, *report.machine, *report.engines)
    explained = f"The names are explained in {_EXPLAINED_IN}." if any(each.finding for each in named) else ""
    return Group(channels, machine, *_engines(report.engines), explained)


def _engines(engines: Sequence[EngineFact]) -> list[RenderableType]:
    if not engines:
        return []
    rows = [
        (
            each.engine,
            "\n".join(each.groups),
            f"{each.shards}\n{_lines(*each.workers)}",
            _lines(f"shares no chunks {each.apart}", _see(each.finding)) if each.apart else "",
        )
        for each in engines
    ]
    return [table("engines", ("engine", "cache groups", "shards of a chunk", "what is wrong"), rows)]


def _rate(rate: Rate | None) -> tuple[str, str]:
    return ("", "") if rate is None else (f"{rate.best_gb_s:.2f}", f"{rate.median_gb_s:.2f}")


def _see(finding: FindingName | None) -> str:
    return f"see troubleshooting: {finding}" if finding else ""


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _region_bytes() -> int:
    stats = os.statvfs(SHM)
    return REGION_BYTES if stats.f_bavail * stats.f_frsize > 4 * REGION_BYTES else SMALL_REGION_BYTES


def _ucx_transports(timeout_s: float) -> list[str]:
    out, status = _run([_LOOPBACK, "ucx"], timeout_s, subprocess.DEVNULL)
    return msgspec.json.decode(out, type=list[str]) if status == 0 else []


def _gpus(timeout_s: float) -> list[Fact]:
    out, status = _run(["pdx.cli.gpus"], timeout_s, subprocess.DEVNULL)
    if status == 0:
        return msgspec.json.decode(out, type=list[Fact])
    end = f"no answer within {timeout_s:g} s" if status is None else f"the process that looked ended with {status}"
    return [Fact("GPU", end, False, "see what `python -m pdx.cli.gpus` says", FindingName.GPU_LOOK_FAILED)]


def _run(command: Sequence[str], timeout_s: float, errors: int) -> tuple[bytes, int | None]:
    """Run one of PDX's programs (a module and its arguments): its output and exit status, None if it was ended at the
    deadline."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    pidfd = os.pidfd_open(child.pid)
    try:
        has_ended = bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with its children; it is not reaped yet, so its id is still valid
        out, _ = child.communicate()
    return out, child.returncode if has_ended else None
