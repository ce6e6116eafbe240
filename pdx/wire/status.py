"""A node's report about itself to its operators, and why chunks were hits or not."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.wire.base import MAX_REASONS, Count, Message, Name, Number, Verdicts
from pdx.wire.hints import Seconds


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
    unshared: str = ""  # the engine of its model that it cannot share chunks with, and why
    facts: dict[str, int | bool] = {}  # `EngineFacts` by name; empty: it has told none
    shards: int = 0  # that a worker writes, from `shard` on; of another process, that a chunk of its engine has
    groups: list[str] = []  # of its engine: each cache group in a few words; empty: it has told none


class PeerStatus(msgspec.Struct, frozen=True):
    """One peer: the connection to it, and what goes over it."""

    name: str
    address: str
    state: str  # of the connection to it
    channel: str  # scheme in use, empty: none yet
    rates: dict[str, float]  # measured by the probe, GB/s by scheme
    pushes: int  # to it, in flight
    landing: int  # from it, in flight
    sent_bytes: int
    landed_bytes: int
    why: str  # why it is not ready


class ArenaStatus(msgspec.Struct, frozen=True):
    """One arena of the node."""

    gpu: str  # UUID of the GPU that it is on; empty: host memory
    total_bytes: int
    free_bytes: int


COUNTING = "counting the files"  # the state of a disk whose index is not complete yet


class TierStatus(msgspec.Struct, frozen=True):
    """One tier below the arenas. `used_bytes` includes what is being written and removed; 0: not known, as for a store
    that others use, too. `state`: "ok", or the problem; `is_up`: it answers all the same.

    What follows is counted since the node started, for this tier alone. Chunks are counted per shard, except in `hits`,
    `misses` and `dropped`, which count keys.
    """

    name: str
    place: str
    chunks: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0
    state: str = "ok"
    copies: int = 0  # in flight, or waiting for their turn
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
    read_bytes: int = 0  # for the loaded bytes: fewer if chunks are encoded …
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
    pinned_bytes: int = 0  # of chunks with a pin: never evicted, even if the process that pinned them has ended
    tiers: list[TierStatus] = []  # below the arenas, the fastest first


# ---- why chunks of requests were hits or not ----------------------------------------------------


class Reason(msgspec.Struct, array_like=True, frozen=True):
    """Why chunks [first, first + count) of a request were a hit, or were not."""

    first: Count
    count: Count
    is_hit: bool
    kind: Annotated[str, Meta(max_length=16)]  # one word: where from, or why not
    text: Annotated[str, Meta(max_length=1024)]


class Explanation(msgspec.Struct, array_like=True, frozen=True):
    """The node's last answer to one request. `chunks`: how many could be hits, `hits`: how many whole ones were."""

    request: Name
    engine: Name
    age_s: Annotated[float, Meta(ge=0.0, le=1e9)]
    waited_s: Seconds  # until what was missing arrived, or was late
    chunks: Count
    hits: Count
    reasons: Annotated[list[Reason], Meta(max_length=MAX_REASONS)]
    notes: Annotated[list[Annotated[str, Meta(max_length=2048)]], Meta(max_length=8)] = []
    verdicts: Verdicts = []  # on its hints


class Explained(Message, frozen=True):
    """Explanations, the newest first, at most 32; `remembered`: how many requests the node remembers."""

    requests: Annotated[list[Explanation], Meta(max_length=32)]
    remembered: Count
