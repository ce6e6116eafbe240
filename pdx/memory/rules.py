"""Which chunks of each cache group a prompt needs, and which of its lengths can be restored; decided only here.

A model's layers form cache groups: layers that attend to all previous tokens, to a window, or to their part of the
prompt (chunked local attention), and layers that keep a state. A chunk belongs to one group (ADR 68). Everything here
counts in chunks; nothing knows tokens, bytes or tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

ALL = 1 << 32  # chunks: more than any prompt has

_Chunks = Annotated[int, Meta(ge=0, le=ALL)]


class Rule(msgspec.Struct, array_like=True, frozen=True):
    """The chunks of one cache group that must be there to restore a prompt's leading chunks.

    Full attention needs all of them; a window the last `reach`; a state only the last one, its snapshot; chunked local
    attention those since the last multiple of `period`. A prompt whose last chunk is a tail needs that one and the
    `tail_reach` before it.
    """

    reach: _Chunks = ALL
    tail_reach: _Chunks = ALL
    period: _Chunks = 0  # 0: none

    @property
    def needs_all(self) -> bool:
        return self.reach == ALL and not self.period

    def first(self, end: int, *, has_tail: bool = False) -> int:
        """The first chunk needed to restore the leading `end` chunks, including the tail; `end` if none is."""
        if self.period:
            whole = end - has_tail
            return whole - whole % self.period
        return max(0, end - 1 - self.tail_reach if has_tail else end - self.reach)


def lengths(
    rules: Sequence[Rule], is_there: Callable[[int, int], bool], count: int, *, has_tail: bool
) -> Iterator[int]:
    """The numbers of leading chunks that can be restored, except 0, the largest first.

    `is_there` takes (group, chunk) and is called at most once for each. `has_tail`: the last of the `count` chunks is a
    tail.
    """
    # starts[group][end]: where the run of present chunks begins that ends before `end`.
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
    """The chunks that the leading `end` of `count` chunks need: indices into all groups' chunks, group after group.

    `has_tail`: the last of the `count` chunks is a tail.
    """
    is_tail = has_tail and end == count
    firsts = [rule.first(end, has_tail=is_tail) for rule in rules]
    return [group * count + chunk for group, first in enumerate(firsts) for chunk in range(first, end)]
