"""The baselines of PDX: vLLM alone and vLLM's own KV connectors, configured as their documentation advises.

docs/adr/0023-baselines.md says what each baseline needs, and which ones vLLM refuses to run on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pdx.bench.harness.report import installed
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
from pdx.cli.ports import free_ports
from pdx.config import parse_bytes

NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
LMCACHE = (sys.executable, "-P", "-c", "from lmcache.cli.main import main; main()", "server")
PICKLES = ("mode=pickle", "Using pickle")  # in the logs of LMCache's engine and LMCache's server: how chunks travel
SHM = Path("/dev/shm")
PROXY = (sys.executable, "-P", "-m", "pdx.bench.systems.baseline_proxy")
LOOK_S = 0.5  # long enough to tell a thread that polls from one that was woken
BUSY_SHARE = 0.3  # of `LOOK_S`: two threads that poll may share a core


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of a pair of engines and its proxy; the defaults are those of vLLM's documentation.

    `…_side`: where the two engines' connectors meet.
    """

    proxy: int = 8000
    prefill: int = 8100
    decode: int = 8200
    prefill_side: int = 5600
    decode_side: int = 5601
    store: int = 6379  # a store shared by all hosts, such as Redis
    line: int = 6380  # the slow line to the store
    spare: int = 8001

    @classmethod
    def free(cls) -> Ports:
        """Distinct ports on which no process listens now."""
        return cls(*free_ports(len(fields(cls))))


@dataclass(frozen=True, slots=True)
class Needs:
    """What a baseline needs besides vLLM."""

    any_of: tuple[str, ...] = ()
    install: str = ""

    def why_not(self) -> str:
        """Why this machine cannot run it; empty if it may be tried."""
        if missing := vllm_missing():
            return missing
        if self.any_of and not any(map(installed, self.any_of)):
            return f"{self.any_of[0]} is not installed: {self.install}"
        return ""


class Baseline(System):
    """A system made of servers: its stores start one by one, then its engines together, then its proxy."""

    needs = Needs()

    def why_not(self) -> str:
        return self.needs.why_not()

    @abstractmethod
    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        """The commands of the engines, the prefill engine first."""

    def proxy_command(self, ports: Ports) -> Command | None:
        """The proxy; None: clients send their requests to the engine."""
        return None

    def store_command(self, bed: Bed, ports: Ports) -> Command | None:
        """A server that the engines need; None: they need none."""
        return None

    def stores(self, bed: Bed, ports: Ports) -> list[Command]:
        """All servers that are started before the engines, one after the other."""
        store = self.store_command(bed, ports)
        return [] if store is None else [store]

    def settle(self, bed: Bed, servers: Servers) -> None:
        """Finish the setup when the engines are ready, before the proxy starts."""

    def running(self, servers: Servers, engines: Sequence[Command], proxy: Command | None, ports: Ports) -> Running:
        return Running(servers, engines, proxy)

    def commands(self, bed: Bed) -> list[str]:
        ports = Ports()
        all_of_them = [*self.stores(bed, ports), *self.engine_commands(bed, ports), self.proxy_command(ports)]
        return [command.line() for command in all_of_them if command is not None]

    def start(self, bed: Bed, *, trace: Path | None = None) -> Running:
        ports = Ports.free()
        engines, proxy = self.engine_commands(bed, ports), self.proxy_command(ports)
        with ExitStack() as undo:
            servers = Servers(bed.logs / self.name)
            undo.callback(servers.close)
            for store in self.stores(bed, ports):
                servers.start([store])
            servers.start(engines)
            self.settle(bed, servers)
            if proxy is not None:
                servers.start([proxy])
            undo.pop_all()
        return self.running(servers, engines, proxy, ports)


class Plain(Baseline):
    """One engine, with or without a connector, on the cores or GPU that the prefill engine of a pair would have."""

    engines = 1

    def __init__(self, name: str = "plain", title: str = "vLLM alone") -> None:
        self.name = name
        self.title = title

    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        home, _ = bed.homes()
        connector = self.connector(bed, ports)
        options = () if connector is None else _transfer(connector)
        return [engine_command(bed, "engine", ports.prefill, env=home, options=options)]

    def connector(self, bed: Bed, ports: Ports) -> dict[str, Any] | None:
        """vLLM's --kv-transfer-config; None: no connector."""
        return None


