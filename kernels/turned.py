"""Scatter of single tokens whose keys were computed at other positions: the keys are turned while they are copied.

Rotary embedding (RoPE, Su et al., https://arxiv.org/abs/2104.09864, section 3.2) turns each pair of a key's elements by
its position times the pair's frequency. So a key that was computed at position p is the key at p + shift once it is
turned by shift times that frequency; values have no position. A copy computes in float32 and rounds once.

Tokens of a moved run lie in a page elsewhere than where they come from, so nothing here is a whole page: a copy goes by
spans of tokens that lie at equal distances on both sides. Compiled when it is first needed, in seconds (`warm_up`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import NDArray

from pdx.kernels.streaming import copy_page, fence

if TYPE_CHECKING:
    from pdx.memory.rope import Rope

Offsets = NDArray[np.int64]
_I32 = ir.IntType(32)


@dataclass(frozen=True, eq=False)
class PageElements:
    """Where the elements of a page lie, in elements from its beginning.

    Of head h and token t, element d of the key lies at h * head + key_tokens[t] + key_elements[d]; of the value, too,
    by its own tables. A page that packs tokens (vLLM's on CPUs) is described as one that does not.
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
        """How many elements a page has at least."""
        last = max(self.key_tokens[-1] + self.key_elements.max(), self.value_tokens[-1] + self.value_elements.max())
        return int(self.num_heads - 1) * self.head + int(last) + 1

    @property
    def has_heads_apart(self) -> bool:
        """Whether all of a head lies before the next one."""
        return self.end <= self.num_heads * self.head


class Turn(NamedTuple):
    """By what keys are turned. `pairs`: int64 [n, 2], the elements of each pair; `cosines`, `sines`: float32 [n]."""

    pairs: Offsets
    cosines: NDArray[np.float32]
    sines: NDArray[np.float32]

    @classmethod
    def of(cls, rope: Rope, shift: int) -> Turn:
        """From where keys were computed to `shift` positions behind that."""
        angles = np.array(rope.angles(shift))
        pairs = np.array(rope.pairs(), dtype=np.int64)
        return cls(pairs, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def spans(elements: PageElements, first: int, target: int, count: int, blocks: Sequence[int]) -> Offsets:
    """A line per span, for tokens [first, first + count) of a chunk, which go to tokens from `target` on of a request
    that has these blocks: both counted from the beginning of their first page. int64 [n, 5]: the page that a span comes
    from, its first token there, the page that it goes to, its first token there, how many tokens."""
    size = elements.block_tokens
    breaks = _breaks(elements)
    lines, done = [], 0
    while done < count:
        here, there = first + done, target + done
        ends = (breaks[breaks > here % size][0] - here % size, breaks[breaks > there % size][0] - there % size)
        length = min(int(ends[0]), int(ends[1]), count - done)
        lines.append((here // size, here % size, blocks[there // size], there % size, length))
        done += length
    return np.array(lines, dtype=np.int64).reshape(-1, 5)


def _breaks(elements: PageElements) -> Offsets:
    """Before which tokens of a page the distance to the one before is another than it was; its end, too."""
    tokens = np.stack([elements.key_tokens, elements.value_tokens])
    steps = np.diff(tokens)
    usual = steps[:, :1] if steps.size else steps
    at = np.nonzero((steps != usual).any(axis=0))[0] + 1
    return np.append(at, elements.block_tokens).astype(np.int64)


def scatter_turned(
    source: NDArray[Any], target: NDArray[Any], lines: Offsets, elements: PageElements, turn: Turn
) -> None:
    """Copy `lines` (`spans`) of one layer from `source`, pages of a slot, to `target`, the engine's pages.

    Both are [pages, elements of a page] of float32, or of uint16, which then are bfloat16; the distance from page to
    page may be any. The GIL is free meanwhile. Any thread may call; two may not write to one page.

    :raises ValueError: the arrays are of another type, or differ in it or in the size of a page.
    :raises IndexError: a line is outside them.
    """
    if source.dtype != target.dtype or source.dtype not in (np.float32, np.uint16):
        raise ValueError(f"expected pages of float32 or uint16 (bfloat16), got {source.dtype} and {target.dtype}")
    if source.shape[1] != target.shape[1] or elements.end > source.shape[1]:
        raise ValueError(f"pages of {source.shape[1]} and {target.shape[1]} elements, where one has {elements.end}")
    if not len(lines):
        return
    size = elements.block_tokens
    is_inside = (
        (lines >= 0).all()
        and lines[:, 0].max() < len(source)
        and lines[:, 2].max() < len(target)
        and (lines[:, [1, 3]].max(axis=1) + lines[:, 4]).max() <= size
    )
    if not is_inside:
        raise IndexError(f"tokens outside {len(source)} and {len(target)} pages of {size} tokens")
    # A page that is filled whole is made in a scratch page, which stays in the processor's cache, and streamed out:
    # then its old bytes are not read. Where heads lie one behind the other, a head is such a page.
    heads, page = (1, elements.head) if elements.has_heads_apart else (elements.num_heads, source.shape[1])
    still = np.setdiff1d(np.arange(len(elements.key_elements)), turn.pairs)  # without position
    scratch = np.empty(page, source.dtype)
    pages = (source.ctypes.data, source.strides[0], target.ctypes.data, target.strides[0])
    _kernel(source.dtype == np.uint16)(
        *(*pages, scratch.ctypes.data, scratch.nbytes, lines, _by_target(lines, size)),
        *(elements.num_heads, heads, elements.head),
        *(elements.key_tokens, elements.key_elements[turn.pairs], turn.cosines, turn.sines),
        *(elements.key_elements[still], elements.value_tokens, elements.value_elements),
    )


def _by_target(lines: Offsets, block_tokens: int) -> Offsets:
    """Of each target page, whose lines follow each other: its first line, the one behind its last, whether they fill
    it. int64 [n, 3]."""
    first = np.flatnonzero(np.diff(lines[:, 2], prepend=-1))
    counts = np.add.reduceat(lines[:, 4], first)
    return np.stack([first, np.append(first[1:], len(lines)), counts == block_tokens], axis=1).astype(np.int64)


def warm_up(*, is_half: bool) -> None:
    """Compile what pages of bfloat16, or of float32, need, which takes some seconds; else the first call does."""
    _kernel(is_half)


def _vector(lanes: int, *, is_half: bool) -> tuple[Any, Any]:
    """The types of so many elements in memory, and in a register."""
    kept = ir.IntType(16) if is_half else ir.FloatType()
    return (ir.VectorType(kept, lanes), ir.VectorType(ir.FloatType(), lanes))


def _all(type_: Any, number: int) -> ir.Constant:
    return ir.Constant(type_, [number] * type_.count)


def _load(builder: Any, address: Any, lanes: int, *, is_half: bool) -> Any:
    """Elements as float32."""
    kept, number = _vector(lanes, is_half=is_half)
    found = builder.load(builder.inttoptr(address, kept.as_pointer()), align=2 if is_half else 4)
    if not is_half:
        return found
    wide = ir.VectorType(_I32, lanes)
    return builder.bitcast(builder.shl(builder.zext(found, wide), _all(wide, 16)), number)


def _store(builder: Any, number: Any, address: Any, lanes: int, *, is_half: bool) -> None:
    """bfloat16 is rounded to the nearest, of two the even one, as torch does; what is no number stays none."""
    kept, _ = _vector(lanes, is_half=is_half)
    if is_half:
        wide = ir.VectorType(_I32, lanes)
        bits = builder.bitcast(number, wide)
        odd = builder.and_(builder.lshr(bits, _all(wide, 16)), _all(wide, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, _all(wide, 0x7FFF)), odd), _all(wide, 16))
        is_none = builder.fcmp_unordered("uno", number, number)
        number = builder.trunc(builder.select(is_none, _all(wide, 0x7FC0), rounded), kept)
    builder.store(number, builder.inttoptr(address, kept.as_pointer()), align=2 if is_half else 4)


def _splat(builder: Any, number: Any, lanes: int) -> Any:
    type_ = ir.VectorType(ir.FloatType(), lanes)
    one = builder.insert_element(ir.Constant(type_, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        one, ir.Constant(type_, ir.Undefined), ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    )


def _turn_lanes(lanes: int, *, is_half: bool, has_one_angle: bool) -> Any:
    """Code that turns so many pairs: (addresses of their first and second elements, and of where they go; the cosine
    and the sine of all of them, or the addresses of one each)."""

    @intrinsic  # type: ignore[untyped-decorator]
    def turn(_typing: Any, x: Any, y: Any, to_x: Any, to_y: Any, cosine: Any, sine: Any) -> Any:
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            first, second = (_load(builder, each, lanes, is_half=is_half) for each in values[:2])
            if has_one_angle:
                c, s = (_splat(builder, each, lanes) for each in values[4:])
            else:
                c, s = (_load(builder, each, lanes, is_half=False) for each in values[4:])
            turned = (
                builder.fsub(builder.fmul(first, c), builder.fmul(second, s)),
                builder.fadd(builder.fmul(second, c), builder.fmul(first, s)),
            )
            for number, address in zip(turned, values[2:4], strict=True):
                _store(builder, number, address, lanes, is_half=is_half)
            return context.get_dummy_value()

        return numba.void(x, y, to_x, to_y, cosine, sine), code

    return turn


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_typing: Any, address: Any) -> Any:
    """The processor prefetches within 4 KiB by itself, and not beyond its end."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        type_ = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], type_)
        told = [ir.Constant(_I32, number) for number in (0, 2, 1)]  # to read, into the second cache, data
        builder.call(function, [builder.inttoptr(values[0], pointer), *told])
        return context.get_dummy_value()

    return numba.void(address), code


_AHEAD = 32768  # bytes


def _copy_lanes(lanes: int) -> Any:
    """Code that copies so many elements of 16 bits."""

    @intrinsic  # type: ignore[untyped-decorator]
    def copy(_typing: Any, old: Any, new: Any) -> Any:
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            type_ = ir.VectorType(ir.IntType(16), lanes).as_pointer()
            here, there = (builder.inttoptr(each, type_) for each in values)
            builder.store(builder.load(here, align=2), there, align=2)
            return context.get_dummy_value()

        return numba.void(old, new), code

    return copy


_copy_1, _copy_8, _copy_32 = map(_copy_lanes, (1, 8, 32))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _copy(old: Any, new: Any, nbytes: Any) -> None:
    """What is left behind the widest copies is copied by one that overlaps them."""
    if nbytes >= 64:
        for at in range(0, nbytes - 63, 64):
            _copy_32(old + at, new + at)
            _prefetch(old + at + _AHEAD)
        _copy_32(old + nbytes - 64, new + nbytes - 64)
    elif nbytes >= 16:
        for at in range(0, nbytes - 15, 16):
            _copy_8(old + at, new + at)
        _copy_8(old + nbytes - 16, new + nbytes - 16)
    else:
        for at in range(0, nbytes, 2):
            _copy_1(old + at, new + at)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _is_even(places: Any) -> Any:
    """Whether they lie at equal distances."""
    for at in range(2, len(places)):  # noqa: SIM110 - which Numba does not know
        if places[at] - places[at - 1] != places[1] - places[0]:
            return False
    return True


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _copy_span(old: Any, new: Any, step: Any, count: Any, places: Any, width: Any) -> None:
    """`count` tokens, `step` elements of `width` bytes apart: their elements at `places`."""
    is_row = len(places) > 0 and places[-1] - places[0] == len(places) - 1  # they lie one behind the other
    if is_row and step == len(places):
        _copy(old + places[0] * width, new + places[0] * width, count * step * width)
    elif is_row:
        for token in range(count):
            at = (token * step + places[0]) * width
            _copy(old + at, new + at, len(places) * width)
    else:
        for place in places:
            if step == 1:
                _copy(old + place * width, new + place * width, count * width)
            else:
                for token in range(count):
                    at = (token * step + place) * width
                    _copy(old + at, new + at, width)


@cache
def _kernel(is_half: bool) -> Any:  # noqa: FBT001 - a key
    """The loops for pages of bfloat16, or of float32, compiled."""
    width = 2 if is_half else 4
    by_tokens = [_turn_lanes(lanes, is_half=is_half, has_one_angle=True) for lanes in (16, 4, 1)]
    by_pairs = [_turn_lanes(lanes, is_half=is_half, has_one_angle=False) for lanes in (16, 4, 1)]
    tokens_16, tokens_4, tokens_1 = by_tokens
    pairs_16, pairs_4, pairs_1 = by_pairs

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def turn_tokens(x: Any, y: Any, to_x: Any, to_y: Any, step: Any, count: Any, c: Any, s: Any) -> None:
        """One pair of `count` tokens. What is left behind whole vectors is turned by one that overlaps them."""
        if step == 1 and count >= 16:
            for first in range(0, count + 15, 16):
                at = min(first, count - 16) * width
                tokens_16(x + at, y + at, to_x + at, to_y + at, c, s)
                _prefetch(x + at + _AHEAD)
                _prefetch(y + at + _AHEAD)
        elif step == 1 and count >= 4:
            for first in range(0, count + 3, 4):
                at = min(first, count - 4) * width
                tokens_4(x + at, y + at, to_x + at, to_y + at, c, s)
        else:
            for token in range(count):
                at = token * step * width
                tokens_1(x + at, y + at, to_x + at, to_y + at, c, s)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def turn_pairs(x: Any, y: Any, to_x: Any, to_y: Any, apart: Any, count: Any, c: Any, s: Any) -> None:
        """All pairs of one token; `c` and `s`: addresses."""
        if apart == 1 and count >= 16:
            for first in range(0, count + 15, 16):
                nth = min(first, count - 16)
                at = nth * width
                pairs_16(x + at, y + at, to_x + at, to_y + at, c + nth * 4, s + nth * 4)
                _prefetch(x + at + _AHEAD)
                _prefetch(y + at + _AHEAD)
        elif apart == 1 and count >= 4:
            for first in range(0, count + 3, 4):
                nth = min(first, count - 4)
                at = nth * width
                pairs_4(x + at, y + at, to_x + at, to_y + at, c + nth * 4, s + nth * 4)
        else:
            for nth in range(count):
                at = nth * apart * width
                pairs_1(x + at, y + at, to_x + at, to_y + at, c + nth * 4, s + nth * 4)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def turn_span(old: Any, new: Any, step: Any, count: Any, pairs: Any, cosines: Any, sines: Any) -> None:
        if step == 1 or not (_is_even(pairs[:, 0]) and _is_even(pairs[:, 1])):
            for nth in range(len(pairs)):
                x, y = pairs[nth, 0] * width, pairs[nth, 1] * width
                turn_tokens(old + x, old + y, new + x, new + y, step, count, cosines[nth], sines[nth])
        else:
            x, y = pairs[0, 0] * width, pairs[0, 1] * width
            apart = pairs[1, 0] - pairs[0, 0] if len(pairs) > 1 else 1
            c, s = cosines.ctypes.data, sines.ctypes.data
            for token in range(count):
                here, there = old + token * step * width, new + token * step * width
                turn_pairs(here + x, here + y, there + x, there + y, apart, len(pairs), c, s)

    @numba.njit(  # type: ignore[untyped-decorator]
        "void(int64, int64, int64, int64, int64, int64, int64[:, ::1], int64[:, ::1], int64, int64, int64, int64[::1], "
        "int64[:, ::1], float32[::1], float32[::1], int64[::1], int64[::1], int64[::1])",
        nogil=True,
    )
    def scatter(
        source: Any,
        old_page: Any,
        target: Any,
        new_page: Any,
        scratch: Any,
        scratch_bytes: Any,
        lines: Any,
        targets: Any,
        num_heads: Any,
        heads: Any,
        head: Any,
        key_tokens: Any,
        pairs: Any,
        cosines: Any,
        sines: Any,
        still: Any,
        value_tokens: Any,
        values: Any,
    ) -> None:
        for nth in range(len(targets)):
            is_whole = targets[nth, 2]
            for first_head in range(0, num_heads, heads):
                for number in range(targets[nth, 0], targets[nth, 1]):
                    line = lines[number]
                    token, to_token, count = line[1], line[3], line[4]
                    for h in range(first_head, first_head + heads):
                        old = source + line[0] * old_page + h * head * width
                        new = target + line[2] * new_page + h * head * width
                        if is_whole:
                            new = scratch + (h - first_head) * head * width
                        here, there = old + key_tokens[token] * width, new + key_tokens[to_token] * width
                        step = key_tokens[token + 1] - key_tokens[token] if count > 1 else 1
                        turn_span(here, there, step, count, pairs, cosines, sines)
                        _copy_span(here, there, step, count, still, width)
                        here, there = old + value_tokens[token] * width, new + value_tokens[to_token] * width
                        step = value_tokens[token + 1] - value_tokens[token] if count > 1 else 1
                        _copy_span(here, there, step, count, values, width)
                if is_whole:
                    at = target + lines[targets[nth, 0], 2] * new_page + first_head * head * width
                    copy_page(numba.uintp(at), numba.uintp(scratch), numba.uintp(scratch_bytes))
        fence()

    return scatter
