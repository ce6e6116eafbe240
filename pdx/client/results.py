"""What a controller speaks of beside prompts: the places that chunks are in, jobs, lookups, and how nodes are."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdx.errors import SelectionError
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import Found, JobStatus

ALL = "*"  # in place of a node's name


class Place(msgspec.Struct, frozen=True):
    """A tier of a node, written NODE/TIER; an empty `tier` is none in particular."""

    node: str
    tier: str = ""

    def __str__(self) -> str:
        return f"{self.node}/{self.tier}" if self.tier else self.node

    @staticmethod
    def of(place: Place | tuple[str, str] | str, *, needs_tier: bool = False) -> Place:
        """A place as it is written, or in two words.

        :raises SelectionError: it is none, or has no tier and `needs_tier`.
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
    """A job as it was when its node `instance` was asked last; or (`name` empty) what it would be."""

    instance: str
    status: JobStatus

    @property
    def name(self) -> str:
        """By which `check_finish` and `cancel` know it."""
        return self.status.job

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status.is_over


class Lookup(msgspec.Struct, frozen=True):
    """Where a prompt's chunks are. All counts but `chunks` are leading ones: of tokens, or of chunks where
    `chunk_tokens` is 0, because nobody has told how many tokens a chunk has."""

    chunks: int  # that were asked for
    chunk_tokens: int
    tiers: dict[str, dict[str, int]]  # by node and tier
    hits: dict[str, int] = {}  # by node: those that some tier of it has
    pinned: dict[str, dict[str, int]] = {}
    asking: dict[str, list[str]] = {}  # tiers that have not answered in time: what they have is not in here
    errors: dict[str, str] = {}  # by node, why it has not answered

    @property
    def tokens(self) -> int:
        """That were asked for; of whole chunks."""
        return self.chunks * self.chunk_tokens

    @staticmethod
    def of(found: Mapping[str, Found], errors: dict[str, str]) -> Lookup:
        """What nodes have told, and why others have not."""
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
    """How a node is. `status` is None where it does not answer, and `why` says more."""

    status: NodeStatus | None
    why: str = ""

    @property
    def troubles(self) -> list[str]:
        """What is the matter, in words; empty: nothing."""
        status = self.status
        if status is None:
            return [self.why or "it does not answer"]
        below = [f"tier {tier.name}: {tier.state}" for tier in status.tiers if not tier.is_up or tier.state != "ok"]
        peers = [f"peer {peer.name}: {peer.state}, {peer.why}" for peer in status.peers if peer.why]
        apart = [f"engine {one.engine} shares no chunks {one.unshared}" for one in status.attached if one.unshared]
        return [*below, *peers, *apart]

    @property
    def state(self) -> str:
        """In a word or two."""
        return "well" if not self.troubles else "not well" if self.status else "does not answer"
