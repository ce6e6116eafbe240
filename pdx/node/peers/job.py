"""One write of one push, as the sender gets it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdx.transports.channel import Piece
from pdx.wire.peer_messages import Slices


class Job(msgspec.Struct, frozen=True):
    """`pieces` carry `slices`, whose local spans are `spans` (per layer: offset, bytes)."""

    push: int
    pieces: Sequence[Piece]
    slices: Sequence[Slices]
    spans: Sequence[Sequence[tuple[int, int]]]
    nbytes: int
    transfer: str | None = None  # that the push is part of
