"""One channel measured in a process of its own, because libraries of channels may hang, crash or not bear each other.

    python -m pdx.bench.channels.trial FOLDER    (a `Task` on standard input) prints `Told` messages as lines of JSON

`told` is the other side of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import IO

import msgspec

from pdx.bench.channels.measure import MEMCPY, Options, Row, measure_memcpy, measure_scheme
from pdx.errors import ChannelUnavailable, ConfigError
from pdx.transports.registry import FOR_GPUS, find

SHM = Path("/dev/shm")
SPARE_BYTES = 8 << 20  # of /dev/shm, for what libraries put there
TIMEOUT_S = 120.0  # for one row
_FOR_GPUS_WHY = f"{FOR_GPUS} moves memory of GPUs, and this bench has memory of the host"
_FOR_GPUS_FIX = "python -m pdx.bench.gpu --only ipc"


class Task(msgspec.Struct, frozen=True):
    """What a process shall measure. `scheme`: a channel, or memcpy."""

    scheme: str
    options: Options


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One case."""

    row: Row


class Missing(msgspec.Struct, frozen=True):
    """Why there are no (more) cases, and what would help. `is_broken`: it should work here and does not."""

    why: str
    fix: str = ""
    is_broken: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last that is heard."""

    missing: Missing


Told = Measured | Failed


def check_room(ring: int) -> None:
    """:raises ConfigError: /dev/shm has no room for the memory that is sent from and the one that is sent to."""
    stats = os.statvfs(SHM)
    free, needed = stats.f_bavail * stats.f_frsize, 2 * ring + SPARE_BYTES
    if free < needed:
        raise ConfigError(
            f"{SHM} has {free >> 20} MiB free, and {needed >> 20} are needed: remove what lies there, "
            f"mount -o remount,size=2G {SHM}, docker run --shm-size=2g, or a smaller --memory"
        )


def told(task: Task) -> Generator[Told, None, None]:
    """Start a process, hand on what it says, end it: also where the caller stops listening (close the iterator)."""
    folder = Path(tempfile.mkdtemp(prefix=f"pdx-bench-{os.getpid()}-", dir=SHM))
    try:
        with (folder / "errors").open("w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdx.bench.channels.trial", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,  # a line that waits in a buffer would not be seen by select
                start_new_session=True,  # Ctrl-C is for us, and with its group all of it can be ended
            )
            try:
                yield from _listen(process, task, folder / "errors")
            finally:
                _end(process)
    finally:
        shutil.rmtree(folder)


def _listen(process: subprocess.Popen[bytes], task: Task, errors: Path) -> Generator[Told, None, None]:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which is seen below
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
    for _ in range(len(task.options.cases) + 1):
        if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
            yield _broken(task, f"nothing for {TIMEOUT_S:g} s; {_last_line(errors)}")
            return
        line = process.stdout.readline()
        if not line:
            break
        message = msgspec.json.decode(line, type=Told)
        yield message
        if isinstance(message, Failed):
            return
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped, see `_end`
    if end is not None and end.si_status:
        how = "with status" if end.si_code == os.CLD_EXITED else "by signal"
        yield _broken(task, f"its process ended {how} {end.si_status}; {_last_line(errors)}")


def _broken(task: Task, why: str) -> Failed:
    return Failed(Missing(why, f"pdx doctor --channel {task.scheme}", is_broken=True))


def _last_line(errors: Path) -> str:
    return errors.read_text(errors="replace").strip().rpartition("\n")[2] or "it said nothing about it"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its receiver, too; not reaped yet, so the id is still its
    with contextlib.suppress(BrokenPipeError):
        process.communicate()


def _follow_parent(folder: Path) -> None:
    """End with whoever started us, even if that was killed: then nobody else removes the folder."""

    def wait() -> None:
        sys.stdin.buffer.read()
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _measure(task: Task, folder: Path, out: IO[bytes]) -> None:
    def say(message: Told) -> None:
        out.write(msgspec.json.encode(message) + b"\n")
        out.flush()

    try:
        if task.scheme == MEMCPY:
            measure_memcpy(task.options, folder, lambda row: say(Measured(row)))
            return
        available = find(task.scheme).availability()
        if not available.is_ok:
            say(Failed(Missing(available.why, available.fix)))
        elif task.scheme == FOR_GPUS:
            say(Failed(Missing(_FOR_GPUS_WHY, _FOR_GPUS_FIX)))
        else:
            measure_scheme(task.scheme, task.options, folder, lambda row: say(Measured(row)))
    except ChannelUnavailable as error:
        say(Failed(Missing(str(error))))
    except Exception as error:  # noqa: BLE001 - root of this program; a third party's backend may raise anything
        say(_broken(task, f"{type(error).__name__}: {error}"))


def main() -> None:
    """What libraries print goes to standard error, so that standard output holds messages only."""
    folder = Path(sys.argv[1])
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
        _follow_parent(folder)
        _measure(task, folder, out)
        out.flush()
    os._exit(0)  # the thread that waits for the parent never ends by itself, and libraries' threads need not


if __name__ == "__main__":
    main()
