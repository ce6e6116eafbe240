"""The controllers' verbs: which nodes exist, which of them receive a verb, and what they answer. No HTTP.

An error of one node is reported in its entry and does not affect the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from pdx.errors import (
    Exhausted,
    LegFailed,
    NodeUnavailable,
    NoEngine,
    PdxError,
    ProtocolError,
    SelectionError,
    VerbRefused,
)
from pdx.proxy.cache.orders import Orders
from pdx.proxy.chunk_index import ANY
from pdx.proxy.control import Control
from pdx.proxy.engines import MAX_NODES, Engines
from pdx.proxy.following import Following
from pdx.proxy.hints import advice
from pdx.proxy.leg import Legs
from pdx.security.address import base_url
from pdx.telemetry.env import Env
from pdx.wire.messages import Outcome, Refused
from pdx.wire.prompt import Prompt, about
from pdx.wire.proxy import NodeReport
from pdx.wire.verbs import (
    Advise,
    Advised,
    AnyVerb,
    CheckFinish,
    Clear,
    EndJob,
    Find,
    Found,
    Model,
    Move,
    Selection,
    Verb,
    node_of,
)

FORGET_S = 3600.0  # a node that is not in a roster is forgotten after this silence
_NAMED = 16  # names in an error message
ALL = "*"
_TOKENIZE_S = 30.0
_AGAIN_S, _SELDOM_S = 0.02, 0.5  # between two lookups while a node's tiers have not answered, doubling


class Instance(msgspec.Struct, frozen=True):
    """A node as last reported. `report` is None if the roster names it and it has not reported."""

    name: str
    report: NodeReport | None
    seen_at: float


class Instances:
    """All calls on one thread. At most MAX_NODES are known."""

    def __init__(self, control: Control, env: Env, *, silent_s: float) -> None:
        self._control = control
        self._silent_s = silent_s
        self._clock = env.clock
        self._seen: dict[str, Instance] = {}

    def report(self, report: NodeReport) -> bool:
        """Process a node's report; True if a known node was restarted."""
        before = self._seen.pop(report.node, None)
        if before is None and len(self._seen) >= MAX_NODES:
            self._expire()
        if before is not None or len(self._seen) < MAX_NODES:
            kept = msgspec.structs.replace(report, marks=[])
            self._seen[report.node] = Instance(report.node, kept, self._clock())
        return before is not None and before.report is not None and before.report.epoch != report.epoch

    def all(self) -> dict[str, Instance]:
        """By name: those that have reported, and those in the roster."""
        members = self._control.members()
        if members is None:
            self._expire()
            return dict(sorted(self._seen.items()))
        return {name: self._seen.get(name) or Instance(name, None, 0.0) for name in sorted(members)}

    def _expire(self) -> None:
        oldest = self._clock() - FORGET_S
        self._seen = {name: each for name, each in self._seen.items() if each.seen_at >= oldest}

    def named(self, names: Collection[str]) -> dict[str, Instance]:
        """The instances with these names; without names, all. :raises SelectionError: a name is unknown."""
        known = self.all()
        for name in names:
            if name not in known:
                there = ", ".join(sorted(known)[:_NAMED]) or "none"
                raise SelectionError(f"no node {name!r:.80} is known here; there are {there}")
        return {name: known[name] for name in names} if names else known

    def get(self, name: str) -> Instance:
        """The instance of this name. :raises SelectionError: there is none."""
        return self.named([name])[name]

    def check_heard(self, instance: Instance) -> None:
        """:raises NodeUnavailable: it has not reported lately."""
        if problem := self.problem(instance):
            raise NodeUnavailable(f"node {instance.name!r} {problem}")

    def problem(self, instance: Instance) -> str:
        """Why it cannot receive a verb; empty if it can."""
        if instance.report is None:
            return "is in the roster, and has not reported to this proxy"
        age_s = self._clock() - instance.seen_at
        return f"has not been heard of for {age_s:.0f} s" if age_s >= self._silent_s else ""

    def models(self) -> list[Model]:
        """How attached engines name the chunks of a prompt, as far as reported."""
        return [
            Model(engine.engine, engine.url, engine.layout, engine.shape)
            for each in self.all().values()
            if each.report is not None and not self.problem(each)
            for engine in each.report.engines
            if engine.layout and engine.shape
        ]


