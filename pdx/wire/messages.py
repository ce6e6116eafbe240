"""The messages of sessions to a node, and its answers. Between a node and the proxy: `pdx.wire.proxy`.

A session is a process of this host, or a peer: another node. Both speak one protocol: they attach, ask for leases and
room, fill, release, push; `RIGHTS` says which kind of session may send what. A node and its peer are each a session of
the other, over one connection.

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
    """What an engine's own configuration adds to every request, not visible in any: reported to the proxy."""

    max_model_len: Count  # tokens of prompt and answer together
    max_new_tokens: Count = 0  # no answer is longer, whatever a request asks for; 0: no such cap
    looks_back: bool = True  # tokens may depend on how many were generated before: penalties, logits processors, …
    stops_short: bool = False  # prefill legs leave the prompt's last token to decode legs, and have no first token


# ---- from a session to its node -----------------------------------------------------------------


class Hello(Message, frozen=True):
    """Attach this process, or this node as a peer. `engine` groups the processes of one engine; a worker writes
    `shards` shards of its chunks, from `shard` on (0: another worker writes what it reads); the shards of a second
    pipeline stage follow those of the first. A peer gives its life (`epoch`), its host's running kernel (`host`), its
    channels and the `layouts` of its engines."""

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
    shape: Shape = {}  # as text: the fields that all cache groups share, and more that keys depend on
    facts: EngineFacts | None = None
    gpu: GpuId = ""  # of a worker's KV cache: its chunks lie in the node's arena on that GPU, if there is one
    epoch: Number = 0
    host: HostId = ""
    schemes: Schemes = []
    layouts: Layouts = []
    groups: Annotated[list[Shape], Meta(max_length=MAX_GROUPS)] = []  # with several cache groups, the fields of each


class Bye(Message, frozen=True):
    """Detach: this session will never write again, and maps nothing."""


class Ping(Message, frozen=True):
    """Heartbeat; `running` is the engine's number of unfinished requests, `degraded` counts what it did without PDX
    since. `chunk_s`: the measured time to compute a chunk's tokens, `load_s`: to copy a chunk into the KV cache; 0: not
    known. `keyed`: the fingerprint that it makes keys with now; empty: its layout's."""

    running: Count = 0
    degraded: Annotated[dict[Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")], Count], Meta(max_length=32)] = {}
    chunk_s: Seconds = 0.0
    load_s: Seconds = 0.0
    keyed: Layout = b""


class Expect(Message, frozen=True):
    """The engine's `request` waits for its turn and will ask for these `keys`, in each of so many shards: those in a
    tier below are loaded ahead, those here are evicted last. This ends when it asks (`Admit.request`), or by a message
    without keys, which also gives up loads for it alone. `groups`: for keys of several cache groups, as in `Admit`;
    then the chunks for the longest part of the prompt that memory and tiers have are loaded.

    `Done.count` is 1 if it is heeded.
    """

    request: Name
    keys: Keys = []
    shards: ShardCount = 1
    groups: Groups = []


class Push(Message, frozen=True):
    """Copy chunks to a peer; fields as in `Admit`. `Done.count` says how many of them are sent, or in flight.

    From a process: sealed chunks, to `peer`. From a peer: to itself, the leading run of these keys and, of a
    `transfer`, also what is still being filled; a later `Done` of 0 may withdraw that. `groups`: from a peer, for keys
    of several cache groups, as in `Admit`: the chunks for the longest part of the prompt that is there. `within_s`:
    from a peer: also what this node's own tiers load in that time; 0: only what is in memory. `dry_run`: nothing is
    copied, and `Done.count` says how many leading chunks could be.
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
    `blended`: the chunks are blended from documents, and this share of their known KV was recomputed (`pdx.blend`)."""

    slots: Slots
    first_layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)] = 0
    layers: LayerCount = 1
    seal: bool = False
    blended: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None


class Abort(Message, frozen=True):
    """These slots will not be finished; from their writer: nor written any more. Slots that are sealed or gone are
    skipped. `unused`: from their owner, which has never told a writer of them."""

    slots: Slots
    unused: bool = False


class Release(Message, frozen=True):
    """End a lease. From a peer: it will never write again to what its `Admit` of this number was granted.

    `complete`: everything granted was written. `request`: this one could not load what was leased for it, from chunk
    `failed_chunk` of its prompt on, and computes that.
    """

    lease: Number
    complete: bool = False
    request: Name = ""
    failed_chunk: Count = 0


class Chosen(Message, frozen=True):
    """The peer will write only by this scheme, of those in its `Welcome`. Sent before its first `Admit`."""

    scheme: SchemeName


class Settle(Message, frozen=True):
    """From a peer, about chunks that it has pushed here: store them in this tier of the node's, and free the memory of
    those that no request has found here; an empty name: they stay in memory. Answered at once, by a `Found`: the peer
    asks again until the tier has them."""

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
    """Give up a transfer: its unsealed slots are aborted, and requests that wait for it stop waiting.

    From a peer: it was to push the transfer, and gave it up before it asked for room.
    """

    transfer: TransferId


class Mark(Message, frozen=True):
    """A moment in a transfer's timeline (see `pdx.telemetry.timeline` for the events), as the sender saw it. The node
    forwards it to the proxy with the name of the `engine`; empty: the node itself saw it."""

    transfer: TransferId
    event: Annotated[str, Meta(max_length=32)]
    at_ns: Stamp
    nbytes: Bytes = 0
    tokens: Count = 0
    engine: Name = ""


# ---- from a node to an attached process ---------------------------------------------------------


class Welcome(Message, frozen=True):
    """Attached. A process maps `arena_path`, which has every slot of this node as long as `epoch` holds. `pid`: 0 if
    the process is in a PID namespace below the node's, where the node has another number or none.

    If `gpu` is not empty, that file has only the tables; a process that needs the data asks for it at the socket
    `handover` and shows this session's secret `ticket` (`pdx.node.handover`).

    A peer writes to `regions`, one per scheme that both have, and to `probe`, a slot to try them out. The answer to a
    `Hello`, and between nodes to that answer, too.
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

    To a peer, about an `Admit`: nothing of it is wanted, even if room was granted before; the peer answers `Release`
    when nothing of it is in flight. About no request: the connection is over.
    """

    error: Annotated[str, Meta(max_length=64)]
    text: Annotated[str, Meta(max_length=1024)]

    @staticmethod
    def of(error: Exception) -> Refused:
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


# What each kind of session may send once it is attached. A peer fills by its writes (`Landed`).
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
    """Slices [first_layer, first_layer + layers) of one slot have landed; `digests`: one each, or none at all."""

    offset: Bytes
    generation: Number
    first_layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
    layers: LayerCount
    digests: Annotated[bytes, Meta(max_length=MAX_LAYERS * DIGEST_BYTES)] = b""


class Landed(msgspec.Struct, array_like=True, frozen=True):
    """What a peer has filled: the notification of one write for its `Admit` of this number; 0: the probe."""

    admit: Number
    slices: Annotated[list[Slices], Meta(max_length=4096)]


_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)
_peer = msgspec.msgpack.Decoder(PeerFrame)
_landed = msgspec.msgpack.Decoder(Landed)


def encode(message: msgspec.Struct) -> bytes:
    """One frame; for a `Landed`, one notification, of at most MAX_NOTIFY_BYTES if it has few slices."""
    return _encoder.encode(message)


def decode_frame(decoder: msgspec.msgpack.Decoder[_T], frame: bytes, limit: int = MAX_FRAME_BYTES) -> _T:
    """Decode one frame. :raises ProtocolError: too long, or not of the decoder's type."""
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
