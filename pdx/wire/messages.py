"""What sessions say to a node, what it answers, and what nodes and proxies tell each other.

A session is a process of this host or a peer, another node. Both speak one protocol: they attach, ask for leases and
room, fill, give back, push; `RIGHTS` says which kind of session may say what. A node and its peer are each a session
of the other, over one connection.

Wire format: msgpack arrays, coded by msgspec against the types below; every number, string and list is
bounded on decode, so a message that decodes is one the receiver can act on. One ZMQ frame is one envelope.
No I/O here. Tests decode the same bytes with the independent `msgpack` package.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError
from pdx.memory.keys import KEY_BYTES
from pdx.memory.slot import Bytes, Slot
from pdx.transports.channel import MAX_NOTIFY_BYTES, RemoteRegion, SchemeName
from pdx.wire.hints import MAX_VERDICTS, FormText, Hints, Seconds, Verdict

_T = TypeVar("_T")

VERSION = 6
MAX_FRAME_BYTES = 4 << 20
MAX_BLOCKS = 1 << 16  # of a prompt whose blocks are told
MAX_KEYS = 16_384  # four million tokens at 256 tokens per chunk
MAX_SHARDS = 1_024
MAX_NAME = 256  # characters
MAX_REASONS = 64  # for the chunks of one request
MAX_LAYERS = 4_096
MAX_SLOTS = MAX_KEYS * 8  # in one answer
MAX_RUN_KEYS = 4096  # of one tier, in one frame of changes …
MAX_RUNS = 256  # … and runs in it

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
BlockNames = Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_BLOCKS)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
TransferId = Annotated[str, Meta(min_length=16, max_length=64, pattern=r"^[0-9a-zA-Z_-]+\Z")]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Count = Annotated[int, Meta(ge=0, le=1 << 32)]
Stamp = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # CLOCK_MONOTONIC of the sender's host, nanoseconds
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
GpuId = Annotated[str, Meta(max_length=64)]  # UUID, the same for every process of a host; empty: host memory
PublicKey = Annotated[str, Meta(max_length=40)]  # CURVE, Z85; empty: none
ShardCount = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
Shard = Annotated[int, Meta(ge=0, lt=MAX_SHARDS)]
Layout = Annotated[bytes, Meta(max_length=KEY_BYTES)]  # fingerprint of a KV layout; empty: of none
FieldName = Annotated[str, Meta(pattern=r"^[a-z_]{2,32}\Z")]
LayerCount = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
MAX_SCHEMES = 32
DIGEST_BYTES = 8  # xxh3 of 64 bits, as `pdx.memory.digest` writes it

Schemes = Annotated[list[SchemeName], Meta(max_length=MAX_SCHEMES)]
HostId = Annotated[str, Meta(max_length=64)]  # equal exactly on one running kernel
Layouts = Annotated[list[Layout], Meta(max_length=1024)]
Verdicts = Annotated[list[Verdict], Meta(max_length=MAX_VERDICTS)]


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all message bodies: a tagged msgpack array."""


Slots = Annotated[list[Slot], Meta(max_length=MAX_SLOTS)]


class EngineFacts(msgspec.Struct, array_like=True, frozen=True):
    """What an engine's own configuration adds to every request, and no request shows: told to the proxy."""

    max_model_len: Count  # tokens of prompt and answer together
    max_new_tokens: Count = 0  # no answer is longer, whatever a request asks for; 0: no such cap
    looks_back: bool = True  # tokens may depend on how many were generated before: penalties, logits processors, …


# ---- from a session to its node -----------------------------------------------------------------

Kind = Literal["scheduler", "worker", "client", "peer", "controller"]


class Hello(Message, frozen=True):
    """Attach this process, or this node as a peer. `engine` groups the processes of one engine; `shard` is the
    worker's rank. A peer says in which life it is (`epoch`), on which running kernel (`host`), by which channels it
    can write, and the KV `layouts` of its engines.
    """

    version: Count
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    kind: Kind
    name: Name = ""
    engine: Name = ""
    shard: Shard = 0
    role: Literal["prefill", "decode", "both"] = "both"
    url: Name = ""  # where the engine serves HTTP, told to the proxy
    layout: Layout = b""  # what its chunks mean
    shape: Annotated[dict[FieldName, Name], Meta(max_length=32)] = {}  # its fields, and more that is in keys, as text
    facts: EngineFacts | None = None
    gpu: GpuId = ""  # of a worker's KV cache: its chunks lie in the node's arena on that GPU, if there is one
    epoch: Number = 0
    host: HostId = ""
    schemes: Schemes = []
    layouts: Layouts = []


