"""Systems that `pdx bench reuse` compares: vLLM without a cache, with its own, or with a KV store beside it.

In each system one engine is asked. Systems with a store for all hosts have a second engine that fills the store: the
asked engine finds there what another host has computed.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pdx.bench.systems.baselines import LMCache, Plain, Ports
from pdx.bench.systems.names import SYSTEMS
from pdx.bench.systems.pdx import PdxAlone, PdxWith
from pdx.bench.systems.system import Bed, Command, Running, Servers, System
from pdx.config import parse_bytes

REDIS_S = 10.0
REDIS_ROOM = 3  # Redis' memory, as a multiple of `Bed.arena`
LINE = (sys.executable, "-P", "-m", "pdx.bench.systems.line")
GIB = 1 << 30


class Source(StrEnum):
    """Where a system should find prompt tokens that were seen before."""

    NOWHERE = "nowhere"
    OWN = "own"  # in the engine's own prefix cache
    KEPT = "kept"  # behind its connector


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of memory, in bytes, and the line and the disk behind it."""

    own_cache: int  # of an engine's KV cache that holds everything at once
    arena_of_many: int  # of the memory beside an engine, if a store for all hosts or a disk is behind it
    gbit: float  # speed of the line to that store, in 10⁹ bits per second
    disk: str = ""  # a folder on the disk below the node; empty: none


class Recompute(Plain):
    """vLLM without prefix caching: it never finds a token."""

    def __init__(self) -> None:
        super().__init__("recompute", "vLLM without any cache")

    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        return [_with_options(command, "--no-enable-prefix-caching") for command in super().engine_commands(bed, ports)]


class OwnCache(Plain):
    """vLLM with so much KV cache that it forgets nothing: no system can find more."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("own-cache", "vLLM whose own cache holds everything")
        self._nbytes = nbytes

    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        size = ("--kv-cache-memory-bytes", str(self._nbytes))  # overrides the one in `Bed.flags`
        return [_with_options(command, *size) for command in super().engine_commands(bed, ports)]


class Central:
    """The servers of a Redis behind a slow line."""

    def __init__(self, gbit: float) -> None:
        self._gbit = gbit

    def why_not(self) -> str:
        """Why Redis cannot run here; empty: it can."""
        return "" if shutil.which("redis-server") else "redis-server is not installed (its package is named redis)"

    def commands(self, bed: Bed, ports: Ports) -> list[Command]:
        """Redis without persistence, and the line to it."""
        size = ("--maxmemory", str(REDIS_ROOM * parse_bytes(bed.arena)), "--maxmemory-policy", "allkeys-lru")
        redis = Command(
            name="redis",
            program=("redis-server",),
            typed="redis-server",
            options=("--bind", "127.0.0.1", "--port", str(ports.store), "--save", "", "--appendonly", "no", *size),
            url=f"tcp://127.0.0.1:{ports.store}",
        )
        line = Command(
            name="line",
            program=LINE,
            typed="python -m pdx.bench.systems.line",
            options=("--port", str(ports.line), "--to", str(ports.store), "--gbit", f"{self._gbit:g}"),
            url=f"tcp://127.0.0.1:{ports.line}",
        )
        return [redis, line]


class CentralRunning(Running):
    """A running system with a Redis."""

    def __init__(self, servers: Servers, engines: Sequence[Command], port: int) -> None:
        super().__init__(servers, engines)
        self._port = port

    def stored_bytes(self) -> int:
        """Bytes that Redis has received so far. :raises OSError: it does not answer."""
        with socket.create_connection(("127.0.0.1", self._port), REDIS_S) as connection:
            connection.sendall(b"INFO stats\r\nQUIT\r\n")
            with connection.makefile("rb") as answer:
                found = re.search(rb"total_net_input_bytes:(\d+)", answer.read())
        if found is None:
            raise OSError(f"Redis at port {self._port} does not say what it has got")
        return int(found[1])


class WithRedis(Plain):
    """Two engines, each with a KV store of little memory beside it, and one Redis for both.

    A mixin: the next base of the derived class provides the KV store.
    """

    engines = 2
    _central: Central
    _arena: int  # bytes, of each KV store

    @abstractmethod
    def redis_options(self, ports: Ports) -> tuple[str, ...]:
        """Options that connect the KV store to Redis."""

    def why_not(self) -> str:
        return super().why_not() or self._central.why_not()

    def store_command(self, bed: Bed, ports: Ports) -> Command:
        command = super().store_command(replace(bed, arena=_mib(self._arena)), ports)
        assert command is not None
        return replace(command, options=(*command.options, *self.redis_options(ports)))

    def stores(self, bed: Bed, ports: Ports) -> list[Command]:
        own = self.store_command(bed, ports)
        first = replace(self.store_command(bed, _first_ports(ports)), name=f"first-{own.name}")
        return [*self._central.commands(bed, ports), first, own]

    def engine_commands(self, bed: Bed, ports: Ports) -> list[Command]:
        return _two_engines(bed, super().engine_commands(bed, _first_ports(ports)), super().engine_commands(bed, ports))

    def running(self, servers: Servers, engines: Sequence[Command], proxy: Command | None, ports: Ports) -> Running:
        return CentralRunning(servers, engines, ports.store)


class PdxCentral(WithRedis, PdxWith):
    """Two engines, each with a node that has little memory, and one Redis."""

    def __init__(
        self,
        sizes: Sizes,
        name: str = "central",
        title: str = "two engines and nodes, one Redis",
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(name, f"{title} behind {sizes.gbit:g} Gb/s", settings or {})
        self.name = f"pdx-{name}"
        self.title = self.title.replace("one engine and its node, ", "")
        self._central, self._arena = Central(sizes.gbit), sizes.arena_of_many

    def redis_options(self, ports: Ports) -> tuple[str, ...]:
        return "--remote", f"redis://127.0.0.1:{ports.line}"


class PdxDisk(PdxWith):
    """One engine, and a node that has little memory and a disk below it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__("disk", "little memory and a disk", {}, ("--disk", sizes.disk))
        self._sizes = sizes

    def why_not(self) -> str:
        return super().why_not() or ("" if self._sizes.disk else "it needs --disk FOLDER, on the disk in question")

    def store_command(self, bed: Bed, ports: Ports) -> Command:
        return super().store_command(replace(bed, arena=_mib(self._sizes.arena_of_many)), ports)


