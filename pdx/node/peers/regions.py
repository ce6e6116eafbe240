"""The node's arena, registered once with every channel that works here, and the listeners that watch what lands.

Registering imports libraries and may take a second, so it happens on a thread, when the first peer comes or is dialled.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from pdx.config import NodeConfig, listen_address
from pdx.cuda.arena import GpuArena
from pdx.errors import PdxError
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.security.address import data_host
from pdx.telemetry.env import Env
from pdx.transports.channel import GpuMemory, Listener, Memory, Region
from pdx.transports.registry import BY_NAME, CLASHES, find, schemes

log = logging.getLogger("pdx.node")


def are_digests_due(setting: str, region: Region) -> bool:
    """Whether writes by this region's channels must carry digests; `setting`: `NodeConfig.digests`."""
    return setting == "always" or (setting == "wire" and region.crosses_wire)


class Regions:
    """All regions of one arena. Owned by the control loop; `_open` runs on a thread of its own."""

    def __init__(self, config: NodeConfig, env: Env, arena: Arena, probe: Slot) -> None:
        """`probe`: a slot that a peer may write to before it has chosen a channel.

        Without `config.channels`, all working channels that authenticate are used; in a trusted network also others.
        """
        self.arena = arena
        self.probe = probe
        self.is_open = False
        self.regions: dict[str, Region] = {}
        self.listeners: dict[str, Listener] = {}
        self.why: dict[str, str] = {}  # by scheme that does not work here
        self._config = config
        self._env = env
        self._host = data_host(listen_address(config))
        self._memory: Memory | None = None
        self._found: dict[str, tuple[Region, Listener]] = {}  # opened by the thread
        self._missing: dict[str, str] = {}  # why the thread could not open a scheme
        self._thread: threading.Thread | None = None
        self._waiting: list[Callable[[], None]] = []
        self._closing = threading.Event()

    @property
    def schemes(self) -> list[str]:
        """The schemes that work here, in order of preference."""
        return list(self.listeners)

    @property
    def candidates(self) -> list[str]:
        """The schemes that may work here, in order of preference."""
        found = schemes(on_gpu=bool(self.arena.gpu))
        return self._config.channels or [scheme for scheme in found if scheme not in BY_NAME]

    def when_open(self, call: Callable[[], None]) -> None:
        """Call this on the control loop as soon as the regions are open; the first caller starts to open them."""
        if self.is_open:
            call()
            return
        self._waiting.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._open, name="pdx-regions", daemon=True)
            self._thread.start()

    def _open(self) -> None:
        opened, why = self._found, self._missing
        memory = self._memory = self._memory_of(self.arena)
        for scheme in self.candidates:
            if self._closing.is_set():
                break
            region: Region | None = None
            try:
                kind = find(scheme)
                is_trusted = self._config.trusted_network or scheme in self._config.channels
                if not (kind.is_authenticated or is_trusted):
                    hint = f"--channel {scheme} or --trusted-network allows it"
                    why[scheme] = f"it does not authenticate who writes; {hint}"
                    continue
                rival = CLASHES.get(scheme)
                if scheme not in self._config.channels and rival in opened:
                    why[scheme] = f"not beside {rival}, which brings a UCX of its own; --channel {scheme} asks for it"
                    continue
                region = kind.register(memory, host=self._host, wake=threading.Event())
                if region.takes_codec:
                    region.codec = self._config.wire_codec
                opened[scheme] = region, region.listen()
            except Exception as error:  # third-party code, too: only this scheme fails
                why[scheme] = str(error)
                if not isinstance(error, PdxError):
                    why[scheme] = f"{type(error).__name__}: {error}"
                    log.exception("channel %s failed", scheme)
                if region is not None:
                    with contextlib.suppress(PdxError):
                        region.close()
        self._env.mailbox.post(self._opened)

    @staticmethod
    def _memory_of(arena: Arena) -> Memory:
        if isinstance(arena, GpuArena):
            return GpuMemory(arena.device, arena.nbytes)
        return Memory(arena.data, arena.path)

    def _opened(self) -> None:
        """Take over what the thread has opened. Only once, even if `close` came first."""
        if self.is_open:
            return
        self.why = self._missing
        for scheme, (region, listener) in self._found.items():
            self.regions[scheme], self.listeners[scheme] = region, listener
        for scheme, text in self.why.items():
            # The absence of a channel named in the settings is worth a warning; else `pdx doctor` shows it.
            is_missed = scheme in self._config.channels
            self._env.counters["channels_unavailable"] += is_missed
            log.log(logging.WARNING if is_missed else logging.INFO, "no channel %s: %s", scheme, text)
        self.is_open = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def close(self) -> None:
        """Close all regions, including those being opened. Idempotent."""
        self._closing.set()
        self._waiting.clear()  # nothing begins to use them any more
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._opened()
        for region in self.regions.values():
            region.close()
        self.regions.clear()
        self.listeners.clear()
        if self._memory is not None:
            self._memory.release()
