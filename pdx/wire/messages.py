"""What sessions say to a node, and what it answers. Between a node and the proxy: `pdx.wire.proxy`.

A session is a process of this host or a peer, another node. Both speak one protocol: they attach, ask for leases and
room, fill, give back, push; `RIGHTS` says which kind of session may say what. A node and its peer are each a session
of the other, over one connection.

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
from pdx.memory.slot import Bytes, Slot
from pdx.transports.channel import MAX_NOTIFY_BYTES, RemoteRegion, SchemeName
from pdx.wire.base import (
    DIGEST_BYTES,
    MAX_BLOCKS,
    MAX_KEYS,
    MAX_LAYERS,
    MAX_SCHEMES,
    BlockNames,
    Count,
    FieldName,
    GpuId,
    HostId,
    Keys,
    Kind,
    LayerCount,
    Layout,
    Layouts,
    Message,
    Name,
    Number,
    Schemes,
    Shard,
    ShardCount,
    Slots,
    Stamp,
    TransferId,
    Verdicts,
)
from pdx.wire.hints import Hints, Seconds
from pdx.wire.verbs import VERBS, AnyAnswer, AnyVerb, Found

_T = TypeVar("_T")

VERSION = 8
MAX_FRAME_BYTES = 4 << 20


class EngineFacts(msgspec.Struct, array_like=True, frozen=True):
    """What an engine's own configuration adds to every request, and no request shows: told to the proxy."""

    max_model_len: Count  # tokens of prompt and answer together
    max_new_tokens: Count = 0  # no answer is longer, whatever a request asks for; 0: no such cap
    looks_back: bool = True  # tokens may depend on how many were generated before: penalties, logits processors, …


# ---- from a session to its node -----------------------------------------------------------------


class Hello(Message, frozen=True):
    """Attach this process, or this node as a peer. `engine` groups the processes of one engine; `shard` is the worker's
    rank. A peer says its life (`epoch`), its running kernel (`host`), its channels and the `layouts` of its engines."""

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
    cache, as measured; 0: not known. `keyed`: the fingerprint that it makes keys with now; empty: its layout's."""

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
    `Done.count` leaves out those whose reservation ended before: they are not sealed, and given back if `seal`."""

    slots: Slots
    first_layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)] = 0
    layers: LayerCount = 1
    seal: bool = False


class Abort(Message, frozen=True):
    """These slots will not be finished. From their writer: and will not be written any more. What is sealed or gone
    already is passed over. `unused`: from their owner, who never told a writer of them."""

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


class Settle(Message, frozen=True):
    """From a peer, of chunks that it has pushed here: store them in this tier of the node's, and let memory be free of
    those that no request has found here; an empty name: they stay in memory. The answer is a `Found`, at once: it is
    asked again until the tier has them."""

    keys: Keys
    shards: ShardCount = 1
    tier: Name = ""


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


class Cancel(Message, frozen=True):
    """Give up a transfer: its unsealed slots are aborted and whoever waits for it stops waiting.

    From a peer: it was to push the transfer, and gave it up before it asked for room.
    """

    transfer: TransferId


class Mark(Message, frozen=True):
    """A moment in a transfer's timeline (see `pdx.telemetry.timeline` for the events), as the sender saw it. Told on to
    the proxy by its node with the name of the `engine`; empty: the node itself saw it."""

    transfer: TransferId
    event: Annotated[str, Meta(max_length=32)]
    at_ns: Stamp
    nbytes: Bytes = 0
    tokens: Count = 0
    engine: Name = ""


# ---- from a node to an attached process ---------------------------------------------------------


class Welcome(Message, frozen=True):
    """Attached. A process maps `arena_path`; every slot of this node is in there while `epoch` stands.

    If `gpu` is not empty, that file has the tables alone; who needs the data asks at the socket `handover` for it
    and shows this session's secret `ticket` (`pdx.node.handover`).

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
    """`slots` holds hits x shards slots, chunk-major, under `lease`, which ends after `lease_s`: no more than was
    asked for.

    `granted` holds indices into `keys`; `granted_slots` holds len(granted) x shards slots, chunk-major. A key behind
    the hits that is not `granted` is there or being filled, or (if `full`) found no room.
    `waiting`: what is missing may still come; `full` without `granted`: there was no room for all. Either way nothing
    is held, and the slots of the hits are left out.
    `part_blocks`: behind the hits, `slots` has a further chunk, of which this many leading blocks are the prompt's.
    `by_layer`: slices are copied on as they are filled, so the node wants to hear of layers before all are. Otherwise
    one `Fill` that seals is enough.
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
    verdicts: Verdicts = []
    lease_s: Seconds = 0.0


class Done(Message, frozen=True):
    """The request was carried out on `count` chunks or leases."""

    count: Count = 0


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


_Keep = Release | Renew | Pin | Delete
Ask = Hello | Bye | Ping | Expect | Admit | Push | Fill | Abort | _Keep | Cancel | Mark | Chosen | Settle | AnyVerb
Outcome = AnyAnswer | Refused
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
_REQUESTS: frozenset[type[Message]] = frozenset({Expect, Admit, Push, Release, Renew, Pin, Delete, Cancel})


def _verbs(kind: Kind) -> frozenset[type[Message]]:
    return frozenset(verb for verb in VERBS.values() if kind in verb.said_by)


# What each kind of session may say once it is attached. A peer fills by its writes (`Landed`).
RIGHTS: dict[Kind, frozenset[type[Message]]] = {
    "worker": _ENGINE,
    "scheduler": _ENGINE - {Fill} | _REQUESTS | _verbs("scheduler"),
    "client": _ENGINE | _REQUESTS | _verbs("client"),
    "peer": frozenset({Bye, Ping, Chosen, Admit, Release, Push, Cancel, Settle}),
    "controller": _verbs("controller") | {Bye, Ping},
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


_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)
_peer = msgspec.msgpack.Decoder(PeerFrame)
_landed = msgspec.msgpack.Decoder(Landed)


def encode(message: msgspec.Struct) -> bytes:
    """One frame; of a `Landed` one notification, at most MAX_NOTIFY_BYTES if the sender keeps to few slices."""
    return _encoder.encode(message)


def decode_frame(decoder: msgspec.msgpack.Decoder[_T], frame: bytes, limit: int = MAX_FRAME_BYTES) -> _T:
    """One frame by its decoder. :raises ProtocolError: too long, or not what the decoder's type says."""
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


def decode_peer(frame: bytes) -> PeerFrame:
    """:raises ProtocolError: not a `PeerFrame` within bounds."""
    return decode_frame(_peer, frame)


def decode_landed(payload: bytes) -> Landed:
    """:raises ProtocolError: not a `Landed` within bounds."""
    return decode_frame(_landed, payload, limit=MAX_NOTIFY_BYTES)
