"""The messages between nodes and the proxy. Wire format and bounds as in `pdx.wire.messages`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdx.memory.keys import KEY_BYTES
from pdx.memory.slot import Bytes
from pdx.wire.base import (
    MAX_GROUPS,
    MAX_RUN_KEYS,
    MAX_RUNS,
    Count,
    Layout,
    Message,
    Name,
    Number,
    PublicKey,
    Shape,
    Stamp,
    TransferId,
)
from pdx.wire.messages import Cancel, EngineFacts, Mark, Outcome, decode_frame
from pdx.wire.verbs import AnyVerb

MAX_WORKERS = 64


class EngineReport(msgspec.Struct, array_like=True, frozen=True):
    """One engine attached to the reporting node."""

    engine: Name
    role: Literal["prefill", "decode", "both"]
    url: Name
    running: Count
    facts: EngineFacts | None = None  # None: not known, assume nothing
    layout: Layout = b""  # see `Model` …
    shape: Shape = {}
    groups: Annotated[list[Shape], Meta(max_length=MAX_GROUPS)] = []  # with several cache groups, the fields of each
    draining: bool = False  # it should get no more requests, see `Drain`


class NodeReport(Message, frozen=True):
    """Node to proxy, every second and at once when engines come or go: registration and heartbeat in one.

    `listen` is where peers reach the node, `public_key` its CURVE key (Z85), both empty if it has none. `host`
    identifies one running kernel; `sent_ns` is the node's clock, so that the proxy can compare marks of hosts.
    `reaches`: the peers to which it has written a probe by the channel that it uses now.
    """

    version: Count
    node: Name
    epoch: Number
    arena_bytes: Bytes
    free_bytes: Bytes
    engines: Annotated[list[EngineReport], Meta(max_length=1024)]
    marks: Annotated[list[Mark], Meta(max_length=4096)]
    listen: Name = ""
    public_key: PublicKey = ""
    host: Annotated[str, Meta(max_length=64)] = ""
    sent_ns: Stamp = 0
    reaches: Annotated[list[Name], Meta(max_length=1024)] = []


class PeerEntry(msgspec.Struct, array_like=True, frozen=True):
    """One node as the proxy knows it."""

    name: Name
    address: Name
    public_key: PublicKey = ""


class Arriving(Message, frozen=True):
    """Proxy to the nodes of the engines that it has chosen: a request of this session (`Hints.session`) is coming. What
    the session's last request used is loaded ahead and evicted last."""

    session: Annotated[str, Meta(min_length=1, max_length=64)]
    salt: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""  # of its tenant (`Hints.salt`)


class Follow(Message, frozen=True):
    """Proxy to a node: report all chunks that enter or leave a tier, after change `seq` of the node's life `epoch`; if
    that is too long ago, first what is where. `stream` is drawn by the proxy: reports under another one are void.

    Sent again for each `frame` of the stream that came, as an acknowledgment: a few more may be sent. 0: none came.
    """

    stream: Number
    epoch: Number = 0
    seq: Number = 0
    frame: Number = 0


class PeerList(Message, frozen=True):
    """Proxy to nodes, whenever it changes: the nodes that report to it. Trusted only as far as a node's own roster file
    allows; without one, for addresses on this host.

    `workers`: how many processes serve together, and nodes report to each (`pdx.security.address.worker_address`).
    `tag`: the prefix of this process's transfer ids, so that nodes tell the others nothing about them.
    """

    peers: Annotated[list[PeerEntry], Meta(max_length=1024)]
    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] = 1
    tag: Annotated[str, Meta(max_length=16)] = ""


class Run(msgspec.Struct, array_like=True, frozen=True):
    """These concatenated keys were stored in a tier, or are no longer there."""

    tier: Name
    is_stored: bool
    keys: Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_RUN_KEYS)]


class Changes(Message, frozen=True):
    """Node to proxy, as asked by `Follow`: the `frame`th frame of the stream. `telling` changes when the node begins
    the stream again after it has lost the proxy.

    `first`: earlier reports are void, and the report of what is where begins. `whole`: that report is complete, and
    with it all changes up to `seq`.
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
    """Proxy to the nodes of a transfer: its prefill leg is over. A node that does not know it by now keeps no request
    waiting that expects it."""

    transfer: TransferId


class Order(Message, frozen=True):
    """Proxy to a node: a verb of a controller that the proxy has admitted, or (number 0) of its own, sent to all nodes.
    The answer is a `Reply` of this number."""

    number: Number
    verb: AnyVerb


class Reply(Message, frozen=True):
    """Node to proxy: the outcome of the `Order` of this number."""

    number: Number
    outcome: Outcome


ToProxy = NodeReport | Changes | Reply
FromProxy = Arriving | Cancel | Follow | Order | PeerList | Prefilled


_to_proxy: msgspec.msgpack.Decoder[ToProxy] = msgspec.msgpack.Decoder(ToProxy)
_from_proxy: msgspec.msgpack.Decoder[FromProxy] = msgspec.msgpack.Decoder(FromProxy)


def decode_to_proxy(frame: bytes) -> ToProxy:
    """:raises ProtocolError: not a `ToProxy` within bounds."""
    return decode_frame(_to_proxy, frame)


def decode_from_proxy(frame: bytes) -> FromProxy:
    """:raises ProtocolError: not a `FromProxy` within bounds."""
    return decode_frame(_from_proxy, frame)
