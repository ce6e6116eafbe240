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

    Copies run in order, one after the other, while the caller goes on. One thread at a time may use it. The caller
    keeps the bytes alive and unchanged until `wait` has returned.
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
        """Begin to copy `nbytes` bytes from address `source` to address `target`. Raises GpuError if the stream is
        closed, the driver does not know the addresses, or an earlier copy failed."""
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
        """Return when all copies have ended; other threads run meanwhile. Raises GpuError if one of them failed, and
        then the state of all bytes is unknown."""
        if self._stream is None:
            return
        self._gpu.use()
        with beside_captures():
            call("cuEventRecord", self._done, self._stream)
            call("cuEventSynchronize", self._done)

    def close(self) -> None:
        """Wait for the copies, then release the stream. Idempotent. Errors of the driver are logged."""
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

    The addresses are in memory that CUDA knows: a GPU's, or page-locked. Since CUDA 12.8 this is one driver call for
    all of them, before that one for each.
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
