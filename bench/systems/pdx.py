"""PDX as a system to compare: `pdx up` with one node or with two nodes and a channel, or one engine and its node."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.harness import web
from pdx.bench.systems.baselines import Plain, Ports
from pdx.bench.systems.system import (
    VLLM,
    Bed,
    CannotRun,
    Command,
    Running,
    Servers,
    System,
    engine_command,
    is_cpu_build,
    vllm_missing,
)
from pdx.cli import guard
from pdx.cli.ports import free_ports
from pdx.cli.serve import connector_option
from pdx.client.api import connect
from pdx.config import runtime_folder
from pdx.errors import PdxError
from pdx.telemetry.timeline import Moment
from pdx.transports.registry import find
from pdx.wire.status import NodeStatus

PORT = 8000  # in the commands that a result shows
ANNOUNCED_S = 30.0  # from readiness until the nodes know their engines' addresses
POLL_S = 0.1
STOP_S = 4 * guard.GRACE_S  # `pdx up` ends its proxy, engines and nodes one after the other, each within GRACE_S
PDX = (sys.executable, "-P", "-m", "pdx.cli.main")
UP = (*PDX, "up")
LIBRARIES = {
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "ucx": ("ucxx-cu12", "libucx-cu12"),
    "cuda_ipc": ("cuda-bindings",),
}


class PdxSystem(System):
    """`pdx up`. `channel`: between two nodes; None: one node for both engines. `gpu`: of the arenas, as for `--gpu`."""

    is_pdx = True

    def __init__(self, channel: str | None, gpu: str = "") -> None:
        self.channel = channel
        self.gpu = gpu
        self.name = "-".join(filter(None, ("pdx", channel or ("gpu" if gpu else ""))))
        where = f", arenas on GPU {gpu}" if gpu else ""
        self.title = ("PDX, one node" if channel is None else f"PDX, two nodes, {channel}") + where
        self.packages = ("pdx-transport", *VLLM, *LIBRARIES.get(channel or "", ()))

    def why_not(self) -> str:
        if missing := vllm_missing():
            return missing
        if self.gpu and is_cpu_build():
            return "needs an NVIDIA GPU and vLLM's build for it"
        if self.channel is None:
            return ""
        try:
            found = find(self.channel).availability()
        except PdxError as error:
            return str(error)
        return "" if found.is_ok else f"{found.why}; {found.fix}".rstrip("; ")

    def commands(self, bed: Bed) -> list[str]:
        command = self._command(bed, PORT, PORT + 1)
        return [command.line()]

    def start(self, bed: Bed, *, trace: Path | None = None) -> PdxRunning:
        port, admin_port = free_ports(2)
        logs = bed.logs / self.name
        command = self._command(bed, port, admin_port, logs, trace)
        with ExitStack() as undo:
            servers = Servers(logs, STOP_S)
            undo.callback(servers.close)
            servers.start([command])
            running = PdxRunning(servers, port, admin_port, is_one_node=self.channel is None)
            running.find_engines()
            undo.pop_all()
        return running

    def _command(
        self, bed: Bed, port: int, admin_port: int, logs: Path | None = None, trace: Path | None = None
    ) -> Command:
        options = ["--port", str(port), "--admin", f"127.0.0.1:{admin_port}", "--debug-headers"]
        options += ["--gpu-arena" if self.gpu else "--arena", bed.arena]
        if self.channel is not None:
            options += ["--channel", self.channel]
        if self.gpu:
            options += ["--gpu", self.gpu]
        if logs is not None:
            options += ["--logs", str(logs)]
        return Command(
            name="up",
            program=(*UP, str(bed.model)),
            typed="pdx up MODEL",
            options=(*options, "--", *bed.engine_flags()),
            url=f"http://127.0.0.1:{port}",
            env=bed.env if trace is None else {**bed.env, "PDX_TRACE": str(trace)},
        )


class PdxAlone(Plain):
    """One engine and its node, as with `pdx serve both`: the node keeps the KV that the engine computed."""

    packages = ("pdx-transport", *VLLM)

    def __init__(self) -> None:
        super().__init__("pdx-both", "PDX, one engine and its node")

    def store_command(self, bed: Bed, ports: Ports) -> Command:
        socket = _socket(ports)
        return Command(
            name="node",
            program=(*PDX, "node", "--node", f"ipc://{socket}", "--proxy", ""),
            typed="pdx node",
            options=("--arena", bed.arena),
            url=f"ipc://{socket}",
            leftovers=(socket,),
        )

    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        home, _ = bed.homes()
        engine = engine_command(bed, "engine", ports.prefill, env=home)
        node = ("--node", f"ipc://{_socket(ports)}", "--no-start-node", "--proxy", "")
        program = (*PDX, "serve", "both", str(bed.model), *node)
        return [replace(engine, program=program, typed="pdx serve both MODEL")]


class PdxWith(PdxAlone):
    """`PdxAlone` with connector settings for which `pdx serve` has no option, and with options of the node."""

    def __init__(self, name: str, title: str, settings: dict[str, Any], node: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.name = f"{self.name}-{name}"
        self.title = f"{self.title}, {title}"
        self._settings = settings
        self._node = node

    def store_command(self, bed: Bed, ports: Ports) -> Command:
        command = super().store_command(bed, ports)
        return replace(command, options=(*command.options, *self._node))

    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        home, _ = bed.homes()
        engine = engine_command(bed, "engine", ports.prefill, env=home)
        here = {"node": f"ipc://{_socket(ports)}", "start_node": False, "proxy": ""}
        program = (*engine.program, *connector_option(self._settings | here))
        return [
            replace(engine, program=program, typed=f"{engine.typed} {shlex.join(connector_option(self._settings))}")
        ]


def _socket(ports: Ports) -> Path:
    """The socket on which the node of these ports' engine listens."""
    return runtime_folder() / f"bench-{ports.prefill}.sock"


