"""Two stand-in engines in one process, a `pdx proxy` in front of them in another, and a node that reports them.

Beside that proxy, vLLM's example if its dependencies are installed, and another proxy with different options.
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
_LOOKS = 4  # per worker: which one gets a connection is random
REPORT_S = 1.0
_ENGINE = "pdx.bench.proxy.stand_in_engine"
_EXAMPLE = "pdx.bench.proxy.example_proxy"
_EXAMPLE_NEEDS = ("fastapi", "httpx", "uvicorn")  # installed with vLLM


@dataclass(frozen=True, slots=True)
class Front:
    """A proxy: its address and process."""

    url: str
    admin_url: str  # empty: none
    pid: int  # with several workers, of their parent


@dataclass(frozen=True, slots=True)
class Stage:
    """Addresses and processes of everything on the stage."""

    pace: Pace  # initial pace of the engines
    prefill_url: str
    decode_url: str
    proxy: Front
    example: Front | None = None
    other: Front | None = None


@contextlib.contextmanager
def stage(pace: Pace, *, other: Sequence[str] = (), workers: int = 1) -> Iterator[Stage]:
    """Start everything; it ends with this context, even if this process is killed. `other`: options of another proxy,
    which has this many `workers`.

    :raises CannotRun: a process did not start; the message has the decisive line of its log.
    :raises RuntimeError: the proxy accepts no reports.
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
        common = ("--log-level", "warning", "--max-body", "8M", "--debug-headers", *engines)
        fronts: dict[str, tuple[str, str]] = {}
        proxies: list[Command] = []
        controls: list[str] = []

        def add(name: str, port: int, admin: int, count: int = 1, options: Sequence[str] = ()) -> None:
            url, control = f"http://127.0.0.1:{port}", f"ipc://{folder}/{name}.sock"
            controls.extend(worker_address(control, number) for number in range(count))
            at = ["--port", str(port), "--control", control]
            at += ["--admin", f"127.0.0.1:{admin}"] if count == 1 else []
            proxies.append(_python("pdx.cli.main", name, url, "proxy", *at, *common, *options))
            fronts[name] = url, f"http://127.0.0.1:{admin}" if count == 1 else ""

        add("proxy", ports[3], ports[4])
        if other:
            add("other", ports[5], ports[6], workers, other)
        has_example = all(importlib.util.find_spec(name) for name in _EXAMPLE_NEEDS)
        if has_example:
            proxies.append(_python(_EXAMPLE, "example", example_url, f"--port={ports[2]}", *engines))
        servers.start(proxies, START_S)
        made = {name: Front(url, admin_url, servers.pid(name)) for name, (url, admin_url) in fronts.items()}
        with _reporting(controls, prefill_url, decode_url):
            for front in made.values():
                for _ in range(1 if front.admin_url else _LOOKS * workers):
                    _wait_for_nodes(front.url)
            example = Front(example_url, "", servers.pid("example")) if has_example else None
            yield Stage(pace, prefill_url, decode_url, made["proxy"], example, made.get("other"))


def _python(module: str, name: str, url: str, *options: str) -> Command:
    return Command(name, (sys.executable, "-P", "-m", module), module, options, url)


@contextlib.contextmanager
def _reporting(controls: Sequence[str], prefill_url: str, decode_url: str) -> Iterator[None]:
    """Report the engines to the proxies as a node would: without that, nothing is forwarded, and the two legs of a chat
    do not overlap. `controls`: their sockets."""
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
                        while True:  # otherwise the proxy would find this node's queue full
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
