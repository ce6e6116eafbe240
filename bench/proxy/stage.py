"""Two stand-in engines and a `pdx proxy` in front of them, in processes of their own, and a node that reports them."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import urlopen

import zmq

from pdx.bench.proxy.stand_in_engine import MODEL_LEN, Pace
from pdx.cli.ports import free_ports
from pdx.cli.processes import Process, Processes, ProcessState
from pdx.cli.ready import answers_health
from pdx.wire.messages import VERSION, EngineFacts, EngineReport, NodeReport, encode

START_S = 60.0
LOOK_S = 0.05
REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Where they listen, and who they are."""

    pace: Pace  # of the engines at first
    prefill_url: str
    decode_url: str
    proxy_url: str
    admin_url: str  # the proxy's
    engine_pids: tuple[int, int]
    proxy_pid: int


@contextlib.contextmanager
def stage(pace: Pace) -> Iterator[Stage]:
    """All of them; they end with this context, and also if this process is killed.

    :raises RuntimeError: one of them did not start; the message has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder, Processes(Path(folder)) as processes:
        ports = free_ports(4)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        times = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(pace).items()]
        engines = [
            _started(processes, name, ["-m", "pdx.bench.proxy.stand_in_engine", f"--port={port}", *times], url)
            for name, port, url in zip(("prefill", "decode"), ports, urls, strict=False)
        ]
        control = f"ipc://{folder}/proxy.sock"
        for engine in engines:
            wait_ready(engine)
        command = ["-m", "pdx.cli.main", "proxy", "--port", str(ports[2]), "--log-level", "warning"]
        command += ["--prefill", urls[0], "--decode", urls[1], "--control", control]
        command += ["--admin", f"127.0.0.1:{ports[3]}", "--debug-headers"]
        proxy = _started(processes, "proxy", command, urls[2])
        wait_ready(proxy)
        first, second = engines
        with _reported(control, urls[0], urls[1]):
            _wait_for_nodes(urls[2])
            yield Stage(pace, urls[0], urls[1], urls[2], urls[3], (first.pid, second.pid), proxy.pid)


@contextlib.contextmanager
def _reported(control: str, prefill_url: str, decode_url: str) -> Iterator[None]:
    """The proxy hears of the engines what a node would tell: without it, nothing is forwarded."""
    facts = EngineFacts(MODEL_LEN, looks_back=False)
    report = encode(
        NodeReport(
            VERSION,
            "stage",
            epoch=1,
            arena_bytes=0,
            free_bytes=0,
            engines=[
                EngineReport("prefill", "prefill", prefill_url, 0, facts),
                EngineReport("decode", "decode", decode_url, 0, facts),
            ],
            marks=[],
        )
    )
    ended = threading.Event()

    def tell() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as line:
            line.setsockopt(zmq.LINGER, 0)
            line.connect(control)
            while True:
                line.send(report)
                if ended.wait(REPORT_S):
                    return

    thread = threading.Thread(target=tell, name="pdx-bench-stage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wait_for_nodes(proxy_url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with urlopen(f"{proxy_url}/health", timeout=START_S) as answer:
            if json.load(answer)["nodes"]:
                return
        if time.monotonic() > deadline:
            raise RuntimeError("the proxy takes no reports")
        time.sleep(LOOK_S)


def _started(processes: Processes, name: str, arguments: list[str], url: str) -> Process:
    return processes.start(name, [sys.executable, "-P", *arguments], is_ready=answers_health(url))


def wait_ready(process: Process) -> None:
    """:raises RuntimeError: it ended, or took longer than `START_S`; the text has the end of its log."""
    deadline = time.monotonic() + START_S
    while process.look() is not ProcessState.READY:
        if process.state is ProcessState.DIED or time.monotonic() > deadline:
            raise RuntimeError(f"{process.name} is {process.state}:\n" + "\n".join(process.tail(10)))
        time.sleep(LOOK_S)