class PdxRunning(Running):
    """A running `pdx up`."""

    def __init__(self, servers: Servers, port: int, admin_port: int, *, is_one_node: bool) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._admin_url = f"http://127.0.0.1:{admin_port}"
        self.prefill_url = ""
        self.decode_url = ""
        self._servers = servers
        self._folder = runtime_folder() / f"up-{port}"
        self._is_one_node = is_one_node

    def find_engines(self) -> None:
        """Wait until the nodes know the engines' addresses, and the proxy knows the nodes; until then it serves prompts
        in another way. :raises CannotRun: this takes longer than `ANNOUNCED_S`."""
        self.prefill_url, self.decode_url = (
            self._wait_for(lambda role=role: self._engine_url(role), f"no node learned the {role} engine's address")  # type: ignore[misc]
            for role in ("prefill", "decode")
        )
        self._wait_for(self._known_nodes, "the proxy heard of no node")

    def _known_nodes(self) -> str:
        nodes = json.loads(web.get(f"{self.url}/health"))["nodes"]
        return str(nodes) if nodes >= (1 if self._is_one_node else 2) else ""

    def _engine_url(self, role: str) -> str:
        node = "node" if self._is_one_node else role
        return next((one.url for one in self.status(node).attached if one.role == role and one.url), "")

    def _wait_for(self, ask: Callable[[], str], what: str) -> str:
        deadline = time.monotonic() + ANNOUNCED_S
        while not (answer := ask()):
            if time.monotonic() > deadline:
                raise CannotRun(f"{what} within {ANNOUNCED_S:.0f} s")
            time.sleep(POLL_S)
        return answer

    def transfer_record(self, transfer: str) -> dict[str, Any] | None:
        """All that the proxy knows of a transfer so far; None: nothing."""
        found = web.get_or_none(f"{self._admin_url}/pdx/requests/{transfer}")
        return None if found is None else msgspec.json.decode(found, type=dict[str, Any])

    def timeline(self, transfer: str) -> list[Moment] | None:
        found = self.transfer_record(transfer)
        return None if found is None else msgspec.convert(found["moments"], list[Moment])

    def status(self, node: str) -> NodeStatus:
        """The status that the node of that name reports."""
        with connect(f"ipc://{self._folder}/{node}.sock") as attached:
            return attached.status()
