"""The `pdx` command in a process of its own, for tests of benches that are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


class CliProcess:
    """`pdx …` whose temporary files are all in `folder`; ends with the context."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self._out = (folder / "stdout").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdx.cli.main", *arguments],
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def __enter__(self) -> CliProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def until(self, start: str) -> None:
        """Read standard error until a line starts so."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if line.startswith(start):
                return
        raise AssertionError(f"it ended without {start!r}: {self.lines}")

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Send a signal; the exit status."""
        assert self._process.stderr is not None
        self._process.send_signal(number)
        reader = threading.Thread(target=lambda: self.lines.extend(self._process.stderr or ()))
        reader.start()
        status = self._process.wait()
        reader.join()
        return status

    @property
    def output(self) -> str:
        """What it printed on standard output."""
        return (self._folder / "stdout").read_text()
