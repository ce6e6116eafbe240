"""A proxy's overview of a whole service: the document that its status page and `pdx top` show.

It is JSON of bounded size, and has no word of a prompt. All text in it is printable: outside names are escaped and cut.
"""

from __future__ import annotations

import msgspec


class Room(msgspec.Struct, frozen=True, omit_defaults=True):
    """An arena or a tier of a node."""

    name: str
    used_bytes: int = 0
    limit_bytes: int = 0  # 0: not known
    place: str = ""
    hits: int = 0  # see `TierStatus`; nothing is counted for an arena alone
    misses: int = 0
    load_gb_s: float = 0.0
    state: str = "ok"


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node's connections to peers by one channel, taken together."""

    channel: str  # empty: none is up
    peers: int = 0
    gb_s: float = 0.0  # of the slowest, as the probe measured
    pushes: int = 0  # in flight, to them and from them
    moved_bytes: int = 0
    why: str = ""  # one of them is not up, because


class NodeView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node. `problem`: why it has not reported what follows now; then the last report stands there, if any."""

    name: str
    problem: str = ""
    uptime_s: float = 0.0
    rooms: list[Room] = []
    links: list[Link] = []
    looked_up: int = 0  # chunks that requests looked for …
    found: int = 0  # … and found
    transfers: int = 0
    degraded: dict[str, int] = {}  # what engines did without PDX, the most frequent reasons


class EngineView(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine as the proxy knows it."""

    name: str
    url: str
    role: str
    state: str
    node: str = ""
    models: str = ""
    requests: int = 0  # that it has, from any sender
    backlog_tokens: int = 0
    tokens_s: float = 0.0  # as it computes prompts; 0: not measured


class RequestView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request. `phases`: milliseconds in the queue, of prefill, of the handoff, and of decoding, one after the other
    as far as it has come (`pdx.telemetry.timeline.phases`)."""

    id: str
    route: str
    mode: str
    phases: list[float]
    why: str = ""
    outcome: str = ""  # empty: in flight
    prefill: str = ""  # engines
    decode: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_ms: float | None = None  # since it came
    landed_ms: float | None = None  # since it came: all its chunks are at the decode engine's node


class FallbackView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that could not be served as it was planned."""

    id: str
    why: str
    ago_s: float


class Overview(msgspec.Struct, frozen=True, omit_defaults=True):
    """The document. Nodes with a problem and the oldest requests in flight come first; `more_…`: left out."""

    version: str
    status: str  # as /health: "ok", or "unavailable"
    prefillers: int
    decoders: int
    nodes: list[NodeView]
    engines: list[EngineView]
    requests: list[RequestView]
    ended: list[RequestView]  # the last ones
    fallbacks: list[FallbackView]  # the last first
    waiting: int = 0  # for their turn, see --max-concurrent
    load: int = 0  # requests of all workers
    workers: int = 1
    worker: int = 0  # the one that reports
    notes: list[str] = []  # what engines or nodes do not share, in sentences
    more_nodes: int = 0
    more_engines: int = 0
    more_requests: int = 0
