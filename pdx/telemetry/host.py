"""The id of this host: two processes share one clock and one memory exactly if their host ids are equal."""

from __future__ import annotations

import functools
import os
import select
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PF_EXITING = 0x4  # one of the kernel's flags of a process


@functools.cache  # it never changes, and a node without a free descriptor must still know it
def host_id() -> str:
    """The running kernel's random boot id, at most 64 characters: containers of one host share it, and a restarted host
    has another. It does not say whether processes see each other's files.

    :raises OSError: it cannot be read.
    """
    return _BOOT_ID.read_text(encoding="ascii").strip()[:64]


def runs_here(host: str, pid: int) -> bool:
    """Whether a process of the kernel `host` may be running here: it is this kernel, and the process is not known to
    have ended. Also True if another process has the pid by now, as may happen with containers.
    """
    if host != host_id():
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # no descriptor is left, or it is not a pid: unknown
        return True
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return not poller.poll(0)
    finally:
        os.close(pidfd)


class ProcessStat(NamedTuple):
    """A process's state as the kernel reports it."""

    state: str  # one letter: Z and X are dead
    is_exiting: bool  # dead or exiting: set before the kernel releases anything of the process
    started: int  # in clock ticks since boot


def process_stat(pid: int) -> ProcessStat | None:
    """The process's state from /proc/PID/stat; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the process's name before it may contain anything
    return ProcessStat(fields[0], bool(int(fields[6]) & _PF_EXITING), int(fields[19]))
