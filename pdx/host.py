"""Which host this is: two processes have one clock and one memory exactly where their host ids are equal."""

from __future__ import annotations

import functools
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache  # a kernel keeps its name, and a node that has no descriptor left must still know it
def host_id() -> str:
    """The running kernel's own random name, at most 64 characters: containers of one host share it, and a host
    that was restarted has another. Whether processes also see each other's files is another question.

    :raises OSError: the kernel does not tell.
    """
    return _BOOT_ID.read_text(encoding="ascii").strip()[:64]
