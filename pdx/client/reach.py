"""How a controller reaches nodes: those of this host at their sockets, or any through their proxy's HTTP.

`ask` sends a verb to some of them and returns the outcome at each.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from pdx.client.connection import Connection, attached, error_of
from pdx.client.http_call import call
from pdx.errors import ConfigError, NodeError, NodeUnavailable, ProtocolError, ProxyError, SelectionError
from pdx.wire.messages import Outcome, Refused
from pdx.wire.objects import Failure, decode_answers
from pdx.wire.overview import Overview
from pdx.wire.prompt import Prompt, about
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import AnyVerb, Find, Found, Model, ModelList, Models, Selection, Status, Verb

_V = TypeVar("_V", bound=Verb)
_TOKENIZE_S = 30.0
_AGAIN_S, _SELDOM_S = 0.02, 0.25  # first and longest pause before tiers are asked again
_LEAST_WAIT_S, _MOST_WAIT_S = 0.05, 60.0


class LocalNodes:
    """Nodes of this host by name, with the methods of `ThroughProxy`. Not thread-safe."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        """Attach to the nodes at these sockets. No answer takes longer than `timeout_s`.

        :raises NodeUnavailable: no node answers at one of them.
        """
        self._timeout_s = timeout_s
        self._nodes: dict[str, Connection] = {}
        with contextlib.ExitStack() as undo:
            for address in addresses:
                connection = undo.enter_context(attached(address, timeout_s, "controller"))
                name = connection.call_for(Status(), timeout_s, NodeStatus).name
                if name in self._nodes:
                    raise SelectionError(f"the nodes at {self._nodes[name].address} and {address} are both {name!r}")
                self._nodes[name] = connection
            self._close = undo.pop_all().close

    def __repr__(self) -> str:
        return f"<LocalNodes {', '.join(self._nodes)}>"

    def close(self) -> None:
        """Detach from the nodes. Idempotent."""
        self._close()

    def names(self) -> list[str]:
        return list(self._nodes)

    def find(self, prompt: Prompt, instances: Sequence[str], wait_s: float) -> dict[str, Outcome]:
        """The outcome of `Find` for a prompt once all tiers have answered, or what is known after `wait_s`."""
        self._check(instances)
        verb, until, pause_s = self._about(Find(Selection()), prompt), time.monotonic() + wait_s, _AGAIN_S
        found = self.ask(verb, instances)
        while asking := [name for name, each in found.items() if isinstance(each, Found) and each.asking]:
            if time.monotonic() + pause_s >= until:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SELDOM_S)
            try:
                again = self.ask(verb, asking)
            except (NodeError, ProtocolError):
                break  # keep the earlier answers
            found.update({name: each for name, each in again.items() if isinstance(each, Found)})
        return found

    def ask(self, verb: AnyVerb, instances: Sequence[str], prompt: Prompt | None = None) -> dict[str, Outcome]:
        """Send a verb, about the prompt's chunks if there is a prompt, to these nodes (none: to all).

        Each outcome is one of the verb's answers, or a `Refused` for a node that refuses or does not answer; if only
        one node is asked, that error is raised.
        """
        self._check(instances)
        if prompt is not None:
            verb = self._about(verb, prompt)
        names = list(dict.fromkeys(instances or self._nodes))
        found: dict[str, Outcome] = {}
        for name in names:
            try:
                found[name] = self._nodes[name].call_for(verb, self._timeout_s, *verb.answers)
            except (NodeError, ProtocolError) as error:
                if len(names) == 1:
                    raise
                found[name] = Refused.of(error)
        return found

    def _check(self, names: Sequence[str]) -> None:
        if unknown := [name for name in names if name not in self._nodes]:
            raise SelectionError(f"no node {unknown[0]!r:.80} is known here; there are {', '.join(self._nodes)}")

    def _about(self, verb: _V, prompt: Prompt) -> _V:
        models = prompt.engines(self._models())
        return about(verb, _in_tokens(prompt, models), models)

    def _models(self) -> list[Model]:
        """The models of all nodes that answer; for the others, the verb itself will fail with the reason."""
        found: list[Model] = []
        for connection in self._nodes.values():
            with contextlib.suppress(NodeUnavailable):
                found += connection.call_for(Models(), self._timeout_s, ModelList).models
        return found


class ThroughProxy:
    """Nodes behind a proxy, with the methods of `LocalNodes`. Thread-safe: each call has a connection of its own."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        """`url`: of the proxy's --admin, or the /path of its Unix socket; `token`: empty if it requires none."""
        self._url = url
        self._token = token
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<ThroughProxy {self._url}>"

    def close(self) -> None:
        pass

    def names(self) -> list[str]:
        try:
            return msgspec.json.decode(self._call("/cache"), type=dict[str, list[str]])["nodes"]
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            raise ProxyError(f"{self._url}/cache answers not as a proxy's --admin address does: {error}") from error

    def overview(self) -> Overview:
        """What the status page shows."""
        try:
            return msgspec.json.decode(self._call("/status.json"), type=Overview)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            text = f"{self._url}/status.json answers not as a proxy of this version does: {error}"
            raise ProxyError(text) from error

    def find(self, prompt: Prompt, instances: Sequence[str], wait_s: float) -> dict[str, Outcome]:
        return self.ask(Find(Selection()), instances, prompt, wait_s)

    def ask(
        self, verb: AnyVerb, instances: Sequence[str], prompt: Prompt | None = None, wait_s: float | None = None
    ) -> dict[str, Outcome]:
        """`wait_s`: how long nodes may take (default: this controller's timeout), clipped to the proxy's limits."""
        wait_s = min(max(self._timeout_s if wait_s is None else wait_s, _LEAST_WAIT_S), _MOST_WAIT_S)
        body: dict[str, Any] = {name: getattr(verb, name) for name in verb.__struct_fields__}
        if "what" in body:
            body["what"] = prompt
        query = urlencode({"node": list(instances) or ["*"], "wait_s": wait_s}, doseq=True)
        answer = self._call(f"/cache/{verb.name}?{query}", body, wait_s)
        try:
            nodes, failures = decode_answers(answer)
        except ProtocolError as error:
            raise ProtocolError(f"the proxy at {self._url} does not answer /cache/{verb.name} so: {error}") from error
        for each in nodes.values():
            if not isinstance(each, verb.answers):
                raise ProtocolError(f"the node answers {type(each).__name__} to {type(verb).__name__}")
        refused = {name: Refused(each.type[:64], each.message[:1024]) for name, each in failures.items()}
        return {**nodes, **refused}

    def _call(self, path: str, body: Any = None, wait_s: float = 0.0) -> bytes:
        """:raises ProxyError: the proxy does not answer. Also raises the error that the proxy or a node reports."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        timeout_s = wait_s + self._timeout_s
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


def _in_tokens(prompt: Prompt, models: Sequence[Model]) -> Prompt:
    """Tokenize a text by the /tokenize of the first of these engines with a URL, with special tokens as for prompts.

    :raises SelectionError: no engine has told its URL, or it does not answer as vLLM does.
    """
    if (body := prompt.untokenized) is None:
        return prompt
    url = next((model.url for model in models if model.url), "")
    if not url:
        raise SelectionError(
            f"engine {models[0].engine!r} has not told where it serves HTTP, so nobody makes tokens of a text: give ids"
        )
    try:
        status, answer = call(url, "/tokenize", body, timeout_s=_TOKENIZE_S)
        if status != 200:
            said = answer[:200].decode(errors="replace")
            raise SelectionError(f"the engine at {url} answers {status} to /tokenize: {said!r}")
        told = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
        tokens = msgspec.json.decode(told["tokens"], type=list[int])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, KeyError, ValueError) as error:
        raise SelectionError(f"the engine at {url} makes no tokens of a text: {error}") from error
    return msgspec.structs.replace(prompt, text=None, messages=None, tokens=tokens)
