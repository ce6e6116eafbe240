"""The parts of messages: bounded numbers, texts and lists, and the base class of all messages."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError
from pdx.memory.keys import KEY_BYTES
from pdx.memory.slot import Slot
from pdx.transports.channel import SchemeName
from pdx.wire.hints import MAX_VERDICTS, Verdict

MAX_BLOCKS = 1 << 16  # of a prompt, named in one message
MAX_KEYS = 16_384  # four million tokens at 256 tokens per chunk
MAX_SHARDS = 1_024
MAX_GROUPS = 64  # of a model's layers
MAX_NAME = 256  # characters
MAX_REASONS = 64  # for the chunks of one request
MAX_LAYERS = 4_096
MAX_SLOTS = MAX_KEYS * 8  # in one answer
MAX_RUN_KEYS = 4096  # of one tier, in one frame of changes …
MAX_RUNS = 256  # … and runs in it

Kind = Literal["scheduler", "worker", "client", "peer", "controller"]  # of a session
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
Shape = Annotated[dict[FieldName, Name], Meta(max_length=32)]
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


def check_groups(keys: int, groups: int) -> None:
    """:raises ProtocolError: the keys are not equally many for each cache group."""
    if groups and keys % groups:
        raise ProtocolError(f"{keys} keys of {groups} cache groups")


def check_slots(keys: int, shards: int) -> None:
    """:raises ProtocolError: the keys have more slots than one answer holds."""
    if keys * shards > MAX_SLOTS:
        raise ProtocolError(f"{keys} keys of {shards} shards are more than {MAX_SLOTS} slots")
