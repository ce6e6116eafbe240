"""Which headers are forwarded from clients to engines, and back. All others are dropped."""

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
_OF_BODIES = ("Content-Type", "Content-Length", "metadata")  # the last one describes vectors that are sent as bytes
_ID = re.compile(r"[0-9A-Za-z._:-]{1,128}")


def to_engines(headers: Mapping[str, str], *, has_key: bool = True, begun: str = "") -> dict[str, str]:
    """The headers of a client's request to forward. `has_key`: the client's key is an engine's key. `begun`: the trace
    context the proxy started because the client sent none."""
    passed = {name: headers[name] for name in _TO_ENGINES if name in headers and (has_key or name != _KEY)}
    if begun:
        passed[TRACEPARENT] = begun
        passed.pop("tracestate", None)  # it belongs to the client's trace context
    return passed | ({REQUEST_ID: own} if (own := request_id(headers)) else {})


def to_prefill(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of `to_engines` for the prefill leg: a rank addresses the engine that answers the client."""
    return {name: value for name, value in headers.items() if name != RANK}


def to_client(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an engine's answer to forward to the client."""
    return {name: headers[name] for name in _TO_CLIENTS if name in headers}


def of_body(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that describe an engine's body, when it is passed on byte for byte."""
    found = {name: headers[name] for name in _OF_BODIES if name in headers}
    if "Content-Encoding" in headers:  # the body was decompressed on arrival
        found.pop("Content-Length", None)
    return found


def media_type(headers: Mapping[str, str]) -> str:
    """The content type without its parameters, which aiohttp reads by Python's parser for mail: that fails on some,
    and takes ten seconds for 64 KiB of others."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def request_id(headers: Mapping[str, str]) -> str:
    """The client's request id; empty if there is none, or none that can be forwarded."""
    found = headers.get(REQUEST_ID, "")
    return found if _ID.fullmatch(found) else ""
