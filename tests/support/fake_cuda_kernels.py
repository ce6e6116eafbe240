"""What kernels of the fake CUDA driver reach: Triton's interpreter runs them, and the fake's memory says where.

While a fake driver is in use, each address that a kernel reads or writes is one of its device memory, mapped for a GPU;
of page-locked host memory; or private memory of this process, which stands for what torch has on the GPU. Everything
else is an illegal address, after which the driver does nothing any more: memory that is not mapped (any more), and
memory which this process shares with others, as a host arena, that is not page-locked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy
from fake_cuda import FakeCuda
from fake_cuda_host import mappings
from triton.runtime import interpreter

from pdx.cuda import driver

_Addresses = Any  # numpy.ndarray of uint64
_seen = threading.local()  # `private`: where this process's own memory was when it was last looked up


def install() -> None:
    """From now on interpreted kernels of this process are watched. Idempotent."""
    if not isinstance(interpreter._interpreter, _Watched):
        interpreter._interpreter = _Watched(interpreter._interpreter)


class _Watched:
    """The interpreter's native part, whose loads and stores go through the fake driver's memory."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, addresses: _Addresses, mask: Any, other: Any, dtype: Any) -> Any:
        with _as_the_gpu_sees(addresses, mask, numpy.dtype(dtype).itemsize) as seen:
            return self._real.load(seen, mask, other, dtype)

    def store(self, addresses: _Addresses, value: Any, mask: Any) -> None:
        with _as_the_gpu_sees(addresses, mask, value.dtype.itemsize) as seen:
            self._real.store(seen, value, mask)


@contextlib.contextmanager
def _as_the_gpu_sees(addresses: _Addresses, mask: Any, itemsize: int) -> Iterator[_Addresses]:
    """Where these addresses lie for the fake GPU. Nothing is unmapped inside of the block.

    :raises RuntimeError: one of them is none of a GPU.
    """
    fake = driver.api()
    if not isinstance(fake, FakeCuda):
        yield addresses
        return
    with fake.memory.lock, fake.host.lock:
        left = numpy.broadcast_to(mask, addresses.shape).astype(bool)
        seen = addresses.copy()
        for found in fake.memory.ranges():
            inside = left & (addresses >= found.start) & (addresses + itemsize <= found.end)
            if inside.any():
                if found.mapped is None or not found.access:
                    _break_down(fake, int(addresses[inside].min()))
                seen[inside] += numpy.uint64((found.shadow - found.start) % (1 << 64))
                left &= ~inside
        for start, nbytes in fake.host.spans():
            registered = fake.host.at(start)
            if registered is not None and registered[2]:
                left &= ~((addresses >= start) & (addresses + itemsize <= start + nbytes))
        if left.any():
            lost = _unreachable(addresses[left])
            if lost is not None:
                _break_down(fake, lost)
        yield seen


def _unreachable(addresses: _Addresses) -> int | None:
    """One of these that is no private memory of this process."""
    known = getattr(_seen, "private", None)
    if known is None or not _within(addresses, known).all():
        # Looked up anew whenever something else is touched: memory comes and goes.
        private = [each for each in mappings() if each.is_readable and not each.is_shared]
        spans = ([each.start for each in private], [each.end for each in private])
        known = _seen.private = tuple(numpy.array(ends, dtype=numpy.uint64) for ends in spans)
    lost = addresses[~_within(addresses, known)]
    return int(lost.min()) if lost.size else None


def _within(addresses: _Addresses, spans: tuple[_Addresses, _Addresses]) -> Any:
    starts, ends = spans
    at = numpy.searchsorted(starts, addresses, side="right")
    return (at > 0) & (addresses < ends[at - 1])


def _break_down(fake: FakeCuda, address: int) -> None:
    fake.break_down("ILLEGAL_ADDRESS")
    raise RuntimeError(f"an interpreted kernel uses {address:#x}, which is not the GPU's to use")