class Bye(Message, frozen=True):
    """Detach: this session writes nothing any more, now and ever, and maps nothing."""


class Ping(Message, frozen=True):
    """Heartbeat; `running` is the engine's number of unfinished requests, `degraded` what it did without since.

    `chunk_s`: how long the engine computes for the tokens of a chunk, `load_s`: how long it copies a chunk into its KV
    cache, as its worker has measured; 0: not known.
    `keyed`: the fingerprint that the engine makes keys with now; empty: that of its layout.
    """

    running: Count = 0
    degraded: Annotated[dict[Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")], Count], Meta(max_length=32)] = {}
    chunk_s: Seconds = 0.0
    load_s: Seconds = 0.0
    keyed: Layout = b""


class Admit(Message, frozen=True):
    """One request's question: what is there of `keys`, room for what is not, and where all of it is to go.

    The leading run that is there is leased for `lease_s` (0: no lease). Behind it room is granted for the chunks that
    are missing, of `nbytes` each (0: no room is asked for); the workers of the asking engine, or the client itself,
    write them.
    `partial`: grant the leading ones that fit instead of all or nothing; where nothing is granted for lack of room,
    nothing is leased either.
    `tail_nbytes`: the last key is the tail of a prompt, of so many bytes. Room for it is granted to the part that
    writes, and to the part that keeps, which is in no transfer. It is found again by its blocks, or goes with its one
    reader.
    `blocks`: a name of 16 bytes for each full block of the prompt, from the first key's first block on, `chunk_blocks`
    of them to a chunk; `parent`: the key before the first one, or what stands for it. Behind the leading run, the chunk
    that begins with the most of the prompt's next blocks is leased, too.
    `transfer`: the handoff that the request has a `part` in. One that writes opens the transfer, and what is granted
    belongs to it. For one that reads, what is missing may still come; one that expects
    also waits for a transfer that the node has not heard of yet.
    `early`: of one that reads, it can copy slices while others are being filled, so that the answer need not wait for
    the last ones: it comes when those take no longer than copying the rest (`Ping.load_s`).
    `push_to`: a peer that gets all of `keys`, those that are here already and those that are granted, as they fill.
    `source`: a peer that is asked for what is missing here.
    `wait_s`: while what is missing may still come, the answer is kept back for so long; then it is `waiting`, and
    nothing is leased or granted.
    `request`: what the engine calls the request; the node can explain its answer to it afterwards (`Why`).

    From a peer: room for what it has, or is filling. `layout`: of these chunks; a process has said its own when it
    attached. `wait_s`: how long it may wait for room for all of it. `want`: the number of the `Push` that this answers.
    """

    keys: Keys
    nbytes: Bytes = 0
    layers: LayerCount = 1
    shards: ShardCount = 1
    lease_s: Seconds = 0.0
    tail_nbytes: Bytes = 0
    partial: bool = False
    transfer: TransferId | None = None
    part: Literal["reads", "writes", "expects", "keeps"] = "reads"
    push_to: Name = ""
    source: Name = ""
    wait_s: Seconds = 0.0
    hints: Hints = Hints("")
    layout: Layout = b""
    want: Number = 0
    blocks: BlockNames = b""
    chunk_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    parent: Annotated[bytes, Meta(max_length=16)] = b""
    request: Name = ""
    early: bool = False

    @property
    def writes_tail(self) -> bool:
        """Whether the last key is a tail that this request itself writes."""
        return self.tail_nbytes > 0 and self.part in ("writes", "keeps")

    @property
    def sought(self) -> int:
        """How many leading keys may come from elsewhere: not the tail that this request itself writes."""
        return len(self.keys) - self.writes_tail

    @property
    def writes(self) -> TransferId | None:
        """The transfer that what is granted belongs to."""
        return self.transfer if self.part == "writes" else None

    def names(self, index: int) -> bytes:
        """Of the full blocks behind the first `index` keys, as many as a chunk has; empty: not told."""
        width = self.chunk_blocks * KEY_BYTES
        return self.blocks[index * width : (index + 1) * width]

    def before(self, index: int) -> bytes:
        """The key that leads up to `keys[index]`, or to what is behind the last one."""
        return self.keys[index - 1] if index else self.parent

    @property
    def awaits(self) -> TransferId | None:
        """The transfer that may bring what is missing."""
        return self.transfer if self.part != "writes" else None


class Expect(Message, frozen=True):
    """The engine's `request` waits for its turn and will ask for these `keys`, in each of so many shards: what of them
    is in a tier below is loaded ahead, and what is here is evicted last. Over when it asks (`Admit.request`); without
    keys: it is over before that, and what is being loaded for it alone is given up.

    `Done.count` is 1 if it is heeded.
    """

    request: Name
    keys: Keys = []
    shards: ShardCount = 1


class Push(Message, frozen=True):
    """Copy chunks to a peer; fields as in `Admit`. `Done.count` says how many of them go, or are on their way.

    From a process: sealed chunks, to `peer`. From a peer: to itself, the leading run of these keys and, of a
    `transfer`, also what is still being filled; a `Done` of 0 may take it back later.
    """

    keys: Keys
    peer: Name = ""
    shards: ShardCount = 1
    transfer: TransferId | None = None


class Fill(Message, frozen=True):
    """The sender has filled slices [first_layer, first_layer + layers) of these slots; optionally seal them.

    `Done.count` leaves out those whose reservation ended before: they are not sealed, and given back if `seal`.
    """

    slots: Slots
    first_layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)] = 0
    layers: LayerCount = 1
    seal: bool = False


