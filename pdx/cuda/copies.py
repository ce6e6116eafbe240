"""Copies by a GPU's copy engines, on a stream of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from pdx.closing import Closing
from pdx.cuda.driver import api, call, version
from pdx.cuda.gpu import Gpu, beside_captures
from pdx.cuda.page_lock import PIECE_BYTES
from pdx.errors import GpuError

_BATCHES_SINCE = 12080  # CUDA 12.8
_log = logging.getLogger(__name__)


class CopyStream(Closing):
    """Copies between any addresses that CUDA knows, or host addresses that it does not (slower: not page-locked).

    Copies run in order, behind each other, while the caller goes on. One thread uses it at a time. Bytes stay the
    caller's to keep alive and unchanged until `wait` has returned.
    """

    def __init__(self, gpu: Gpu) -> None:
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
        """Begin to copy `nbytes` bytes from address `source` to address `target`. A GpuError if it is closed, the
        driver does not know the addresses, or an earlier copy failed."""
        if self._stream is None:
            raise GpuError("a copy on a closed stream")
        self._gpu.use()
        for piece in _pieces(target, source, nbytes):
            call("cuMemcpyAsync", *piece, self._stream)

    def copy_all(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Begin these copies, in any order, behind those before: `queue_copies`."""
        if self._stream is None:
            raise GpuError("a copy on a closed stream")
        self._gpu.use()
        queue_copies(self._stream, copies)

    def wait(self) -> None:
        """Return when all copies have ended; other threads run meanwhile. A GpuError if one of them failed, so that
        nothing is known of any bytes."""
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

    def _destroy_event(self) -> None:
        call("cuEventDestroy", self._done)

    def _destroy_stream(self) -> None:
        stream, self._stream = self._stream, None
        call("cuStreamDestroy", stream)


def queue_copies(stream: Any, copies: Iterable[tuple[int, int, int]]) -> None:
    """Begin copies of (to address, from address, bytes) on a stream of the current context, in any order.

    The addresses are in memory that CUDA knows: a GPU's, or page-locked. One call of the driver for all of them since
    CUDA 12.8, one for each before.
    """
    pieces = [piece for each in copies for piece in _pieces(*each)]
    if len(pieces) < 2 or not hasattr(api(), "cuMemcpyBatchAsync") or version() < _BATCHES_SINCE:
        for piece in pieces:
            call("cuMemcpyAsync", *piece, stream)
        return
    how = api().CUmemcpyAttributes()
    how.srcAccessOrder = api().CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    targets, sources, sizes = zip(*pieces, strict=True)
    address = api().CUdeviceptr
    call(
        "cuMemcpyBatchAsync",
        [address(target) for target in targets],
        [address(source) for source in sources],
        list(sizes),
        len(pieces),
        [how],
        [0],
        1,
        stream,
    )


def _pieces(target: int, source: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """A copy in parts: the driver refuses one that touches two registrations of host memory; see `PageLock`."""
    while nbytes > 0:
        step = min(nbytes, PIECE_BYTES - target % PIECE_BYTES, PIECE_BYTES - source % PIECE_BYTES)
        yield target, source, step
        target, source, nbytes = target + step, source + step, nbytes - step
