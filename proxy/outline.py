"""Work on large texts in steps, between which other requests get their turn; and finding where the values of a large
JSON object or list begin and end.

As in simdjson, a table marks the significant bytes (quotes, backslashes, brackets); whether a byte is inside a string,
and how deeply it is nested, are running sums. Everything else in a value is skipped, so invalid JSON has an outline,
too. But for text that a JSON parser accepts, the outline matches that parser's result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

import numpy as np

from pdx.errors import RequestRefused

STEP = 64 << 10  # even; see how backslashes are cut
_QUOTE, _BACKSLASH, _OPEN, _CLOSE = 1, 2, 3, 4
_KINDS = {ord('"'): _QUOTE, ord("\\"): _BACKSLASH, **dict.fromkeys(b"[{", _OPEN), **dict.fromkeys(b"]}", _CLOSE)}
_KIND = bytes(_KINDS.get(byte, 0) for byte in range(256))
_DEEPER = np.array([0, 0, 0, 1, -1], np.int8)  # depth change, by kind
Array = np.ndarray[Any, Any]
T = TypeVar("T")
Steps = Generator[None, None, T]


async def in_turns(steps: Steps[T]) -> T:
    """Run the steps and return their result; the event loop serves others between steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        await asyncio.sleep(0)


def at_once(steps: Steps[T]) -> T:
    """Run the steps without a break and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def outline(raw: bytes | bytearray | memoryview, most: int) -> Steps[list[tuple[int, int]]]:
    """Begin and end of each string (including names), list and object directly inside the outermost value, in order.

    :raises RequestRefused: there are more than `most`.
    """
    view, edges = memoryview(raw), list[int]()
    at, depth, in_string = 0, 0, 0
    while at < len(view):
        if at:
            yield
        piece = bytes(view[at : at + STEP])
        piece = piece.rstrip(b"\\") or piece  # never split a run of backslashes at an odd position
        where, kinds = _marked(piece)
        quotes = kinds == _QUOTE
        inside = (np.cumsum(quotes) - quotes + in_string) & 1
        steps = np.where(inside, 0, _DEEPER[kinds])
        after = np.cumsum(steps, dtype=np.int64) + depth
        is_edge = np.where(quotes, after == 1, (steps != 0) & (np.maximum(after, after - steps) == 2))
        edges += (where[is_edge] + at).tolist()
        if len(edges) > 2 * most:
            raise RequestRefused(400, f"the request has more than {most} names, strings, lists and objects")
        depth, in_string = depth + int(steps.sum()), (in_string + int(quotes.sum())) & 1
        at += len(piece)
    return [(begin, end + 1) for begin, end in zip(edges[::2], edges[1::2], strict=False)]


def _marked(piece: bytes) -> tuple[Array, Array]:
    """Positions and kinds of brackets and unescaped quotes."""
    kinds = np.frombuffer(piece.translate(_KIND), np.uint8)
    where = np.flatnonzero(kinds)
    kinds = kinds[where]
    slashes = kinds == _BACKSLASH
    if not slashes.any():
        return where, kinds
    index = np.arange(len(where))
    behind = np.zeros(len(where), bool)  # directly behind a backslash
    behind[1:] = slashes[:-1] & (np.diff(where) == 1)
    begins = np.maximum.accumulate(np.where(slashes & ~behind, index, 0))  # start of the latest run of backslashes
    escaped = behind.copy()
    escaped[1:] &= (index[1:] - begins[:-1]) % 2 == 1
    kept = ~(slashes | (escaped & (kinds == _QUOTE)))
    return where[kept], kinds[kept]