class Abort(Message, frozen=True):
    """These slots will not be finished. From their writer: and will not be written any more.

    What is sealed or gone already is passed over. `unused`: from their owner, who never told a writer of them.
    """

    slots: Slots
    unused: bool = False


class Release(Message, frozen=True):
    """End a lease. From a peer: of what this `Admit` of it was granted it writes nothing more, now and ever.

    `complete`: all that was granted was written.
    `request`: it could not load what was leased for it, from chunk `failed_chunk` of its keys on, and computes that.
    """

    lease: Number
    complete: bool = False
    request: Name = ""
    failed_chunk: Count = 0


class Chosen(Message, frozen=True):
    """The peer will write by this scheme and no other of those it was welcomed to; before its first `Admit`."""

    scheme: SchemeName


class Renew(Message, frozen=True):
    """Let a lease run `lease_s` from now."""

    lease: Number
    lease_s: Seconds


class Pin(Message, frozen=True):
    """Keep these chunks, in each of so many shards, until unpinned (counted per chunk, not per caller)."""

    keys: Keys
    pinned: bool = True
    shards: ShardCount = 1


class Delete(Message, frozen=True):
    """Forget these chunks; leased ones disappear from lookup now and are freed with their last lease."""

    keys: Keys


class Advise(Message, frozen=True):
    """An application says something of the future of `keys`, in each of so many shards, or, without keys, of what the
    last request of `hints.session` used. Of another tenant (`hints.salt`) nothing is found by its name. `Advised`.

    From a controller: of chunks in the node's first arena.
    """

    hints: Hints
    keys: Keys = []
    shards: ShardCount = 1


class Cancel(Message, frozen=True):
    """Give up a transfer: its unsealed slots are aborted and whoever waits for it stops waiting.

    From a peer: it was to push the transfer, and gave it up before it asked for room.
    """

    transfer: TransferId


class Mark(Message, frozen=True):
    """A moment in a transfer's timeline, as seen by the sender (see `pdx.telemetry.timeline` for the events)."""

    transfer: TransferId
    event: Annotated[str, Meta(max_length=32)]
    at_ns: Stamp
    nbytes: Bytes = 0
    tokens: Count = 0


class Status(Message, frozen=True):
    """Ask for a `NodeStatus`."""


class Why(Message, frozen=True):
    """Ask why chunks of the last requests whose name contains `request` were hits or not: an `Explained`."""

    request: Name = ""


# ---- from a controller to a node ----------------------------------------------------------------

