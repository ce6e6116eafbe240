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
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdx.cuda import driver
from pdx.cuda.gpu import Gpu
from pdx.errors import ChannelUnavailable, GpuError
from pdx.extras import install
from pdx.transports.channel import Availability, Memory

Span = tuple[int, int]  # address, bytes

_WHEELS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")  # host memory is the same to all of them
_CUDA_13 = 13000  # a driver older than that runs nothing that was built for it
_FIX = install("nixl")
_PROGRESS_US = 1000  # NIXL's thread sleeps until UCX wakes it, at most so long; with 0 it would take a whole core


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where memory lies: on the host, or on the device with this number in the process that registered it."""

    segment: Literal["DRAM_SEG", "VRAM_SEG"] = "DRAM_SEG"
    device: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0

    @classmethod
    def of(cls, memory: Memory) -> Place:
        """:raises ChannelUnavailable: it is a GPU's that this process does not see."""
        if not memory.gpu:
            return cls()
        try:
            return cls("VRAM_SEG", Gpu.find(memory.gpu).ordinal)
        except GpuError as error:
            raise ChannelUnavailable(str(error)) from error


_HOST = Place()


@functools.cache
def _load() -> Any:
    """The bindings of the wheel that is loaded already, else of the first that is installed and suits the driver.

    :raises ImportError: there is none.
    """
    try:
        suits = "nixl_cu12" if driver.version() < _CUDA_13 else "nixl_cu13"
    except GpuError:
        suits = ""
    for name in sorted(_WHEELS, key=lambda name: (name not in sys.modules, name != suits)):
        try:
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ImportError(f"none of {', '.join(_WHEELS)} is installed")


def _new_agent(bindings: Any, name: str, *, has_thread: bool) -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread = has_thread
    config.pthrDelay = _PROGRESS_US
    # STRICT: a writing thread and a receiving one share the agent; RW would let two of them into the UCX backend.
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    return bindings.nixlAgent(name, config)


def _errors(bindings: Any) -> tuple[type[Exception], ...]:
    return tuple(each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception))


def availability() -> Availability:
    """Whether a wheel of NIXL imports and has its UCX plugin."""
    try:
        plugins = _new_agent(_load(), "pdx-availability", has_thread=False).getAvailPlugins()
    except ImportError as error:
        return Availability(False, f"NIXL does not import: {error}", _FIX)
    if "UCX" not in plugins:
        return Availability(False, f"NIXL has no UCX plugin, only {plugins}", f"{_FIX}; unset NIXL_PLUGIN_DIR")
    return Availability(True)


class NixlAgent:
    """An agent and the memory it has registered: the border to the library, which raises `errors`.

    UCX asks the driver about events of a GPU, which ends the process if no context is current (NIXL issue 2102). So an
    agent with a GPU's memory has no thread of NIXL's, and each call makes the context current in its own.
    """

    def __init__(self, memory: Memory, settings: dict[str, str]) -> None:
        """Register `memory`; `settings` are UCX's, and variables of the environment (UCX_…) have precedence.

        :raises ChannelUnavailable: NIXL cannot.
        """
        self._bindings = _load()
        self.errors: tuple[type[Exception], ...] = (*_errors(self._bindings), GpuError)
        self.place = Place.of(memory)
        self._gpu = Gpu.find(memory.gpu) if memory.gpu else None
        self.name = f"pdx-{secrets.token_hex(16)}"
        config = ",".join(f"{key}={value}" for key, value in settings.items())
        try:
            self._agent = _new_agent(self._bindings, self.name, has_thread=self._gpu is None)
            self._check_plugin()
            self._library()
            self._backends = [self._agent.createBackend("UCX", {"engine_config": config})]
            self._registered = [self._register(memory, self.place)]
            self.metadata: bytes = self._agent.getLocalMD()
            self._page = Memory(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))  # where greetings read to; no peer knows it
            self._registered.append(self._register(self._page, _HOST))
        except self.errors as error:
            hint = "; is its UCX one with CUDA?" if memory.gpu else ""
            raise ChannelUnavailable(f"NIXL cannot register {memory}: {error}{hint}") from error

    def _check_plugin(self) -> None:
        _, segments = self._agent.getPluginParams("UCX")
        if self.place.segment not in segments:
            raise ChannelUnavailable(f"NIXL's UCX plugin takes no memory of GPUs, only {', '.join(segments)}")

    def _library(self) -> Any:
        """NIXL's own agent, for calls by this thread."""
        if self._gpu is not None:
            self._gpu.use()
        return self._agent

    def _register(self, memory: Memory, place: Place) -> Any:
        segment = getattr(self._bindings, place.segment)
        descriptors = self._bindings.nixlRegDList(segment, [(memory.address, memory.nbytes, place.device, "")])
        self._agent.registerMem(descriptors, self._backends)
        return descriptors

    def load(self, metadata: bytes) -> str:
        """Load an agent's metadata, so that it can be written to. Returns its name."""
        name: bytes = self._library().loadRemoteMD(metadata)
        return name.decode()

    def unload(self, name: str) -> None:
        """Disconnect; no request to it may be in flight."""
        with contextlib.suppress(self._bindings.nixlNotFoundError):  # NIXL has unloaded it when it lost it
            self._library().invalidateRemoteMD(name)

    def write(self, name: str, local: Sequence[Span], remote: Sequence[Span], place: Place) -> int:
        """Begin to write from the registered memory to the other agent's, which lies at `place`. Returns the handle."""
        lists = self._descriptors(local, self.place), self._descriptors(remote, place)
        return self._post(self._bindings.NIXL_WRITE, name, *lists)

    def read_byte(self, name: str, address: int, place: Place) -> int:
        """Begin to read one byte, which is discarded. Returns the handle."""
        lists = self._descriptors([(self._page.address, 1)], _HOST), self._descriptors([(address, 1)], place)
        return self._post(self._bindings.NIXL_READ, name, *lists)

    def _descriptors(self, spans: Sequence[Span], place: Place) -> Any:
        segment = getattr(self._bindings, place.segment)
        return self._bindings.nixlXferDList(segment, [(address, nbytes, place.device) for address, nbytes in spans])

    def _post(self, verb: Any, name: str, local: Any, remote: Any) -> int:
        handle: int = self._library().createXferReq(verb, local, remote, name, b"", self._backends)
        try:
            self._library().postXferReq(handle, b"")
        except self.errors:
            self._library().releaseXferReq(handle)
            raise
        return handle

    def is_done(self, handle: int) -> bool:
        """Whether the request has succeeded; raises its error."""
        return bool(self._library().getXferStatus(handle) == self._bindings.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Forget a request that is over. One in flight is cancelled, which does not stop its bytes."""
        self._library().releaseXferReq(handle)

    def notify(self, name: str, message: bytes) -> None:
        """Send the other agent a message."""
        self._library().genNotif(name, message, self._backends)

    def take(self) -> list[bytes]:
        """All messages from others. Senders choose their own names, which are ignored."""
        found: dict[str, list[bytes]] = self._library().getNotifs({}, self._backends)
        return [message for messages in found.values() for message in messages]

    def close(self) -> None:
        """Deregister and end the agent with its thread. This object must not be used any more."""
        with contextlib.suppress(GpuError):  # its context is broken, and the memory gone with it
            for descriptors in self._registered:
                self._library().deregisterMem(descriptors, self._backends)
        self._agent = None
