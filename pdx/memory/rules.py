"""Which chunks of each cache group a prompt needs, and which of its lengths can be restored: the one place that knows.

A model's layers are in cache groups: those that attend to all tokens before them, those that attend to a window, or to
their part of a prompt (chunked local attention), and those that keep a state. A chunk is of one group (ADR 68).
Lengths and numbers of chunks; nothing here knows tokens, bytes or tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

ALL = 1 << 32  # chunks: more than any prompt has

_Chunks = Annotated[int, Meta(ge=0, le=ALL)]


class Rule(msgspec.Struct, array_like=True, frozen=True):
    """Of one cache group: which chunks must be there for a prompt's first chunks to be restored.

    Full attention needs all of them; a window the last `reach`; a state the last one alone, which is its snapshot;
    chunked local attention those since the last multiple of `period`. A prompt whose last chunk is a tail needs that
    one and the `tail_reach` before it.
    """

    reach: _Chunks = ALL
    tail_reach: _Chunks = ALL
    period: _Chunks = 0  # 0: none

    @property
    def needs_all(self) -> bool:
        return self.reach == ALL and not self.period

    def first(self, end: int, *, has_tail: bool = False) -> int:
        """The first chunk that the leading `end` chunks need, the tail counted; `end`: none."""
        if self.period:
            whole = end - has_tail
            return whole - whole % self.period
        return max(0, end - 1 - self.tail_reach if has_tail else end - self.reach)


def lengths(
    rules: Sequence[Rule], is_there: Callable[[int, int], bool], count: int, *, has_tail: bool
) -> Iterator[int]:
    """How many leading chunks of a prompt can be restored, the most first: each length but 0 whose chunks are there.

    `is_there`: of (group, chunk) whether it is. `has_tail`: the last of the `count` chunks is a tail. Each chunk is
    asked for once at most.
    """
    # Of each group, for each number of chunks, where the run of chunks that are there begins that ends with it.
    starts: list[list[int]] = []
    for group in range(len(rules)):
        start, of_group = 0, [0]
        for chunk in range(count):
            if not is_there(group, chunk):
                start = chunk + 1
            of_group.append(start)
        starts.append(of_group)
    for end in range(count, 0, -1):
        is_tail = has_tail and end == count
        firsts = [rule.first(end, has_tail=is_tail) for rule in rules]
        if all(first == end or of_group[end] <= first for first, of_group in zip(firsts, starts, strict=True)):
            yield end


def needed(rules: Sequence[Rule], count: int, end: int, *, has_tail: bool) -> list[int]:
    """What the leading `end` of `count` chunks need of each group: indices into its chunks, group behind group.

    `has_tail`: the last of the `count` chunks is a tail.
    """
    is_tail = has_tail and end == count
    firsts = [rule.first(end, has_tail=is_tail) for rule in rules]
    return [group * count + chunk for group, first in enumerate(firsts) for chunk in range(first, end)]
