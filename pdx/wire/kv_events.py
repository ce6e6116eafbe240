"""Events of a KV cache, as vLLM publishes them over ZMQ: which blocks were stored or removed.

A message has three frames: the topic, a sequence number of 8 bytes, and a batch in msgpack. Numbers grow by one. A
subscriber that has missed some sends the first missing number to another socket, a ROUTER, and gets all batches from
there on that are still kept, and finally the number -1 with an empty batch.

A block is named by the engine's chained hash of it: the last 64 bits as a number, or the bytes. Batches are written in
the form of vLLM 0.33, which readers of other releases accept. They are read in the forms of earlier releases, too:
batches and events as arrays or as maps, answers of two frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdx.errors import ProtocolError

SEQ_BYTES = 8
END_SEQ = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
MAX_BATCH_BYTES = 1 << 30

Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """These consecutive blocks were stored in a place (`medium` and `locality`); the first one follows
    `parent_block_hash`. `group_idx`: their cache group, of kind `kv_cache_spec_kind`; None: not known."""

    block_hashes: Sequence[Hash]
    parent_block_hash: Hash | None
    token_ids: Sequence[int]  # empty: not known
    block_size: int  # tokens; 0: not known
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """These blocks are no longer in a place."""

    block_hashes: Sequence[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No place has any block."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """`ts`: seconds since 1970. Events apply in order."""

    ts: float
    events: Sequence[KvEvent]


_FIELDS: dict[str, tuple[str, ...]] = {  # of events as arrays, which may have more behind these
    BlockStored.__name__: BlockStored.__struct_fields__[:7],
    BlockRemoved.__name__: BlockRemoved.__struct_fields__[:2],
    AllBlocksCleared.__name__: (),
}
_encoder = msgspec.msgpack.Encoder()


def encode_batch(batch: EventBatch) -> bytes:
    return _encoder.encode(batch)


def encode_whole(ts: float, pieces: Sequence[bytes], count: int) -> bytes:
    """One batch of `count` events that were encoded before (`encode_events`), so that no call takes long."""
    return b"".join((b"\x92", _encoder.encode(ts), b"\xdd", count.to_bytes(4, "big"), *pieces))


def encode_events(events: Sequence[KvEvent]) -> bytes:
    """A part of a batch for `encode_whole`."""
    return b"".join(map(_encoder.encode, events))


def decode_batch(payload: bytes) -> EventBatch:
    """A batch of any vLLM; events of a kind that is not known here are left out. :raises ProtocolError: it is none."""
    try:
        raw = msgspec.msgpack.decode(payload)
        ts, events = (raw["ts"], raw["events"]) if isinstance(raw, dict) else raw[:2]
        known = [named for event in events if (named := _named(event))["type"] in _FIELDS]
        return EventBatch(float(ts), msgspec.convert(known, list[KvEvent]))
    except (msgspec.MsgspecError, TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
        raise ProtocolError(f"no batch of KV events: {str(error)[:200]!r}") from error


def _named(event: Any) -> dict[str, Any]:
    """An event as a map."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(_FIELDS.get(kind, ()), values, strict=False))}
