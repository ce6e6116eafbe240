"""The border to NIXL: one agent, as little of its library as PDX needs, and where the library is found.

NIXL is reached through the bindings of its wheel, not through `nixl._api`, which imports torch to choose the wheel and
logs to standard output.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import secrets
import sys
from typing import Any

from pdx.channel import Availability, Memory
from pdx.errors import ChannelUnavailable

Span = tuple[int, int, int]  # address, bytes, device: 0 for host memory

_WHEELS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")  # host memory is the same to all of them
_FIX = "pip install 'pdx-transport[nixl]'"
_PROGRESS_US = 1000  # NIXL's thread sleeps until UCX wakes it, at most so long; with 0 it would take a whole core


@functools.cache
def _load() -> Any:
    """The bindings of the wheel that is loaded already, else of the first that is installed.

    :raises ImportError: there is none.
    """
    names = sorted(_WHEELS, key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ImportError(f"none of {', '.join(_WHEELS)} is installed")


def _new_agent(bindings: Any, name: str) -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = _PROGRESS_US
    # STRICT: a writing thread and a receiving one share the agent; RW would let two of them into the UCX backend.
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    return bindings.nixlAgent(name, config)


def _errors(bindings: Any) -> tuple[type[Exception], ...]:
    return tuple(each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception))


def availability() -> Availability:
    """Whether a wheel of NIXL imports and has its UCX plugin."""
    try:
        plugins = _new_agent(_load(), "pdx-availability").getAvailPlugins()
    except ImportError as error:
        return Availability(False, f"NIXL does not import: {error}", _FIX)
    if "UCX" not in plugins:
        return Availability(False, f"NIXL has no UCX plugin, only {plugins}", f"{_FIX}; unset NIXL_PLUGIN_DIR")
    return Availability(True)


class NixlAgent:
    """An agent and the memory it has registered: the border to the library, whose errors become ours here."""

    def __init__(self, memory: Memory, settings: dict[str, str]) -> None:
        """Register `memory`; `settings` are UCX's, and variables of the environment (UCX_…) have precedence.

        :raises ChannelUnavailable: NIXL cannot.
        """
        self._bindings = _load()
        self.errors = _errors(self._bindings)
        self.name = f"pdx-{secrets.token_hex(16)}"
        config = ",".join(f"{key}={value}" for key, value in settings.items())
        try:
            self._agent = _new_agent(self._bindings, self.name)
            self._backends = [self._agent.createBackend("UCX", {"engine_config": config})]
            self._registered = [self._register(memory)]
            self.metadata: bytes = self._agent.getLocalMD()
            self._page = Memory(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))  # where greetings read to; no peer knows it
            self._registered.append(self._register(self._page))
        except self.errors as error:
            raise ChannelUnavailable(f"NIXL cannot register {memory}: {error}") from error

    def _register(self, memory: Memory) -> Any:
        descriptors = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, [(memory.address, memory.nbytes, 0, "")])
        self._agent.registerMem(descriptors, self._backends)
        return descriptors

    def load(self, metadata: bytes) -> str:
        """The name of the agent whose metadata this is; it can be written to now."""
        name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def unload(self, name: str) -> None:
        """Disconnect; no request to it may be under way."""
        with contextlib.suppress(self._bindings.nixlNotFoundError):  # NIXL has unloaded it when it lost it
            self._agent.invalidateRemoteMD(name)

    def write(self, name: str, local: list[Span], remote: list[Span]) -> int:
        """Begin to write; the handle."""
        return self._post(self._bindings.NIXL_WRITE, name, local, remote)

    def read_byte(self, name: str, address: int) -> int:
        """Begin to read one byte, into nowhere; the handle."""
        return self._post(self._bindings.NIXL_READ, name, [(self._page.address, 1, 0)], [(address, 1, 0)])

    def _post(self, verb: Any, name: str, local: list[Span], remote: list[Span]) -> int:
        lists = [self._bindings.nixlXferDList(self._bindings.DRAM_SEG, each) for each in (local, remote)]
        handle: int = self._agent.createXferReq(verb, *lists, name, b"", self._backends)
        try:
            self._agent.postXferReq(handle, b"")
        except self.errors:
            self._agent.releaseXferReq(handle)
            raise
        return handle

    def is_done(self, handle: int) -> bool:
        """Whether it has succeeded; an error is raised."""
        return bool(self._agent.getXferStatus(handle) == self._bindings.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Forget a request that is over. One that is under way is cancelled, which does not stop its bytes."""
        self._agent.releaseXferReq(handle)

    def notify(self, name: str, message: bytes) -> None:
        """Tell the other agent something."""
        self._agent.genNotif(name, message, self._backends)

    def take(self) -> list[bytes]:
        """All messages from others. Names of senders are theirs to choose; they are not looked at."""
        found: dict[str, list[bytes]] = self._agent.getNotifs({}, self._backends)
        return [message for messages in found.values() for message in messages]

    def close(self) -> None:
        """Deregister and end the agent with its thread. Nobody may use this object any more."""
        for descriptors in self._registered:
            self._agent.deregisterMem(descriptors, self._backends)
        self._agent = None
