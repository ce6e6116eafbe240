"""A named fake of a GPU's streams: threads that do in order what is queued on them, and lag at random or on command.

KV cache and arena are host memory, the copy kernel runs under Triton's interpreter, and whoever forgets to wait for a
stream sees it in the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import triton  # noqa: F401  natively: imported under TRITON_INTERPRET, parts of it could not be imported later
from fake_cuda_calls import Refused
from fake_cuda_kernels import install

import pdx
from pdx.cuda import driver
from pdx.cuda.driver import api, call
from pdx.cuda.gpu import Gpu
from pdx.engine.streams import Streams

DEADLINE_S = 20.0


@functools.cache
def interpreted() -> ModuleType:
    """A private copy of pdx.kernels.paged that Triton's interpreter runs."""
    spec = importlib.util.spec_from_file_location("paged_interpreted", f"{pdx.__path__[0]}/kernels/paged.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    install()
    return module


class LaggingStream:
    """A queue and a thread. `gate`: while it is cleared, nothing runs."""

    def __init__(self, lag_s: float) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[BaseException] = []
        self._lag_s = lag_s
        self.awaits_event = False
        self._left = 0  # queued or being done; guarded by `_lock`
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lagging-stream", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> bool:
        """Whether something was begun or waits."""
        return bool(self._left)

    @property
    def is_still(self) -> bool:
        """Whether it has done all that it can: there is nothing left, or it waits for an event of another stream."""
        return self.awaits_event or not self.waiting

    def put(self, work: Callable[[], Any]) -> None:
        with self._lock:
            self._left += 1
        self._work.put(work)

    def close(self) -> None:
        self.gate.set()
        self._work.put(None)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "a stream waits for ever"

    def _run(self) -> None:
        chance = random.Random(1)
        while (work := self._work.get()) is not None:
            if self._lag_s:
                time.sleep(chance.random() * self._lag_s)
            self.gate.wait()
            try:
                work()
            except BaseException as error:  # noqa: BLE001  shown when the streams are closed
                self.errors.append(error)
            with self._lock:
                self._left -= 1


def _called(name: str) -> None:
    """torch calls this function of the driver, which may spoil a capture."""
    try:
        driver.api().check_capture(name)
    except Refused as refused:
        raise RuntimeError(f"CUDA error: {refused}") from refused


class LaggingEvent:
    """See pdx.engine.streams.StreamEvent."""

    def __init__(self, streams: LaggingStreams | None = None) -> None:
        self._streams = streams
        self._passed = threading.Event()
        self._passed.set()

    def record(self, stream: LaggingStream) -> None:
        self._passed = threading.Event()
        stream.put(self._passed.set)

    def wait(self, stream: LaggingStream) -> None:
        passed = self._passed

        def wait() -> None:
            stream.awaits_event = not passed.is_set()
            passed.wait()
            stream.awaits_event = False

        stream.put(wait)

    def query(self) -> bool:
        _called("cuEventQuery")
        return self._passed.is_set()

    def synchronize(self) -> None:
        _called("cuEventSynchronize")
        if self._streams is not None and self._streams.fault:
            raise RuntimeError(self._streams.fault)
        assert self._passed.wait(DEADLINE_S), "an event never passed"


class LaggingStreams(Streams):
    """One compute stream of a GPU, and those of a mover: first the one that gathers, then the one that loads."""

    def __init__(self, lag_s: float = 0.001, gpu: str = "0") -> None:
        self.made: list[LaggingStream] = []
        self.log: list[Any] = []  # in the order of their ends: (kernel, first layer, layers), and what tests add
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
            event = LaggingEvent()
            event.record(stream)
            assert event._passed.wait(DEADLINE_S), "a stream does not end"

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
