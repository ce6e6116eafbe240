"""How many file descriptors this process may still open, and raising that limit to what the system allows."""

from __future__ import annotations

import contextlib
import os
import resource

_MOST = 1 << 20  # some container runtimes allow a billion, and some libraries close each one
_OPEN = "/proc/self/fd"


def raise_limit() -> int:
    """Raise the soft limit of open files (`ulimit -n`) to the hard one; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limit()
    with contextlib.suppress(OSError, ValueError):  # forbidden: the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def reserve() -> int:
    """How many descriptors a process keeps for its own use, and not for incoming connections."""
    return max(32, min(limit() // 4, 1024))


def left() -> int:
    """How many more files can be opened. One system call; before Linux 6.2, one per some hundred open files."""
    try:
        num_open = os.stat(_OPEN).st_size or len(os.listdir(_OPEN))  # the size is their number, or 0 on older kernels
    except OSError:
        return 0
    return max(0, limit() - num_open)
