"""What controllers ask of a node, and what it answers: `pdx.node.control` does it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdx.memory.slot import Bytes
from pdx.wire.base import Count, FieldName, Keys, Layout, Message, Name, ShardCount
from pdx.wire.hints import FormText

JobId = Annotated[str, Meta(max_length=64, pattern=r"^([0-9a-f]+-[0-9]+)?\Z")]  # the node's epoch, and a number
CodecName = Annotated[str, Meta(max_length=16, pattern=r"^[a-z0-9]*\Z")]
MAX_LISTED = 1_000
MAX_MODELS = 256
MAX_EVICTED = 2048  # chunks, by one message


class Selection(msgspec.Struct, array_like=True, frozen=True):
    """Which chunks a verb is about: these `keys`, in each of so many shards; or, where there are none, those that the
    last request asked for whose name contains `request`."""

    keys: Keys = []
    shards: ShardCount = 1
    request: Name = ""


class Find(Message, frozen=True):
    """Ask where chunks are: a `Found`."""

    what: Selection


class Move(Message, frozen=True):
    """Copy chunks from the tier `source` of this node, any that has them where it is empty, to the tier `target` of the
    node `node` (empty: this one), and drop them at the source unless it `keeps` them. The answer is a `JobStatus`.

    A chunk is dropped only when the target has said that it has it. A chunk that is there already is not copied again.
    `dry_run`: here as in all verbs, nothing is done, and the answer says what would be.
    """

    what: Selection
    source: Name
    target: Name
    node: Name = ""
    keeps: bool = False
    dry_run: bool = False


class Clear(Message, frozen=True):
    """Forget chunks in a tier (empty: in all of this node), pinned or not; the last lease of those that are read frees
    them. The answer is an `Effect`. `everything`: all that the tier has, whatever `what` says; the answer is a
    `JobStatus`."""

    what: Selection
    tier: Name = ""
    everything: bool = False
    dry_run: bool = False


class PinIn(Message, frozen=True):
    """Pin chunks in one tier (empty: the first that has them all), or unpin them there. The answer is an `Effect`."""

    what: Selection
    tier: Name = ""
    pinned: bool = True
    dry_run: bool = False


class Recode(Message, frozen=True):
    """Store chunks of a tier by another codec: "none" (as they are), "lossless", or with a loss, by the text of a
    `pdx.memory.form.Form`. The answer is a `JobStatus`.

    `new_keys`: of a lossy codec, under which keys they are found from then on, one for each key.
    """

    what: Selection
    tier: Name
    codec: FormText
    new_keys: Keys = []
    dry_run: bool = False


class Evict(Message, frozen=True):
    """Evict from an arena (empty: the first) up to `nbytes` of what has a lower priority than `below`, in the order of
    its policy. The answer is an `Effect`; where it has MAX_EVICTED chunks there may be more: ask again."""

    below: Annotated[int, Meta(ge=1, le=10)]
    nbytes: Bytes
    tier: Name = ""
    dry_run: bool = False


class Verify(Message, frozen=True):
    """Read all chunks of a tier that is a disk, and compare their digests. The answer is a `JobStatus`."""

    tier: Name
    remove: bool = False
    dry_run: bool = False


class List(Message, frozen=True):
    """Ask what memory holds, by model and by session: a `Listing`. `session`, `model`: only those whose name contains
    this."""

    session: Name = ""
    model: Name = ""


class Jobs(Message, frozen=True):
    """Ask how a job is doing (a `JobStatus`); without a name, how all are that the node knows of (a `JobList`)."""

    job: JobId = ""


class EndJob(Message, frozen=True):
    """Cancel a job: what it has moved stays moved, nothing more is. The answer is its `JobStatus`."""

    job: JobId


class Settle(Message, frozen=True):
    """From a peer, of chunks that it has pushed here: store them in this tier of the node's, and let memory be free of
    those that no request has found here; an empty name: they stay in memory. The answer is a `Found`, at once: it is
    asked again until the tier has them."""

    keys: Keys
    shards: ShardCount = 1
    tier: Name = ""


class Models(Message, frozen=True):
    """Ask how the engines here name the chunks of a prompt: a `ModelList`."""


# ---- answers -----------------------------------------------------------------------------------


class Found(Message, frozen=True):
    """By tier, how many leading ones of the chunks it has; `hits`: how many leading ones some tier has; `chunks`: how
    many were asked for. `asking`: tiers that are being asked and have not answered; ask again. `nbytes`: of a chunk of
    one shard, 0: not known."""

    chunks: Count
    hits: Count
    tiers: Annotated[dict[Name, Count], Meta(max_length=256)]
    pinned: Annotated[dict[Name, Count], Meta(max_length=256)] = {}  # leading ones that are pinned there
    asking: Annotated[list[Name], Meta(max_length=64)] = []
    nbytes: Bytes = 0


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """Of a tier, a model or a session: so many chunks of one shard."""

    name: Name
    chunks: Count
    nbytes: Bytes


class Effect(Message, frozen=True):
    """What a verb did, or would do, in each tier."""

    tiers: Annotated[list[Kept], Meta(max_length=256)]
    dry_run: bool = False

    @property
    def chunks(self) -> int:
        """In the tier where they were most."""
        return max((of_tier.chunks for of_tier in self.tiers), default=0)


class JobStatus(Message, frozen=True):
    """One job of a node, or (`job` empty) what it would be. `state` "failed" and `why` go together; `why` of one
    that is done is what it has found. One that was cancelled, or has failed, says how much it has done before that."""

    job: JobId
    verb: Annotated[str, Meta(max_length=16)]
    state: Literal["planned", "running", "done", "failed", "cancelled"]
    chunks: Count  # of one shard each: all there are to do, without those that a store turned out to lack …
    chunks_done: Count = 0  # … and those that are done, or were done before
    nbytes: Bytes = 0
    bytes_done: Bytes = 0
    age_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    seconds: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0  # that it has taken so far, or took
    what: Annotated[str, Meta(max_length=1024)] = ""  # in words: from where to where
    why: Annotated[str, Meta(max_length=1024)] = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state not in ("running", "planned")


class JobList(Message, frozen=True):
    """The newest first."""

    jobs: Annotated[list[JobStatus], Meta(max_length=MAX_LISTED)]


class Listing(Message, frozen=True):
    """What memory holds, the largest first; `more`: models and sessions that are left out."""

    models: Annotated[list[Kept], Meta(max_length=MAX_LISTED)]
    sessions: Annotated[list[Kept], Meta(max_length=MAX_LISTED)]
    more: Count = 0


class Model(msgspec.Struct, array_like=True, frozen=True):
    """How one engine names the chunks of a prompt: see `pdx.wire.tokens`."""

    engine: Name
    url: Name  # where it serves HTTP, empty: nowhere
    layout: Layout  # what its keys are made with
    shape: Annotated[dict[FieldName, Name], Meta(max_length=32)]


class ModelList(Message, frozen=True):
    """The engines that are attached and have told the shape of their chunks."""

    models: Annotated[list[Model], Meta(max_length=MAX_MODELS)]