JobId = Annotated[str, Meta(max_length=64, pattern=r"^([0-9a-f]+-[0-9]+)?\Z")]  # the node's epoch, and a number
CodecName = Annotated[str, Meta(max_length=16, pattern=r"^[a-z0-9]*\Z")]
MAX_LISTED = 1_000
MAX_MODELS = 256


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
    its policy. The answer is an `Effect`."""

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


# ---- from a node to an attached process ---------------------------------------------------------


class Welcome(Message, frozen=True):
    """Attached. A process maps `arena_path`; every slot of this node is in there while `epoch` stands.

    If `gpu` is not empty, that file has the tables alone; who needs the data asks at the socket `handover` for it
    and shows this session's secret `ticket` (`pdx.cuda.handover`).

    A peer writes to `regions`, one per scheme that both have, and to `probe`, a slot that is there to try them out.
    The answer to a hello, and to that answer.
    """

    epoch: Number
    pid: Count
    arena_path: Name = ""
    arena_bytes: Bytes = 0
    gpu: GpuId = ""
    handover: Name = ""
    ticket: Annotated[bytes, Meta(max_length=16)] = b""
    version: Count = VERSION
    name: Name = ""
    host: HostId = ""
    regions: Annotated[list[RemoteRegion], Meta(max_length=MAX_SCHEMES)] = []
    probe: Slot | None = None
    layouts: Layouts = []


class Admitted(Message, frozen=True):
    """`slots` holds hits x shards slots, chunk-major, under `lease`.

    `granted` holds indices into `keys`; `granted_slots` holds len(granted) x shards slots, chunk-major. A key behind
    the hits that is not `granted` is there or being filled, or (if `full`) found no room.
    `waiting`: what is missing may still come; `full` without `granted`: there was no room for all. Either way nothing
    is held, and the slots of the hits are left out.
    `part_blocks`: behind the hits, `slots` has a further chunk, of which this many leading blocks are the prompt's.
    `by_layer`: slices are copied on as they are filled, so the node wants to hear of layers before all are. Otherwise
    one `Fill` that seals is enough.
    `filling`: some of the hits are still being filled, as the arena says of each (`Arena.filled_slices`).
    `verdicts`: what became of `Admit.hints`, for each field that says something.
    """

    hits: Count = 0
    slots: Slots = []
    lease: Number = 0
    waiting: bool = False
    granted: Annotated[list[Count], Meta(max_length=MAX_KEYS)] = []
    granted_slots: Slots = []
    full: bool = False
    by_layer: bool = False
    part_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    filling: bool = False
    verdicts: Verdicts = []


class Done(Message, frozen=True):
    """The request was carried out on `count` chunks or leases."""

    count: Count = 0


class Advised(Message, frozen=True):
    """What became of an `Advise`, for each field of its hints that says something."""

    verdicts: Verdicts = []


class Refused(Message, frozen=True):
    """The request was not carried out; `error` is the name of a class in `pdx.errors`.

    To a peer, of an `Admit`: nothing of it is wanted, also if room was granted before; the peer answers `Release` when
    nothing of it is under way. Of none: the connection is over.
    """

    error: Annotated[str, Meta(max_length=64)]
    text: Annotated[str, Meta(max_length=1024)]

    @staticmethod
    def of(error: Exception) -> Refused:
        """That error, told."""
        return Refused(type(error).__name__, str(error)[:1024])


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
    """One job of a node, or (`job` empty) what it would be. `state` "failed" and `why` go together; a job that was
    cancelled, or has failed, says how much it has done before that."""

    job: JobId
    verb: Annotated[str, Meta(max_length=16)]
    state: Literal["planned", "running", "done", "failed", "cancelled"]
    chunks: Count  # of one shard each: all there are to do …
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


class AttachedStatus(msgspec.Struct, frozen=True):
    """One attached process, as `pdx node --status` shows it."""

    pid: int
    kind: str
    name: str
    engine: str
    shard: int
    role: str
    url: str
    running: int
    silent_s: float
    unshared: str = ""  # with which engine of its model it cannot share chunks, and why
    facts: dict[str, int | bool] = {}  # `EngineFacts` by name; empty: it has told none


class PeerStatus(msgspec.Struct, frozen=True):
    """One peer: the connection to it, and what goes over it."""

    name: str
    address: str
    state: str  # of the connection to it
    channel: str  # scheme in use, empty: none yet
    rates: dict[str, float]  # measured by the probe, GB/s by scheme
    pushes: int  # to it, under way
    landing: int  # from it, under way
    sent_bytes: int
    landed_bytes: int
    why: str  # it is not ready


class ArenaStatus(msgspec.Struct, frozen=True):
    """One arena of the node."""

    gpu: str  # UUID of the GPU that it is on; empty: host memory
    total_bytes: int
    free_bytes: int


COUNTING = "counting the files"  # the state of a disk whose index is not complete yet


class TierStatus(msgspec.Struct, frozen=True):
    """One tier below the arenas. `used_bytes` count what is being written and removed, too; 0: not known, as of a store
    that others use as well. `state`: "ok", or what is the matter; `is_up`: it answers all the same.

    What follows is counted since the node started, for this tier alone. Chunks are those of one shard, but for `hits`,
    `misses` and `dropped`, which count keys.
    """

    name: str
    place: str
    chunks: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0
    state: str = "ok"
    copies: int = 0  # under way, or waiting for their turn
    load_gb_s: float = 0.0  # as last measured; 0: not yet
    store_gb_s: float = 0.0
    is_up: bool = True
    hits: int = 0  # chunks that a request found, for the first time since they came from here
    misses: int = 0  # first chunks that a request lacked, or got from a tier below this one
    loads: int = 0  # chunks that were read …
    stores: int = 0  # … and written
    loaded_bytes: int = 0
    stored_bytes: int = 0
    dropped: int = 0  # chunks that were not stored: the tier did not keep up, or took none
    errors: int = 0  # calls that failed, and what was not the chunk that it should be
    read_bytes: int = 0  # for the loaded bytes: fewer where chunks are encoded …
    written_bytes: int = 0  # … and for the stored ones


class NodeStatus(Message, frozen=True):
    """Everything `pdx node --status` shows."""

    name: Name
    epoch: Number
    pid: Count
    uptime_s: float
    arena_bytes: int
    free_bytes: int
    chunks: dict[str, int]  # by state
    chunk_bytes: dict[str, int]  # by state
    leases: int
    pins: int
    transfers: int
    attached: list[AttachedStatus]
    counters: dict[str, int]
    listen: str = ""
    peers: list[PeerStatus] = []
    gpu: str = ""  # UUID of the GPU that the arena is on; empty: host memory
    mapped: int = 0  # blocks of device memory that the node's process has mapped, its own included
    arenas: list[ArenaStatus] = []  # the first is the one that peers write to
    pinned_bytes: int = 0  # of chunks with a pin: never evicted, whatever became of the process that pinned them
    tiers: list[TierStatus] = []  # below the arenas, the fastest first


_Keep = Release | Renew | Pin | Delete
_Look = Find | List | Jobs | Models | Status | Why
Verb = _Look | Move | Clear | PinIn | Recode | Evict | Verify | EndJob | Advise
Ask = Hello | Bye | Ping | Expect | Admit | Push | Fill | Abort | _Keep | Cancel | Mark | Chosen | Settle | Verb
Outcome = Found | Effect | JobStatus | JobList | Listing | ModelList | NodeStatus | Explained | Advised | Refused
Answer = Welcome | Admitted | Done | Outcome


class ToNode(msgspec.Struct, array_like=True, frozen=True):
    """Envelope: `seq` grows by at least one per message of a connection; `reply` asks for an answer."""

    seq: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    reply: bool
    body: Ask


class FromNode(msgspec.Struct, array_like=True, frozen=True):
    """Envelope: the answer to the message `seq`."""

    seq: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    body: Answer


_ENGINE: frozenset[type[Message]] = frozenset({Bye, Ping, Fill, Abort, Mark})
_REQUESTS: frozenset[type[Message]] = frozenset(
    {Expect, Admit, Push, Release, Renew, Pin, Delete, Advise, Cancel, Status, Why}
)
# What each kind of session may say once it is attached. A peer fills by its writes (`Landed`).
RIGHTS: dict[Kind, frozenset[type[Message]]] = {
    "worker": _ENGINE,
    "scheduler": _ENGINE - {Fill} | _REQUESTS,
    "client": _ENGINE | _REQUESTS,
    "peer": frozenset({Bye, Ping, Chosen, Admit, Release, Push, Cancel, Settle}),
    "controller": frozenset({Bye, Ping, *get_args(Verb)}),
}


# ---- between two nodes --------------------------------------------------------------------------

_Said = Hello | Chosen | Ping | Bye | Admit | Release | Push | Cancel | Settle
PeerBody = _Said | Welcome | Refused | Admitted | Done | Found
PEER_ANSWERS = frozenset({Admitted, Done, Refused, Found})


class PeerFrame(msgspec.Struct, array_like=True, frozen=True):
    """Envelope: `seq` grows by at least one per message and direction of a connection.

    `about`: the number that its asker gave to an `Admit` or a `Push`, in that message and in the answers to it.
    """

    seq: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    about: Number
    body: PeerBody


class Slices(msgspec.Struct, array_like=True, frozen=True):
    """Slices [first_layer, first_layer + layers) of one slot have landed; a digest each, or none at all."""

    offset: Bytes
    generation: Number
    first_layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
    layers: LayerCount
    digests: Annotated[bytes, Meta(max_length=MAX_LAYERS * DIGEST_BYTES)] = b""


class Landed(msgspec.Struct, array_like=True, frozen=True):
    """What a peer fills: the notification of one write, for its `Admit` of this number. 0 is the probe, which fills
    nothing."""

    admit: Number
    slices: Annotated[list[Slices], Meta(max_length=4096)]


# ---- between a node and the proxy ---------------------------------------------------------------


class EngineReport(msgspec.Struct, array_like=True, frozen=True):
    """One engine attached to the reporting node."""

    engine: Name
    role: Literal["prefill", "decode", "both"]
    url: Name
    running: Count
    facts: EngineFacts | None = None  # not known: nothing may be taken for granted
    layout: Layout = b""  # see `Model` …
    shape: Annotated[dict[FieldName, Name], Meta(max_length=32)] = {}


class MarkReport(msgspec.Struct, array_like=True, frozen=True):
    """One moment of a transfer's timeline; `engine` saw it; empty: the node itself."""

    transfer: TransferId
    event: Annotated[str, Meta(max_length=32)]
    at_ns: Stamp
    nbytes: Bytes
    tokens: Count
    engine: Name


