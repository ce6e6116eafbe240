"""The essence of an answer, which has to be equal: all but ids, times, cached token counts, and an engine's identity.

The events of a stream are joined as a client would join them: consecutive events of the same form, and token events of
any form, because a busy engine puts the tokens of several steps into one event.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdx.bench.parity.records import Answer

ABSENT = "(nothing)"
OWN_ID = "parity-"  # part of the ids that cases choose themselves; these are compared in full
_ORIGIN = re.compile(r"https?://[^/]*")
_TOLERANCE = 1e-3  # of log probabilities and vectors, whose last digits depend on the rest of the batch
# Headers that depend on the transport or on the time.
_PASSING = {"date", "content-length", "transfer-encoding", "connection", "keep-alive"}
_IDS = {"id", "item_id", "request_id", "response_id"}
_TIMES = {"created", "created_at", "completed_at"}
# The engine's identity, and its connector's message to a router.
_OF_AN_ENGINE = {"system_fingerprint", "kv_transfer_params", "service_tier_used"}
# How much of the prompt was cached.
_CACHED = {"cached_tokens", "created_cache_tokens", "cache_write_tokens"}
_READ = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")  # /v1/messages; sum: prompt
_TOKENS = "tokens"
_FORMS = "forms of tokens"
# Texts that are concatenated over events; of any other text or number, the last one counts.
_GROWING = {"text", "content", "delta", "arguments", "partial_json", "reasoning", "reasoning_content", "thinking"}


Path = tuple[str | int, ...]  # field names and list indices


class Difference(msgspec.Struct, frozen=True):
    """Where two answers differ: a path in their essences, and both values."""

    path: Path
    want: Any
    got: Any


def essence(answer: Answer) -> dict[str, Any]:
    """The parts of an answer that have to be equal, as JSON values."""
    headers = {name: value for name, value in answer.headers.items() if name not in _PASSING}
    if headers.get("content-type", "").startswith("application/json"):
        headers["content-type"] = "application/json"  # JSON is UTF-8 with or without a charset
    if "location" in headers:
        headers["location"] = _ORIGIN.sub("", headers["location"])
    if "endpoint-load-metrics" in headers:
        headers["endpoint-load-metrics"] = f"{headers['endpoint-load-metrics'].partition(' ')[0]} …"
    found: dict[str, Any] = {"status": answer.status, "headers": headers}
    found["body"] = _content(headers.get("content-type", ""), answer.content)
    return found | {name: said for name in ("fault", "left") if (said := getattr(answer, name))}


def differences(want: Any, got: Any, loose: frozenset[Path] = frozenset()) -> list[Difference]:
    """Where two essences differ. At paths in `loose`, and below them, only the form has to be equal."""
    return list(_compared((), want, got, loose))


def place(path: Path) -> Path:
    """A path with "[]" for each list index: all items of a list count as one place."""
    return tuple("[]" if isinstance(step, int) else step for step in path)


def path_text(path: Path) -> str:
    """A path as text: `body.choices[0].text`."""
    steps = (f"[{step}]" if isinstance(step, int) else step if step == "[]" else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


# ---- bodies -----------------------------------------------------------------------------------


def _content(kind: str, content: bytes) -> Any:
    if kind.startswith("text/event-stream"):
        return _streamed(content)
    if kind.startswith("application/json"):
        try:
            return _normalized(json.loads(content))
        except (ValueError, RecursionError):
            return {"no JSON": content.decode("utf-8", "replace")}
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _streamed(content: bytes) -> dict[str, Any]:
    """The joined events; the number of ids, the models, whether sequence numbers and token counts grow, and the forms
    of token events before the last one: none if an engine has sent all tokens in one event."""
    joined: list[tuple[str, Any]] = []
    names, models, forms = set(), set(), set()
    numbers: list[int] = []
    counted: dict[Any, list[Any]] = {}
    for name, data in _events(content):
        try:
            found = json.loads(data)
            event = _normalized(found)
        except (ValueError, RecursionError):
            joined.append((name, data))  # [DONE], and what is not JSON
            continue
        if isinstance(event, dict):
            names.add(str(found.get("id")))
            models.add(str(found.get("model")))
            numbers.append(event.pop("sequence_number", len(numbers)))
        form = f"{name} {_form(event)}".strip()
        if _has_tokens(event):
            choice, usage = event["choices"][0], event.get("usage")
            if choice.get("finish_reason") is None:
                forms.add(form)
            if isinstance(usage, dict):
                counted.setdefault(str(choice.get("index")), []).append(usage.get("completion_tokens"))
            form = _TOKENS
        if joined and joined[-1][0] == form:
            joined[-1] = form, _joined(joined[-1][1], event)
        else:
            joined.append((form, event))
    return {
        "events": [{"form": form, "data": data} for form, data in joined],
        "ids": len(names),
        "models": sorted(models),
        "counts up": numbers == list(range(len(numbers))) and all(map(_grows, counted.values())),
        _FORMS: sorted(forms),
    }


def _grows(counts: list[Any]) -> bool:
    return all(isinstance(each, int) for each in counts) and counts == sorted(set(counts))


def _events(content: bytes) -> Iterator[tuple[str, str]]:
    """The name and the data of each event. A line with any other field is marked and put into the data."""
    for piece in content.decode("utf-8", "replace").replace("\r\n", "\n").split("\n\n"):
        name, data = "", []
        for line in piece.split("\n"):
            field, _, value = line.partition(":")
            if field == "event":
                name = value.strip()
            elif field == "data":
                data.append(value.removeprefix(" "))
            elif field:  # empty for a comment
                data.append(f"no field of an event: {line}")
        if data:
            yield name, "\n".join(data)


def _has_tokens(event: Any) -> bool:
    """Whether the event has tokens of a completion or a chat; the event that names a chat's role has none."""
    choices = event.get("choices") if isinstance(event, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    delta = first.get("delta") if isinstance(first, dict) else None
    return isinstance(first, dict) and (not isinstance(delta, dict) or delta.get("role") is None)


def _form(value: Any) -> str:
    """The names of an event's fields, with those of nested objects except `logprobs`; a list has its first item's."""
    if isinstance(value, dict):
        inner = {
            key: _form(each) if isinstance(each, dict | list) and key != "logprobs" else ""
            for key, each in value.items()
        }
        return "{" + " ".join(f"{key}{form}" for key, form in sorted(inner.items())) + "}"
    return f"[{_form(value[0])}]" if isinstance(value, list) and value and isinstance(value[0], dict) else ""


def _joined(one: Any, other: Any, key: str = "") -> Any:
    """Join two events of the same form."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        return {name: _joined(one.get(name), other.get(name), name) for name in keys}
    if isinstance(one, list) and isinstance(other, list):
        if not all(isinstance(each, dict) and isinstance(each.get("index"), int) for each in (*one, *other)):
            return one + other
        by_index = {each["index"]: each for each in one}
        for each in other:
            at = each["index"]
            by_index[at] = _joined(by_index[at], each) if at in by_index else each
        return [by_index[at] for at in sorted(by_index)]
    if isinstance(one, str) and isinstance(other, str) and key in _GROWING:
        return one + other
    return one if other is None else other


def _normalized(value: Any, key: str = "", beside: Mapping[str, Any] | None = None) -> Any:
    """A value without what differs from answer to answer."""
    if isinstance(value, dict):
        found = {name: _normalized(each, name, value) for name, each in value.items() if name not in _OF_AN_ENGINE}
        if "cache_read_input_tokens" in value and all(isinstance(value.get(name) or 0, int) for name in _READ):
            found["prompt tokens"] = sum(value.get(name) or 0 for name in _READ)
            found |= {name: "…" for name in _READ if name in value}
        return found
    if isinstance(value, list):
        return [_normalized(each, key, beside) for each in value]
    if key in _IDS and isinstance(value, str) and OWN_ID not in value and (beside or {}).get("object") != "model":
        return _prefix(value)
    if key in _TIMES and isinstance(value, int | float):
        return "a time"
    if key in _CACHED and isinstance(value, int | None):
        return "…"
    return value


def _prefix(name: str) -> str:
    """The prefix of an id that tells its kind: `cmpl-…`, `resp_…`."""
    ends = [at for mark in "-_" if (at := name.find(mark)) >= 0]
    return name[: min(ends) + 1] + "…" if ends else "…"


# ---- comparing --------------------------------------------------------------------------------


def _compared(path: Path, want: Any, got: Any, loose: frozenset[Path]) -> Iterator[Difference]:
    if place(path) in loose:
        if _shape(want) != _shape(got):
            yield Difference(path, want, got)
    elif isinstance(want, dict) and isinstance(got, dict):
        for name in dict.fromkeys([*want, *got]):
            if name in want and name in got:
                yield from _compared((*path, name), want[name], got[name], loose)
            elif (*place(path), name) not in loose:
                yield Difference((*path, name), want.get(name, ABSENT), got.get(name, ABSENT))
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for number, (one, other) in enumerate(zip(want, got, strict=True)):
            yield from _compared((*path, number), one, other, loose)
    elif not (path[-1:] == (_FORMS,) and not (want and got)) and not _equal(want, got):
        yield Difference(path, want, got)


def _equal(want: Any, got: Any) -> bool:
    if isinstance(want, float) and isinstance(got, float):
        return abs(want - got) <= _TOLERANCE * max(1.0, abs(want))
    return type(want) is type(got) and bool(want == got)


def _shape(value: Any) -> Any:
    """The form of a value: its field names and kinds of values; a list has the form of its first item."""
    if isinstance(value, dict):
        return {name: _shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return "text" if isinstance(value, str | None) else "number" if isinstance(value, int | float) else value
