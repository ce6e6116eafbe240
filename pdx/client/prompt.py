"""What a controller's verb is about, and where: the prompt whose chunks are meant, the places they are in, and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdx.errors import JobUnknown, SelectionError
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import JobId, JobStatus

ALL = "*"  # in place of a node's name


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Whose chunks: exactly one of `tokens`, `text` and `request`, a part of a request's id.

    `model`: whose chunks, where engines of several models are attached: an engine's name or URL, or how its layout or
    its model begins. `salt`: the requests' `cache_salt`; it is shown nowhere. `codec`: the lossy one that the requests
    ask for, whose chunks have other keys than those of exact requests; empty: none.
    """

    tokens: Sequence[int] | None = None
    text: str | None = None
    request: str = ""
    model: str = ""
    salt: str = ""
    codec: str = ""

    def __post_init__(self) -> None:
        given = (self.tokens is not None) + (self.text is not None) + bool(self.request)
        if given != 1:
            raise SelectionError("name the chunks by one of tokens, a text, and a part of a request's id")

    def __repr__(self) -> str:
        if self.request:
            return f"<Prompt of request {self.request!r}>"
        return f"<Prompt of {'a text' if self.tokens is None else f'{len(self.tokens)} tokens'}>"


Tokens = Prompt | Sequence[int] | str


def prompt_of(tokens: Tokens) -> Prompt:
    """Ids of tokens, or a text, as a prompt of the only model there is.

    :raises SelectionError: it is none of these.
    """
    if isinstance(tokens, Prompt):
        return tokens
    return Prompt(text=tokens) if isinstance(tokens, str) else Prompt(tokens=list(tokens))


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
        return f"{self.instance}:{self.status.job}" if self.status.job else ""

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status.is_over

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        """The node, and what it calls the job.

        :raises JobUnknown: that is no job's name.
        """
        instance, _, job = name.rpartition(":")
        try:
            msgspec.convert(job, JobId)
        except msgspec.ValidationError:
            job = ""
        if not instance or not job:
            raise JobUnknown(f"{name!r:.80} is no job's name, which is NODE:EPOCH-NUMBER; pdx cache jobs lists them")
        return instance, job


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

    def as_object(self) -> dict[str, Any]:
        """As plain data."""
        return {"is_well": not self.troubles, "troubles": self.troubles}
