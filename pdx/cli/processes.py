"""The processes of one `pdx up`: started with logs, polled until ready, watched, and ended together with everything
they started.

Each process leads its own group, so a terminal's Ctrl-C reaches only `pdx up`; and a guard ends the groups if `pdx up`
itself is killed (see `guard`).
"""

from __future__ import annotations

import errno
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from pdx.cli import guard
from pdx.client.connection import attached
from pdx.client.http_call import call
from pdx.errors import ConfigError, NodeError, NodeUnavailable
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import Status

ANSWER_S = 1.0  # time limit for a readiness check
TAIL_BYTES = 8 << 10
MAX_LOG_BYTES = 64 << 20
MARK = ".pdx-logs"  # marks a folder whose logs PDX writes: logs of others are never replaced


def last_lines(log: Path, count: int) -> list[str]:
    """The last `count` non-empty lines of a file; none if it cannot be read, for example because it was removed. A
    carriage return ends a line, too, as progress bars use it."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.replace("\r", "\n").split("\n") if line.strip()][-count:]


def earlier(log: Path) -> Path:
    """The log of the previous run, or the part cut off when the log grew too long."""
    return log.with_name(f"{log.name}.1")


def _opened(path: Path, mode: str) -> IO[bytes]:
    """Open a log without following links: anyone who can write to the folder could link to any file of this user."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


class ProcessState(StrEnum):
    """The stage of a process's life."""

    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"
    DIED = "died"


class Process:
    """A process, its log, and its readiness check. Only the thread that created it uses it."""

    def __init__(self, name: str, child: subprocess.Popen[bytes], log: Path, is_ready: Callable[[], bool]) -> None:
        self.name = name
        self.log = log
        self.state = ProcessState.STARTING
        self.started_at = time.monotonic()
        self.ready_after_s = 0.0
        self._child = child
        self._is_ready = is_ready

    def __repr__(self) -> str:
        return f"<Process {self.name} {self.pid} {self.state}>"

    @property
    def pid(self) -> int:
        """Process id, which is also its group's id."""
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """As a shell shows it: 128 + signal if a signal ended it; None while it runs."""
        status = self._child.poll()
        return 128 - status if status is not None and status < 0 else status

    def look(self) -> ProcessState:
        """The current state; checks whether a starting process is ready."""
        if self.state in (ProcessState.STARTING, ProcessState.READY) and self._child.poll() is not None:
            self.state = ProcessState.DIED
        elif self.state is ProcessState.STARTING and self._is_ready():
            self.state = ProcessState.READY
            self.ready_after_s = time.monotonic() - self.started_at
        return self.state

    def tail(self, lines: int) -> list[str]:
        return last_lines(self.log, lines)

    def bound_log(self) -> None:
        """If the log has grown too long, start it anew and keep its last part beside it.

        Output between the two steps is lost.
        """
        with suppress(OSError), _opened(self.log, "r+b") as log:
            size = os.fstat(log.fileno()).st_size
            if size > MAX_LOG_BYTES:
                with suppress(OSError):  # without room, less is kept
                    earlier(self.log).unlink(missing_ok=True)
                    with _opened(earlier(self.log), "xb") as kept:
                        # Stop at the current size: a process may write faster than this copies.
                        log.seek(size - MAX_LOG_BYTES)
                        kept.write(log.read(MAX_LOG_BYTES))
                log.truncate(0)

    def reap(self) -> None:
        """Collect the exit status after the group has been ended."""
        self._child.wait()
        if self.state is not ProcessState.DIED:
            self.state = ProcessState.STOPPED


