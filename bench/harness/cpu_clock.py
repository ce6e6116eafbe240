"""CPU time of other processes, and of all on this machine."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


class CpuClock:
    """What a process and all of its threads have computed since it started, in user and in kernel mode."""

    def __init__(self, pid: int) -> None:
        """:raises OSError: there is no such process."""
        found = ctypes.c_int()
        if status := _libc.clock_getcpuclockid(pid, ctypes.byref(found)):
            raise OSError(status, f"process {pid}: {os.strerror(status)}")
        self._clock = found.value

    def seconds(self) -> float:
        """:raises OSError: the process is gone."""
        return time.clock_gettime(self._clock)


def machine_seconds() -> float:
    """What all processors of the machine have been busy since it started, for whomever."""
    user, nice, system, _, _, *others = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(map(int, (user, nice, system, *others))) / os.sysconf("SC_CLK_TCK")
