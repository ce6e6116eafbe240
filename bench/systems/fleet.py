"""The running systems of a benchmark: started on first use, ended when other systems need their room."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pdx.bench.systems.system import Bed, CannotRun, Running, System, is_cpu_build
from pdx.cli import placement
from pdx.closing import Closing
from pdx.config import parse_bytes

ENGINE_BYTES = 2 << 30  # of one engine's processes besides the KV cache: measured 1.6-1.9 GiB with a tiny model
SPARE_BYTES = 1 << 30  # for proxies, nodes and the measuring process
AWAKE_S = 1.5  # for a resumed system: overdue timers, and the work that they start
DEFAULT_KV_GIB = 4.0  # vLLM's default, without VLLM_CPU_KVCACHE_SPACE


class Fleet(Closing):
    """Runs at most `max_engines` engines at a time. The caller must finish with a system before it asks for another.

    Systems that poll when idle are paused while another system is in use, or they would distort its figures.

    `traces`: a folder with an existing folder for each PDX system, of the system's name, in which it records spans.
    A context manager: leaving it ends all systems. Not thread-safe.
    """

    def __init__(self, bed: Bed, systems: Sequence[System], max_engines: int, *, traces: Path | None = None) -> None:
        self._bed = bed
        self._systems = {system.name: system for system in systems}
        self._max_engines = max_engines
        self._traces = traces
        self._running: dict[str, Running] = {}  # least recently used first
        self._paused: set[str] = set()  # the running systems that are paused

    @property
    def holds_all(self) -> bool:
        """Whether there is room for all systems at once, so that none is ever ended for another."""
        return sum(system.engines for system in self._systems.values()) <= self._max_engines

    @property
    def running(self) -> list[str]:
        """Names of the systems that run, least recently used first."""
        return list(self._running)

    def get(self, name: str) -> Running:
        """The system of that name, started or resumed if necessary.

        :raises CannotRun: it cannot be started, has died since, or can never have room. The fleet then drops it.
        """
        system = self._systems[name]
        if system.engines > self._max_engines:
            raise CannotRun(f"{name} has {system.engines} engines, and there is room for {self._max_engines}")
        self.pause_pollers(but=name)
        running = self._running.get(name)
        if running is None:
            self._make_room(system.engines)
            trace = self._traces / name if self._traces is not None and system.is_pdx else None
            running = system.start(self._bed, trace=trace)
        elif why := running.died():
            self._end(name)
            raise CannotRun(why)
        elif name in self._paused:
            self._paused.discard(name)
            running.resume()
            time.sleep(AWAKE_S)
        self._running.pop(name, None)
        self._running[name] = running  # as the most recently used
        return running

    def pause_pollers(self, but: str = "") -> None:
        """Pause all systems that poll when idle, except `but`; the next `get` of a system resumes it."""
        for name, running in self._running.items():
            if name != but and self._systems[name].polls_idle:
                running.pause()
                self._paused.add(name)

    def _make_room(self, engines: int) -> None:
        while sum(self._systems[name].engines for name in self._running) + engines > self._max_engines:
            name = next(iter(self._running))
            self._end(name)

    def _end(self, name: str) -> None:
        self._paused.discard(name)
        self._running.pop(name).close()

    def close(self) -> None:
        """End all systems, even if ending one of them fails. Idempotent."""
        try:
            while self._running:
                self._end(next(reversed(self._running)))
        finally:
            if self._running:
                self.close()


def engines_that_fit(bed: Bed) -> int:
    """How many engines fit on this machine now: by memory and, with GPUs, also by their number (two may share one)."""
    by_memory = (available_bytes() - SPARE_BYTES) // engine_bytes(bed)
    if is_cpu_build():
        return max(0, by_memory)
    return max(0, min(by_memory, max(2, len(placement.gpus()))))


def engine_bytes(bed: Bed) -> int:
    """Host memory of one engine with its KV cache and its share of PDX's arenas (at worst one arena per engine)."""
    kv_gib = float(bed.env.get("VLLM_CPU_KVCACHE_SPACE", DEFAULT_KV_GIB)) if is_cpu_build() else 0.0
    return ENGINE_BYTES + int(kv_gib * (1 << 30)) + parse_bytes(bed.arena)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be allocated without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise OSError(f"{meminfo} does not tell MemAvailable")
