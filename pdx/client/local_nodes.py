"""Nodes of this host, each over its own socket, for a controller; what a proxy does for others is done here."""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pdx.client.connection import Connection
from pdx.client.http_call import call
from pdx.errors import NodeError, NodeUnavailable, ProtocolError, SelectionError
from pdx.wire.messages import VERSION, Answer, Hello, Outcome, Refused, ToNode, decode_to_node, encode
from pdx.wire.prompt import Prompt, about
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import AnyVerb, Model, ModelList, Models, Status

_T = TypeVar("_T")

_LOOK_S = 0.2  # between two looks whether a node that has not answered lives
TOKENIZE_S = 30.0


class LocalNodes:
    """See `Reach`. One thread at a time."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        """Attach to the nodes at these sockets. No answer takes longer than `timeout_s`.

        :raises NodeUnavailable: no node answers at one of them.
        """
        self._timeout_s = timeout_s
        self._nodes: dict[str, Connection] = {}
        with contextlib.ExitStack() as undo:
            for address in addresses:
                hello = Hello(VERSION, os.getpid(), "controller", name=os.path.basename(sys.argv[0]))
                connection = undo.enter_context(Connection(address, hello))
                if not connection.attach(timeout_s):
                    raise NodeUnavailable(
                        f"no node answers at {address} within {timeout_s:g} s; start one with: pdx node"
                    )
                name = self._call(connection, Status(), NodeStatus).name
                if name in self._nodes:
                    raise SelectionError(f"the nodes at {self._nodes[name].address} and {address} are both {name!r}")
                self._nodes[name] = connection
            self._close = undo.pop_all().close

    def __repr__(self) -> str:
        return f"<LocalNodes {', '.join(self._nodes)}>"

    def close(self) -> None:
        self._close()

    def names(self) -> list[str]:
        return list(self._nodes)

    def address(self, name: str) -> str:
        return self._nodes[name].address

    def ask(self, verb: AnyVerb, instances: Sequence[str], prompt: Prompt | None = None) -> dict[str, Outcome]:
        if unknown := [name for name in instances if name not in self._nodes]:
            raise SelectionError(f"no node {unknown[0]!r:.80} is known here; there are {', '.join(self._nodes)}")
        if prompt is not None:
            models = prompt.engines(self._models())
            verb = about(verb, _in_tokens(prompt, models), models)
        names = list(dict.fromkeys(instances or self._nodes))
        found: dict[str, Outcome] = {}
        for name in names:
            try:
                found[name] = self._call(self._nodes[name], verb, verb.answers)  # type: ignore[arg-type]
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
                found += self._call(connection, Models(), ModelList).models
        return found

    def _call(self, connection: Connection, ask: AnyVerb, kind: type[_T]) -> _T:
        """A node's answer, of this kind.

        :raises NodeUnavailable: the node has died, or does not answer.
        """
        decode_to_node(encode(ToNode(1, True, ask)))  # the node would drop what is out of bounds, without an answer
        until = time.monotonic() + self._timeout_s
        seq = connection.ask(ask)
        answer: Answer | None = None
        while answer is None:
            answer = connection.collect(seq, _LOOK_S)
            gone = "has died" if not connection.is_alive else "does not answer" if time.monotonic() >= until else ""
            if answer is None and gone:
                connection.forget(seq)
                raise NodeUnavailable(f"the node at {connection.address} {gone}")
        if not isinstance(answer, kind):
            raise ProtocolError(f"the node answers {type(answer).__name__} to {type(ask).__name__}")
        return answer


class _Tokens(msgspec.Struct):
    tokens: list[int]


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
        answer = call(url, "/tokenize", body, timeout_s=TOKENIZE_S)
        if answer.status != 200:
            raise SelectionError(f"the engine at {url} answers {answer.status} to /tokenize: {answer.text[:200]!r}")
        tokens = msgspec.json.decode(answer.body, type=_Tokens).tokens
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError) as error:
        raise SelectionError(f"the engine at {url} makes no tokens of a text: {error}") from error
    return msgspec.structs.replace(prompt, text=None, messages=None, tokens=tokens)
