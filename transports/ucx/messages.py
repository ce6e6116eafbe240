"""The messages of UCX channels besides payload: typed, bounded, without I/O.

    writer → reader   Greet, then per write: Put, and each run of its pieces under the write's tag
    reader → writer   Welcome, then per write: Done
    either            End

A channel's id is drawn by its writer and known only to both ends: a message that has it is from that channel.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError
from pdx.transports.channel import MAX_NOTIFY_BYTES, MAX_PIECES, Buffer, Piece, Token, decoded

CONTROL_TAG = 1 << 63  # of all messages here; tags of payload have this bit clear
LANE_MASK = 0x7FFF_FFFF << 32
MAX_LANE = 0x7FFF_FFFF
WINDOW = 256  # writes of one channel that have begun and are not done
MAX_ADDRESS_BYTES = 8 << 10
MAX_MESSAGE_BYTES = MAX_NOTIFY_BYTES + MAX_PIECES * 28 + 128

OK, REFUSED, FAILED = range(3)

ChannelId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Number = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Greet(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """A writer shows the token; `address` is its worker's, for answers."""

    token: Token
    channel: ChannelId
    address: Annotated[bytes, Meta(min_length=1, max_length=MAX_ADDRESS_BYTES)]


class Welcome(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Tags of the channel's payload begin with `lane`, which the reader gives to no other channel."""

    channel: ChannelId
    lane: Annotated[int, Meta(ge=0, le=MAX_LANE)]


class Put(msgspec.Struct, tag=2, array_like=True, frozen=True):
    channel: ChannelId
    number: Number
    pieces: Annotated[list[Piece], Meta(min_length=1, max_length=MAX_PIECES)]
    notify: Annotated[bytes, Meta(max_length=MAX_NOTIFY_BYTES)]


class Done(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The outcome of a write: OK, REFUSED or FAILED."""

    channel: ChannelId
    number: Number
    status: Annotated[int, Meta(ge=OK, le=FAILED)]


class End(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The sender closes the channel."""

    channel: ChannelId


Message = Greet | Welcome | Put | Done | End
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(data: Buffer) -> Message:
    """:raises ProtocolError: it is none of these, or out of bounds."""
    return decoded(_decoder, data, ProtocolError, "a message of a UCX channel")


def payload_tag(lane: int, number: int) -> int:
    """The tag of all runs of one write, which are sent in order."""
    return lane << 32 | number
