"""A span of a trace, made once all its times are known, with an id that was chosen before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Value = str | int | float | bool


class Span(NamedTuple):
    """Times are CLOCK_MONOTONIC nanoseconds; `parent` 0: it is the root of its trace."""

    name: str
    trace: int
    id: int
    parent: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value | None]  # None: unknown
    kind: Literal["INTERNAL", "SERVER", "CLIENT"] = "INTERNAL"
    error: str = ""  # its class; empty: success
    events: Sequence[tuple[str, int, Mapping[str, Value]]] = ()
