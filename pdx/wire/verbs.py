"""What controllers ask of a node, and its answers; `pdx.node.control` carries it out.

A verb is one struct, which declares its name, which sessions may send it and what answers it. The rights of sessions,
`POST /cache/<name>` of the proxy, the Python client and the table in docs/controller.md follow from that. A new verb is
a struct here and in `AnyVerb`, its execution in `pdx.node.control`, and its line in `pdx.cli.cache`.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta

from pdx.errors import JobUnknown
from pdx.memory.slot import Bytes
from pdx.wire.base import Count, Keys, Kind, Layout, Message, Name, Shape, ShardCount, Verdicts
from pdx.wire.hints import FormText, Hints
from pdx.wire.status import Explained, NodeStatus

# NODE:EPOCH-NUMBER: the node, its epoch, and a number.
JobName = Annotated[str, Meta(max_length=320, pattern=r"^([^\n]{1,256}:[0-9a-f]+-[0-9]+)?\Z")]
MAX_LISTED = 1_000
MAX_MODELS = 256
MAX_EVICTED = 2048  # chunks, by one message
ANY_SESSION: frozenset[Kind] = frozenset({"controller", "scheduler", "client"})


def node_of(job: str) -> str:
    """The node whose job this is. :raises JobUnknown: that is no job's name."""
    if not job or len(job) > 320 or not re.fullmatch(r"[^\n]{1,256}:[0-9a-f]+-[0-9]+", job):
        raise JobUnknown(f"{job!r:.80} is no job's name, which is NODE:EPOCH-NUMBER; pdx cache jobs lists them")
    return job.rpartition(":")[0]


# ---- answers -----------------------------------------------------------------------------------


class Advised(Message, frozen=True):
    """The outcome of an `Advise`, for each field of its hints that is set."""

    verdicts: Verdicts = []


class Found(Message, frozen=True):
    """`tiers`: how many leading chunks each tier has; `hits`: how many some tier has; `chunks`: how many were asked
    for. `asking`: tiers that have not answered yet; ask again. `nbytes`: of a chunk of one shard, `chunk_tokens`: of a
    chunk; 0: not known. `by_index`: no node was asked, so no pins are known."""

    chunks: Count
    hits: Count
    tiers: Annotated[dict[Name, Count], Meta(max_length=256)]
    pinned: Annotated[dict[Name, Count], Meta(max_length=256)] = {}  # leading ones that are pinned there
    asking: Annotated[list[Name], Meta(max_length=64)] = []
    nbytes: Bytes = 0
    chunk_tokens: Count = 0
    by_index: bool = False


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """How many chunks of one shard a tier, a model or a session has."""

    name: Name
    chunks: Count
    nbytes: Bytes


class Effect(Message, frozen=True):
    """What a verb did, or would do, in each tier."""

    tiers: Annotated[list[Kept], Meta(max_length=256)]
    dry_run: bool = False

    @property
    def chunks(self) -> int:
        """The number in the tier with the most."""
        return max((of_tier.chunks for of_tier in self.tiers), default=0)


class JobStatus(Message, frozen=True):
    """One job of a node, or (`job` empty) what it would be. A failed job has a `why`; `why` of one that is done is what
    it has found. A cancelled or failed job says how much it had done."""

    job: JobName
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
        """Whether the job has ended."""
        return self.state not in ("running", "planned")


class JobList(Message, frozen=True):
    """Jobs, the newest first."""

    jobs: Annotated[list[JobStatus], Meta(max_length=MAX_LISTED)]


class Listing(Message, frozen=True):
    """What memory holds, the largest first; `more`: models and sessions that are left out."""

    models: Annotated[list[Kept], Meta(max_length=MAX_LISTED)]
    sessions: Annotated[list[Kept], Meta(max_length=MAX_LISTED)]
    more: Count = 0


class Drained(Message, frozen=True):
    """The engine of this name is being drained, or not any more; it has `running` unfinished requests."""

    engine: Name
    running: Count
    draining: bool = True


class Model(msgspec.Struct, array_like=True, frozen=True):
    """How one engine names the chunks of a prompt: see `pdx.wire.tokens`."""

    engine: Name
    url: Name  # where it serves HTTP, empty: nowhere
    layout: Layout  # what its keys are made with
    shape: Shape


class ModelList(Message, frozen=True):
    """The engines that are attached and have told the shape of their chunks."""

    models: Annotated[list[Model], Meta(max_length=MAX_MODELS)]


# ---- verbs -------------------------------------------------------------------------------------


class Selection(msgspec.Struct, array_like=True, frozen=True):
    """Which chunks a verb is about: these `keys`, in each of so many shards; or, if there are none, those that the
    latest request asked for whose name contains `request`. `chunk_tokens`: of each, 0: not known."""

    keys: Keys = []
    shards: ShardCount = 1
    request: Name = ""
    chunk_tokens: Count = 0


class Verb(Message, frozen=True):
    """Base of all verbs. Those with a `what` are about chunks; those with a `dry_run` change something, unless it is
    set: then they only answer what they would do. A verb that is answered only by a `JobStatus` is for one node."""

    name: ClassVar[str]
    answers: ClassVar[tuple[type[Message], ...]]
    said_by: ClassVar[frozenset[Kind]] = frozenset({"controller"})

    @classmethod
    def is_of_one_node(cls) -> bool:
        """Whether it is never sent to several nodes at once."""
        return cls.answers == (JobStatus,)

    @classmethod
    def only_looks(cls) -> bool:
        """Whether it changes no chunk, so that it goes to all nodes if none is named."""
        return "dry_run" not in cls.__struct_fields__


