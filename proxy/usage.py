"""Token counts that engines report for a prompt, in each route's own field names; and rewriting them in an answer.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from pdx.errors import ProtocolError
from pdx.proxy.routes import Route

_CACHED, _CREATED = "cached_tokens", "created_cache_tokens"
_READ, _CREATION = "cache_read_input_tokens", "cache_creation_input_tokens"  # not included in `input_tokens`
_parts = msgspec.json.Decoder(dict[str, Raw])
_numbers = msgspec.json.Decoder(dict[str, Any])


class Usage(msgspec.Struct, frozen=True):
    """In the field names of completions and chats."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompt's tokens the engine did not compute; None if it does not report that."""
        return self.cache_counts.get(_CACHED)

    @property
    def cache_counts(self) -> dict[str, int]:
        """What the engine reports about its cache: how many of the prompt's tokens it had, and how many it stored."""
        found = {name: (self.prompt_tokens_details or {}).get(name) for name in (_CACHED, _CREATED)}
        return {name: count for name, count in found.items() if isinstance(count, int) and count >= 0}


def usage_of(route: Route, raw: bytes) -> Usage:
    """The usage of a whole answer to a response or a message. :raises ProtocolError: there is none."""
    try:
        usage = _numbers.decode(_parts.decode(raw)["usage"])
        if route is Route.RESPONSES:
            details = usage.get("input_tokens_details") or {}
            found = {_CACHED: details.get(_CACHED), _CREATED: details.get("cache_write_tokens")}
        else:
            found = {_CACHED: usage.get(_READ), _CREATED: usage.get(_CREATION)}
        beside = sum(count or 0 for count in found.values()) if route is Route.MESSAGES else 0
        return Usage(int(usage["input_tokens"]) + beside, int(usage.get("output_tokens") or 0), found)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"an answer of {len(raw)} bytes has no usage: {error}") from error


def counts_cached(route: Route, raw: bytes) -> bool:
    """Whether an answer or event may contain something to rewrite."""
    return (b'"cache_read_input_tokens"' if route is Route.MESSAGES else b'"cached_tokens"') in raw


def with_cached(route: Route, raw: bytes, counts: Mapping[str, int]) -> bytes:
    """An answer, or an event's data, with these counts in its usage; fields that it lacks are not added."""
    try:
        parts: dict[str, Any] = _parts.decode(raw)
        if route is Route.RESPONSES and "response" in parts:
            inner = bytes(parts["response"])
            changed = with_cached(route, inner, counts)
            return raw if changed is inner else msgspec.json.encode({**parts, "response": Raw(changed)})
        usage: dict[str, Any] = _parts.decode(parts.get("usage", b"{}"))
        if route is Route.MESSAGES:
            return _with_read(raw, parts, usage, counts)
        place = "input_tokens_details" if route is Route.RESPONSES else "prompt_tokens_details"
        details: dict[str, Any] = _parts.decode(usage.get(place, b"{}"))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return raw
    named = {"cache_write_tokens" if route is Route.RESPONSES and name == _CREATED else name: name for name in counts}
    known = {name: counts[of] for name, of in named.items() if name in details}
    if not known:
        return raw
    usage[place] = {**details, **known}
    return msgspec.json.encode({**parts, "usage": usage})


def _with_read(raw: bytes, parts: Mapping[str, Any], usage: dict[str, Any], counts: Mapping[str, int]) -> bytes:
    of = {_READ: counts.get(_CACHED), _CREATION: counts.get(_CREATED)}
    known = {name: count for name, count in of.items() if name in usage and count is not None}
    if not known or "input_tokens" not in usage:
        return raw
    was = [msgspec.json.decode(usage[name], type=int) for name in ("input_tokens", *known)]
    usage |= {"input_tokens": max(0, sum(was) - sum(known.values())), **known}
    return msgspec.json.encode({**parts, "usage": usage})
