"""Streams of a GPU, as far as copies need them: in production torch's; tests have streams of their own that lag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from pdx.cuda.driver import api, call
from pdx.cuda.gpu import Gpu

Stream = Any  # whatever `Streams.new_stream` makes


class Event(Protocol):
    """A point on a stream, as in torch.cuda.Event. Recording it again does not change what already waits for it."""

    def record(self, stream: Stream) -> None:
        """It passes when all that is queued on `stream` by now is done."""

    def wait(self, stream: Stream) -> None:
        """What is queued on `stream` from now on starts after it has passed. The caller does not wait."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> None:
        """Wait until it has passed, without the GIL."""


class Streams(ABC):
    """The streams of one GPU. Any thread may use it, after `bind_thread`."""

    @abstractmethod
    def gpu(self) -> Gpu:
        """The GPU they are on.

        :raises GpuUnavailable: the driver cannot be reached.
        """

    @abstractmethod
    def bind_thread(self) -> None:
        """Prepare the calling thread, which is not the engine's."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream that waits for no other by itself."""

    @abstractmethod
    def compute(self) -> Stream:
        """The stream that the calling thread computes on."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """What torch does inside is queued on `stream`."""

    @abstractmethod
    def event(self) -> Event:
        """A new event, which has passed as long as it is not recorded."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread's stream records a graph instead of working."""

    def launch(self, stream: Stream, kernel: Callable[..., None], *args: Any, **settings: Any) -> None:
        """Queue `kernel(*args, **settings)` on `stream`."""
        with self.on(stream):
            kernel(*args, **settings)


class TorchStreams(Streams):
    """torch.cuda's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu: Gpu | None = None

    def gpu(self) -> Gpu:
        """See `Streams.gpu`. In one process torch and the driver number GPUs alike."""
        if self._gpu is None:
            self._gpu = Gpu.find(str(self._device.index))
        return self._gpu

    def bind_thread(self) -> None:
        """See `Streams.bind_thread`. A graph that another thread captures is not spoiled by what this one calls."""
        torch.cuda.set_device(self._device)
        self.gpu().use()
        call("cuThreadExchangeStreamCaptureMode", api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def new_stream(self) -> Stream:
        """See `Streams.new_stream`."""
        return torch.cuda.Stream(self._device)

    def compute(self) -> Stream:
        """See `Streams.compute`."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """See `Streams.on`."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def event(self) -> Event:
        """See `Streams.event`. Waiting for it sleeps instead of keeping a core busy."""
        event: Event = torch.cuda.Event(blocking=True)
        return event

    def is_capturing(self) -> bool:
        """See `Streams.is_capturing`."""
        return bool(torch.cuda.is_current_stream_capturing())
