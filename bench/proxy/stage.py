"""Two stand-in engines in a process, and a `pdx proxy` in front of them in another, and a node that reports them.

Beside that proxy vLLM's example, if what it is made of is installed, and a further one with other options.
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
_LOOKS = 4  # for each worker: which one a connection meets is chance
REPORT_S = 1.0
_ENGINE = "pdx.bench.proxy.stand_in_engine"
_EXAMPLE = "pdx.bench.proxy.example_proxy"
_EXAMPLE_NEEDS = ("fastapi", "httpx", "uvicorn")  # they come with vLLM


@dataclass(frozen=True, slots=True)
class Front:
    """A proxy: where it listens, and who it is."""

    url: str
    admin_url: str  # empty: it has none
    pid: int  # of several workers: of the process that started them


@dataclass(frozen=True, slots=True)
class Stage:
    """Where they listen, and who they are."""

    pace: Pace  # of the engines at first
    prefill_url: str
    decode_url: str
    proxy: Front
    example: Front | None = None
    other: Front | None = None


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
        prefill_url, decode_url, example_url = (f"http://127.0.0.1:{port}" for port in ports[:3])
        times = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(pace).items()]
        servers.start(
            [_python(_ENGINE, "engines", decode_url, *(f"--port={port}" for port in ports[:2]), *times)], START_S
        )
        engines = ("--prefill", prefill_url, "--decode", decode_url)
        told = ("--log-level", "warning", "--max-body", "8M", "--debug-headers", *engines)
        fronts: dict[str, tuple[str, str]] = {}
        proxies: list[Command] = []
        controls: list[str] = []

        def add(name: str, port: int, admin: int, count: int = 1, options: Sequence[str] = ()) -> None:
            url, control = f"http://127.0.0.1:{port}", f"ipc://{folder}/{name}.sock"
            controls.extend(worker_address(control, number) for number in range(count))
            at = ["--port", str(port), "--control", control]
            at += ["--admin", f"127.0.0.1:{admin}"] if count == 1 else []
            proxies.append(_python("pdx.cli.main", name, url, "proxy", *at, *told, *options))
            fronts[name] = url, f"http://127.0.0.1:{admin}" if count == 1 else ""

        add("proxy", ports[3], ports[4])
        if other:
            add("other", ports[5], ports[6], workers, other)
        has_example = all(importlib.util.find_spec(name) for name in _EXAMPLE_NEEDS)
        if has_example:
            proxies.append(_python(_EXAMPLE, "example", example_url, f"--port={ports[2]}", *engines))
        servers.start(proxies, START_S)
        made = {name: Front(url, admin_url, servers.pid(name)) for name, (url, admin_url) in fronts.items()}
        with _reported(controls, prefill_url, decode_url):
            for front in made.values():
                for _ in range(1 if front.admin_url else _LOOKS * workers):
                    _wait_for_nodes(front.url)
            example = Front(example_url, "", servers.pid("example")) if has_example else None
            yield Stage(pace, prefill_url, decode_url, made["proxy"], example, made.get("other"))


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
    report = NodeReport(VERSION, "stage", epoch=1, arena_bytes=0, free_bytes=0, engines=engines, marks=[])
    ended = threading.Event()

    def tell() -> None:
        with zmq.Context() as context, contextlib.ExitStack() as stack:
            lines = [stack.enter_context(context.socket(zmq.DEALER)) for _ in controls]
            for line, control in zip(lines, controls, strict=True):
                line.setsockopt(zmq.LINGER, 0)
                line.connect(control)
            while True:
                for line in lines:
                    line.send(encode(report))
                if ended.wait(REPORT_S):
                    return
                for line in lines:
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