class LMCache(Plain):
    """LMCache as vLLM's `--kv-offloading-backend lmcache` sets it up: a separate server beside the engine.

    The server gets as much host memory as PDX's arena. On a CPU the engine copies chunks, through shared memory if the
    server has a name for it, otherwise in pickled messages. LMCache's own tests on CPUs use shared memory, as here.
    """

    packages = (*VLLM, "lmcache")
    needs = Needs(
        any_of=("lmcache",),
        install="pip install lmcache (it pins many packages: a virtual environment of its own is safer)",
    )

    def __init__(self, chunk_tokens: int | None = None) -> None:
        """`chunk_tokens`: None: LMCache's default. Hits end with a chunk, so smaller chunks leave less to compute."""
        if chunk_tokens is None:
            super().__init__("lmcache", "LMCache")
            self._chunks: tuple[str, ...] = ()
        else:
            super().__init__(f"lmcache-{chunk_tokens}", f"LMCache, chunks of {chunk_tokens} tokens")
            self._chunks = ("--chunk-size", str(chunk_tokens))

    def store_command(self, bed: Bed, ports: Ports) -> Command:
        gib = parse_bytes(bed.arena) / (1 << 30)
        size = ("--l1-size-gb", f"{gib:g}", "--eviction-policy", "LRU", *self._chunks)
        here = ("--host", "127.0.0.1", "--http-host", "127.0.0.1")
        name = f"pdx-bench-{ports.prefill_side}"
        # By default the server lets no engine copy, and has no shared memory to copy through.
        modes = ("--supported-transfer-mode", "auto", "--shm-name", name) if is_cpu_build() else ()
        return Command(
            name="store",
            program=LMCACHE,
            typed="lmcache server",
            options=("--port", str(ports.prefill_side), "--http-port", str(ports.proxy), *here, *size, *modes),
            url=f"http://127.0.0.1:{ports.proxy}",
            health="/healthcheck",
            leftovers=(SHM / f"lmcache_l1_pool_{name}",) if modes else (),
        )

    def settle(self, bed: Bed, servers: Servers) -> None:
        """Refuse a set-up in which LMCache pickles every chunk.

        :raises CannotRun: the log of the server or of the engine says so.
        """
        for log in sorted((bed.logs / self.name).glob("*.log")):
            if found := next((words for words in PICKLES if words in log.read_text(errors="replace")), ""):
                raise CannotRun(
                    f"LMCache pickles every chunk instead of sharing memory ({log.name} says {found!r}), so its "
                    "figures would not be LMCache's"
                )

    def connector(self, bed: Bed, ports: Ports) -> dict[str, Any]:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": ports.prefill_side}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Nixl(Baseline):
    """A prefill and a decode engine behind the baseline proxy. With vLLM's NixlConnector, the decode engine reads the
    blocks after prefill has ended.

    `yields`: the connector's progress thread runs at idle priority, so the figures exclude the cost of its polling. No
    documentation advises this; it separates the connector's share of `nixl`'s figures from that of its polling thread.
    """

    polls_idle = True  # its progress thread
    packages = (*VLLM, *NIXL)
    needs = Needs(any_of=NIXL, install="pip install nixl")

    def __init__(self, name: str, title: str, *, yields: bool = False) -> None:
        self.name = name
        self.title = title
        self._yields = yields

    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
        if is_cpu_build():
            config["kv_buffer_device"] = "cpu"
        found = []
        engines = ("prefill", ports.prefill, ports.prefill_side), ("decode", ports.decode, ports.decode_side)
        for (role, port, side), home in zip(engines, bed.homes(), strict=True):
            env = {**home, "UCX_NET_DEVICES": "all", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
            found.append(engine_command(bed, role, port, env=env, options=_transfer(config)))
        return found

    def proxy_command(self, ports: Ports) -> Command:
        engines = ("--prefill", f"http://127.0.0.1:{ports.prefill}", "--decode", f"http://127.0.0.1:{ports.decode}")
        return Command(
            name="proxy",
            program=PROXY,
            typed="python -m pdx.bench.systems.baseline_proxy",
            options=(*engines, "--port", str(ports.proxy)),
            url=f"http://127.0.0.1:{ports.proxy}",
        )

    def commands(self, bed: Bed) -> list[str]:
        """The commands, with remarks that say what `settle` does."""
        back = "taskset -p moves the main thread of its worker back to its own core"
        idle = "chrt --idle gives its threads that poll idle priority"
        remarks = [*([back] if is_cpu_build() else []), *([idle] if self._yields else [])]
        return [
            *super().commands(bed),
            *(f"# then, of each engine: {each} (pdx.bench.systems.baselines)" for each in remarks),
        ]

    def settle(self, bed: Bed, servers: Servers) -> None:
        """Undo what would cripple this baseline on few cores; with `yields`, also give polling threads idle priority.

        On a CPU, NixlConnector moves the worker's main thread to the last core of the machine. That thread also
        computes, so with few cores both engines would compute on the same one.
        """
        for role, home in zip(("prefill", "decode"), bed.homes(), strict=True) if is_cpu_build() else ():
            if cores := home.get("VLLM_CPU_OMP_THREADS_BIND"):
                bind_workers(servers.pids(role), int(cores.split("|")[0].split(",")[0]))
        if self._yields:
            lower_pollers_priority(servers.pids("prefill", "decode"))


def baselines() -> list[System]:
    return [
        Nixl("nixl", "vLLM's NixlConnector (pull)"),
        Nixl("nixl-yield", "NixlConnector (pull), its polling thread at idle priority", yields=True),
        LMCache(),
        LMCache(128),
        Plain(),
    ]


def _transfer(config: Mapping[str, Any]) -> tuple[str, str]:
    return ("--kv-transfer-config", json.dumps(config))


# ---- threads of other processes ---------------------------------------------------------------


def bind_workers(pids: Sequence[int], core: int) -> None:
    """Bind the main thread of each vLLM worker among these processes to `core`."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::Worker"):
                os.sched_setaffinity(pid, {core})


def lower_pollers_priority(pids: Sequence[int]) -> list[int]:
    """Give idle priority to the threads of these processes that are busy although no request is in flight.

    Takes `LOOK_S`; returns the ids of those threads.
    """
    before = _thread_cpu_s(pids)
    time.sleep(LOOK_S)
    after = _thread_cpu_s(pids)
    busy = [thread for thread, used_s in after.items() if used_s - before.get(thread, used_s) > BUSY_SHARE * LOOK_S]
    for thread in busy:
        with suppress(ProcessLookupError):
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    return busy


def _thread_cpu_s(pids: Sequence[int]) -> dict[int, float]:
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                found[int(task.name)] = (int(fields[11]) + int(fields[12])) / ticks
    return found
