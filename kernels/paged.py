"""Gather and scatter of KV pages by one Triton kernel: pages of many layers <-> contiguous slices, whole bytes.

The kernel reaches device memory, a peer's mapped memory and page-locked host memory alike, and one launch copies a
whole batch. A launch neither allocates nor waits, and compiles only what `warm_up` has not; block counts, layers and
addresses are not compile-time constants. A page is a number of pieces (see `page_map`): a program copies a tile of
several pieces' columns, 16 bytes per access.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pdx.kernels.page_map import Batch, PageMap, Place, Run

__all__ = ["Batch", "PageMap", "Place", "Run", "gather", "scatter", "warm_up"]

_WORD_BYTES = 8  # an element of the kernel: Triton has none of 16 bytes, so two words make one access
_RUNTIME_ARGUMENTS = ["layers", "batch", "first_layer", "num_pieces", "num_tiles"]


class _Shape(NamedTuple):
    """How a launch uses the GPU. Every thread has tile_bytes / (512 * num_warps) accesses of 16 bytes in flight.

    `store_hint`: the cache modifier of a gather's stores.
    """

    tile_bytes: int
    num_warps: int
    max_programs: int
    store_hint: str = ""


# Device memory: small programs, so that even a batch of one chunk gives every multiprocessor work, and many fit on
# each. Host memory: the link is the limit, and a few large programs saturate it; more would only take multiprocessors
# away from the engine's own kernels meanwhile.
_ON_DEVICE = _Shape(tile_bytes=8 << 10, num_warps=4, max_programs=(1 << 31) - 1)
# A slice on this GPU is often read by its next copy within a millisecond, so it should stay in the cache; a slice
# elsewhere is not read here again, so it should be evicted first (.cs).
_ON_PEER = _ON_DEVICE._replace(store_hint=".cs")
_ON_HOST = _Shape(tile_bytes=64 << 10, num_warps=32, max_programs=8, store_hint=".cs")


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)  # type: ignore[untyped-decorator]
def _copy_tiles(
    layers: tl.tensor,
    batch: tl.tensor,
    first_layer: tl.int32,
    num_pieces: tl.int32,
    num_tiles: tl.int32,
    PIECES: tl.constexpr,
    PIECE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_GATHER: tl.constexpr,
    STORE_HINT: tl.constexpr,
) -> None:
    """Tables as in PageMap.table and Batch.table. A tile is ROWS pieces x COLUMNS words of each."""
    column_tiles: tl.constexpr = (PIECE_WORDS + COLUMNS - 1) // COLUMNS
    row_tiles = (num_pieces + ROWS - 1) // ROWS
    words = tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row_tile = tile // column_tiles
        nth_layer = row_tile // row_tiles
        column = (tile - row_tile * column_tiles) * COLUMNS + words
        piece = (row_tile - nth_layer * row_tiles) * ROWS + tl.arange(0, ROWS)
        layer = (first_layer + nth_layer).to(tl.int64)
        is_piece = piece < num_pieces
        page = batch + piece // PIECES * 3
        part = (piece % PIECES).to(tl.int64)
        block_id = tl.load(page, mask=is_piece, other=0)
        place = tl.load(page + 1, mask=is_piece, other=0)
        layer_bytes = tl.load(page + 2, mask=is_piece, other=0)
        base = tl.load(layers + layer * 3)
        block_stride = tl.load(layers + layer * 3 + 1)
        piece_stride = tl.load(layers + layer * 3 + 2)
        at_engine = base + block_id * block_stride + part * piece_stride
        at_slice = place + layer * layer_bytes + part * (PIECE_WORDS * 8)
        engine = at_engine.to(tl.pointer_type(tl.int64))[:, None] + column[None, :]
        slice_ = at_slice.to(tl.pointer_type(tl.int64))[:, None] + column[None, :]
        # All numbers in the tables are divisible by 16; unless told, the compiler copies 8 bytes at a time.
        engine = tl.multiple_of(tl.max_contiguous(engine, [1, COLUMNS]), [1, 16])
        slice_ = tl.multiple_of(tl.max_contiguous(slice_, [1, COLUMNS]), [1, 16])
        mask = is_piece[:, None]
        if PIECE_WORDS % COLUMNS != 0:
            mask = mask & (column < PIECE_WORDS)[None, :]
        # Each byte is read once (past L1). A scattered page is read again by this GPU, a gathered slice: see _Shape.
        if IS_GATHER:
            tl.store(slice_, tl.load(engine, mask=mask, cache_modifier=".cg"), mask=mask, cache_modifier=STORE_HINT)
        else:
            tl.store(engine, tl.load(slice_, mask=mask, cache_modifier=".cg"), mask=mask)


# Compiled kernels, by everything they depend on. Triton's own lookup takes longer than the launch.
_compiled: dict[tuple[Any, ...], Any] = {}
# Triton's interpreter (the tests on a CPU) keeps its state in globals.
_is_interpreted = not isinstance(_copy_tiles, triton.runtime.JITFunction)
_launching: Any = threading.Lock() if _is_interpreted else contextlib.nullcontext()


def gather(
    pages: PageMap, batch: Batch, first_layer: int = 0, num_layers: int = 1, *, place: Place = Place.HERE
) -> None:
    """Copy the batch's pages of these layers from the engine to their places: one launch on torch's current stream.

    The device of `pages` must be current in the calling thread, the stream must be that of `Batch.of`, and the places
    must belong to the caller until the launch has ended. `place`: the memory that has them; with `Place.HOST` the copy
    takes few of the GPU's multiprocessors. Nothing is launched if not all layers are in `pages` (IndexError), or if the
    batch was made for other pages or another device is current (ValueError); errors of the copy come with a later call.
    """
    _launch(pages, batch, first_layer, num_layers, _shape(place), is_gather=True)


def scatter(
    pages: PageMap, batch: Batch, first_layer: int = 0, num_layers: int = 1, *, place: Place = Place.HERE
) -> None:
    """Copy the batch's pages of these layers from their places into the engine, like `gather`. Block ids must differ;
    otherwise it is undefined which page wins."""
    _launch(pages, batch, first_layer, num_layers, _shape(place), is_gather=False)


def warm_up(pages: PageMap) -> None:
    """Compile and load what `gather` and `scatter` launch for `pages`, so that no step of the engine pays for it.

    Takes seconds if Triton's cache is cold. Launches on torch's current stream; copies nothing.
    """
    empty = Batch(pages, 0, pages.table)
    for place in Place:
        for is_gather in (True, False):
            _run(pages, empty, 0, 0, _shape(place), is_gather=is_gather)


def columns_of(piece_bytes: int, tile_bytes: int) -> int:
    """Bytes of a piece per tile: the largest power of two that wastes at most an eighth of the tiles."""
    columns = tile_bytes
    while columns > 512 and -(-piece_bytes // columns) * columns > piece_bytes * 9 // 8:
        columns //= 2
    return min(columns, 1 << (piece_bytes - 1).bit_length())


def _shape(place: Place) -> _Shape:
    if place is Place.HOST:
        return _ON_HOST
    return _ON_PEER if place is Place.PEER else _ON_DEVICE


def _launch(pages: PageMap, batch: Batch, first_layer: int, num_layers: int, shape: _Shape, *, is_gather: bool) -> None:
    if batch.pages is not pages:
        raise ValueError("the batch was made for other pages")
    if min(first_layer, num_layers) < 0 or first_layer + num_layers > pages.num_layers:
        raise IndexError(f"layers {first_layer} to {first_layer + num_layers} of {pages.num_layers}")
    if pages.device.type == "cuda" and pages.device.index != torch.cuda.current_device():
        raise ValueError(f"{pages.device} is not the thread's current device")
    if batch.num_pages and num_layers:
        _run(pages, batch, first_layer, num_layers, shape, is_gather=is_gather)


def _run(pages: PageMap, batch: Batch, first_layer: int, num_layers: int, shape: _Shape, *, is_gather: bool) -> None:
    columns = columns_of(pages.piece_bytes, shape.tile_bytes)
    rows = shape.tile_bytes // columns
    num_pieces = batch.num_pages * pages.pieces
    num_tiles = -(-num_pieces // rows) * -(-pages.piece_bytes // columns) * num_layers
    grid = (max(1, min(num_tiles, shape.max_programs)), 1, 1)
    arguments = (pages.table, batch.table, first_layer, num_pieces, num_tiles)
    hint = shape.store_hint if is_gather else ""
    constants = (pages.pieces, pages.piece_bytes // _WORD_BYTES, rows, columns // _WORD_BYTES, is_gather, hint)
    key = (pages.device, shape.num_warps, *constants)
    with _launching:
        if (compiled := _compiled.get(key)) is not None:
            compiled[grid](*arguments, *constants)
            return
        compiled = _copy_tiles[grid](
            *arguments,
            *constants,
            num_warps=shape.num_warps,
            num_stages=1,
            enable_fp_fusion=False,  # nothing to fuse; without this Triton 3.9 warns
        )
        if compiled is not None:  # the interpreter compiles nothing
            _compiled[key] = compiled
