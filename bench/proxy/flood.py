"""What a proxy does under a flood of connections, and whether honest clients are served meanwhile.

Strangers hold 2,000 connections to the clients' port that say nothing, and 400 to the control port; those that are
closed are opened again at once. Meanwhile eight clients ask over connections that they keep, and one over a new
connection for each request. The reference is the same without the flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pdx.bench.harness.report import Figure, at_least, at_most, plain
from pdx.bench.proxy.stage import wait_ready
from pdx.cli.ports import free_ports
from pdx.cli.processes import Process, Processes
from pdx.cli.ready import answers_health
from pdx.security.curve_keys import KeyPair

CONNECTS, CONTROL_CONNECTS = 2000, 400
KEPT = 8
ANSWER_S = 30.0
PAUSE_S = 0.02
GOAL_LOG = 10_000.0
BODY = {"model": "stand-in", "prompt": "alpha", "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Stage:
    """A proxy with keys that may open few files, before one engine."""

    process: Process
    url: str
    port: int
    control_port: int

    def log_bytes(self) -> int:
        """What it has logged."""
        return self.process.log.stat().st_size


@contextlib.contextmanager
def stage(limit: int) -> Iterator[Stage]:
    """:raises RuntimeError: something did not start."""
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as name, Processes(Path(name)) as processes:
        folder = Path(name)
        engine_port, port, control_port = free_ports(3)
        roster = folder / "roster.toml"
        secret, _ = KeyPair.make().save(folder / "keys", "proxy")
        roster.write_text(f'[nodes.alpha]\naddress = "tcp://127.0.0.1:1"\nkey = "{KeyPair.make().public}"\n')
        roster.chmod(0o600)
        engine_url, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}"
        python = [sys.executable, "-P", "-m"]
        command = [*python, "pdx.cli.main", "proxy", "--port", str(port), "--decode", engine_url]
        command += ["--control", f"tcp://127.0.0.1:{control_port}", "--keys", str(secret), "--roster", str(roster)]
        limited = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command] if limit else command
        engine = [*python, "pdx.bench.proxy.stand_in_engine", f"--port={engine_port}", "--first-ms=0", "--pace-ms=0"]
        wait_ready(processes.start("engine", engine, is_ready=answers_health(engine_url)))
        proxy = processes.start("proxy", limited, is_ready=answers_health(url))
        wait_ready(proxy)
        yield Stage(proxy, url, port, control_port)


class Clients:
    """Honest ones: how long each answer took, and which were none."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.kept: list[float] = []
        self.new: list[float] = []
        self.failures: list[str] = []

    async def run(self, seconds: float) -> None:
        """Ask for so long."""
        over = time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with contextlib.AsyncExitStack() as stack:
            keeping = [await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout)) for _ in range(KEPT)]
            closing = aiohttp.TCPConnector(force_close=True)
            new = await stack.enter_async_context(aiohttp.ClientSession(connector=closing, timeout=timeout))
            await asyncio.gather(
                *(self._ask(each, over, self.kept) for each in keeping), self._ask(new, over, self.new)
            )

    async def _ask(self, session: aiohttp.ClientSession, over: float, times: list[float]) -> None:
        while time.monotonic() < over:
            started_at = time.perf_counter()
            try:
                async with session.post(f"{self._url}/v1/completions", json=BODY) as response:
                    await response.read()
                    if response.status != 200:
                        self.failures.append(f"status {response.status}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self.failures.append(repr(error))
            times.append(time.perf_counter() - started_at)
            await asyncio.sleep(PAUSE_S)


def asked(made: Stage, seconds: float) -> Clients:
    """Clients that have asked for so long."""
    clients = Clients(made.url)
    asyncio.run(clients.run(seconds))
    return clients


def figures(calm: Clients, flooded: Clients, *, lives: bool, log_rate: float, flood_s: float) -> list[Figure]:
    """What is reported."""

    def spread(name: str, times: list[float], reference: list[float]) -> list[Figure]:
        found = [
            (word, sorted(times)[int(share * (len(times) - 1))], sorted(reference)[int(share * (len(reference) - 1))])
            for word, share in (("median", 0.5), ("p99", 0.99))
        ]
        return [
            plain(f"an answer over {name}, {word}", here * 1e3, "ms", f"without: {there * 1e3:.1f}")
            for word, here, there in found
        ]

    asks = len(flooded.kept) + len(flooded.new)
    return [
        at_least("the proxy lives", float(lives), "", 1),
        at_most("honest requests that failed", len(flooded.failures), "", 0, f"of {asks:,} in {flood_s:g} s"),
        at_most("log", log_rate / 1e3, "kB/s", GOAL_LOG / 1e3),
        *spread("a connection that is kept", flooded.kept, calm.kept),
        *spread("a new connection", flooded.new, calm.new),
    ]
