"""The end of a child process that works as long as its standard input is open."""

from __future__ import annotations

import contextlib
import subprocess

PATIENCE_S = 20.0


def end_child(process: subprocess.Popen[str]) -> None:
    """Close its pipes and wait until it is gone; what does not end by itself is killed. Idempotent."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
