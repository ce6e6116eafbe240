"""Copies by a GPU's copy engines, on a stream of their own."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from pdx.cuda.driver import api, call
from pdx.cuda.gpu import Gpu, beside_captures
from pdx.cuda.page_lock import PIECE_BYTES
from pdx.errors import GpuError

_log = logging.getLogger(__name__)


class CopyStream:
    """Copies between any addresses that CUDA knows, or host addresses that it does not (slower: not page-locked).

    Copies run in order, behind each other, while the caller goes on. One thread uses it at a time. Bytes stay the
    caller's to keep alive and unchanged until `wait` has returned.
    """

    def __init__(self, gpu: Gpu) -> None:
        """:raises GpuError: the driver refused."""
        self._gpu = gpu
        gpu.use()
        flags, events = api().CUstream_flags, api().CUevent_flags
        self._stream: Any = call("cuStreamCreate", int(flags.CU_STREAM_NON_BLOCKING))
        try:
            # A thread that waits for a stream spins; for such an event it sleeps.
            sleeping = int(events.CU_EVENT_BLOCKING_SYNC) | int(events.CU_EVENT_DISABLE_TIMING)
            self._done = call("cuEventCreate", sleeping)
        except GpuError:
            call("cuStreamDestroy", self._stream)
            raise

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Begin to copy `nbytes` bytes from address `source` to address `target`.

        :raises GpuError: it is closed, the driver does not know the addresses, or an earlier copy failed.
        """
        if self._stream is None:
            raise GpuError("a copy on a closed stream")
        self._gpu.use()
        while nbytes > 0:
            # The driver refuses a copy that touches two registrations of host memory; see `PageLock`.
            step = min(nbytes, PIECE_BYTES - target % PIECE_BYTES, PIECE_BYTES - source % PIECE_BYTES)
            call("cuMemcpyAsync", target, source, step, self._stream)
            target, source, nbytes = target + step, source + step, nbytes - step

    def wait(self) -> None:
        """Return when all copies have ended; other threads run meanwhile.

        :raises GpuError: one of them failed, so that nothing is known of any bytes.
        """
        if self._stream is None:
            return
        self._gpu.use()
        with beside_captures():
            call("cuEventRecord", self._done, self._stream)
            call("cuEventSynchronize", self._done)

    def close(self) -> None:
        """Wait for the copies, then give the stream back. Idempotent. What the driver refuses is logged."""
        if self._stream is None:
            return
        for step in (self.wait, self._destroy_event, self._destroy_stream):
            try:
                step()
            except GpuError as error:
                _log.warning("a copy stream of GPU %s did not end cleanly: %s", self._gpu.uuid, error)

    def __enter__(self) -> CopyStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _destroy_event(self) -> None:
        call("cuEventDestroy", self._done)

    def _destroy_stream(self) -> None:
        stream, self._stream = self._stream, None
        call("cuStreamDestroy", stream)