class Find(Verb, frozen=True):
    """Say how many leading chunks each tier has. `ask`: ask the nodes, even if the proxy has an index."""

    name = "lookup"
    answers = (Found,)
    what: Selection
    ask: bool = False


class Move(Verb, frozen=True):
    """Copy chunks from the tier `source` of this node (empty: any that has them) to the tier `target` of the node
    `target_node` (empty: this one), and drop them at the source unless it `keeps` them: a job.

    A chunk is dropped only after the target has confirmed it. A chunk that is there already is not copied again.
    """

    name = "move"
    answers = (JobStatus,)
    what: Selection
    source: Name
    target: Name
    target_node: Name = ""
    keeps: bool = False
    dry_run: bool = False


class Prefetch(Verb, frozen=True):
    """Load chunks from the other tiers of this node into memory, `to` "host" or "gpu" (empty: the first arena), as if a
    request for them were on its way: behind what requests wait for, and evicted last for half a minute. Answers how
    many are not there yet."""

    name = "prefetch"
    answers = (Effect,)
    what: Selection
    to: Name = ""
    dry_run: bool = False


class Clear(Verb, frozen=True):
    """Forget chunks in a tier (empty: in all of this node), pinned or not; leased ones are freed with their last lease.
    `everything`: clear the whole tier, whatever `what` says; that is a job."""

    name = "clear"
    answers = (Effect, JobStatus)
    what: Selection
    tier: Name = ""
    everything: bool = False
    dry_run: bool = False


class PinIn(Verb, frozen=True):
    """Pin chunks in one tier (empty: the first that has them all), or (`pinned` is false) unpin them there."""

    name = "pin"
    answers = (Effect,)
    what: Selection
    tier: Name = ""
    pinned: bool = True
    dry_run: bool = False


class Recode(Verb, frozen=True):
    """Store chunks of a tier by another codec: "none" (as they are), "lossless", or lossy, by the text of a
    `pdx.memory.form.Form`: a job.

    `new_keys`: for a lossy codec, the keys under which they are found from then on, one for each key.
    """

    name = "compress"
    answers = (JobStatus,)
    what: Selection
    tier: Name
    codec: FormText
    new_keys: Keys = []
    dry_run: bool = False


class Evict(Verb, frozen=True):
    """Evict from an arena (empty: the first) up to `nbytes` of chunks whose priority is lower than `below`, in the
    order of its policy. If the answer has MAX_EVICTED chunks there may be more: ask again."""

    name = "evict"
    answers = (Effect,)
    below: Annotated[int, Meta(ge=1, le=10)]
    nbytes: Bytes
    tier: Name = ""
    dry_run: bool = False


class List(Verb, frozen=True):
    """Say what memory holds, by model and by session. `session`, `model`: only those whose name contains this."""

    name = "ls"
    answers = (Listing,)
    session: Name = ""
    model: Name = ""


class Jobs(Verb, frozen=True):
    """Report all jobs that the node knows of."""

    name = "jobs"
    answers = (JobList,)


class CheckFinish(Verb, frozen=True):
    """Report one job."""

    name = "check_finish"
    answers = (JobStatus,)
    job: JobName


class EndJob(Verb, frozen=True):
    """Cancel a job: what it has moved stays moved."""

    name = "cancel"
    answers = (JobStatus,)
    job: JobName


class Drain(Verb, frozen=True):
    """Have proxies give an engine, by its URL or its own name, no more requests, as long as others can serve them; or
    give it requests again. Holds until the engine attaches again."""

    name = "drain"
    answers = (Drained,)
    engine: Annotated[str, Meta(min_length=1, max_length=256)]
    draining: bool = True


class Models(Verb, frozen=True):
    """Say how the engines here name the chunks of a prompt."""

    name = "models"
    answers = (ModelList,)


class Status(Verb, frozen=True):
    """Report the node's state."""

    name = "health"
    answers = (NodeStatus,)
    said_by = ANY_SESSION


class Why(Verb, frozen=True):
    """Explain why chunks of the latest requests whose name contains `request` were hits or not."""

    name = "why"
    answers = (Explained,)
    said_by = ANY_SESSION
    request: Name = ""


class Advise(Verb, frozen=True):
    """An application's hints about the future of `keys`, in each of so many shards, or, without keys, of what the
    latest request of `hints.session` used. Sessions of other tenants (`hints.salt`) are not found.

    From a controller: about chunks in the node's first arena.
    """

    name = "advise"
    answers = (Advised,)
    said_by = ANY_SESSION
    hints: Hints
    keys: Keys = []
    shards: ShardCount = 1


AnyVerb = (
    Find
    | Move
    | Prefetch
    | Clear
    | PinIn
    | Recode
    | Evict
    | List
    | Jobs
    | CheckFinish
    | EndJob
    | Drain
    | Models
    | Status
    | Why
    | Advise
)
VERBS: dict[str, type[Verb]] = {verb.name: verb for verb in get_args(AnyVerb)}
AnyAnswer = Found | Effect | JobStatus | JobList | Listing | ModelList | NodeStatus | Explained | Drained | Advised
