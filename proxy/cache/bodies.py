"""What a controller may say in the body of each verb (docs/controller-http.md), bounded as it is decoded."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.memory.slot import Bytes
from pdx.proxy.cache.prompts import HexKeys, What
from pdx.proxy.engines import MAX_NODES
from pdx.wire.base import Name
from pdx.wire.verbs import CodecName

WAIT_S = 5.0
WaitSeconds = Annotated[float, Meta(ge=0.05, le=60.0)]
Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)]
Address = Annotated[str, Meta(min_length=1, max_length=513)]  # NODE/TIER
JobName = Annotated[str, Meta(min_length=1, max_length=512)]


class _Body(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    wait_s: WaitSeconds = WAIT_S  # that each node has to answer


class OfNodes(_Body, kw_only=True, frozen=True):
    """Of several nodes; of none: of all."""

    instances: Names = ()


class OfChunks(What, frozen=True):
    """Of some chunks in one place."""

    at: Address
    dry_run: bool = False
    wait_s: WaitSeconds = WAIT_S


class Lookup(What, frozen=True):
    """Where chunks are. `ask`: the nodes, also where the proxy has an index of what they have."""

    instances: Names = ()
    ask: bool = False
    wait_s: WaitSeconds = WAIT_S


class MoveBody(What, frozen=True):
    """From one tier to another."""

    source: Address
    target: Address
    keeps: bool = False
    dry_run: bool = False
    wait_s: WaitSeconds = WAIT_S


class ClearBody(OfChunks, frozen=True):
    """`everything`: in place of what chunks."""

    everything: bool = False


class RecodeBody(OfChunks, frozen=True):
    """`method`: the codec."""

    method: CodecName = "none"
    new_keys: HexKeys | None = None


class EvictBody(_Body, frozen=True):
    """Of a priority lower than `below`, up to `nbytes`."""

    at: Address
    below: Annotated[int, Meta(ge=1, le=10)]
    nbytes: Bytes
    dry_run: bool = False


class VerifyBody(_Body, frozen=True):
    """`remove`: what is not as it was written."""

    at: Address
    remove: bool = False
    dry_run: bool = False


class ListBody(OfNodes, frozen=True):
    """Parts of names; empty: all."""

    session: Name = ""
    model: Name = ""


class WhyBody(OfNodes, frozen=True):
    """A part of the name of a request; empty: the last ones."""

    request: Name = ""


class AdviseBody(OfNodes, kw_only=True, frozen=True):
    """An envelope of hints that names a session, of the tenant of that salt."""

    hints: msgspec.Raw
    cache_salt: str = ""


class JobBody(_Body, frozen=True):
    """A job, by the name that it has across nodes."""

    job: JobName
