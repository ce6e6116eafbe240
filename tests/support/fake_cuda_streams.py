"""The streams and events of the fake CUDA driver: threads that work in order, and lag a little at random."""

from __future__ import annotations

import functools
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from fake_cuda_calls import DeviceCalls, Refused
from fake_cuda_host import HostMemory
from fake_cuda_memory import FakeMemory, Range


class FakeStream:
    """Work that is done in order by a thread, some time after it was asked for."""

    def __init__(self, ordinal: int, lag_s: float, seed: int, gate: threading.Event) -> None:
        self.ordinal = ordinal
        self._lag_s = lag_s
        self._gate = gate  # nothing is done while it is not set
        self._random = random.Random(seed)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="fake-cuda-stream", daemon=True)
        self.thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Do this behind all that was put before."""
        self._work.put(work)

    def mark(self) -> threading.Event:
        """Set once all that was put before is done."""
        marker = threading.Event()
        self._work.put(marker.set)
        return marker

    def destroy(self) -> None:
        """The thread ends behind its work; does not wait for it."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._lag_s:
                time.sleep(self._random.random() * self._lag_s)
            self._gate.wait()
            work()


class FakeEvent:
    """The end of the work that a stream had when it was recorded; before that, of no work."""

    def __init__(self) -> None:
        self._marker = threading.Event()
        self._marker.set()

    def record(self, stream: FakeStream) -> None:
        self._marker = stream.mark()

    def is_done(self) -> bool:
        return self._marker.is_set()

    def wait(self) -> None:
        self._marker.wait()


class StreamCalls:
    """What the fake driver does for calls about streams, events and copies: names and arguments are the bindings'."""

    def __init__(self, devices: DeviceCalls, memory: FakeMemory, host: HostMemory, lag_s: float) -> None:
        self.broken = ""  # a copy has failed: every later call says so, as after a fault on a GPU
        self._devices = devices
        self._bindings = devices.bindings
        self._memory = memory
        self._host = host
        self._lag_s = lag_s
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self._objects: dict[int, FakeStream | FakeEvent] = {}
        self._next_object = 0x100

    def counts(self) -> dict[str, int]:
        """Streams and events that are not destroyed."""
        with self._lock:
            streams = sum(isinstance(found, FakeStream) for found in self._objects.values())
            return {"streams": streams, "events": len(self._objects) - streams}

    def close(self) -> None:
        """End all threads behind their work."""
        with self._lock:
            streams = [found for found in self._objects.values() if isinstance(found, FakeStream)]
            self._objects.clear()
        for stream in streams:
            stream.destroy()
            stream.thread.join()

    def _add(self, found: FakeStream | FakeEvent) -> int:
        with self._lock:
            self._next_object += 1
            self._objects[self._next_object] = found
            return self._next_object

    def _stream(self, handle: Any) -> FakeStream:
        found = self._objects.get(int(handle))
        if not isinstance(found, FakeStream):
            raise Refused("INVALID_HANDLE")
        return found

    def _event(self, handle: Any) -> FakeEvent:
        found = self._objects.get(int(handle))
        if not isinstance(found, FakeEvent):
            raise Refused("INVALID_HANDLE")
        return found

    def cuStreamCreate(self, flags: int) -> Any:
        return self._bindings.CUstream(
            self._add(FakeStream(self._devices.here(), self._lag_s, seed=self._next_object, gate=self.gate))
        )

    def cuStreamDestroy(self, stream: Any) -> None:
        self._devices.here()
        found = self._stream(stream)
        with self._lock:
            del self._objects[int(stream)]
        found.destroy()

    def cuStreamSynchronize(self, stream: Any) -> None:
        self._devices.here()
        self._stream(stream).mark().wait()
        self._raise_if_broken()

    def cuCtxSynchronize(self) -> None:
        here = self._devices.here()
        with self._lock:
            streams = [found for found in self._objects.values() if isinstance(found, FakeStream)]
        for marker in [stream.mark() for stream in streams if stream.ordinal == here]:
            marker.wait()
        self._raise_if_broken()

    def cuEventCreate(self, flags: int) -> Any:
        self._devices.here()
        return self._bindings.CUevent(self._add(FakeEvent()))

    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self._devices.here()
        self._event(event).record(self._stream(stream))

    def cuEventQuery(self, event: Any) -> None:
        if not self._event(event).is_done():
            raise Refused("NOT_READY")
        self._raise_if_broken()

    def cuEventSynchronize(self, event: Any) -> None:
        self._event(event).wait()
        self._raise_if_broken()

    def cuEventDestroy(self, event: Any) -> None:
        self._event(event)
        with self._lock:
            del self._objects[int(event)]

    def cuMemcpyAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> None:
        here, found = self._devices.here(), self._stream(stream)
        if found.ordinal != here:
            raise Refused("INVALID_HANDLE")
        sides = []
        for address in (int(target), int(source)):
            device_memory = self._memory.check_copy(address, nbytes, here)
            if device_memory is None:
                self._host.check_copy(address, nbytes)
            sides.append((address, device_memory))
        found.put(functools.partial(self._copy, sides[0], sides[1], nbytes))

    def cuMemcpyBatchAsync(
        self,
        targets: Any,
        sources: Any,
        sizes: Any,
        count: int,
        attributes: Any,
        indices: Any,
        num_attributes: int,
        stream: Any,
    ) -> int:
        if not (len(targets) == len(sources) == len(sizes) == count and indices == [0] and num_attributes == 1):
            raise Refused("INVALID_VALUE")
        order = self._bindings.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        if attributes[0].srcAccessOrder != order or not int(stream):
            raise Refused("INVALID_VALUE")
        copies = list(zip(targets, sources, sizes, strict=True))
        random.shuffle(copies)  # nothing is said of their order
        for target, source, nbytes in copies:
            self.cuMemcpyAsync(target, source, nbytes, stream)
        return 0

    def _copy(self, target: tuple[int, Range | None], source: tuple[int, Range | None], nbytes: int) -> None:
        try:
            self._memory.copy(target, source, nbytes)
        except Refused as refused:
            self.broken = str(refused)

    def _raise_if_broken(self) -> None:
        if self.broken:
            raise Refused(self.broken)
