"""What processes say to a node, what it answers, and what nodes and proxies tell each other.

Wire format: msgpack arrays, coded by msgspec against the types below; every number, string and list is
bounded on decode, so a message that decodes is one the receiver can act on. One ZMQ frame is one envelope.
No I/O here. Tests decode the same bytes with the independent `msgpack` package.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError
from pdx.memory.keys import KEY_BYTES
from pdx.memory.slot import Slot

_T = TypeVar("_T")

VERSION = 3
MAX_FRAME_BYTES = 4 << 20
MAX_KEYS = 16_384  # four million tokens at 256 tokens per chunk
MAX_SHARDS = 1_024
MAX_LAYERS = 4_096
MAX_SLOTS = MAX_KEYS * 8  # in one answer

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
TransferId = Annotated[str, Meta(min_length=16, max_length=64, pattern=r"^[0-9a-zA-Z_-]+\Z")]
Name = Annotated[str, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=1 << 32)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 48)]
Stamp = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # CLOCK_MONOTONIC of the sender's host, nanoseconds
Handle = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]
GpuId = Annotated[str, Meta(max_length=64)]  # UUID, the same for every process of a host; empty: host memory
PublicKey = Annotated[str, Meta(max_length=40)]  # CURVE, Z85; empty: none
ShardCount = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
Shard = Annotated[int, Meta(ge=0, lt=MAX_SHARDS)]
Layout = Annotated[bytes, Meta(max_length=KEY_BYTES)]  # fingerprint of a KV layout; empty: of none
FieldName = Annotated[str, Meta(pattern=r"^[a-z_]{2,32}\Z")]
LayerCount = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all message bodies: a tagged msgpack array."""


Slots = Annotated[list[Slot], Meta(max_length=MAX_SLOTS)]


class EngineFacts(msgspec.Struct, array_like=True, frozen=True):
    """What an engine's own configuration adds to every request, and no request shows: told to the proxy."""

    max_model_len: Count  # tokens of prompt and answer together
    max_new_tokens: Count = 0  # no answer is longer, whatever a request asks for; 0: no such cap
    looks_back: bool = True  # tokens may depend on how many were generated before: penalties, logits processors, …


class Hints(msgspec.Struct, array_like=True, frozen=True):
    """What a request knows of the future of its chunks; the store may keep and evict by it."""

    session: Annotated[str, Meta(max_length=64)]  # requests of one session share their beginning; empty: none
    priority: Annotated[int, Meta(ge=0, le=9)] = 0  # more is more important
    reuse_s: Seconds = 0.0  # after which the chunks are expected to be wanted again; 0: not known


# ---- from an attached process to its node -------------------------------------------------------


class Hello(Message, frozen=True):
    """Attach this process. `engine` groups the processes of one engine; `shard` is the worker's rank."""

    version: Count
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    kind: Literal["scheduler", "worker", "client"]
    name: Name = ""
    engine: Name = ""
    shard: Shard = 0
    role: Literal["prefill", "decode", "both"] = "both"
    url: Name = ""  # where the engine serves HTTP, told to the proxy
    layout: Layout = b""  # what its chunks mean
    shape: Annotated[dict[FieldName, Name], Meta(max_length=32)] = {}  # the fields of that layout, as text
    facts: EngineFacts | None = None
    gpu: GpuId = ""  # of a worker's KV cache: its chunks lie in the node's arena on that GPU, if there is one


class Bye(Message, frozen=True):
    """Detach: this process maps nothing and writes nothing any more."""


