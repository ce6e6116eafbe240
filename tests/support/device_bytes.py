"""Bytes at addresses of a GPU (or of page-locked memory), by the driver's own copies."""

from __future__ import annotations

import ctypes

from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu


def read(gpu: Gpu, address: int, nbytes: int) -> bytes:
    """A copy of them."""
    found = ctypes.create_string_buffer(nbytes)
    with CopyStream(gpu) as stream:
        stream.copy(ctypes.addressof(found), address, nbytes)
        stream.wait()
    return found.raw


def write(gpu: Gpu, address: int, data: bytes) -> None:
    """Put them there; returns when they are."""
    source = ctypes.create_string_buffer(data, len(data))
    with CopyStream(gpu) as stream:
        stream.copy(address, ctypes.addressof(source), len(data))
        stream.wait()
