"""Process groups that cannot outlive `pdx up`, even if it is killed with SIGKILL. Standard library only.

Run by path, as two small programs around one pipe, whose write end only `pdx up` and starting children hold:

    guard.py watch GRACE_S     reads group ids ("+id", "-id") until the pipe closes, then ends the remaining groups
    guard.py launch FD ARGV…   started as a group leader, sends its group to the pipe FD, then executes ARGV
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

GRACE_S = 10.0


def members(groups: Collection[int]) -> list[int]:
    """Running processes in `groups`. Zombies do not count: their new parent may never reap them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # bytes, because a name may be cut inside a character
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
        except OSError:
            continue  # it ended between listing and reading
        if int(group) in groups and state not in b"ZX":
            found.append(int(path.parent.name))
    return found


def send(groups: Collection[int], number: int) -> None:
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            continue  # its process has ended completely


def end(groups: Collection[int], grace_s: float) -> None:
    """Send TERM, then KILL to what is left after `grace_s`; returns when nothing is running."""
    send(groups, signal.SIGTERM)
    send(groups, signal.SIGCONT)  # a stopped process would not notice otherwise
    deadline = time.monotonic() + grace_s
    while members(groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    while members(groups):
        send(groups, signal.SIGKILL)
        time.sleep(0.05)


def watch(grace_s: float) -> None:
    """Track groups until stdin closes, then end them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    end(groups, grace_s)


def launch(pipe: int, argv: list[str]) -> None:
    """Execute `argv` in this process. The guard is told the group first, so that it can never miss it."""
    os.write(pipe, b"+%d\n" % os.getpgrp())
    os.close(pipe)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(float(sys.argv[2]))
    else:
        launch(int(sys.argv[2]), sys.argv[3:])
