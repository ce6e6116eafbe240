"""A named fake of a GPU's streams, and a bed of toy engines on them. Fixtures are in conftest.py.

Streams are threads that do in order what is queued on them, and lag at random or on command. KV cache and arena are
host memory, the copy kernel runs under Triton's interpreter, and whoever forgets to wait for a stream sees it in the
bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import triton  # noqa: F401  natively: imported under TRITON_INTERPRET, parts of it could not be imported later
from fake_cuda_calls import Refused
from fake_cuda_kernels import install
from fake_cuda_streams import FakeEvent, FakeStream
from gpu_harness import GpuNode
from node_harness import MIB, NodeProcess, NodeThread
from toy_engine import ToyEngine

import pdx
from pdx.config import NodeConfig
from pdx.cuda import driver
from pdx.cuda.driver import api, call
from pdx.cuda.gpu import Gpu
from pdx.cuda.page_lock import PageLock
from pdx.engine import gpu_copier
from pdx.engine.streams import Streams

DEADLINE_S = 20.0


@functools.cache
def interpreted(name: str = "paged") -> ModuleType:
    """A private copy of this module of pdx.kernels that Triton's interpreter runs."""
    spec = importlib.util.spec_from_file_location(f"{name}_interpreted", f"{pdx.__path__[0]}/kernels/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    install()
    return module


def use_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copier's kernels, from now on. The interpreter keeps its state in globals: one at a time runs."""
    for name in ("gather", "scatter", "warm_up"):
        monkeypatch.setattr(gpu_copier, name, getattr(interpreted(), name))
    for name in ("scatter_turned", "warm_up_turned"):
        kernel = getattr(interpreted("turned_gpu"), name)

        @functools.wraps(kernel)
        def alone(*args: Any, kernel: Callable[..., None] = kernel, **settings: Any) -> None:
            with interpreted()._launching:
                kernel(*args, **settings)

        monkeypatch.setattr(gpu_copier, name, alone)


class LaggingStream(FakeStream):
    """`gate`: while it is cleared, nothing runs."""

    def __init__(self, lag_s: float) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[BaseException] = []
        self.awaits_event = False
        self._left = 0  # queued or being done; guarded by `_lock`
        self._lock = threading.Lock()
        super().__init__(0, lag_s, 1, self.gate)

    @property
    def waiting(self) -> bool:
        """Whether something was begun or waits."""
        return bool(self._left)

    @property
    def is_still(self) -> bool:
        """Whether it has done all that it can: there is nothing left, or it waits for an event of another stream."""
        return self.awaits_event or not self.waiting

    def put(self, work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  shown when the streams are closed
                self.errors.append(error)
            with self._lock:
                self._left -= 1

        with self._lock:
            self._left += 1
        super().put(run)

    def mark(self) -> threading.Event:
        marker = threading.Event()
        self.put(marker.set)
        return marker

    def close(self) -> None:
        self.gate.set()
        self.destroy()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "a stream waits for ever"


def _called(name: str) -> None:
    """torch calls this function of the driver, which may spoil a capture."""
    try:
        driver.api().check_capture(name)
    except Refused as refused:
        raise RuntimeError(f"CUDA error: {refused}") from refused


class LaggingEvent(FakeEvent):
    """See pdx.engine.streams.StreamEvent."""

    def __init__(self, streams: LaggingStreams) -> None:
        super().__init__()
        self._streams = streams

    def wait(self, stream: LaggingStream) -> None:  # type: ignore[override]
        passed = self._marker

        def wait() -> None:
            stream.awaits_event = not passed.is_set()
            passed.wait()
            stream.awaits_event = False

        stream.put(wait)

    def query(self) -> bool:
        _called("cuEventQuery")
        return self.is_done()

    def synchronize(self) -> None:
        _called("cuEventSynchronize")
        if self._streams.fault:
            raise RuntimeError(self._streams.fault)
        assert self._marker.wait(DEADLINE_S), "an event never passed"


class LaggingStreams(Streams):
    """One compute stream of a GPU, and those of a mover: first the one that gathers, then the one that loads."""

    def __init__(self, lag_s: float = 0.001, gpu: str = "0", log: list[Any] | None = None) -> None:
        self.made: list[LaggingStream] = []
        # In the order of their ends: (kernel, first layer, layers), and what tests add.
        self.log: list[Any] = [] if log is None else log
        self._captured: list[Callable[[], None]] | None = None
        self.fault = ""  # what waiting for an event raises
        self._lag_s = lag_s
        self._which = gpu
        self._gpu: Gpu | None = None
        self._compute = self.new_stream()

    @property
    def gathering(self) -> LaggingStream:
        return self.made[1]

    @property
    def loading(self) -> LaggingStream:
        return self.made[2]

    @property
    def copying(self) -> LaggingStream:
        """The copy engine's, once an arena in host memory is mapped."""
        return self.made[3]

    @property
    def captured(self) -> list[Callable[[], None]] | None:
        """The work of the graph that is being captured."""
        return self._captured

    @captured.setter
    def captured(self, work: list[Callable[[], None]] | None) -> None:
        self._captured = work
        driver.api().capture(is_under_way=work is not None)

    def gpu(self) -> Gpu:
        if self._gpu is None:
            self._gpu = Gpu.find(self._which)
        return self._gpu

    def bind_thread(self) -> None:
        self.gpu().use()
        call("cuThreadExchangeStreamCaptureMode", api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def new_stream(self) -> LaggingStream:
        self.made.append(LaggingStream(self._lag_s))
        return self.made[-1]

    def compute(self) -> LaggingStream:
        return self._compute

    def on(self, stream: LaggingStream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def event(self) -> LaggingEvent:
        return LaggingEvent(self)

    def is_capturing(self) -> bool:
        return self.captured is not None

    def copy(self, stream: LaggingStream, copies: Sequence[tuple[int, int, int]]) -> None:
        assert self.captured is None, "a copy of PDX is captured into the engine's graph"

        def run() -> None:
            for target, source, nbytes in copies:
                ctypes.memmove(target, source, nbytes)

        stream.put(run)

    def launch(self, stream: LaggingStream, kernel: Callable[..., None], *args: Any, **settings: Any) -> None:
        assert self.captured is None, "a kernel of PDX is captured into the engine's graph"

        def run() -> None:
            kernel(*args, **settings)
            self.log.append((kernel.__name__, args[2], args[3]))

        stream.put(run)

    # ---- the engine's side ------------------------------------------------------------------

    def do(self, work: Callable[[], None]) -> None:
        """The engine's own kernel, on the compute stream or into the graph that is being captured."""
        if self.captured is None:
            self._compute.put(work)
        else:
            self.captured.append(work)

    def synchronize(self) -> None:
        """Wait until nothing is queued."""
        for stream in self.made:
            assert stream.mark().wait(DEADLINE_S), "a stream does not end"

    @contextlib.contextmanager
    def held(self, *streams: LaggingStream) -> Iterator[None]:
        """These do nothing inside of the block."""
        for stream in streams:
            stream.gate.clear()
        try:
            yield
        finally:
            for stream in streams:
                stream.gate.set()

    def close(self) -> None:
        for stream in self.made:
            stream.close()
        errors = [error for stream in self.made for error in stream.errors]
        assert not errors, errors


class WholePageLock(PageLock):
    """Covers all before an engine is attached: what it does before that it does not save, by chance."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._thread.join()


class Bed:
    """A node, and engines whose streams lag. `log` has what workers told the node, and what their kernels did.

    The node has a process of its own where it `is_killed`, or has a GPU: memory of another's.
    """

    def __init__(self, address: str, *, on_gpu: bool, is_killed: bool) -> None:
        self.address = address
        self.on_gpu = on_gpu
        self.is_killed = is_killed
        self.nodes: list[Any] = []
        self.made: list[tuple[ToyEngine, list[LaggingStreams]]] = []
        self.log: list[Any] = []

    @property
    def node(self) -> Any:
        return self.nodes[-1]

    def start_node(self, *flags: str, **settings: Any) -> None:
        config = NodeConfig(
            **{"address": self.address, "arena_bytes": 8 * MIB, "gpu": "0" if self.on_gpu else "", **settings}
        )
        if self.on_gpu:
            self.nodes.append(GpuNode(config, *flags))
            self.node.wait_ready()
        else:
            self.nodes.append(NodeProcess.ready(config) if self.is_killed else NodeThread(config))

    def engine(
        self, *, lag_s: float = 0.001, lags: bool = True, gpus: Sequence[str] = ("0",), **settings: Any
    ) -> ToyEngine:
        """An engine with a rank on each of `gpus`."""
        streams = [LaggingStreams(lag_s, gpu, self.log) for gpu in gpus] if lags else []
        if streams:
            settings = {"shards": len(streams), **settings, "streams": streams[0], "more_streams": streams[1:]}
        try:
            engine = ToyEngine(self.address, f"toy-{len(self.made)}", **settings)
        except BaseException:
            for each in streams:
                each.close()
            raise
        self.made.append((engine, streams))
        return engine

    def told(self, kind: type) -> list[Any]:
        return [entry for entry in self.log if isinstance(entry, kind)]

    def close(self) -> None:
        for _, streams in self.made:
            for stream in (stream for each in streams for stream in each.made):
                stream.gate.set()
        for engine, _ in self.made:
            engine.close()
        for node in self.nodes:
            node.close()
        for _, streams in self.made:
            for each in streams:
                each.close()
