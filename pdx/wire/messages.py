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
from pdx.memory.slot import Bytes, Slot
from pdx.transports.channel import MAX_NOTIFY_BYTES, RemoteRegion, SchemeName
from pdx.wire.admit import Admit as Admit
from pdx.wire.admit import Admitted as Admitted
from pdx.wire.admit import Group as Group
from pdx.wire.admit import Groups
from pdx.wire.base import (
    DIGEST_BYTES,
    MAX_GROUPS,
    MAX_LAYERS,
    MAX_SCHEMES,
    MAX_SHARDS,
    Count,
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
    Shape,
    Shard,
    ShardCount,
    Slots,
    Stamp,
    TransferId,
)
from pdx.wire.hints import Seconds
from pdx.wire.moved import FindMoved as FindMoved
from pdx.wire.moved import Moved as Moved
from pdx.wire.verbs import VERBS, AnyAnswer, AnyVerb, Found

_T = TypeVar("_T")

VERSION = 14
MAX_FRAME_BYTES = 4 << 20


class EngineFacts(msgspec.Struct, array_like=True, frozen=True):
    """What an engine's own configuration adds to every request, and no request shows: told to the proxy."""

    max_model_len: Count  # tokens of prompt and answer together
    max_new_tokens: Count = 0  # no answer is longer, whatever a request asks for; 0: no such cap
    looks_back: bool = True  # tokens may depend on how many were generated before: penalties, logits processors, …
    stops_short: bool = False  # prefill legs leave the prompt's last token to decode legs, and have no first token


# ---- from a session to its node -----------------------------------------------------------------


class Hello(Message, frozen=True):
    """Attach this process, or this node as a peer. `engine` groups the processes of one engine; a worker writes
    `shards` shards of its chunks, from `shard` on (0: another one writes what it reads); those of a second pipeline
    stage follow those of the first. A peer says its life (`epoch`), its running kernel (`host`), its channels and the
    `layouts` of its engines."""

    version: Count
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    kind: Kind
    name: Name = ""
    engine: Name = ""
    shard: Shard = 0
    shards: Annotated[int, Meta(ge=0, le=MAX_SHARDS)] = 1
    role: Literal["prefill", "decode", "both"] = "both"
    url: Name = ""  # where the engine serves HTTP, told to the proxy
    layout: Layout = b""  # what its chunks mean
    shape: Shape = {}  # its fields, those that all cache groups have alike, and more that is in keys, as text
    facts: EngineFacts | None = None
    gpu: GpuId = ""  # of a worker's KV cache: its chunks lie in the node's arena on that GPU, if there is one
    epoch: Number = 0
    host: HostId = ""
    schemes: Schemes = []
    layouts: Layouts = []
    groups: Annotated[list[Shape], Meta(max_length=MAX_GROUPS)] = []  # of several cache groups the fields of each


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


class Expect(Message, frozen=True):
    """The engine's `request` waits for its turn and will ask for these `keys`, in each of so many shards: what of them
    is in a tier below is loaded ahead, and what is here is evicted last. Over when it asks (`Admit.request`); without
    keys: it is over before that, and what is being loaded for it alone is given up. `groups`: of the keys of several
    cache groups, as in `Admit`; loaded is what the longest part of the prompt needs that memory and tiers have.

    `Done.count` is 1 if it is heeded.
    """

    request: Name
    keys: Keys = []
    shards: ShardCount = 1
    groups: Groups = []


class Push(Message, frozen=True):
    """Copy chunks to a peer; fields as in `Admit`. `Done.count` says how many of them go, or are on their way.

    From a process: sealed chunks, to `peer`. From a peer: to itself, the leading run of these keys and, of a
    `transfer`, also what is still being filled; a `Done` of 0 may take it back later. `groups`: from a peer, of the
    keys of several cache groups, as in `Admit`, what the longest part of the prompt needs that is there. `within_s`:
    from a peer, what its own tiers load in that time goes, too; 0: what is in memory. `dry_run`: nothing is copied,
    and `Done.count` says how many leading chunks could be.
    """

    keys: Keys
    peer: Name = ""
    shards: ShardCount = 1
    transfer: TransferId | None = None
    groups: Groups = []
    dry_run: bool = False
    within_s: Seconds = 0.0


class Fill(Message, frozen=True):
    """The sender has filled slices [first_layer, first_layer + layers) of these slots; optionally seal them.
    `Done.count` leaves out those whose reservation ended before: they are not sealed, and given back if `seal`.
    `blended`: of documents, and this share of what was known of them was computed again (`pdx.blend`)."""

    slots: Slots
    first_layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)] = 0
    layers: LayerCount = 1
    seal: bool = False
    blended: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None


class Abort(Message, frozen=True):
    """These slots will not be finished. From their writer: and will not be written any more. What is sealed or gone
    already is passed over. `unused`: from their owner, who never told a writer of them."""

    slots: Slots
    unused: bool = False


class Release(Message, frozen=True):
    """End a lease. From a peer: of what this `Admit` of it was granted it writes nothing more, now and ever.

    `complete`: all that was granted was written.
    `request`: it could not load what was leased for it, from chunk `failed_chunk` of its prompt on, and computes that.
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
    """Attached. A process maps `arena_path`; every slot of this node is in there while `epoch` stands. `pid`: 0 where
    the process is in a PID namespace below the node's, which has another number there or none.

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
_Found = Expect | Admit | FindMoved
Ask = Hello | Bye | Ping | _Found | Push | Fill | Abort | _Keep | Cancel | Mark | Chosen | Settle | AnyVerb
Outcome = AnyAnswer | Refused
Answer = Welcome | Admitted | Moved | Done | Outcome


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
    "scheduler": _ENGINE - {Fill} | _REQUESTS | {FindMoved} | _verbs("scheduler"),
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
