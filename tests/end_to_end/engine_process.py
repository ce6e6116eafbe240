"""Real vLLM servers as child processes of the tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from pdx.testing.waiting import wait_until

READY_S = 240.0


class Server:
    """A process that serves HTTP, in a process group of its own, with its log in a file."""

    def __init__(
        self,
        command: list[str],
        port: int,
        log: Path,
        env: dict[str, str] | None = None,
        *,
        admin_port: int | None = None,
    ) -> None:
        """`admin_port`: where it tells of itself, if not where it serves."""
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port or port}"
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,  # no session: see pdx/cli/processes.py
            )

    def is_healthy(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"{self.log.name} ended with {self.process.returncode}:\n{self.tail()}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self) -> None:
        wait_until(self.is_healthy, timeout_s=READY_S, what=f"{self.log.name} serves")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a Prometheus metric's samples with these labels."""
        with urllib.request.urlopen(f"{self.admin_url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        total = 0.0
        for match in re.finditer(rf"^{re.escape(name)}(?:\{{(.*?)\}})? (\S+)$", text, re.MULTILINE):
            if all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def descendants(self, pattern: str) -> list[int]:
        """Processes of this group whose name matches, for example its vLLM worker."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                stat = (folder / "stat").read_text()
                group = int(stat.rpartition(")")[2].split()[2])
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if group == self.process.pid and re.search(pattern, f"{title} {stat}"):
                    found.append(int(folder.name))
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """End it, gently first."""
        self.kill(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()
        self.process.wait()
