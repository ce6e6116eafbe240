"""Two stand-in engines and a `pdx proxy` in front of them, in processes of their own, and a node that reports them.

Beside that proxy vLLM's example, if what it is made of is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import urlopen

import zmq

from pdx.bench.proxy.stand_in_engine import MODEL_LEN, Pace
from pdx.bench.systems.system import Command, Servers
from pdx.cli.ports import free_ports
from pdx.security.address import worker_address
from pdx.wire.messages import VERSION, EngineFacts, encode
from pdx.wire.proxy import EngineReport, NodeReport

START_S = 60.0
LOOK_S = 0.05
_LOOKS = 4
REPORT_S = 1.0
_EXAMPLE = "pdx.bench.proxy.example_proxy"
_EXAMPLE_NEEDS = ("fastapi", "httpx", "uvicorn")  # they come with vLLM


@dataclass(frozen=True, slots=True)
class Front:
    """A proxy: where it listens, and who it is."""

    url: str
    admin_url: str  # empty: it is not PDX's
    pid: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Where they listen, and who they are."""

    pace: Pace  # of the engines at first
    prefill_url: str
    decode_url: str
    engine_pids: tuple[int, int]
    proxy: Front
    example: Front | None = None
    other: Front | None = None  # of several workers, `pid` is that of the process that started them


@contextlib.contextmanager
def stage(pace: Pace, *, other: Sequence[str] = (), workers: int = 1) -> Iterator[Stage]:
    """All of them; they end with this context, and also if this process is killed. `other`: a further proxy has these
    options, and so many `workers`.

    :raises CannotRun: one of them did not start; the message has the decisive line of its log.
    :raises RuntimeError: the proxy takes no reports.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder,
        contextlib.closing(Servers(Path(folder))) as servers,
    ):
        ports = free_ports(7)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        times = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(pace).items()]
        engines = [
            _python(
                "pdx.bench.proxy.stand_in_engine", name, url, f"--port={port}", f"--{link}={folder}/kv.sock", *times
            )
            for name, port, url, link in zip(("prefill", "decode"), ports, urls, ("kv-to", "kv-from"), strict=False)
        ]
        ways = {"proxy": 2} | ({"other": 4} if other else {})
        controls: list[str] = []
        proxies = []
        for name, at in ways.items():
            control = f"ipc://{folder}/{name}.sock"
            controls += [worker_address(control, number) for number in range(workers if name == "other" else 1)]
            options = ["--port", str(ports[at]), "--log-level", "warning", "--max-body", "8M", "--control", control]
            options += ["--prefill", urls[0], "--decode", urls[1]]
            is_other = name == "other"
            options += ["--admin", f"127.0.0.1:{ports[at + 1]}"] if not is_other or workers == 1 else []
            options += other if is_other else []
            proxies.append(_python("pdx.cli.main", name, urls[at], "proxy", *options, "--debug-headers"))
        servers.start(engines, START_S)
        has_example = all(importlib.util.find_spec(name) for name in _EXAMPLE_NEEDS)
        if has_example:
            options = [f"--port={ports[6]}", "--prefill", urls[0], "--decode", urls[1]]
            proxies.append(_python(_EXAMPLE, "example", urls[6], *options))
        servers.start(proxies, START_S)
        example = Front(urls[6], "", servers.pid("example")) if has_example else None
        fronts = {name: Front(urls[at], urls[at + 1], servers.pid(name)) for name, at in ways.items()}
        with _reported(controls, urls[0], urls[1]):
            for name, front in fronts.items():
                for _ in range(_LOOKS * workers if name == "other" else 1):  # connections, of any worker
                    _wait_for_nodes(front.url)
            pids = servers.pid("prefill"), servers.pid("decode")
            yield Stage(pace, urls[0], urls[1], pids, fronts["proxy"], example, fronts.get("other"))


def _python(module: str, name: str, url: str, *options: str) -> Command:
    return Command(name, (sys.executable, "-P", "-m", module), module, options, url)


@contextlib.contextmanager
def _reported(controls: Sequence[str], prefill_url: str, decode_url: str) -> Iterator[None]:
    """Proxies hear of the engines what a node would tell: without it, nothing is forwarded, and no chat has both of its
    legs under way at once. `controls`: their sockets."""
    facts = EngineFacts(MODEL_LEN, looks_back=False)
    engines = [
        EngineReport("prefill", "prefill", prefill_url, 0, facts),
        EngineReport("decode", "decode", decode_url, 0, facts),
    ]
    ended = threading.Event()

    def tell() -> None:
        with zmq.Context() as context, contextlib.ExitStack() as lines:
            told = []
            for address in controls:
                line = lines.enter_context(context.socket(zmq.DEALER))
                line.setsockopt(zmq.LINGER, 0)
                line.connect(address)
                report = NodeReport(VERSION, "stage", epoch=1, arena_bytes=0, free_bytes=0, engines=engines, marks=[])
                told.append((line, encode(report)))
            while True:
                for line, frame in told:
                    line.send(frame)
                if ended.wait(REPORT_S):
                    return
                for line, _ in told:
                    with contextlib.suppress(zmq.Again):
                        while True:  # else the proxy would find this node's queue full
                            line.recv(zmq.NOBLOCK)

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
