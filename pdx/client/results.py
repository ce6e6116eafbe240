"""Values of the controller's API: places of chunks, jobs, lookups, and the health of nodes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdx.errors import SelectionError
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import Found, JobStatus

ALL = "*"  # in place of a node's name


class Place(msgspec.Struct, frozen=True):
    """A tier of a node, written NODE/TIER; an empty `tier` means none in particular."""

    node: str
    tier: str = ""

    def __str__(self) -> str:
        return f"{self.node}/{self.tier}" if self.tier else self.node

    @staticmethod
    def of(place: Place | tuple[str, str] | str, *, needs_tier: bool = False) -> Place:
        """A place from its written form, or from node and tier.

        :raises SelectionError: it is not a place, or it has no tier and `needs_tier`.
        """
        if isinstance(place, Place):
            found = place
        elif isinstance(place, str):
            node, slash, tier = place.partition("/")
            if slash and not tier:
                raise SelectionError(f"{place!r} has no tier behind its slash: write NODE/TIER, as alpha/disk")
            found = Place(node, tier)
        else:
            found = Place(*place)
        if not found.node:
            raise SelectionError(f"{str(place)!r} names no node: write NODE/TIER, as alpha/disk")
        if needs_tier and not found.tier:
            raise SelectionError(f"{found.node!r} names no tier: write NODE/TIER, as {found.node}/disk")
        return found


class Job(msgspec.Struct, frozen=True):
    """A job as its node `instance` last reported it, or (`name` empty) as a dry run planned it."""

    instance: str
    status: JobStatus

    @property
    def name(self) -> str:
        """The name that `check_finish` and `cancel` take."""
        return self.status.job

    @property
    def is_over(self) -> bool:
        return self.status.is_over


class Lookup(msgspec.Struct, frozen=True):
    """Where a prompt's chunks are. All counts but `chunks` are of leading tokens, or, if `chunk_tokens` is 0 because no
    engine has told how many tokens a chunk has, of leading chunks."""

    chunks: int  # asked for
    chunk_tokens: int
    tiers: dict[str, dict[str, int]]  # by node and tier
    hits: dict[str, int] = {}  # by node: those that any of its tiers has
    pinned: dict[str, dict[str, int]] = {}
    asking: dict[str, list[str]] = {}  # tiers that have not answered in time: their chunks are not counted
    errors: dict[str, str] = {}  # by node: why it has not answered

    @property
    def tokens(self) -> int:
        """The tokens asked for, in whole chunks."""
        return self.chunks * self.chunk_tokens

    @staticmethod
    def of(found: Mapping[str, Found], errors: dict[str, str]) -> Lookup:
        """Put together what nodes found, and the errors of the others."""
        unit = max((each.chunk_tokens for each in found.values()), default=0)

        def scaled(counts: Mapping[str, int]) -> dict[str, int]:
            return {tier: count * (unit or 1) for tier, count in counts.items()}

        return Lookup(
            max((each.chunks for each in found.values()), default=0),
            unit,
            {name: scaled(each.tiers) for name, each in found.items()},
            {name: each.hits * (unit or 1) for name, each in found.items()},
            {name: scaled(each.pinned) for name, each in found.items() if each.pinned},
            {name: list(each.asking) for name, each in found.items() if each.asking},
            errors,
        )


class Health(msgspec.Struct, frozen=True):
    """The health of a node. `status` is None if it does not answer; then `why` says more."""

    status: NodeStatus | None
    why: str = ""

    @property
    def troubles(self) -> list[str]:
        """What is wrong, in words; empty: nothing."""
        status = self.status
        if status is None:
            return [self.why or "it does not answer"]
        below = [f"tier {tier.name}: {tier.state}" for tier in status.tiers if not tier.is_up or tier.state != "ok"]
        peers = [f"peer {peer.name}: {peer.state}, {peer.why}" for peer in status.peers if peer.why]
        apart = [f"engine {one.engine} shares no chunks {one.unshared}" for one in status.attached if one.unshared]
        return [*below, *peers, *apart]

    @property
    def state(self) -> str:
        """The health in a word or two."""
        return "well" if not self.troubles else "not well" if self.status else "does not answer"
