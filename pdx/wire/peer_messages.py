"""What nodes say to each other: over the control link, and with each write.

The same wire format and the same care as in `pdx.wire.messages`. A push moves chunks from the node that offers to the
one that grants; a fetch is a push that its receiver asked for (`Want`). No I/O here.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.memory.slot import Slot
from pdx.transports.channel import MAX_NOTIFY_BYTES, RemoteRegion, SchemeName
from pdx.wire.messages import (
    MAX_LAYERS,
    Bytes,
    Count,
    Handle,
    Keys,
    LayerCount,
    Layout,
    Message,
    Name,
    Refused,
    Seconds,
    ShardCount,
    Slots,
    Stamp,
    TransferId,
    decode_frame,
)

MAX_SCHEMES = 32
DIGEST_BYTES = 8  # xxh3 of 64 bits, as `pdx.memory.digest` writes it

Schemes = Annotated[list[SchemeName], Meta(max_length=MAX_SCHEMES)]
HostId = Annotated[str, Meta(max_length=64)]  # equal exactly on one running kernel
Layouts = Annotated[list[Layout], Meta(max_length=1024)]
Indices = Annotated[list[Count], Meta(max_length=16_384)]
Version = Annotated[int, Meta(ge=0, le=1 << 32)]


# ---- the link -----------------------------------------------------------------------------------


class PeerHello(Message, frozen=True):
    """The dialling node asks to write to the other's memory. `layouts` are those of its attached engines."""

    version: Version
    name: Name
    epoch: Handle
    host: HostId
    pid: Count
    schemes: Schemes
    layouts: Layouts = []


class PeerWelcome(Message, frozen=True):
    """Yes: one region per scheme that both have, and `probe`, a slot that may be written to try them out."""

    version: Version
    name: Name
    epoch: Handle
    host: HostId
    pid: Count
    regions: Annotated[list[RemoteRegion], Meta(max_length=MAX_SCHEMES)]
    probe: Slot | None = None
    layouts: Layouts = []


class PeerPing(Message, frozen=True):
    """Heartbeat, both ways, each `report_s`."""

    at_ns: Stamp = 0


class Chosen(Message, frozen=True):
    """The dialling node will use this scheme and no other of those it was invited to; before its first offer."""

    scheme: SchemeName


class PeerBye(Message, frozen=True):
    """This link ends: nothing more comes, and nothing of it is written any more."""


# ---- a push -------------------------------------------------------------------------------------


class Offer(Message, frozen=True):
    """The sender has, or is filling, these chunks. `push` is its number for them; fields as in `Reserve`.

    `wait_s`: how long it may wait for room. `want`: the number of the `Want` that this answers.
    """

    push: Handle
    keys: Keys
    nbytes: Annotated[int, Meta(ge=1, le=1 << 48)]
    layers: LayerCount
    shards: ShardCount
    tail_nbytes: Bytes = 0
    transfer: TransferId | None = None
    layout: Layout = b""
    wait_s: Seconds = 0.0
    want: Handle = 0


class Granted(Message, frozen=True):
    """`slots` holds len(granted) x shards slots, chunk-major, for the keys at these indices of the offer.

    Once per offer. Keys that are not granted are there already, being filled, or found no room.
    """

    push: Handle
    granted: Indices
    slots: Slots


class Stop(Message, frozen=True):
    """The receiver does not want (the rest of) a push; the sender answers `LetGo` when nothing is under way."""

    push: Handle
    text: Annotated[str, Meta(max_length=256)] = ""


class LetGo(Message, frozen=True):
    """The sender writes nothing more of this push, now and ever. `complete`: all that was granted was written."""

    push: Handle
    complete: bool


# ---- a fetch ------------------------------------------------------------------------------------


class Want(Message, frozen=True):
    """The receiver asks for the leading run of these keys, and for the rest of `transfer` if that is under way."""

    want: Handle
    keys: Keys
    shards: ShardCount = 1
    transfer: TransferId | None = None


class Coming(Message, frozen=True):
    """Answer to `Want`: `chunks` of the keys are offered next, or are under way already (`pushing`); 0: nothing is."""

    want: Handle
    chunks: Count
    pushing: bool = False


PeerBody = (
    PeerHello | PeerWelcome | Refused | Chosen | PeerPing | PeerBye | Offer | Granted | Stop | LetGo | Want | Coming
)


class PeerFrame(msgspec.Struct, array_like=True, frozen=True):
    """Envelope: `seq` grows by at least one per message and direction of a link."""

    seq: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    body: PeerBody


# ---- with each write ----------------------------------------------------------------------------


class Slices(msgspec.Struct, array_like=True, frozen=True):
    """Slices [first_layer, first_layer + layers) of one slot have landed; a digest each, or none at all."""

    offset: Bytes
    generation: Handle
    first_layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
    layers: LayerCount
    digests: Annotated[bytes, Meta(max_length=MAX_LAYERS * DIGEST_BYTES)] = b""


class Landed(msgspec.Struct, array_like=True, frozen=True):
    """The notification of one write of a push. Push 0 is the probe, which fills nothing."""

    push: Handle
    slices: Annotated[list[Slices], Meta(max_length=4096)]


_encoder = msgspec.msgpack.Encoder()
_frame = msgspec.msgpack.Decoder(PeerFrame)
_landed = msgspec.msgpack.Decoder(Landed)


def encode_peer(frame: PeerFrame) -> bytes:
    """One ZMQ frame."""
    return _encoder.encode(frame)


def decode_peer(frame: bytes) -> PeerFrame:
    """:raises ProtocolError: not a `PeerFrame` within bounds."""
    return decode_frame(_frame, frame)


def encode_landed(landed: Landed) -> bytes:
    """One notification; at most MAX_NOTIFY_BYTES if the sender keeps to few slices."""
    return _encoder.encode(landed)


def decode_landed(payload: bytes) -> Landed:
    """:raises ProtocolError: not a `Landed` within bounds."""
    return decode_frame(_landed, payload, limit=MAX_NOTIFY_BYTES)
