"""Nodes anywhere, through their proxy's HTTP, for a controller: POST /cache/VERB, with a token if it asks for one.

Outcomes come as JSON objects; they are the messages of `pdx.wire.messages` again before anybody sees them.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec
from msgspec import inspect

from pdx.client.http_call import call
from pdx.client.prompt import ALL, Health, Lookup, Place, Prompt
from pdx.client.reach import error_of
from pdx.errors import ConfigError, ProtocolError, ProxyError
from pdx.wire.messages import Outcome, Refused, Verb, Why
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import Clear, EndJob, Evict, Jobs, JobStatus, List, Move, PinIn, Recode, Verify

_Object = dict[str, Any]
_OUTCOMES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Outcome)}
_LEAST_WAIT_S, _MOST_WAIT_S = 0.05, 60.0


class ThroughProxy:
    """See `Reach`. Each call is a connection of its own, so any thread may use it."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        """`url`: of the proxy's --admin, or the /path of its Unix socket; `token`: empty where it asks for none."""
        self._url = url
        self._token = token
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<ThroughProxy {self._url}>"

    def close(self) -> None:
        pass

    def names(self) -> list[str]:
        return list(self._entries("query_ip", {}))

    def find(self, prompt: Prompt, instances: Sequence[str], wait_s: float) -> Lookup:
        told = self._post("lookup", {**_what(prompt), "instances": list(instances)}, wait_s)
        errors = {name: str(error["message"]) for name, error in told.get("errors", {}).items()}
        found: Lookup = _convert({**told, "tiers": told.get("instances"), "errors": errors}, Lookup)
        return found

    def addresses(self, instances: Sequence[str]) -> dict[str, str]:
        entries = self._entries("query_ip", {"instances": list(instances)})
        return {name: str(entry["address"]) for name, entry in entries.items()}

    def health(self, instances: Sequence[str]) -> dict[str, Health]:
        found = {}
        for name, entry in self._entries("health", {"instances": list(instances)}).items():
            if entry.get("type") == Refused.__name__:
                found[name] = Health(None, str(entry["text"]))
                continue
            status = entry["status"]
            found[name] = Health(
                _message(status, NodeStatus) if status is not None else None, "" if status else str(entry["why"])
            )
        return found

    def ask(self, verb: Verb, instances: Sequence[str], prompt: Prompt | None = None) -> dict[str, Outcome]:
        if isinstance(verb, (Jobs, EndJob)) and verb.job:
            (node,) = instances
            route = "cancel" if isinstance(verb, EndJob) else "check_finish"
            return self._one(route, {"job": f"{node}:{verb.job}"})
        what = _what(prompt) if prompt is not None else {}
        route, fields = _route(verb, instances)
        if isinstance(verb, (Move, Recode, Verify)):
            return self._one(route, {**what, **fields})
        entries = self._entries(route, {**what, **fields})
        return {name: _outcome(entry) for name, entry in entries.items()}

    def _one(self, route: str, body: _Object) -> dict[str, Outcome]:
        told = self._post(route, body)
        return {str(told.get("instance", "")): _outcome(told)}

    def _entries(self, route: str, body: _Object) -> dict[str, _Object]:
        entries = self._post(route, body).get("instances")
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise ProtocolError(f"the proxy at {self._url} does not answer /cache/{route} by nodes")
        return entries

    def _post(self, route: str, body: _Object, wait_s: float | None = None) -> _Object:
        """`wait_s`: that nodes have; not less than the proxy allows, nor more.

        :raises ProxyError: nobody answers. Or what the proxy or a node says is the matter.
        """
        wait_s = min(max(self._timeout_s if wait_s is None else wait_s, _LEAST_WAIT_S), _MOST_WAIT_S)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        timeout_s = wait_s + self._timeout_s
        try:
            answer = call(
                self._url, f"/cache/{route}", {**body, "wait_s": wait_s}, timeout_s=timeout_s, headers=headers
            )
        except (OSError, http.client.HTTPException) as error:
            raise ProxyError(f"the proxy at {self._url} does not answer: {error}") from error
        except ValueError as error:
            raise ConfigError(f"the proxy at {self._url!r}: {error}") from error
        try:
            told = msgspec.json.decode(answer.body, type=_Object)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            told = {}
        said = told.get("error")
        if isinstance(said, dict) and answer.status != 200:
            raise error_of(str(said.get("type")), str(said.get("message")))
        if answer.status != 200 or not told:
            raise ProxyError(
                f"{self._url}/cache/{route} answers {answer.status}, and not as a proxy's --admin address does"
            )
        return told


