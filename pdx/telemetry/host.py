"""Which host this is: two processes have one clock and one memory exactly where their host ids are equal."""

from __future__ import annotations

import functools
import os
import select
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PF_EXITING = 0x4  # of the kernel's flags of a process


@functools.cache  # a kernel keeps its name, and a node that has no descriptor left must still know it
def host_id() -> str:
    """The running kernel's own random name, at most 64 characters: containers of one host share it, and a host
    that was restarted has another. Whether processes also see each other's files is another question.

    :raises OSError: the kernel does not tell.
    """
    return _BOOT_ID.read_text(encoding="ascii").strip()[:64]


def runs_here(host: str, pid: int) -> bool:
    """Whether a process of the kernel `host` may be running here: it is this kernel, and nothing says that it has
    ended. In containers the number may be another process's by now; then this is True as well.
    """
    if host != host_id():
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # no descriptor is left, or it is no process's number: nobody knows
        return True
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return not poller.poll(0)
    finally:
        os.close(pidfd)


class ProcessStat(NamedTuple):
    """What the kernel says of a process."""

    state: str  # one letter: Z and X are dead
    is_exiting: bool  # gone or on its way: the kernel says so before it takes away anything of the process
    started: int  # in clock ticks since boot


def process_stat(pid: int) -> ProcessStat | None:
    """What /proc/PID/stat says; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return ProcessStat(fields[0], bool(int(fields[6]) & _PF_EXITING), int(fields[19]))
