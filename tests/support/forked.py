"""Python processes for tests, forked from one that has imported PDX: an interpreter of their own costs half a second.

    process = forked.Popen(["-m", "pdx.node", settings], stdout=log, stderr=log)

as `subprocess.Popen([sys.executable, …])`. They are real processes, with a pid, signals and an end of their own; they
are children of the one they were forked from, which hears of their end and tells. Where tests have changed PYTHONPATH,
an interpreter is started after all.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_MAX_MESSAGE = 1 << 18


class Origin:
    """The process that forks; one for each process that runs tests. Any thread may use it.

    `modules`: what it imports besides PDX, with these variables.
    """

    def __init__(self, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(variables or {})},
                stdin=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        self.python_path = os.environ.get("PYTHONPATH")
        self._variables = dict(variables or {})
        self._socket = ours
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}

    def fork(self, arguments: list[str], fds: list[int], *, new_session: bool) -> int:
        """Have a process forked that runs `arguments` with these as standard streams; its pid."""
        environ = {**os.environ, **self._variables}
        order = {"arguments": arguments, "cwd": os.getcwd(), "environ": environ, "new_session": new_session}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            while True:
                told = json.loads(self._socket.recv(_MAX_MESSAGE))
                if "code" not in told:
                    self._codes.pop(told["pid"], None)  # of one that had this number before; nobody asked for it
                    return int(told["pid"])
                self._codes[told["pid"]] = told["code"]

    def code(self, pid: int, timeout_s: float | None) -> int | None:
        """How it ended, as `subprocess` says it; None: it has not, in this time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                while select.select([self._socket], [], [], 0)[0]:
                    told = json.loads(self._socket.recv(_MAX_MESSAGE))
                    self._codes[told["pid"]] = told["code"]
                if pid in self._codes:
                    return self._codes.pop(pid)
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0 and not _has_ended(pid):
                return None
            select.select([self._socket], [], [], 0.05 if left_s is None else max(0.001, min(left_s, 0.05)))

    def close(self) -> None:
        """End it; what it forked goes on."""
        self._socket.close()
        self._process.wait(30)


def _has_ended(pid: int) -> bool:
    """Then its end is told at once."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


_origin: Origin | None = None


def origin() -> Origin:
    """That of this process, started when it is first needed."""
    global _origin
    if _origin is None:
        _origin = Origin()
    return _origin


def close() -> None:
    """End it, if there is one."""
    global _origin
    if _origin is not None:
        _origin.close()
        _origin = None


def Popen(  # noqa: N802 - it stands for a class
    arguments: list[str], *, stdin: Any = None, stdout: Any = None, stderr: Any = None, start_new_session: bool = False
) -> Forked | subprocess.Popen[Any]:
    """Run Python with `arguments`. Streams: None, DEVNULL, a file, or PIPE, which is then a text stream by lines."""
    if os.environ.get("PYTHONPATH") != origin().python_path:
        is_text = subprocess.PIPE in (stdin, stdout, stderr)
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
            text=is_text,
            bufsize=1 if is_text else -1,
        )
    return Forked(arguments, (stdin, stdout, stderr), new_session=start_new_session)


class Forked:
    """One of them, forked from `parent` or this process's origin; what tests use of `subprocess.Popen`."""

    def __init__(
        self, arguments: list[str], streams: tuple[Any, Any, Any], *, new_session: bool, parent: Origin | None = None
    ) -> None:
        self.args = arguments
        self._origin = parent or origin()
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        theirs, given = [], []
        for number, stream in enumerate(streams):
            if stream is None:
                given.append(number)
            elif stream == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR))
                given.append(theirs[-1])
            elif stream == subprocess.PIPE:
                read, write = os.pipe()
                mine, other, mode = (write, read, "w") if number == 0 else (read, write, "r")
                setattr(self, ("stdin", "stdout", "stderr")[number], os.fdopen(mine, mode, buffering=1))
                theirs.append(other)
                given.append(other)
            else:
                given.append(stream.fileno())
        try:
            self.pid = self._origin.fork(arguments, given, new_session=new_session)
        finally:
            for fd in theirs:
                os.close(fd)

    def poll(self) -> int | None:
        """See `subprocess.Popen`."""
        if self.returncode is None:
            self.returncode = self._origin.code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen`."""
        if self.returncode is None:
            self.returncode = self._origin.code(self.pid, timeout)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """See `subprocess.Popen`."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, and the origin is about to tell
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """See `subprocess.Popen`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See `subprocess.Popen`."""
        self.send_signal(signal.SIGKILL)


def _serve(orders: socket.socket) -> None:
    """What the origin does: fork as it is told, and tell of ends, until nobody listens."""
    children: dict[int, int] = {}  # by pidfd
    while True:
        ready = select.select([orders, *children], [], [])[0]
        for pidfd in ready:
            if pidfd is not orders:
                pid = children.pop(pidfd)
                os.close(pidfd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                orders.send(json.dumps({"pid": pid, "code": code}).encode())
        if orders not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(orders, _MAX_MESSAGE, 3)
        if not message:
            return
        order = json.loads(message)
        if "fake_cuda" in order["arguments"]:
            import fake_cuda  # noqa: F401 - once, and not by each
        pid = os.fork()
        if pid == 0:
            orders.close()
            for pidfd in children:
                os.close(pidfd)
            _become(order, fds)
        for fd in fds:
            os.close(fd)
        children[os.pidfd_open(pid)] = pid
        orders.send(json.dumps({"pid": pid}).encode())


def _become(order: dict[str, Any], fds: list[int]) -> None:
    """In the forked process: run what it is for, and end."""
    code: Any = 1
    try:
        if order["new_session"]:
            os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 256)
        os.environ.clear()
        os.environ.update(order["environ"])
        os.chdir(order["cwd"])
        random.seed()
        arguments = [word for word in order["arguments"] if word != "-P"]
        try:
            if arguments[0] == "-m":
                sys.argv = arguments[1:]
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = arguments
                sys.path.insert(0, str(Path(arguments[0]).parent))
                runpy.run_path(arguments[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
    except BaseException:  # noqa: BLE001 - nothing of it may go on in this process as if it were the origin
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    import gc
    import importlib

    import pdx.client.api  # noqa: F401
    import pdx.node.daemon  # noqa: F401
    import pdx.transports.shm
    import pdx.transports.tcp  # noqa: F401

    for module in sys.argv[2:]:
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
