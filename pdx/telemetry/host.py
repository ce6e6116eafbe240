"""Which host this is: two processes have one clock and one memory exactly where their host ids are equal."""

from __future__ import annotations

import functools
import os
import select
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
