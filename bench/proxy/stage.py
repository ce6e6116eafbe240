"""Two stand-in engines and a `pdx proxy` in front of them, in processes of their own, and a node that reports them.

Beside that proxy the one of another checkout, if there is one to compare with.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True, slots=True)
class Front:
    """A proxy: where it listens, and who it is."""

    url: str
    admin_url: str
    pid: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Where they listen, and who they are."""

    pace: Pace  # of the engines at first
    prefill_url: str
    decode_url: str
    engine_pids: tuple[int, int]
    proxy: Front
    before: Front | None = None  # of another checkout
    shared: Front | None = None  # by several workers; `pid` is that of the process that started them


@contextlib.contextmanager
def stage(pace: Pace, before: Path | None = None, *, workers: int = 0) -> Iterator[Stage]:
    """All of them; they end with this context, and also if this process is killed. `before`: another checkout.
    `workers`: a further proxy has so many.

    :raises CannotRun: one of them did not start; the message has the decisive line of its log.
    :raises RuntimeError: the proxy takes no reports.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder,
        contextlib.closing(Servers(Path(folder))) as servers,
    ):
        ports = free_ports(8)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        times = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(pace).items()]
        engines = [
            _python(
                "pdx.bench.proxy.stand_in_engine", name, url, f"--port={port}", f"--{link}={folder}/kv.sock", *times
            )
            for name, port, url, link in zip(("prefill", "decode"), ports, urls, ("kv-to", "kv-from"), strict=False)
        ]
        ways = {"proxy": 2} | ({"before": 4} if before is not None else {}) | ({"shared": 6} if workers else {})
        controls: dict[str, int] = {}
        proxies = []
        for name, at in ways.items():
            control, checkout = f"ipc://{folder}/{name}.sock", before if name == "before" else None
            of_it = range(workers if name == "shared" else 1)
            version = VERSION if checkout is None else _version(checkout)
            controls |= {worker_address(control, number): version for number in of_it}
            options = ["--port", str(ports[at]), "--log-level", "warning", "--max-body", "8M", "--control", control]
            options += ["--prefill", urls[0], "--decode", urls[1]]
            alone = ["--admin", f"127.0.0.1:{ports[at + 1]}"]
            options += alone if name != "shared" else ["--workers", str(workers)]
            env = {} if checkout is None else {"PYTHONPATH": str(checkout)}
            proxies.append(_python("pdx.cli.main", name, urls[at], "proxy", *options, "--debug-headers", env=env))
        servers.start(engines, START_S)
        servers.start(proxies, START_S)
        fronts = {name: Front(urls[at], urls[at + 1], servers.pid(name)) for name, at in ways.items()}
        with _reported(controls, urls[0], urls[1]):
            for name, front in fronts.items():
                for _ in range(_LOOKS * workers if name == "shared" else 1):  # connections, of any worker
                    _wait_for_nodes(front.url)
            pids = servers.pid("prefill"), servers.pid("decode")
            others = fronts.get("before"), fronts.get("shared")
            yield Stage(pace, urls[0], urls[1], pids, fronts["proxy"], *others)


def _python(module: str, name: str, url: str, *options: str, env: dict[str, str] | None = None) -> Command:
    return Command(name, (sys.executable, "-P", "-m", module), module, options, url, env or {})


def _version(checkout: Path) -> int:
    """What the control socket of its proxy speaks. :raises RuntimeError: it does not say."""
    for path in (checkout / "pdx" / "wire" / "messages.py", checkout / "pdx" / "messages.py"):
        if path.exists() and (found := re.search(r"^VERSION = (\d+)$", path.read_text(), re.MULTILINE)):
            return int(found[1])
    raise RuntimeError(f"{checkout} is no checkout of PDX")


@contextlib.contextmanager
def _reported(controls: Mapping[str, int], prefill_url: str, decode_url: str) -> Iterator[None]:
    """Proxies hear of the engines what a node would tell: without it, nothing is forwarded, and no chat has both of its
    legs under way at once. `controls`: their sockets, and the versions that these speak."""
    facts = EngineFacts(MODEL_LEN, looks_back=False)
    engines = [
        EngineReport("prefill", "prefill", prefill_url, 0, facts),
        EngineReport("decode", "decode", decode_url, 0, facts),
    ]
    ended = threading.Event()

    def tell() -> None:
        with zmq.Context() as context, contextlib.ExitStack() as lines:
            told = []
            for address, version in controls.items():
                line = lines.enter_context(context.socket(zmq.DEALER))
                line.setsockopt(zmq.LINGER, 0)
                line.connect(address)
                report = NodeReport(version, "stage", epoch=1, arena_bytes=0, free_bytes=0, engines=engines, marks=[])
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
