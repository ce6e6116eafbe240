"""Nodes of this host, each over its own socket, for a controller; what a proxy does for others is done here."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Sequence

import msgspec

from pdx.client.connection import Connection, attached
from pdx.client.http_call import call
from pdx.errors import NodeError, NodeUnavailable, ProtocolError, SelectionError
from pdx.wire.messages import Outcome, Refused
from pdx.wire.prompt import Prompt, about
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import AnyVerb, Model, ModelList, Models, Status

_TOKENIZE_S = 30.0


class LocalNodes:
    """Nodes by their names, as those of `ThroughProxy`. One thread at a time."""

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
        """Let go of the nodes. Idempotent."""
        self._close()

    def names(self) -> list[str]:
        """The nodes there are."""
        return list(self._nodes)

    def address(self, name: str) -> str:
        """Where this node is reached from here; empty: through a proxy."""
        return self._nodes[name].address

    def ask(self, verb: AnyVerb, instances: Sequence[str], prompt: Prompt | None = None) -> dict[str, Outcome]:
        """What came of a verb at each of these nodes, of none: at all; its chunks, if it has any, are the prompt's.

        Each answer is one that the verb has. A node that refuses, or does not answer, has a `Refused`; where it is the
        only one, that is raised.
        """
        if unknown := [name for name in instances if name not in self._nodes]:
            raise SelectionError(f"no node {unknown[0]!r:.80} is known here; there are {', '.join(self._nodes)}")
        if prompt is not None:
            models = prompt.engines(self._models())
            verb = about(verb, _in_tokens(prompt, models), models)
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

    def _models(self) -> list[Model]:
        """Of the nodes that answer: the others' own verbs say what is the matter with them."""
        found: list[Model] = []
        for connection in self._nodes.values():
            with contextlib.suppress(NodeUnavailable):
                found += connection.call_for(Models(), self._timeout_s, ModelList).models
        return found


def _in_tokens(prompt: Prompt, models: Sequence[Model]) -> Prompt:
    """A text as tokens, by the first of these engines with a URL, whose /tokenize adds special tokens as to prompts.

    :raises SelectionError: none of them has told its URL, or it does not answer as vLLM does.
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
