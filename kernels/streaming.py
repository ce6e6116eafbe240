"""Copies of pages with streaming stores, on the calling thread, without the GIL. Compiled at import (half a second).

A streaming (non-temporal) store writes a cache line without reading it first, which saves a third of the traffic
(Intel 64 and IA-32 Architectures Optimization Reference Manual, "Non-temporal Stores"; STNP on Arm). glibc uses them
for single copies of tens of MB, torch never. As in glibc's large copies, several memory pages are read concurrently,
because the processor prefetches within each page, but not beyond its end. They are read with a lag: lines at the same
offset of 4 KiB pages share a set of the L1 cache, and stores to a set evict lines prefetched into it for later loads.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic

from pdx.kernels.page_rows import ELEMENT_BYTES

LINE_BYTES = 64
STREAM_BYTES = 4096  # the range of prefetching, and the period of the L1 cache's sets
_LAG_BYTES = 128  # of each stream behind the previous one: lines are prefetched one or two ahead

_I64 = ir.IntType(64)
_ELEMENT = ir.VectorType(_I64, 2)


def _store(context: Any, builder: Any, addresses: Any, count: int, *, is_streaming: bool) -> Any:
    """Code that loads `count` elements, then stores them together, because streaming only pays for whole lines."""
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
    """Order streaming stores, which may be delayed, before a later notification that the copy is done."""

    def code(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), code


@numba.njit("uintp(uintp, uintp)", nogil=True)  # type: ignore[untyped-decorator]
def offset_in_stream(step: Any, stream: Any) -> Any:
    """The offset in its 4 KiB at which a stream copies a line while the first stream is at `step`."""
    return (step + stream * numba.uintp(_LAG_BYTES)) % numba.uintp(STREAM_BYTES)


@numba.njit("uintp(uintp, uintp, uintp, uintp, uintp)", nogil=True)  # type: ignore[untyped-decorator]
def _copy_spans(target: Any, source: Any, at: Any, nbytes: Any, streams: Any) -> Any:
    """Copy from `at` on while so many streams fit; return the offset reached."""
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
    """Copy one page. Addresses and bytes are multiples of 16. A `fence` makes the copy visible to other threads."""
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
    """For each line of `copies`, copy row i to page `block_ids[first + i]` (`to_pages`), or back, for all i < `count`.

    A line is (address of page 0, bytes from page to page, number of pages, address of row 0, bytes from row to row,
    bytes of a page, first, count); addresses and bytes are multiples of 16. Only block ids are checked: if one is
    outside its pages, return its index and copy nothing, otherwise return -1. The copies are visible to all threads
    when this returns.
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