class NodeReport(Message, frozen=True):
    """Node to proxy, every second and at once when engines come or go: registration and heartbeat in one.

    `listen` is where peers reach the node, `public_key` its CURVE key (Z85), both empty where it has none. `host` is
    equal exactly on one running kernel; `sent_ns` is the node's clock, so that the proxy can compare marks of hosts.
    """

    version: Count
    node: Name
    epoch: Number
    arena_bytes: Bytes
    free_bytes: Bytes
    engines: Annotated[list[EngineReport], Meta(max_length=1024)]
    marks: Annotated[list[MarkReport], Meta(max_length=4096)]
    listen: Name = ""
    public_key: PublicKey = ""
    host: Annotated[str, Meta(max_length=64)] = ""
    sent_ns: Stamp = 0


class PeerEntry(msgspec.Struct, array_like=True, frozen=True):
    """One node as the proxy knows it."""

    name: Name
    address: Name
    public_key: PublicKey = ""


class Arriving(Message, frozen=True):
    """Proxy to the nodes of the engines that it has chosen: a request of this session (`Hints.session`) comes to them.
    What the last one used is loaded ahead and evicted last."""

    session: Annotated[str, Meta(min_length=1, max_length=64)]
    salt: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""  # of its tenant (`Hints.salt`)


class Follow(Message, frozen=True):
    """Proxy to a node: tell of all chunks that come into a tier or go, behind change `seq` of the node's life `epoch`;
    if that is too long ago, what is where first. `stream` is drawn by the proxy: what was told under another is void.

    Said again with each `frame` of the stream that came: so many are here, and a few more may be sent. 0: of none.
    """

    stream: Number
    epoch: Number = 0
    seq: Number = 0
    frame: Number = 0


