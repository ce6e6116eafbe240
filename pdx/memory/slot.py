"""A place for one chunk."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Bytes = Annotated[int, Meta(ge=0, le=1 << 48)]
ArenaNumber = Annotated[int, Meta(ge=0, lt=64)]
Generation = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Slot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Room for one chunk of one shard in the arena `arena` of a node: valid while `generation` stands at `offset`."""

    offset: Bytes
    nbytes: Bytes
    generation: Generation
    arena: ArenaNumber = 0
