"""Measures one channel in a separate process, because channel libraries may hang, crash or conflict with each other.

    python -m pdx.bench.channels.trial FOLDER SCHEME OPTIONS    prints rows as lines of JSON until its input ends

`run` is the other side of it.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.channels.measure import CHECKED, MEMCPY, Options, Row, measure_memcpy, measure_scheme
from pdx.bench.channels.plots import size_text
from pdx.bench.harness.report import Figure, plain
from pdx.errors import ChannelBroken, ChannelUnavailable, ConfigError
from pdx.transports.registry import FOR_GPUS, find

SHM = Path("/dev/shm")
SPARE_BYTES = 8 << 20  # of /dev/shm, for files of libraries
TIMEOUT_S = 120.0  # for one row
MAX_CASES = 16  # sizes, and numbers in flight


class Missing(msgspec.Struct, frozen=True, tag=True):
    """Why there are no (more) rows, and what would help. `is_broken`: there should be some."""

    why: str
    is_broken: bool = False


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One case."""

    row: Row


def options(sizes: Sequence[int], depths: Sequence[int], repeats: int, *, has_raw: bool, ring: int) -> Options:
    """Sorted, without duplicates; `ring` rounded up so that all cases can be compared.

    :raises ConfigError: there are too many, or they exceed the memory that is sent from.
    """
    ring = max(1, -(-ring // CHECKED)) * CHECKED
    chosen = Options(tuple(sorted(set(sizes))), tuple(sorted(set(depths))), repeats, has_raw, ring)
    for what, values in (("sizes", chosen.sizes), ("numbers in flight", chosen.depths)):
        if not 1 <= len(values) <= MAX_CASES:
            raise ConfigError(f"{len(values)} {what}; give 1 to {MAX_CASES}")
        if values[0] < 1:
            raise ConfigError(f"{values[0]} is not among possible {what}; the least is 1")
    if chosen.sizes[-1] * chosen.depths[-1] > ring:
        raise ConfigError(
            f"{chosen.depths[-1]} messages of {size_text(chosen.sizes[-1])} in flight are more than the "
            f"{size_text(ring)} that are sent from; give smaller --sizes or --in-flight, or more --memory"
        )
    return chosen


def check_room(ring: int) -> None:
    """:raises ConfigError: /dev/shm lacks room for the sending and the receiving memory."""
    stats = os.statvfs(SHM)
    free, needed = stats.f_bavail * stats.f_frsize, 2 * ring + SPARE_BYTES
    if free < needed:
        raise ConfigError(
            f"{SHM} has {free >> 20} MiB free, and {needed >> 20} are needed: remove what lies there, "
            f"mount -o remount,size=2G {SHM}, docker run --shm-size=2g, or a smaller --memory"
        )


def figure(row: Row) -> Figure:
    """Its rate, compared with the raw technology's."""
    note = f"directly {row.raw_gb_s:.3f}: {row.ratio:.0%}" if row.raw_gb_s and row.ratio else ""
    depth = "" if row.scheme == MEMCPY else f", {row.in_flight} in flight"
    return plain(f"{row.scheme}, {size_text(row.nbytes)}{depth}", row.gb_s, "GB/s", note)


def run(scheme: str, chosen: Options) -> Iterator[Row]:
    """Start a process, pass on its rows, and end it, also if the caller stops iterating.

    :raises ChannelUnavailable: there are no rows here; the message says why, and what would help.
    :raises ChannelBroken: it should work here, and does not.
    """
    asked = msgspec.json.encode(chosen).decode()
    folder = Path(tempfile.mkdtemp(prefix=f"pdx-bench-{os.getpid()}-", dir=SHM))
    try:
        with (folder / "errors").open("w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdx.bench.channels.trial", str(folder), scheme, asked],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,  # select would not see a line held in a buffer
                start_new_session=True,  # Ctrl-C reaches only this process, and the group can be ended as a whole
            )
            try:
                yield from _rows(process, scheme, chosen, folder / "errors")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its receiver; not reaped yet, so its id is valid
                with contextlib.suppress(BrokenPipeError):
                    process.communicate()
    finally:
        shutil.rmtree(folder)


def _rows(process: subprocess.Popen[bytes], scheme: str, chosen: Options, errors: Path) -> Iterator[Row]:
    assert process.stdout is not None
    count = len(chosen.sizes) * (1 if scheme == MEMCPY else len(chosen.depths))
    for _ in range(count):
        if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
            raise _broken(scheme, f"nothing for {TIMEOUT_S:g} s", errors)
        line = process.stdout.readline()
        if not line:
            raise _broken(scheme, "its process ended too early", errors)
        message = msgspec.json.decode(line, type=Measured | Missing)
        if isinstance(message, Missing):
            raise (ChannelBroken if message.is_broken else ChannelUnavailable)(message.why)
        yield message.row


def _broken(scheme: str, why: str, errors: Path) -> ChannelBroken:
    last = errors.read_text(errors="replace").strip().rpartition("\n")[2] or "it said nothing about it"
    return ChannelBroken(f"{why}; {last}; see pdx doctor --channel {scheme}")


def _follow_parent(folder: Path) -> None:
    """End with the parent, even if that is killed: then nobody else removes the folder."""

    def wait() -> None:
        sys.stdin.buffer.read()
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _measure(scheme: str, chosen: Options, folder: Path, say: Any) -> None:
    def measured(row: Row) -> None:
        say(Measured(row))

    try:
        if scheme == MEMCPY:
            measure_memcpy(chosen, folder, measured)
            return
        available = find(scheme).availability()
        if not available.is_ok:
            say(Missing("; ".join(filter(None, (available.why, available.fix)))))
        elif scheme == FOR_GPUS:
            say(Missing(f"{FOR_GPUS} moves memory of GPUs: python -m pdx.bench.gpu --only ipc"))
        else:
            measure_scheme(scheme, chosen, folder, measured)
    except ChannelUnavailable as error:
        say(Missing(str(error)))
    except Exception as error:  # noqa: BLE001 - root of this program; a third party's backend may raise anything
        say(Missing(f"{type(error).__name__}: {error}; see pdx doctor --channel {scheme}", is_broken=True))


def main() -> None:
    """Output of libraries goes to standard error, so that standard output holds only messages."""
    folder, scheme = Path(sys.argv[1]), sys.argv[2]
    _follow_parent(folder)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        chosen = msgspec.json.decode(sys.argv[3], type=Options)

        def say(message: Measured | Missing) -> None:
            out.write(msgspec.json.encode(message) + b"\n")
            out.flush()

        _measure(scheme, chosen, folder, say)
    os._exit(0)  # the thread that waits for the parent never ends by itself, and threads of libraries may not either


if __name__ == "__main__":
    main()