class PeerList(Message, frozen=True):
    """Proxy to nodes, whenever it changes: the nodes that report to it. Believed only as far as a node's own roster
    file allows; without one, for addresses on this host."""

    peers: Annotated[list[PeerEntry], Meta(max_length=1024)]


class Run(msgspec.Struct, array_like=True, frozen=True):
    """These keys, one after the other, came into a tier, or they are not there any more."""

    tier: Name
    is_stored: bool
    keys: Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_RUN_KEYS)]


class Changes(Message, frozen=True):
    """Node to proxy, as it was asked by `Follow`: one frame of the stream, the `frame`th. `telling` is another number
    where the node has begun the stream anew, because it had lost the proxy.

    `first`: what was told before is void, and what is where begins. `whole`: all of that has been told by now, and with
    it all changes up to `seq`.
    """

    stream: Number
    telling: Number
    frame: Number
    epoch: Number
    seq: Number
    runs: Annotated[list[Run], Meta(max_length=MAX_RUNS)]
    first: bool = False
    whole: bool = True


class Prefilled(Message, frozen=True):
    """Proxy to the nodes of a transfer: its prefill leg is over. A node that has not heard of it by now does not keep
    those waiting who expect it."""

    transfer: TransferId


class Order(Message, frozen=True):
    """A verb. Proxy to a node: of a controller that the proxy has let in. Controller to the proxy: for the node `node`.
    The answer is a `Reply` of this number, which its sender has chosen."""

    number: Number
    verb: Verb
    node: Name = ""