class Processes:
    """A context in which processes run; leaving it ends them all, last started first."""

    def __init__(self, logs: Path, grace_s: float = guard.GRACE_S) -> None:
        self._logs = logs
        self._grace_s = grace_s
        self._stages: list[list[Process]] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Processes:
        """:raises ConfigError: the logs cannot be written there."""
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._no_logs(error) from error
        if not os.access(self._logs, os.W_OK | os.X_OK):
            raise self._no_logs(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        mark = self._logs / MARK
        if mark.is_symlink():
            raise ConfigError(f"{mark} is a symbolic link, which is not followed; remove it, or name another --logs")
        others = None if mark.exists() else next(self._logs.glob("*.log*"), None)
        if others is not None:
            raise ConfigError(f"{others} is none of pdx, and might be replaced; name another folder with --logs")
        self._guard = subprocess.Popen(
            [*_guard_program(), "watch", str(self._grace_s)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # otherwise a reader of this process's output would wait for the guard
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._pipe().close()
        assert self._guard is not None
        self._guard.wait()

    def __iter__(self) -> Iterator[Process]:
        return (process for stage in self._stages for process in stage)

    def stage(self) -> None:
        """Processes started from now on are ended before those started so far."""
        self._stages.append([])

    def start(
        self, name: str, argv: Sequence[str], *, is_ready: Callable[[], bool], env: Mapping[str, str] | None = None
    ) -> Process:
        """Run `argv` with its output in `<logs>/<name>.log`; `env` is added to this process's environment.

        :raises ConfigError: that file cannot be written.
        """
        pipe = self._pipe().fileno()
        path = self._logs / f"{name}.log"
        with self._fresh(path) as log:
            child = subprocess.Popen(
                [*_guard_program(), "launch", str(pipe), *argv],
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[pipe],
                # A group, but not a session: Linux divides the cores among sessions (autogroups), and workers of one
                # engine that spin with sched_yield have starved others for 30 s (kernel 6.18).
                process_group=0,
            )
        process = Process(name, child, path, is_ready)
        if not self._stages:
            self.stage()
        self._stages[-1].append(process)
        return process

    def look(self) -> list[Process]:
        """The processes that have died on their own, after checking all; also limits the size of logs."""
        for process in self:
            process.bound_log()
        return [process for process in self if process.look() is ProcessState.DIED]

    def stop(self) -> None:
        """End all processes and everything they started: TERM, then KILL. Idempotent."""
        while self._stages:
            stage = self._stages[-1]
            groups = {process.pid for process in stage}
            guard.end(groups, self._grace_s)
            for process in stage:
                process.reap()
                self._forget(process.pid)
            self._stages.pop()

    def _fresh(self, path: Path) -> IO[bytes]:
        try:
            _opened(self._logs / MARK, "ab").close()
            with suppress(FileNotFoundError):
                path.replace(earlier(path))
            return _opened(path, "ab")  # opened for appending, so that it can be truncated meanwhile
        except OSError as error:
            raise self._no_logs(error) from error

    def _no_logs(self, error: OSError) -> ConfigError:
        return ConfigError(f"logs cannot be written to {self._logs}: {error.strerror}; name a folder with --logs")

    def _forget(self, group: int) -> None:
        # The id may now belong to a stranger, which the guard must not end.
        with suppress(BrokenPipeError):  # the guard was killed; the other processes have to be ended anyway
            self._pipe().write(b"-%d\n" % group)

    def _pipe(self) -> IO[bytes]:
        assert self._guard is not None, "not inside the context"
        assert self._guard.stdin is not None
        return self._guard.stdin


def _guard_program() -> list[str]:
    return [sys.executable, "-I", "-S", guard.__file__]


def answers(where: str, **at_least: int) -> bool:
    """Whether the node at an ipc:// address accepts this process, or the HTTP server at a URL reports that it is
    healthy. A proxy also has to know `at_least` so many nodes, prefillers and decoders: it can neither place requests
    on engines it has not heard of, nor tell them about nodes."""
    try:
        if where.startswith("ipc://"):
            attached(where, ANSWER_S).close()
            return True
        status, body = call(where, "/health", timeout_s=ANSWER_S)
        told = msgspec.json.decode(body, type=dict[str, Any]) if at_least else {}
    except (NodeUnavailable, OSError, http.client.HTTPException, ValueError):
        return False
    counts = ((told.get(what), least) for what, least in at_least.items())
    # Another server may have the port; then this process will end and say so.
    return status == 200 and all(isinstance(count, int) and count >= least for count, least in counts)


def attached_urls(address: str) -> set[str]:
    """URLs of the engines attached to the node at `address`; none if it does not answer."""
    try:
        with attached(address, ANSWER_S) as node:
            told = node.call_for(Status(), ANSWER_S, NodeStatus).attached
    except NodeError:
        return set()
    return {one.url for one in told if one.kind == "scheduler"}