class Verbs:
    """All calls on one event loop. Methods raise the errors of `pdx.errors` for an invalid body, node or chunks."""

    def __init__(
        self, instances: Instances, orders: Orders, engines: Engines, legs: Legs, chunks: Following | None
    ) -> None:
        """`chunks`: the index of what nodes have; without it, or while it is incomplete, nodes are asked."""
        self._instances = instances
        self._orders = orders
        self._engines = engines
        self._chunks = chunks
        self._legs = legs
        self._turn = asyncio.Semaphore(1)  # for computing keys: more Python threads would only delay the loop

    async def carry_out(self, kind: type[Verb], said: Any, names: Collection[str], wait_s: float) -> dict[str, Outcome]:
        """Send a verb to these nodes; returns their answers in the verb's form in `pdx.wire.objects`.

        :raises VerbRefused: the only named node refuses it.
        """
        nodes = self._nodes(kind, said, names)
        envelope = advice(bytes(said.hints)) if kind is Advise else None
        verb: Any
        if envelope is not None:
            verb = Advise(envelope.hints, said.keys, said.shards)
        else:
            verb = await self._read(kind, said)
        if isinstance(verb, Move) and verb.target_node:
            self._instances.check_heard(self._instances.get(verb.target_node))
        if isinstance(verb, Find) and (found := self._by_index(verb, nodes)) is not None:
            return found
        if kind.is_of_one_node() or (len(nodes) == 1 and names and ALL not in names):
            found = {name: await self._ask(node, verb, wait_s) for name, node in nodes.items()}
        else:
            found = await self.settled(nodes, verb, wait_s)
        if envelope is None:
            return found
        return {  # every field gets a verdict, also those that are not sent to nodes
            name: Advised(envelope.answer(each.verdicts)) if isinstance(each, Advised) else each
            for name, each in found.items()
        }

    async def settled(self, nodes: Mapping[str, Instance], verb: AnyVerb, wait_s: float) -> dict[str, Outcome]:
        """Each node's answer, or why there is none."""
        outcomes = await asyncio.gather(*(self._settled(node, verb, wait_s) for node in nodes.values()))
        return dict(zip(nodes, outcomes, strict=True))

    def _nodes(self, kind: type[Verb], said: Any, names: Collection[str]) -> dict[str, Instance]:
        """:raises SelectionError: a name is unknown, or none is given for a verb that must not go to all nodes."""
        if kind in (CheckFinish, EndJob):
            names = [node_of(said.job)]
        if not names and not kind.only_looks():
            raise SelectionError(f"say at which node: {kind.name}?node=NAME, or ?node=* for all")
        nodes = self._instances.named([] if ALL in names else names)
        if kind.is_of_one_node() and (len(nodes) != 1 or ALL in names):
            raise SelectionError("a job is of one node: name it")
        return nodes

    async def _read(self, kind: type[Verb], said: Any) -> Any:
        """The verb as nodes receive it.

        :raises SelectionError: the chunks are not specified, or in two ways, or there are none.
        :raises NoEngine: it is about a text, and no engine tokenizes it.
        """
        fields = {name: getattr(said, name) for name in said.__struct_fields__}
        prompt: Prompt | None = fields.get("what")
        if "what" in fields:
            fields["what"] = Selection()
        verb: Any = kind(**fields)
        if "what" not in fields or (prompt is None and isinstance(verb, Clear) and verb.everything):
            return verb
        return await self._about(verb, prompt or Prompt())

    async def _about(self, verb: AnyVerb, prompt: Prompt) -> AnyVerb:
        models = prompt.engines(self._instances.models())
        if (body := prompt.untokenized) is not None:
            try:
                written = msgspec.json.encode(body)
            except RecursionError as error:
                raise SelectionError("the messages are nested too deeply") from error
            tokens = await self._tokenize(next((model for model in models if model.url), models[0]), written)
            prompt = msgspec.structs.replace(prompt, text=None, messages=None, tokens=tokens)
        # In a thread: a million tokens take a second, during which clients would wait.
        async with self._turn:
            return await asyncio.to_thread(about, verb, prompt, models)

    def _by_index(self, ask: Find, nodes: Mapping[str, Instance]) -> dict[str, Outcome] | None:
        """The index's answer; None: nodes have to be asked."""
        if self._chunks is None or not ask.what.keys or ask.ask:
            return None
        known, is_complete = self._chunks.lookup(ask.what.keys)
        if not is_complete:
            return None
        found: dict[str, Outcome] = {}
        for name, instance in nodes.items():
            if problem := self._instances.problem(instance):
                found[name] = Refused(NodeUnavailable.__name__, f"node {name!r} {problem}")
                continue
            tiers = dict(known.get(name, {}))
            hits = tiers.pop(ANY, 0)
            found[name] = Found(len(ask.what.keys), hits, tiers, chunk_tokens=ask.what.chunk_tokens, by_index=True)
        return found

    async def _ask(self, node: Instance, verb: AnyVerb, wait_s: float) -> Outcome:
        """A node's answer. A lookup is repeated until all tiers have answered, or `wait_s` is over; then what is known
        counts."""
        self._instances.check_heard(node)
        until, pause_s = asyncio.get_running_loop().time() + wait_s, _AGAIN_S
        outcome = await self._orders.ask(node.name, verb, wait_s)
        while isinstance(outcome, Found) and outcome.asking:
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= pause_s:
                break
            await asyncio.sleep(pause_s)
            try:
                outcome = await self._orders.ask(node.name, verb, left_s - pause_s)
            except NodeUnavailable:
                break
            pause_s = min(2 * pause_s, _SELDOM_S)
        if isinstance(outcome, Refused):
            raise VerbRefused(outcome.error, outcome.text)
        return outcome

    async def _settled(self, node: Instance, verb: AnyVerb, wait_s: float) -> Outcome:
        try:
            return await self._ask(node, verb, wait_s)
        except VerbRefused as error:
            return Refused(error.error, str(error))
        except PdxError as error:
            return Refused.of(error)

    async def _tokenize(self, model: Model, body: bytes) -> list[int]:
        """Tokenize a text at an engine. The request has no key: a controller's key is not an engine's.

        :raises NoEngine: no engine can be asked, or its answer is invalid.
        """
        url = base_url(model.url) if model.url else ""
        engine = next((each for each in self._engines.all() if each.url == url), None)
        if engine is None:
            raise NoEngine(f"engine {model.engine!r} serves no HTTP that this proxy knows, so give token ids")
        try:
            return await self._legs.tokens(engine, body, headers={}, timeout_s=_TOKENIZE_S)
        except (LegFailed, Exhausted, ProtocolError) as error:
            why = str(error)[:200]
            raise NoEngine(f"engine {model.engine!r} made no tokens of the text ({why}), so give token ids") from error