class LMCacheCentral(WithRedis, LMCache):
    """Two engines, each with an LMCache server that has little memory, and one Redis through LMCache's own adapter."""

    def __init__(self, sizes: Sizes, chunk_tokens: int | None) -> None:
        super().__init__(chunk_tokens)
        self.name = self.name.replace("lmcache", "lmcache-central")
        self.title = f"{self.title}, two engines and servers, one Redis behind {sizes.gbit:g} Gb/s"
        self._central, self._arena = Central(sizes.gbit), sizes.arena_of_many

    def redis_options(self, ports: Ports) -> tuple[str, ...]:
        return "--l2-adapter", json.dumps({"type": "resp", "host": "127.0.0.1", "port": ports.line})


def contenders(sizes: Sizes) -> dict[str, System]:
    """All systems by name. Those without a KV store come first."""
    systems: list[System] = [
        Recompute(),
        Plain(),
        OwnCache(sizes.own_cache),
        PdxAlone(),
        SYSTEMS["pdx-both-128"],
        PdxDisk(sizes),
        PdxCentral(sizes),
        PdxCentral(
            sizes, "central-128", "two engines and nodes, chunks of 128 tokens, one Redis", {"chunk_tokens": 128}
        ),
        LMCache(),
        LMCache(128),
        LMCacheCentral(sizes, None),
        LMCacheCentral(sizes, 128),
    ]
    return {system.name: system for system in systems}


NAMES = tuple(contenders(Sizes(1, 1, 1.0)))
SOURCES: Mapping[str, Source] = {
    **dict.fromkeys(NAMES, Source.KEPT),
    "recompute": Source.NOWHERE,
    "plain": Source.OWN,
    "own-cache": Source.OWN,
}


def _with_options(command: Command, *options: str) -> Command:
    return replace(command, options=(*command.options, *options))


def _first_ports(ports: Ports) -> Ports:
    """Ports of the engine that fills the store for all hosts, and of the KV store beside that engine."""
    return replace(ports, prefill=ports.decode, prefill_side=ports.decode_side, proxy=ports.spare)


def _two_engines(bed: Bed, filling: list[Command], asked: list[Command]) -> list[Command]:
    """The asked engine has the same cores as the engine of every other system, and comes last."""
    _, home = bed.homes()
    return [*(replace(each, name="first-engine", env={**each.env, **home}) for each in filling), *asked]


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 20))}MiB"
