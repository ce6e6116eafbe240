"""The systems that run now: started when first asked for, ended when others need their room."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pdx.bench.systems.system import Bed, CannotRun, Running, System, is_cpu_build
from pdx.cli import placement
from pdx.closing import Closing
from pdx.config import parse_bytes

ENGINE_BYTES = 2 << 30  # of one engine's processes beside the KV cache: measured 1.6-1.9 GiB with a tiny model
SPARE_BYTES = 1 << 30  # for proxies, nodes and whoever measures
AWAKE_S = 1.5  # for a system that was stopped: timers that are overdue, and what they start
DEFAULT_KV_GIB = 4.0  # vLLM's, where VLLM_CPU_KVCACHE_SPACE says nothing


class Fleet(Closing):
    """At most `max_engines` engines at a time. Whoever asks for a system uses it before asking for another.

    Systems that poll without a pause do not run while another one is used, or its figures would be theirs, too.

    `traces`: a folder; each PDX system records spans in its folder of the system's name, which must be there.
    A context: leaving it ends everything. For one thread.
    """

    def __init__(self, bed: Bed, systems: Sequence[System], max_engines: int, *, traces: Path | None = None) -> None:
        self._bed = bed
        self._systems = {system.name: system for system in systems}
        self._max_engines = max_engines
        self._traces = traces
        self._running: dict[str, Running] = {}  # least recently used first
        self._stopped: set[str] = set()  # those of them that do not run now

    @property
    def holds_all(self) -> bool:
        """Whether there is room for all systems at once, so that none is ever ended for another."""
        return sum(system.engines for system in self._systems.values()) <= self._max_engines

    @property
    def running(self) -> list[str]:
        """Names of the systems that run, least recently used first."""
        return list(self._running)

    def get(self, name: str) -> Running:
        """The running system of that name.

        :raises CannotRun: it cannot be started, has died since, or can never have room. It is not kept then.
        """
        system = self._systems[name]
        if system.engines > self._max_engines:
            raise CannotRun(f"{name} has {system.engines} engines, and there is room for {self._max_engines}")
        self.rest(but=name)
        running = self._running.get(name)
        if running is None:
            self._make_room(system.engines)
            trace = self._traces / name if self._traces is not None and system.is_pdx else None
            running = system.start(self._bed, trace=trace)
        elif why := running.died():
            self._end(name)
            raise CannotRun(why)
        elif name in self._stopped:
            self._stopped.discard(name)
            running.resume()
            time.sleep(AWAKE_S)
        self._running.pop(name, None)
        self._running[name] = running  # as the last one
        return running

    def rest(self, but: str = "") -> None:
        """Nobody takes processor time now, `but` one; the next `get` of a system wakes it."""
        for name, running in self._running.items():
            if name != but and self._systems[name].polls_idle:
                running.pause()
                self._stopped.add(name)

    def _make_room(self, engines: int) -> None:
        while sum(self._systems[name].engines for name in self._running) + engines > self._max_engines:
            name = next(iter(self._running))
            self._end(name)

    def _end(self, name: str) -> None:
        self._stopped.discard(name)
        self._running.pop(name).close()

    def close(self) -> None:
        """End all systems, each of them even if ending another one fails. Idempotent."""
        try:
            while self._running:
                self._end(next(reversed(self._running)))
        finally:
            if self._running:
                self.close()


def engines_that_fit(bed: Bed) -> int:
    """How many engines this machine has room for now: by its memory, with GPUs by their number (two may share one)."""
    by_memory = (available_bytes() - SPARE_BYTES) // engine_bytes(bed)
    if is_cpu_build():
        return max(0, by_memory)
    return max(0, min(by_memory, max(2, len(placement.gpus()))))


def engine_bytes(bed: Bed) -> int:
    """Host memory of one engine with its KV cache and its share of PDX's arenas (at worst one for each engine)."""
    kv_gib = float(bed.env.get("VLLM_CPU_KVCACHE_SPACE", DEFAULT_KV_GIB)) if is_cpu_build() else 0.0
    return ENGINE_BYTES + int(kv_gib * (1 << 30)) + parse_bytes(bed.arena)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What can be had without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise OSError(f"{meminfo} does not tell MemAvailable")
