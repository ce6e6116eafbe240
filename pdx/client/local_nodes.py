"""Nodes of this host, each over its own socket, for a controller; what a proxy does for others is done here."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, get_args

import msgspec

from pdx.client.connection import Connection
from pdx.client.prompt import Health, Lookup, Prompt
from pdx.client.reach import named
from pdx.client.tokenizer import tokens_of
from pdx.errors import NodeError, NodeUnavailable, PdxError, ProtocolError, SelectionError
from pdx.memory.form import LossyName
from pdx.wire.messages import VERSION, Answer, Hello, Outcome, Refused, Status, ToNode, Verb, decode_to_node, encode
from pdx.wire.status import NodeStatus
from pdx.wire.tokens import chosen, chunk_keys, chunk_tokens, form_text, num_shards
from pdx.wire.verbs import Find, Found, Model, ModelList, Models, Recode, Selection

_T = TypeVar("_T")

_LOOK_S = 0.2  # between two looks whether a node that has not answered lives
_AGAIN_S, _SELDOM_S = 0.02, 0.5  # until tiers that had not answered are asked again


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

    def ask(self, verb: Verb, instances: Sequence[str], prompt: Prompt | None = None) -> dict[str, Outcome]:
        if prompt is not None:
            prompt, models = self._read(prompt)
            verb = msgspec.structs.replace(verb, what=_selection(prompt, models))
            if isinstance(verb, Recode):
                verb = _with_new_keys(verb, prompt, models)
        return self._each(instances, lambda connection: self._call(connection, verb, None))

    def find(self, prompt: Prompt, instances: Sequence[str], wait_s: float) -> Lookup:
        prompt, models = self._read(prompt)
        selection = _selection(prompt, models)
        sizes = {chunk_tokens(model) for model in models if model.shape.get("chunk_tokens")}
        per_chunk = sizes.pop() if len(sizes) == 1 else 0  # 0: not known
        until = time.monotonic() + wait_s
        found = self._each(instances, lambda connection: self._found(connection, Find(selection), until))
        tiers, hits, pinned, asking, errors = {}, {}, {}, {}, {}
        chunks = len(selection.keys)
        for name, outcome in found.items():
            if isinstance(outcome, Refused):
                errors[name] = outcome.text
                continue
            assert isinstance(outcome, Found)
            chunks = max(chunks, outcome.chunks)
            tiers[name], pinned[name] = _scaled(outcome.tiers, per_chunk), _scaled(outcome.pinned, per_chunk)
            hits[name] = outcome.hits * (per_chunk or 1)
            asking[name] = list(outcome.asking)
        return Lookup(chunks, per_chunk, tiers, hits, _only(pinned), _only(asking), errors)

    def _found(self, connection: Connection, ask: Find, until: float) -> Found:
        """What a node has, once all its tiers have answered, or what is known of it by then."""
        pause_s = _AGAIN_S
        while True:
            found = self._call(connection, ask, Found)
            if not found.asking or time.monotonic() + pause_s >= until:
                return found
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SELDOM_S)

    def addresses(self, instances: Sequence[str]) -> dict[str, str]:
        found = {}
        for name in named(instances, self._nodes):
            connection = self._nodes[name]
            found[name] = self._call(connection, Status(), NodeStatus).listen or connection.address
        return found

    def health(self, instances: Sequence[str]) -> dict[str, Health]:
        found = {}
        for name in named(instances, self._nodes):
            try:
                found[name] = Health(self._call(self._nodes[name], Status(), NodeStatus))
            except PdxError as error:
                found[name] = Health(None, str(error))
        return found

    def _read(self, prompt: Prompt) -> tuple[Prompt, list[Model]]:
        """The prompt, as tokens where it is a text, and the engines that make keys of these; of a request: all there
        are."""
        models = self._models()
        if prompt.request:
            return prompt, models
        models = chosen(models, prompt.model)
        if prompt.text is not None:
            prompt = msgspec.structs.replace(prompt, text=None, tokens=tokens_of(prompt.text, models))
        return prompt, models

    def _models(self) -> list[Model]:
        """Of the nodes that answer: the others' own verbs say what is the matter with them."""
        found: list[Model] = []
        for connection in self._nodes.values():
            with contextlib.suppress(NodeUnavailable):
                found += self._call(connection, Models(), ModelList).models
        return found

    def _each(self, instances: Sequence[str], ask: Callable[[Connection], Outcome]) -> dict[str, Outcome]:
        names = named(instances, self._nodes)
        found: dict[str, Outcome] = {}
        for name in names:
            try:
                found[name] = ask(self._nodes[name])
            except (NodeError, ProtocolError) as error:
                if len(names) == 1:
                    raise
                found[name] = Refused.of(error)
        return found

    def _call(self, connection: Connection, ask: Verb, kind: type[_T] | None) -> _T:
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
        if kind is not None and not isinstance(answer, kind):
            raise ProtocolError(f"the node answers {type(answer).__name__} to {type(ask).__name__}")
        return answer  # type: ignore[return-value]


def _selection(prompt: Prompt, models: Sequence[Model]) -> Selection:
    if prompt.request:
        return Selection(request=prompt.request)
    return Selection(chunk_keys(models[0], prompt.tokens or (), prompt.salt, prompt.codec), num_shards(models[0]))


def _with_new_keys(verb: Recode, prompt: Prompt, models: Sequence[Model]) -> Recode:
    """Of a lossy codec: its form, and the keys that the chunks have then."""
    if prompt.request:
        if verb.codec in get_args(LossyName):
            raise SelectionError(
                f"chunks that are stored by {verb.codec} get other keys, which no request's id tells: name tokens or a "
                f"text"
            )
        return verb
    form = form_text(models[0], verb.codec)
    if not form:
        return verb
    lossy = msgspec.structs.replace(prompt, codec=verb.codec)
    return msgspec.structs.replace(verb, codec=form, new_keys=_selection(lossy, models).keys)


def _scaled(counts: dict[str, int], per_chunk: int) -> dict[str, int]:
    return {name: count * (per_chunk or 1) for name, count in counts.items()}


def _only(said: dict[str, _T]) -> dict[str, _T]:
    """Of those who have said something."""
    return {name: each for name, each in said.items() if each}