def _what(prompt: Prompt) -> _Object:
    if prompt.request:
        return {"request": prompt.request}
    said: _Object = {"text": prompt.text} if prompt.tokens is None else {"tokens": list(prompt.tokens)}
    return {**said, "model": prompt.model, "salt": prompt.salt, "codec": prompt.codec}


def _route(verb: Verb, instances: Sequence[str]) -> tuple[str, _Object]:
    """Where a verb is said over HTTP, and how."""
    node = instances[0] if len(instances) == 1 else ALL
    match verb:
        case Move():
            source, target = Place(node, verb.source), Place(verb.node or node, verb.target)
            places = {"source": str(source), "target": str(target)}
            return "move", {**places, "keeps": verb.keeps, "dry_run": verb.dry_run}
        case Clear():
            at = {"at": str(Place(node, verb.tier)), "dry_run": verb.dry_run}
            return "clear", {**at, **({"everything": True} if verb.everything else {})}
        case PinIn():
            return "pin" if verb.pinned else "unpin", {"at": str(Place(node, verb.tier)), "dry_run": verb.dry_run}
        case Recode(codec="none"):
            return "decompress", {"at": str(Place(node, verb.tier)), "dry_run": verb.dry_run}
        case Recode():
            return "compress", {"at": str(Place(node, verb.tier)), "method": verb.codec, "dry_run": verb.dry_run}
        case Evict():
            bound = {"below": verb.below, "nbytes": verb.nbytes}
            return "evict", {"at": str(Place(node, verb.tier)), **bound, "dry_run": verb.dry_run}
        case Verify():
            return "verify", {"at": str(Place(node, verb.tier)), "remove": verb.remove, "dry_run": verb.dry_run}
        case List():
            return "ls", {"instances": list(instances), "session": verb.session, "model": verb.model}
        case Why():
            return "why", {"instances": list(instances), "request": verb.request}
        case Jobs():
            return "jobs", {"instances": list(instances)}
    raise ProtocolError(f"{type(verb).__name__} is no verb that a proxy's HTTP has")


# ---- from JSON to messages ----------------------------------------------------------------------


def _outcome(told: _Object) -> Outcome:
    kind = _OUTCOMES.get(str(told.get("type")))
    if kind is None:
        raise ProtocolError(f"the proxy answers {told.get('type')!r:.80}")
    found: Outcome = _message(told, kind)
    return found


def _message(told: Mapping[str, Any], kind: type[Any]) -> Any:
    return _convert(_as_wire(inspect.type_info(kind), told), kind)


def _convert(value: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(value, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the proxy's {kind.__name__} is none: {error}") from error


def _as_wire(kind: inspect.Type, value: Any) -> Any:
    """As msgspec wants it for a message: objects as the arrays that they are on the wire, hex as bytes."""
    match kind, value:
        case inspect.StructType(), dict():
            if kind.cls is JobStatus and isinstance(value.get("job"), str):  # there its node's name is before it
                value = {**value, "job": value["job"].rpartition(":")[2]}
            types = {field.name: field.type for field in kind.fields}
            fields = {name: _as_wire(type_, value[name]) for name, type_ in types.items() if name in value}
            if not kind.array_like:
                return fields
            missing = next((at for at, name in enumerate(types) if name not in fields), len(types))
            if missing < len(fields):
                raise ProtocolError(f"the proxy's {kind.cls.__name__} lacks {list(types)[missing]}")
            return [*([kind.tag] if kind.tag is not None else []), *fields.values()]
        case inspect.ListType(), list():
            return [_as_wire(kind.item_type, each) for each in value]
        case inspect.DictType(), dict():
            return {name: _as_wire(kind.value_type, each) for name, each in value.items()}
        case inspect.BytesType(), str():
            try:
                return bytes.fromhex(value)
            except ValueError as error:
                raise ProtocolError(f"the proxy's {value!r:.80} is no hex") from error
    return value