class Ping(Message, frozen=True):
    """Heartbeat; `running` is the engine's number of unfinished requests, `degraded` what it did without since."""

    running: Count = 0
    degraded: Annotated[dict[Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")], Count], Meta(max_length=32)] = {}


class Admit(Message, frozen=True):
    """One request's question: what is there of `keys`, room for what is not, and where all of it is to go.

    The leading run that is there is leased for `lease_s` (0: no lease). Behind it room is granted for the chunks that
    are missing, of `nbytes` each (0: no room is asked for); the workers of `engine` (or the sender) write them.
    `partial`: grant the leading ones that fit instead of all or nothing; where nothing is granted for lack of room,
    nothing is leased either.
    `tail_nbytes`: the last key is the tail of a prompt, of so many bytes, never kept for reuse. Room for it is granted
    to the part that writes.
    `transfer`: the handoff that the request has a `part` in. One that writes opens the transfer, and what is granted
    belongs to it. For one that reads, what is missing may still come; one that expects
    also waits for a transfer that the node has not heard of yet.
    `push_to`: a peer that gets all of `keys`, those that are here already and those that are granted, as they fill.
    `source`: a peer that is asked for what is missing here.
    `wait_s`: while what is missing may still come, the answer is kept back for so long; then it is `waiting`, and
    nothing is leased or granted.
    """

    keys: Keys
    nbytes: Bytes = 0
    layers: LayerCount = 1
    shards: ShardCount = 1
    lease_s: Seconds = 0.0
    tail_nbytes: Bytes = 0
    partial: bool = False
    transfer: TransferId | None = None
    part: Literal["reads", "writes", "expects"] = "reads"
    push_to: Name = ""
    source: Name = ""
    wait_s: Seconds = 0.0
    hints: Hints = Hints("")

    @property
    def sought(self) -> int:
        """How many leading keys may come from elsewhere: not the tail that this request itself writes."""
        return len(self.keys) - (self.tail_nbytes > 0 and self.part == "writes")

    @property
    def writes(self) -> TransferId | None:
        """The transfer that what is granted belongs to."""
        return self.transfer if self.part == "writes" else None

    @property
    def awaits(self) -> TransferId | None:
        """The transfer that may bring what is missing."""
        return self.transfer if self.part != "writes" else None


class Push(Message, frozen=True):
    """Send these sealed chunks to a peer; fields as in `Admit`. `Done.count` says how many are here to be sent."""

    keys: Keys
    peer: Name
    shards: ShardCount = 1


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
    """End a lease."""

    lease: Handle


class Renew(Message, frozen=True):
    """Let a lease run `lease_s` from now."""

    lease: Handle
    lease_s: Seconds


class Pin(Message, frozen=True):
    """Keep these chunks, in each of so many shards, until unpinned (counted per chunk, not per caller)."""

    keys: Keys
    pinned: bool = True
    shards: ShardCount = 1


class Delete(Message, frozen=True):
    """Forget these chunks; leased ones disappear from lookup now and are freed with their last lease."""

    keys: Keys


class Cancel(Message, frozen=True):
    """Give up a transfer: its unsealed slots are aborted and whoever waits for it stops waiting."""

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


# ---- from a node to an attached process ---------------------------------------------------------


class Welcome(Message, frozen=True):
    """Attached. Map `arena_path`; every slot of this node is in there while `epoch` stands.

    If `gpu` is not empty, that file has the generations alone; who needs the data asks at the socket `handover` for it
    and shows this session's secret `ticket` (`pdx.cuda.handover`).
    """

    epoch: Handle
    pid: Count
    arena_path: Name
    arena_bytes: Bytes
    granule_bytes: Bytes
    gpu: GpuId = ""
    handover: Name = ""
    ticket: Annotated[bytes, Meta(max_length=16)] = b""


class Admitted(Message, frozen=True):
    """`slots` holds hits x shards slots, chunk-major, under `lease`.

    `granted` holds indices into `keys`; `granted_slots` holds len(granted) x shards slots, chunk-major. A key behind
    the hits that is not `granted` is there or being filled, or (if `full`) found no room.
    `waiting`: what is missing may still come; `full` without `granted`: there was no room for all. Either way nothing
    is held, and the slots of the hits are left out.
    `is_pushed`: slices are sent on as they are filled, so the node wants to hear of each layer. Otherwise one `Fill`
    that seals is enough.
    """

    hits: Count = 0
    slots: Slots = []
    lease: Handle = 0
    waiting: bool = False
    granted: Annotated[list[Count], Meta(max_length=MAX_KEYS)] = []
    granted_slots: Slots = []
    full: bool = False
    is_pushed: bool = False


class Done(Message, frozen=True):
    """The request was carried out on `count` chunks or leases."""

    count: Count = 0


class Refused(Message, frozen=True):
    """The request was not carried out; `error` is the name of a class in `pdx.errors`."""

    error: Annotated[str, Meta(max_length=64)]
    text: Annotated[str, Meta(max_length=1024)]

    @staticmethod
    def of(error: Exception) -> Refused:
        """That error, told."""
        return Refused(type(error).__name__, str(error)[:1024])


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
    """One peer: the link from here to there, and what goes over it."""

    name: str
    address: str
    state: str  # of the link by which this node writes to it
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


class DiskStatus(msgspec.Struct, frozen=True):
    """What a node has on its disk; `used_bytes` count what is being written and removed, too."""

    folder: str
    chunks: int
    used_bytes: int
    limit_bytes: int


class NodeStatus(Message, frozen=True):
    """Everything `pdx node --status` shows."""

    name: Name
    epoch: Handle
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
    disk: DiskStatus | None = None


Ask = Hello | Bye | Ping | Admit | Push | Fill | Abort | Release | Renew | Pin | Delete | Cancel | Mark | Status
Answer = Welcome | Admitted | Done | Refused | NodeStatus


class ToNode(msgspec.Struct, array_like=True, frozen=True):
    """Envelope: `seq` grows by at least one per message of a connection; `reply` asks for an answer."""

    seq: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    reply: bool
    body: Ask


class FromNode(msgspec.Struct, array_like=True, frozen=True):
    """Envelope: the answer to the message `seq`."""

    seq: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    body: Answer


# ---- between a node and the proxy ---------------------------------------------------------------


class EngineReport(msgspec.Struct, array_like=True, frozen=True):
    """One engine attached to the reporting node."""

    engine: Name
    role: Literal["prefill", "decode", "both"]
    url: Name
    running: Count
    facts: EngineFacts | None = None  # not known: nothing may be taken for granted


class MarkReport(msgspec.Struct, array_like=True, frozen=True):
    """One moment of a transfer's timeline; `who` is the kind of process that saw it."""

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
    epoch: Handle
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


class PeerList(Message, frozen=True):
    """Proxy to nodes, whenever it changes: the nodes that report to it. Believed only as far as a node's own roster
    file allows; without one, for addresses on this host."""

    peers: Annotated[list[PeerEntry], Meta(max_length=1024)]


class Prefilled(Message, frozen=True):
    """Proxy to the nodes of a transfer: its prefill leg is over. A node that has not heard of it by now does not keep
    those waiting who expect it."""

    transfer: TransferId


ToProxy = NodeReport
FromProxy = Cancel | PeerList | Prefilled


_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)
_to_proxy = msgspec.msgpack.Decoder(ToProxy)
_from_proxy: msgspec.msgpack.Decoder[FromProxy] = msgspec.msgpack.Decoder(FromProxy)


def encode(message: ToNode | FromNode | NodeReport | FromProxy) -> bytes:
    """One frame."""
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


def decode_to_proxy(frame: bytes) -> NodeReport:
    """:raises ProtocolError: not a `NodeReport` within bounds."""
    return decode_frame(_to_proxy, frame)


def decode_from_proxy(frame: bytes) -> FromProxy:
    """:raises ProtocolError: not a `FromProxy` within bounds."""
    return decode_frame(_from_proxy, frame)
