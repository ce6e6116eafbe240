"""Scatter of single tokens whose keys were computed at other positions; the keys are turned while they are copied.

Rotary embedding (RoPE, Su et al., https://arxiv.org/abs/2104.09864, section 3.2) turns each pair of a key's elements by
its position times the pair's frequency. So a key computed at position p becomes the key at p + shift when it is turned
by shift times that frequency; values have no position. A copy computes in float32 and rounds once.

Tokens of a moved run have other offsets in their target pages than in their source pages, so a copy goes tile by tile:
a tile is tokens of a target page at equal distances. A whole tile is made of one or two spans of source tokens, in
vectors that each take some lanes from the one and the rest from the other, and written by streaming stores, so that its
old bytes are not read. Compiled on first use, in seconds (`warm_up`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from pdx.kernels.streaming import LINE_BYTES, copy_page, fence

if TYPE_CHECKING:
    from pdx.memory.rope import Rope

Offsets = NDArray[np.int64]
_I32 = ir.IntType(32)
_HIGH = 0xFFFF0000


@dataclass(frozen=True, eq=False)
class PageElements:
    """Where the elements of a page lie, in elements from its beginning.

    Element d of the key of head h and token t is at h * head + key_tokens[t] + key_elements[d]; likewise for the value,
    with its own tables. Pages that pack tokens (vLLM's on CPUs) can be described just like others.
    """

    num_heads: int
    head: int
    key_tokens: Offsets
    key_elements: Offsets
    value_tokens: Offsets
    value_elements: Offsets

    @property
    def block_tokens(self) -> int:
        return len(self.key_tokens)

    @property
    def end(self) -> int:
        """The minimum number of elements of a page."""
        last = max(self.key_tokens[-1] + self.key_elements.max(), self.value_tokens[-1] + self.value_elements.max())
        return int(self.num_heads - 1) * self.head + int(last) + 1

    @cached_property
    def tile_tokens(self) -> int:
        """The size of a tile: tokens from a multiple of it on are at equal distances."""
        tokens = np.stack([self.key_tokens, self.value_tokens])
        steps = np.diff(tokens)
        usual = steps[:, :1] if steps.size else steps
        breaks = np.append(np.nonzero((steps != usual).any(axis=0))[0] + 1, self.block_tokens)
        first = int(breaks[0])
        return first if np.array_equal(breaks, np.arange(first, self.block_tokens + 1, first)) else 1

    @property
    def breaks(self) -> Offsets:
        """The token indices at which tiles of a page end, including the page's end."""
        return np.arange(self.tile_tokens, self.block_tokens + 1, self.tile_tokens, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Turn:
    """How keys of such pages are turned, in vectors of `lanes` consecutive pairs: pairs of one token, one pair of
    several tokens, or something between.

    A tile has a vector for each combination of `rows` (int64 [n, 2]: offsets of the first and the second elements) and
    `sweeps` (int64 [m, 3]: an offset added to these, and the tokens of the first and the last lane). Lane i belongs to
    the token i >> `lane_shift` after the first. `angles`: float32, the cosines and sines of the lanes per row, for
    bfloat16 even lanes first (`_Lanes`). `still`, `values`: runs of elements to be copied unchanged, from `_runs`.
    """

    elements: PageElements
    is_half: bool
    lanes: int
    lane_shift: int
    rows: Offsets
    sweeps: Offsets
    angles: NDArray[np.float32]
    still: Offsets
    values: Offsets

    @classmethod
    def of(cls, elements: PageElements, rope: Rope, shift: int, *, is_half: bool) -> Turn:
        """The turn that moves keys `shift` positions further."""
        pairs = np.array(rope.pairs(), dtype=np.int64)
        at = elements.key_elements[pairs]
        angles = np.array(rope.angles(shift))
        count = elements.tile_tokens
        tokens = elements.key_tokens[:count] - elements.key_tokens[0]
        breaks = np.flatnonzero((np.diff(at, axis=0) != 1).any(axis=1)) + 1
        near = int(breaks[0]) if len(breaks) else len(pairs)  # so many pairs of a token are consecutive …
        if not np.array_equal(breaks, np.arange(near, len(pairs), near)):
            near = 1
        # … and followed by the next token's.
        is_dense = count > 1 and tokens[1] == near and near & (near - 1) == 0
        lanes = LINE_BYTES // (2 if is_half else 4)
        while near % lanes and not (is_dense and lanes % near == 0 and count * near % lanes == 0):
            lanes //= 2
        of_token = min(near, lanes)  # lanes per token
        first = np.arange(0, count, lanes // of_token)
        told = np.stack([np.cos(angles), np.sin(angles)]).reshape(2, -1, of_token).transpose(1, 0, 2)
        told = np.tile(told, (1, 1, lanes // of_token)).astype(np.float32)
        if is_half and lanes > 1:
            told = np.concatenate([told[..., ::2], told[..., 1::2]], axis=2)
        still = np.setdiff1d(np.arange(len(elements.key_elements)), pairs)
        return cls(
            elements,
            is_half,
            lanes,
            31 if near >= lanes else of_token.bit_length() - 1,
            np.ascontiguousarray(at[::of_token]),
            np.stack([tokens[first], first, first + lanes // of_token - 1], axis=1).astype(np.int64),
            told.ravel(),
            _runs(elements.key_elements[still]),
            _runs(elements.value_elements),
        )


def _runs(places: Offsets) -> Offsets:
    """Runs of consecutive places: the first place of each, and its length. int64 [n, 2]."""
    first = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    return np.stack([places[first], np.diff(first, append=len(places))], axis=1).astype(np.int64)


def spans(elements: PageElements, first: int, target: int, count: int, blocks: Sequence[int]) -> Offsets:
    """The spans for tokens [first, first + count) of a chunk, which go to a request with these blocks, from its token
    `target` on; both are counted from the beginning of their first page. int64 [n, 5], a line per span: source page,
    first token in it, target page, first token in it, number of tokens."""
    size = elements.block_tokens
    breaks = elements.breaks
    lines, done = [], 0
    while done < count:
        here, there = first + done, target + done
        ends = (breaks[breaks > here % size][0] - here % size, breaks[breaks > there % size][0] - there % size)
        length = min(int(ends[0]), int(ends[1]), count - done)
        lines.append((here // size, here % size, blocks[there // size], there % size, length))
        done += length
    return np.array(lines, dtype=np.int64).reshape(-1, 5)


def scatter_turned(source: NDArray[Any], targets: Sequence[NDArray[Any]], lines: Offsets, turn: Turn) -> None:
    """Copy `lines` (from `spans`) of all layers from `source`, a slot as [layers, pages, elements of a page], to
    `targets`, the engine's pages of each layer.

    All arrays are float32, or uint16 with the bits of bfloat16; the stride between pages is arbitrary. The GIL is
    released during the copy. Any thread may call; no two may write to the same page.

    :raises ValueError: the arrays have another type, or differ in type or in page size.
    :raises IndexError: a line is outside them.
    """
    elements, dtype = turn.elements, np.dtype(np.uint16 if turn.is_half else np.float32)
    kinds = {(each.dtype, each.shape[1:], each.strides[1:]) for each in (source[0], *targets)}
    if kinds != {(dtype, source.shape[2:], (dtype.itemsize,))} or len(source) != len(targets):
        raise ValueError(f"expected {len(source)} layers of pages of {dtype} of one size, got {len(targets)}: {kinds}")
    if elements.end > source.shape[2]:
        raise ValueError(f"pages of {source.shape[2]} elements, where one has {elements.end}")
    if not len(lines):
        return
    size, num_pages = elements.block_tokens, min(map(len, targets))
    is_inside = (
        (lines >= 0).all()
        and lines[:, 0].max() < source.shape[1]
        and lines[:, 2].max() < num_pages
        and (lines[:, [1, 3]].max(axis=1) + lines[:, 4]).max() <= size
    )
    if not is_inside:
        raise IndexError(f"tokens outside {source.shape[1]} and {num_pages} pages of {size} tokens")
    places = np.array([(each.ctypes.data, each.strides[0]) for each in targets], dtype=np.int64)
    strides = [*elements.key_tokens[:: elements.tile_tokens], *turn.rows.flat, *turn.sweeps[:, 0], elements.head]
    line = turn.lanes * source.itemsize
    is_aligned = not (places % line).any() and not (np.array(strides) % turn.lanes).any()
    tiles, copies = _tiles(lines, turn, source[0], is_aligned=is_aligned), _joined(lines, elements)
    # By page, of tiles, lines and copies.
    pages = np.concatenate([_groups(each) for each in (tiles[:, 2], lines[:, 2], copies[:, 2])], axis=1)
    _kernel(turn.is_half, turn.lanes)(
        *(source.ctypes.data, source.strides[0], source.strides[1], places, pages, tiles, lines, copies),
        *(elements.num_heads, elements.head, elements.key_tokens, elements.value_tokens),
        *(turn.rows, turn.sweeps, turn.lane_shift, turn.angles, turn.still, turn.values),
    )


def _groups(numbers: Offsets) -> Offsets:
    """The begin and end of each run of equal numbers."""
    first = np.flatnonzero(np.diff(numbers, prepend=-1))
    return np.stack([first, np.append(first[1:], len(numbers))], axis=1).astype(np.int64)


def _tiles(lines: Offsets, turn: Turn, source: NDArray[Any], *, is_aligned: bool) -> Offsets:
    """A row for each whole tile, and for each line of the other tiles: where the tile's first token is, or would be, in
    the first head of `source`, in elements; the same for its second line; the target page, and the offset of the tile's
    first token in it; the tile's tokens [from, to) in the (first) line; whether it is whole. int64 [n, 7]."""
    elements, size = turn.elements, turn.elements.tile_tokens
    tile = lines[:, 3] // size * size
    at = elements.key_tokens[tile]
    low = lines[:, 3] - tile
    page = source.strides[0] // source.itemsize
    begins = lines[:, 0] * page + elements.key_tokens[lines[:, 1]] - elements.key_tokens[lines[:, 3]] + at
    found = np.stack(
        [begins, begins, lines[:, 2], at, low, low + lines[:, 4], is_aligned & (lines[:, 4] == size) & (low == 0)],
        axis=1,
    )
    # Vectors of two lines read more of both than they use, which must be inside the source, too.
    extent = int(turn.rows.max() + turn.sweeps[:, 0].max()) + turn.lanes + (elements.num_heads - 1) * elements.head
    is_first = (np.diff(lines[:, 2], append=-1) == 0) & (np.diff(tile, append=-1) == 0)
    is_first[:-1] &= (lines[:-1, 4] + lines[1:, 4] == size) & (begins[1:] >= 0)
    is_first &= is_aligned & (low == 0) & (begins + extent <= (len(source) - 1) * page + source.shape[1])
    (first,) = np.nonzero(is_first)
    found[first, 1], found[first, 6] = begins[first + 1], 1
    return np.delete(found, first + 1, axis=0).astype(np.int64)


def _joined(lines: Offsets, elements: PageElements) -> Offsets:
    """The lines for values, joined if these are at equal distances for longer: longer copies are faster."""
    if len(lines) < 2 or (np.diff(elements.value_tokens, n=2) != 0).any():
        return lines
    before, behind = lines[:-1], lines[1:]
    follows = (behind[:, [0, 2]] == before[:, [0, 2]]) & (behind[:, [1, 3]] == before[:, [1, 3]] + before[:, 4:])
    first = np.append(0, np.flatnonzero(~follows.all(axis=1)) + 1)
    found: Offsets = lines[first]
    found[:, 4] = np.add.reduceat(lines[:, 4], first)
    return found


def warm_up(turn: Turn) -> None:
    """Compile the kernel for such turns, which takes some seconds; otherwise the first call does."""
    _kernel(turn.is_half, turn.lanes)


class _Lanes:
    """Code for vectors of elements in memory, which are float32 in registers; bfloat16 as two vectors, of even and odd
    lanes, because that converts fastest. `is_part`: lanes outside the mask are neither read nor written; otherwise they
    are read from another address, and all lanes are written by streaming stores."""

    def __init__(self, builder: Any, lanes: int, *, is_half: bool, is_part: bool) -> None:
        self._builder, self._is_half, self._is_part = builder, is_half, is_part
        self._count = 2 if is_half and lanes > 1 else 1
        self._kept = ir.VectorType(ir.IntType(16) if is_half else ir.FloatType(), lanes)
        self._align = ir.Constant(_I32, 2 if is_half else 4)
        self.numbers = ir.VectorType(_I32, lanes)
        self._words = ir.VectorType(_I32, lanes // self._count)
        self._floats = ir.VectorType(ir.FloatType(), lanes // self._count)

    def all(self, number: Any) -> Any:
        none = ir.Constant(self.numbers, ir.Undefined)
        one = self._builder.insert_element(none, number, ir.Constant(_I32, 0))
        return self._builder.shuffle_vector(one, none, ir.Constant(self.numbers, [0] * self.numbers.count))

    def angles(self, address: Any) -> tuple[list[Any], list[Any]]:
        """Cosines and sines."""
        size = self._words.count * 4
        ats = [self._builder.add(address, ir.Constant(address.type, at * size)) for at in range(2 * self._count)]
        found = [self._builder.load(self._at(at, self._floats), align=4) for at in ats]
        return found[: self._count], found[self._count :]

    def load(self, address: Any, other: Any, ahead: Any, mask: Any) -> list[Any]:
        """Load the lanes in the mask, and the rest from `other` bytes further. Prefetch at `ahead`, because the
        processor itself only prefetches within 4 KiB."""
        b, kept = self._builder, self._kept
        if self._is_part:
            found = self._masked("load", [self._at(address, kept), self._align, mask, ir.Constant(kept, None)])
        else:
            ats = (address, b.add(address, other))
            found = b.select(mask, *[b.load(self._at(at, kept), align=self._align.constant) for at in ats])
            self._prefetch(b.add(address, ahead))
        if not self._is_half:
            return [found]
        words = b.bitcast(found, self._words) if self._count == 2 else b.zext(found, self._words)
        halves = b.shl(words, self._constant(16)), b.and_(words, self._constant(_HIGH))
        return [b.bitcast(each, self._floats) for each in halves[: self._count]]

    def store(self, numbers: Sequence[Any], address: Any, mask: Any) -> None:
        b, kept, found = self._builder, self._kept, numbers[0]
        if self._is_half:
            words = [self._rounded(each) for each in numbers]
            found = b.lshr(words[0], self._constant(16))
            if self._count == 2:
                found = b.bitcast(b.or_(found, b.and_(words[1], self._constant(_HIGH))), kept)
            else:
                found = b.trunc(found, kept)
        if self._is_part:
            self._masked("store", [found, self._at(address, kept), self._align, mask])
        else:
            store = b.store(found, self._at(address, kept), align=kept.count * self._align.constant)
            store.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(_I32, 1)]))

    def _rounded(self, number: Any) -> Any:
        """Round to bfloat16 in the high half: to nearest, ties to even, as torch does; NaN stays NaN."""
        b = self._builder
        bits = b.bitcast(number, self._words)
        odd = b.and_(b.lshr(bits, self._constant(16)), self._constant(1))
        rounded = b.add(b.add(bits, self._constant(0x7FFF)), odd)
        return b.select(b.fcmp_unordered("uno", number, number), self._constant(0x7FC00000), rounded)

    def _constant(self, number: int) -> Any:
        return ir.Constant(self._words, [number] * self._words.count)

    def _at(self, address: Any, type_: Any) -> Any:
        return self._builder.inttoptr(address, type_.as_pointer())

    def _prefetch(self, address: Any) -> None:
        """Prefetch into the L2 cache."""
        told = [self._at(address, ir.IntType(8)), *(ir.Constant(_I32, number) for number in (0, 2, 1))]
        self._call("llvm.prefetch.p0", ir.VoidType(), told)

    def _masked(self, what: str, operands: list[Any]) -> Any:
        kind = f"v{self._kept.count}{'i16' if self._is_half else 'f32'}"
        return self._call(f"llvm.masked.{what}.{kind}.p0", self._kept if what == "load" else ir.VoidType(), operands)

    def _call(self, name: str, returns: Any, operands: list[Any]) -> Any:
        module = self._builder.module
        type_ = ir.FunctionType(returns, [each.type for each in operands])
        return self._builder.call(module.globals.get(name) or ir.Function(module, type_, name), operands)


def _turn_lanes(lanes: int, *, is_half: bool, is_part: bool) -> Any:
    """Code that turns `lanes` pairs. `x`, `y`: addresses of their first and second elements, which go to `to_x` and
    `to_y`; `other`: the distance to the same elements of a tile's second line; `angles`: an address. Lane i belongs to
    the token `token` + (i >> `shift`), and to the (first) line if that token is in [`low`, `high`)."""

    @intrinsic  # type: ignore[untyped-decorator]
    def turn(
        _typing: Any,
        x: Any,
        y: Any,
        to_x: Any,
        to_y: Any,
        angles: Any,
        other: Any,
        ahead: Any,
        token: Any,
        shift: Any,
        low: Any,
        high: Any,
    ) -> Any:
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            x, y, to_x, to_y, angles, other, ahead, *tokens = values
            vector = _Lanes(builder, lanes, is_half=is_half, is_part=is_part)
            token, shift, low, high = (vector.all(builder.trunc(each, _I32)) for each in tokens)
            of_lane = builder.add(builder.lshr(ir.Constant(vector.numbers, list(range(lanes))), shift), token)
            mask = builder.icmp_signed("<", of_lane, high)
            if is_part:
                mask = builder.and_(mask, builder.icmp_signed(">=", of_lane, low))
            parts = zip(
                *(vector.load(each, other, ahead, mask) for each in (x, y)), *vector.angles(angles), strict=True
            )
            turned = [
                (
                    builder.fsub(builder.fmul(first, c), builder.fmul(second, s)),
                    builder.fadd(builder.fmul(second, c), builder.fmul(first, s)),
                )
                for first, second, c, s in parts
            ]
            for numbers, address in zip(zip(*turned, strict=True), (to_x, to_y), strict=True):
                vector.store(numbers, address, mask)
            return context.get_dummy_value()

        return numba.void(x, y, to_x, to_y, angles, other, ahead, token, shift, low, high), code

    return turn


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(_typing: Any, new: Any, old: Any, nbytes: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, *(builder.inttoptr(each, pointer) for each in values[:2]), values[2], 1)
        return context.get_dummy_value()

    return numba.void(new, old, nbytes), code


@numba.njit("void(int64, int64, int64)", nogil=True)  # type: ignore[untyped-decorator]
def _copy(new: Any, old: Any, nbytes: Any) -> None:
    if nbytes < 1024 or (new | old | nbytes) & 15:
        _memcpy(new, old, nbytes)
    else:
        copy_page(numba.uintp(new), numba.uintp(old), numba.uintp(nbytes))


def _runs_copied(width: int) -> Any:
    """The loop over the elements that a line copies unchanged: `runs` of elements of `width` bytes, for tokens at the
    offsets in `tokens`. `new`, `old`: addresses of one head in both pages."""

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def runs_copied(new: Any, old: Any, line: Any, tokens: Any, runs: Any) -> None:
        token, to_token, count = line[1], line[3], line[4]
        for run in range(len(runs)):
            at, length = runs[run]
            step = tokens[token + 1] - tokens[token] if count > 1 else length
            if step == length:
                length, times = length * count, 1
            else:
                times = count
            for t in range(times):
                _copy(
                    new + (tokens[to_token] + at + t * step) * width,
                    old + (tokens[token] + at + t * step) * width,
                    length * width,
                )

    return runs_copied


@cache
def _kernel(is_half: bool, lanes: int) -> Any:  # noqa: FBT001 - a key
    """The compiled loops for pages of bfloat16 (`is_half`) or float32."""
    width = 2 if is_half else 4
    copy = _runs_copied(width)
    whole, part = (_turn_lanes(lanes, is_half=is_half, is_part=is_part) for is_part in (False, True))
    angle_bytes = 2 * lanes * 4

    @numba.njit(  # type: ignore[untyped-decorator]
        "void(int64, int64, int64, int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, "
        "int64, int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64, float32[::1], int64[:, ::1], "
        "int64[:, ::1])",
        nogil=True,
    )
    def scatter(
        source: Any,
        layer_bytes: Any,
        page_bytes: Any,
        targets: Any,
        pages: Any,
        tiles: Any,
        lines: Any,
        copies: Any,
        num_heads: Any,
        head: Any,
        key_tokens: Any,
        value_tokens: Any,
        rows: Any,
        sweeps: Any,
        shift: Any,
        angles: Any,
        still: Any,
        values: Any,
    ) -> None:
        ahead = (value_tokens[0] - key_tokens[0]) * width  # prefetch the values while keys are turned
        first_angle = numba.int64(angles.ctypes.data)
        for layer in range(len(targets)):
            for page in pages:
                for h in range(num_heads):
                    old = source + layer * layer_bytes + h * head * width
                    new = targets[layer, 0] + tiles[page[0], 2] * targets[layer, 1] + h * head * width
                    for nth in range(page[0], page[1]):
                        low, high, is_whole = tiles[nth, 4], tiles[nth, 5], tiles[nth, 6]
                        for sweep in range(len(sweeps)):
                            at, token, end = sweeps[sweep, 0], sweeps[sweep, 1], sweeps[sweep, 2]
                            here, there = old + (tiles[nth, 0] + at) * width, new + (tiles[nth, 3] + at) * width
                            other, angle = (tiles[nth, 1] - tiles[nth, 0]) * width, first_angle
                            if token >= high:
                                here += other
                            if token >= high or end < high:
                                other = 0
                            for row in range(len(rows) if is_whole or (token < high and end >= low) else 0):
                                x, y = rows[row, 0] * width, rows[row, 1] * width
                                to_x, to_y = there + x, there + y
                                if is_whole:
                                    whole(here + x, here + y, to_x, to_y, angle, other, ahead, token, shift, low, high)
                                else:
                                    part(here + x, here + y, to_x, to_y, angle, 0, 0, token, shift, low, high)
                                angle += angle_bytes
                    for number in range(page[2], page[3]):
                        copy(new, old + lines[number, 0] * page_bytes, lines[number], key_tokens, still)
                    for number in range(page[4], page[5]):
                        copy(new, old + copies[number, 0] * page_bytes, copies[number], value_tokens, values)
        fence()

    return scatter
