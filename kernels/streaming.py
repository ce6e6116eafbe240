"""Copies of pages by streaming stores, on the calling thread, without the GIL. Compiled at import (half a second).

A streaming (non-temporal) store writes a cache line without reading it first, which saves a third of the traffic
(Intel 64 and IA-32 Architectures Optimization Reference Manual, "Non-temporal Stores"; STNP on Arm). glibc does so for
one copy of tens of MB, torch never. As in glibc's large copies, several memory pages are read at once: the processor
prefetches each by itself, and not beyond its end. They are not read in step: lines at the same place of a 4 KiB page
share a set of the first cache, and stores to a set push out what was prefetched into it for the next loads.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic

from pdx.kernels.page_rows import ELEMENT_BYTES

LINE_BYTES = 64
STREAM_BYTES = 4096  # what the processor prefetches in, and what the sets of its first cache repeat after
_LAG_BYTES = 128  # of a stream behind the one before: a line is prefetched one or two lines ahead

_I64 = ir.IntType(64)
_ELEMENT = ir.VectorType(_I64, 2)


def _store(context: Any, builder: Any, addresses: Any, count: int, *, is_streaming: bool) -> Any:
    """Code that loads `count` elements, then stores them: a line is written whole, or streaming does not pay."""
    out, at = (builder.inttoptr(address, _ELEMENT.as_pointer()) for address in addresses)
    indices = [ir.Constant(_I64, index) for index in range(count)]
    elements = [builder.load(builder.gep(at, [index]), align=ELEMENT_BYTES) for index in indices]
    for index, element in zip(indices, elements, strict=True):
        store = builder.store(element, builder.gep(out, [index]), align=ELEMENT_BYTES)
        if is_streaming:
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(_typing: Any, target: Any, source: Any) -> Any:
    """`target` is aligned to a line."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _store(context, builder, values, LINE_BYTES // ELEMENT_BYTES, is_streaming=True)

    return numba.void(target, source), code


@intrinsic  # type: ignore[untyped-decorator]
def _store_element(_typing: Any, target: Any, source: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _store(context, builder, values, 1, is_streaming=False)

    return numba.void(target, source), code


@intrinsic  # type: ignore[untyped-decorator]
def fence(_typing: Any) -> Any:
    """Streaming stores pass others, so whoever is told that the copy is done must not be told before they are."""

    def code(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), code


@numba.njit("uintp(uintp, uintp)", nogil=True)  # type: ignore[untyped-decorator]
def offset_in_stream(step: Any, stream: Any) -> Any:
    """Where in its 4 KiB a stream copies a line when the first one copies that at `step`."""
    return (step + stream * numba.uintp(_LAG_BYTES)) % numba.uintp(STREAM_BYTES)


@numba.njit("uintp(uintp, uintp, uintp, uintp, uintp)", nogil=True)  # type: ignore[untyped-decorator]
def _copy_spans(target: Any, source: Any, at: Any, nbytes: Any, streams: Any) -> Any:
    """Copy from `at` on as long as so many streams fit, and return how far it came."""
    stream_bytes, line = numba.uintp(STREAM_BYTES), numba.uintp(LINE_BYTES)
    while at + streams * stream_bytes <= nbytes:
        for step in range(numba.uintp(0), stream_bytes, line):
            for stream in range(streams):
                here = at + stream * stream_bytes + offset_in_stream(step, stream)
                _stream_line(target + here, source + here)
        at += streams * stream_bytes
    return at


@numba.njit("void(uintp, uintp, uintp)", nogil=True)  # type: ignore[untyped-decorator]
def copy_page(target: Any, source: Any, nbytes: Any) -> None:
    """Addresses and bytes are multiples of 16. Other threads may see it behind a `fence`."""
    element, line = numba.uintp(ELEMENT_BYTES), numba.uintp(LINE_BYTES)
    at = numba.uintp(0)
    while at < nbytes and (target + at) % line:
        _store_element(target + at, source + at)
        at += element
    at = _copy_spans(target, source, at, nbytes, numba.uintp(8))
    at = _copy_spans(target, source, at, nbytes, numba.uintp(4))
    while at + line <= nbytes:
        _stream_line(target + at, source + at)
        at += line
    while at < nbytes:
        _store_element(target + at, source + at)
        at += element


@numba.njit("intp(int64[:, ::1], int64[::1], boolean)", nogil=True)  # type: ignore[untyped-decorator]
def copy_pages(copies: Any, block_ids: Any, to_pages: Any) -> int:
    """Each line of `copies`: row i to page `block_ids[first + i]` (`to_pages`), or back, for all i below `count`.

    A line is (address of page 0, bytes from page to page, number of pages, address of row 0, bytes from row to row,
    bytes of a page, first, count); addresses and bytes are multiples of 16. They are trusted, except for block ids: if
    one is outside its pages, its index is returned and nothing is copied, otherwise -1. The bytes are there for every
    thread when this returns.
    """
    for number in range(len(copies)):
        line = copies[number]
        for index in range(line[6], line[6] + line[7]):
            if block_ids[index] < 0 or block_ids[index] >= line[2]:
                return index
    for number in range(len(copies)):
        line = copies[number]
        for row in range(line[7]):
            page = numba.uintp(line[0] + block_ids[line[6] + row] * line[1])
            other = numba.uintp(line[3] + row * line[4])
            if to_pages:
                copy_page(page, other, numba.uintp(line[5]))
            else:
                copy_page(other, page, numba.uintp(line[5]))
    fence()
    return -1
