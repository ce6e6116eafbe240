"""Slots: room for a chunk in an arena."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Bytes = Annotated[int, Meta(ge=0, le=1 << 48)]
ArenaNumber = Annotated[int, Meta(ge=0, lt=64)]
Generation = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Slot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Room for one chunk of one shard in a node's arena, valid while the arena has `generation` at `offset`."""

    offset: Bytes
    nbytes: Bytes
    generation: Generation
    arena: ArenaNumber = 0
