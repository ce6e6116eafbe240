"""Where threads of other processes run, and who goes first: what baselines need on machines with few cores."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.5  # long enough to tell a thread that polls from one that was woken
BUSY_SHARE = 0.3  # of that time: two threads that poll may share a core


def bring_home(pids: Sequence[int], core: int) -> list[int]:
    """Bind the main threads of vLLM's workers among these processes to `core`; returns which."""
    workers = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::Worker"):
                os.sched_setaffinity(pid, {core})
                workers.append(pid)
    return workers


def let_go_first(pids: Sequence[int]) -> list[int]:
    """Threads of these processes that are busy though nobody asks for anything: they get time that nobody else wants.

    Takes `LOOK_S`; returns the threads.
    """
    before = _seconds(pids)
    time.sleep(LOOK_S)
    after = _seconds(pids)
    busy = [thread for thread, used_s in after.items() if used_s - before.get(thread, used_s) > BUSY_SHARE * LOOK_S]
    for thread in busy:
        with suppress(ProcessLookupError):
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    return busy


def _seconds(pids: Sequence[int]) -> dict[int, float]:
    """Processor time of each thread."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                found[int(task.name)] = (int(fields[11]) + int(fields[12])) / ticks
    return found
