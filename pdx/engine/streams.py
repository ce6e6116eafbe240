"""The streams of a GPU that copies need: torch's. Tests have streams of their own that lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pdx.cuda.copies import queue_copies
from pdx.cuda.driver import api, call
from pdx.cuda.gpu import Gpu

Stream = Any  # whatever `Streams.new_stream` makes
# A point on a stream, as torch.cuda.Event: `record`, `wait` (what is queued on a stream from now on starts after it),
# `query` and `synchronize` (without the GIL). Recording it again does not change what already waits for it.
StreamEvent = Any


class Streams:
    """The streams of one GPU. Any thread may use it, after `bind_thread`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu: Gpu | None = None

    def gpu(self) -> Gpu:
        """The streams' GPU; raises GpuUnavailable. Within a process torch and the driver number GPUs alike."""
        if self._gpu is None:
            self._gpu = Gpu.find(str(self._device.index))
        return self._gpu

    def bind_thread(self) -> None:
        """Prepare the calling thread, which is not the engine's: its calls must not spoil other threads' graph
        captures."""
        torch.cuda.set_device(self._device)
        self.gpu().use()
        call("cuThreadExchangeStreamCaptureMode", api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def new_stream(self) -> Stream:
        """A stream that does not wait for others implicitly."""
        return torch.cuda.Stream(self._device)

    def compute(self) -> Stream:
        """The stream that the calling thread computes on."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def event(self) -> StreamEvent:
        """A new event, which counts as passed until it is recorded. Waiting for it sleeps, and keeps no core busy."""
        return torch.cuda.Event(blocking=True)

    def is_capturing(self) -> bool:
        """Whether the calling thread's stream records a graph instead of working."""
        return bool(torch.cuda.is_current_stream_capturing())

    def copy(self, stream: Stream, copies: Sequence[tuple[int, int, int]]) -> None:
        """Queue copies by the copy engine on `stream`, as `queue_copies`."""
        queue_copies(stream.cuda_stream, copies)

    def launch(self, stream: Stream, kernel: Callable[..., None], *args: Any, **settings: Any) -> None:
        with self.on(stream):
            kernel(*args, **settings)
