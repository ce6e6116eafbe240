"""Why chunks of requests were hits or not, as a node tells it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.wire.base import MAX_REASONS, Count, Message, Name, Verdicts
from pdx.wire.hints import Seconds


class Reason(msgspec.Struct, array_like=True, frozen=True):
    """Why chunks [first, first + count) of a request were a hit, or were not."""

    first: Count
    count: Count
    is_hit: bool
    kind: Annotated[str, Meta(max_length=16)]  # one word: where from, or why not
    text: Annotated[str, Meta(max_length=1024)]


class Explanation(msgspec.Struct, array_like=True, frozen=True):
    """The node's last answer to one request. `chunks` counts what may be hit, `hits` the whole ones that were."""

    request: Name
    engine: Name
    age_s: Annotated[float, Meta(ge=0.0, le=1e9)]
    waited_s: Seconds  # until what was missing had come, or did not come in time
    chunks: Count
    hits: Count
    reasons: Annotated[list[Reason], Meta(max_length=MAX_REASONS)]
    notes: Annotated[list[Annotated[str, Meta(max_length=2048)]], Meta(max_length=8)] = []
    verdicts: Verdicts = []  # what became of its hints


class Explained(Message, frozen=True):
    """The newest first, 32 at most; `remembered`: of how many requests the node knows."""

    requests: Annotated[list[Explanation], Meta(max_length=32)]
    remembered: Count
