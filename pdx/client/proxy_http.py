"""Nodes anywhere, through their proxy's HTTP, for a controller: POST /cache/VERB, with a token if it asks for one."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from pdx.client.connection import error_of
from pdx.client.http_call import call
from pdx.errors import ConfigError, ProtocolError, ProxyError, SelectionError
from pdx.wire.messages import Outcome, Refused
from pdx.wire.objects import Failure, decode_answers
from pdx.wire.prompt import Prompt
from pdx.wire.verbs import AnyVerb

_LEAST_WAIT_S, _MOST_WAIT_S = 0.05, 60.0


class ThroughProxy:
    """As `LocalNodes`. Each call is a connection of its own, so any thread may use it."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        """`url`: of the proxy's --admin, or the /path of its Unix socket; `token`: empty where it asks for none."""
        self._url = url
        self._token = token
        self._timeout_s = timeout_s
        self._wait_s = min(max(timeout_s, _LEAST_WAIT_S), _MOST_WAIT_S)  # that nodes have, as the proxy allows

    def __repr__(self) -> str:
        return f"<ThroughProxy {self._url}>"

    def close(self) -> None:
        pass

    def names(self) -> list[str]:
        try:
            return msgspec.json.decode(self._call("/cache"), type=dict[str, list[str]])["nodes"]
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            raise ProxyError(f"{self._url}/cache answers not as a proxy's --admin address does: {error}") from error

    def address(self, name: str) -> str:
        return ""

    def ask(self, verb: AnyVerb, instances: Sequence[str], prompt: Prompt | None = None) -> dict[str, Outcome]:
        body: dict[str, Any] = {name: getattr(verb, name) for name in verb.__struct_fields__}
        if "what" in body:
            body["what"] = prompt
        query = urlencode({"node": list(instances) or ["*"], "wait_s": self._wait_s}, doseq=True)
        try:
            nodes, failures = decode_answers(self._call(f"/cache/{verb.name}?{query}", body))
        except ProtocolError as error:
            raise ProtocolError(f"the proxy at {self._url} does not answer /cache/{verb.name} so: {error}") from error
        for each in nodes.values():
            if not isinstance(each, verb.answers):
                raise ProtocolError(f"the node answers {type(each).__name__} to {type(verb).__name__}")
        refused = {name: Refused(each.type[:64], each.message[:1024]) for name, each in failures.items()}
        return {**nodes, **refused}

    def _call(self, path: str, body: Any = None) -> bytes:
        """:raises ProxyError: nobody answers. Or what the proxy or a node says is the matter."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        timeout_s = self._wait_s + self._timeout_s
        try:
            status, answer = call(self._url, path, body, timeout_s=timeout_s, headers=headers)
        except (OSError, http.client.HTTPException) as error:
            raise ProxyError(f"the proxy at {self._url} does not answer: {error}") from error
        except TypeError as error:
            raise SelectionError(f"that cannot be said in JSON: {error}") from error
        except ValueError as error:
            raise ConfigError(f"the proxy at {self._url!r}: {error}") from error
        if status != 200:
            try:
                said = msgspec.json.decode(answer, type=dict[str, Failure])["error"]
            except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
                where = self._url + path.partition("?")[0]
                raise ProxyError(f"{where} answers {status}, and not as a proxy's --admin address does") from None
            raise error_of(Refused(said.type[:64], said.message[:1024]))
        return answer
