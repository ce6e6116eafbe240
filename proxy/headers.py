"""Which headers go from clients to engines, and which from engines to clients. All others stay where they came from."""

from __future__ import annotations

import re
from collections.abc import Mapping

REQUEST_ID = "X-Request-Id"
TRACEPARENT = "traceparent"
RANK = "X-data-parallel-rank"
_KEY = "Authorization"
_TO_ENGINES = (
    *(_KEY, TRACEPARENT, "tracestate", "X-Session-ID", "X-Vllm-Priority"),
    *(RANK, "endpoint-load-metrics-format"),
)
_TO_CLIENTS = (
    *("Retry-After", "Retry-After-Ms", "X-Should-Retry", "WWW-Authenticate", REQUEST_ID),
    "endpoint-load-metrics",
)
_OF_BODIES = ("Content-Type", "Content-Length", "metadata")  # the last one of vectors as bytes
_ID = re.compile(r"[0-9A-Za-z._:-]{1,128}")


def to_engines(headers: Mapping[str, str], *, has_key: bool = True, begun: str = "") -> dict[str, str]:
    """Those of a client's request that its engines get. `has_key`: the client's key is one of theirs. `begun`: the
    trace that was begun for it, since its client has told of none."""
    passed = {name: headers[name] for name in _TO_ENGINES if name in headers and (has_key or name != _KEY)}
    if begun:
        passed[TRACEPARENT] = begun
        passed.pop("tracestate", None)  # it goes with the client's
    return passed | ({REQUEST_ID: own} if (own := request_id(headers)) else {})


def to_prefill(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of `to_engines` for the prefill leg: a rank is one of the engine that answers the client."""
    return {name: value for name, value in headers.items() if name != RANK}


def to_client(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of an engine's answer that its client gets."""
    return {name: headers[name] for name in _TO_CLIENTS if name in headers}


def of_body(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that say what an engine's answer is, where the client gets its very bytes."""
    return {name: headers[name] for name in _OF_BODIES if name in headers}


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id of its request; empty: it has none, or none that can be passed on."""
    found = headers.get(REQUEST_ID, "")
    return found if _ID.fullmatch(found) else ""