class Reply(Message, frozen=True):
    """Node to proxy, proxy to controller: what came of the `Order` of this number."""

    number: Number
    outcome: Outcome


ToProxy = NodeReport | Explained | Changes | Reply | Hello | Order | Ping | Bye
FromProxy = Arriving | Cancel | Follow | Order | PeerList | Prefilled | Why
ToController = Welcome | Refused | Reply | PeerList


_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)
_to_proxy: msgspec.msgpack.Decoder[ToProxy] = msgspec.msgpack.Decoder(ToProxy)
_from_proxy: msgspec.msgpack.Decoder[FromProxy] = msgspec.msgpack.Decoder(FromProxy)
_to_controller: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)
_peer = msgspec.msgpack.Decoder(PeerFrame)
_landed = msgspec.msgpack.Decoder(Landed)


def encode(message: ToNode | FromNode | PeerFrame | Landed | ToProxy | FromProxy | ToController) -> bytes:
    """One frame; of a `Landed` one notification, at most MAX_NOTIFY_BYTES if the sender keeps to few slices."""
    return _encoder.encode(message)


def decode_frame(decoder: msgspec.msgpack.Decoder[_T], frame: bytes, limit: int = MAX_FRAME_BYTES) -> _T:
    """One frame by its decoder.

    :raises ProtocolError: too long, or not what the decoder's type says.
    """
    if len(frame) > limit:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds the limit of {limit}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame of {len(frame)} bytes does not decode: {str(error)[:200]!r}") from error


def decode_to_node(frame: bytes) -> ToNode:
    """:raises ProtocolError: not a `ToNode` within bounds."""
    return decode_frame(_to_node, frame)


def decode_from_node(frame: bytes) -> FromNode:
    """:raises ProtocolError: not a `FromNode` within bounds."""
    return decode_frame(_from_node, frame)


def decode_to_proxy(frame: bytes) -> ToProxy:
    """:raises ProtocolError: nothing that a node or a controller may say to the proxy, within bounds."""
    return decode_frame(_to_proxy, frame)


def decode_from_proxy(frame: bytes) -> FromProxy:
    """:raises ProtocolError: not a `FromProxy` within bounds."""
    return decode_frame(_from_proxy, frame)


def decode_to_controller(frame: bytes) -> ToController:
    """:raises ProtocolError: nothing that the proxy says to a controller, within bounds."""
    return decode_frame(_to_controller, frame)


def decode_peer(frame: bytes) -> PeerFrame:
    """:raises ProtocolError: not a `PeerFrame` within bounds."""
    return decode_frame(_peer, frame)


def decode_landed(payload: bytes) -> Landed:
    """:raises ProtocolError: not a `Landed` within bounds."""
    return decode_frame(_landed, payload, limit=MAX_NOTIFY_BYTES)
