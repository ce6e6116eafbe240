"""Finds out what is known about a prompt before it is placed: its tokens, and how many of them each node has."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from pdx.errors import Exhausted, LegFailed, ProtocolError, SelectionError
from pdx.proxy import body
from pdx.proxy.cache.verbs import Instances
from pdx.proxy.chunk_index import ANY
from pdx.proxy.config import ProxyConfig, Routing
from pdx.proxy.engines import Engine, Engines
from pdx.proxy.exchange import Exchange
from pdx.proxy.following import Following
from pdx.proxy.health import NO_WORK, Record, Work
from pdx.proxy.leg import Legs
from pdx.proxy.placing import Coming, Keys, Prompt, cost, paced
from pdx.proxy.plan import BYTES_PER_TOKEN, Body, Mode, prompt_bytes
from pdx.proxy.router import serving
from pdx.proxy.routes import Route
from pdx.security.address import base_url
from pdx.telemetry.env import Env
from pdx.telemetry.recent import remember
from pdx.wire.tokens import each_chunk_key, number_of

FIND_S = 0.02  # time limit for tokenizing a prompt; a request that would wait longer is placed without tokens
MOST_IDS = 1 << 18  # of a prompt: reading more ids would block the event loop
_AT_ONCE = 8  # keys of chunks that are computed before other requests get their turn
SESSIONS = 100_000  # remembered sessions
_TOKENIZED = {  # request fields that affect tokenization
    Route.COMPLETIONS: ("model", "prompt", "add_special_tokens"),
    Route.CHAT: (
        *("model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "mm_processor_kwargs"),
    ),
}
_UNTOLD = ("truncate_prompt_tokens", "documents", "reasoning_effort")  # these do, too, and /tokenize ignores them
# In messages: content that an engine would fetch or process again, and that is in no key computed here.
_MEDIA = re.compile(rb'"(?:input_)?(?:image|audio|video|file)[a-z_]*"\s*:')


class Locating:
    """Runs on the event loop's thread."""

    def __init__(
        self,
        config: ProxyConfig,
        env: Env,
        *,
        engines: Engines,
        legs: Legs,
        instances: Instances,
        chunks: Following | None,
    ) -> None:
        """`instances`: how engines name chunks. `chunks`: the index of what nodes have."""
        self._routing = config.routing
        self._split_tokens = config.min_split_tokens
        self._engines = engines
        self._health = engines.health
        self._legs = legs
        self._instances = instances
        self._chunks = chunks
        self._counters = env.counters
        self._coming = Coming()
        self._sessions: OrderedDict[str, Prompt] = OrderedDict()  # their last turns

    async def locate(self, exchange: Exchange) -> None:
        """Record what is known about a request's prompt, within FIND_S."""
        last = self._sessions.get(exchange.hints.session) if exchange.hints.session else None
        if self._routing is Routing.SESSION:
            exchange.prompt = last
        if self._routing is not Routing.PREFIX or exchange.whole is not None:
            return
        engines = serving(self._engines.all(), self._health, exchange.model)
        nbytes = prompt_bytes(exchange.route, exchange.body)
        longest = max((engine.facts.max_model_len for engine in engines if engine.facts is not None), default=nbytes)
        # An inline image is many bytes but few tokens: judged by its length, it would keep an engine busy for minutes.
        estimate = min(nbytes // BYTES_PER_TOKEN, longest)
        exchange.prompt = Prompt(estimate, last.hits if last is not None else {})
        if len({engine.node for engine in engines} - {""}) < 2:  # all would find the same
            return
        try:
            exchange.prompt = await self._found(exchange, engines)
        except (TimeoutError, LegFailed, Exhausted, ProtocolError, SelectionError, ValueError, RecursionError):
            # What the client sent may be nonsense, which is for an engine to reject.
            self._counters["placed_without_tokens"] += 1
        finally:
            exchange.prompt = paced(exchange.prompt, [self._health.of(engine.url) for engine in engines])

    async def _found(self, exchange: Exchange, engines: Sequence[Engine]) -> Prompt:
        models = {base_url(model.url): model for model in self._instances.models() if model.url}
        able = [engine for engine in engines if engine.url in models]
        is_untold = any(exchange.body.get(name) is not None for name in _UNTOLD)
        if exchange.route not in _TOKENIZED or not able or self._chunks is None or is_untold:
            raise SelectionError("no chunks' keys can be computed from such a request")
        engine = min(able, key=self._asked_first)
        if exchange.model in self._health.of(engine.url).adapters:
            raise SelectionError(f"an adapter's chunks have other keys: {exchange.model!r}")
        async with asyncio.timeout(FIND_S):
            tokens = await self._tokens(exchange, engine)
        salt = exchange.body.get("cache_salt")
        named = msgspec.json.decode(salt, type=str | None) if isinstance(salt, Raw) else None
        model = models[engine.url]
        index, per_chunk = self._chunks.index, number_of(model, "chunk_tokens")
        if len(tokens) < per_chunk:
            return Prompt(len(tokens), chunk_tokens=per_chunk)
        keys, known = Keys(each_chunk_key(model, tokens, named or "")), 0
        while (key := keys.get(known)) is not None and (index.is_known(key) or self._coming.is_known(key)):
            known += 1
            if not known % _AT_ONCE:
                await asyncio.sleep(0)
        there = {node: tiers[ANY] for node, tiers in index.lookup(keys).items()}
        leads = self._coming.leads(keys, there, index.has)
        exchange.keys = keys
        return Prompt(len(tokens), {node: lead * per_chunk for node, lead in leads.items()}, per_chunk)

    def _asked_first(self, engine: Engine) -> tuple[bool, int, int]:
        """A sort key: every text an engine fails to tokenize moves it back, so one that hangs is seldom asked."""
        record = self._health.of(engine.url)
        return record.avoided, record.untold, record.in_flight

    async def _tokens(self, exchange: Exchange, engine: Engine) -> list[int]:
        said, route = exchange.body, exchange.route
        prompt = said.get("prompt")
        if route is Route.COMPLETIONS and isinstance(prompt, Raw) and bytes(memoryview(prompt)[:1]) == b"[":
            if len(raw := memoryview(prompt)) > 8 * MOST_IDS or bytes(raw).count(b",") >= MOST_IDS:
                raise SelectionError(f"a prompt of {len(raw)} bytes is too long to be read here")
            return msgspec.json.decode(prompt, type=list[int])
        asked: dict[str, Any] = {name: said[name] for name in _TOKENIZED[route] if said.get(name) is not None}
        payload = body.encode(asked)
        if not isinstance(payload, bytes) or _MEDIA.search(payload) is not None:
            raise SelectionError(f"no engine is to make tokens of these {len(payload)} bytes")
        record = self._health.of(engine.url)
        record.untold += 1
        tokens = await self._legs.tokens(engine, payload, headers=exchange.headers, timeout_s=FIND_S)
        record.untold -= 1
        return tokens

    def cost(self, engine: Engine, record: Record, prompt: Prompt | None) -> int:
        """See `pdx.proxy.placing.cost`."""
        return cost(self._routing, engine, record, prompt)

    def has_all(self, exchange: Exchange, engine: Engine) -> bool:
        """Whether so little of the prompt is missing at this engine that no other engine need prefill it."""
        prompt = exchange.prompt
        return prompt is not None and prompt.chunk_tokens > 0 and prompt.missing(engine.node) < self._split_tokens

    def chosen(self, exchange: Exchange, engine: Engine) -> None:
        """Record that this engine is about to compute the missing part of the prompt, so that it counts as there from
        now on."""
        prompt, is_known = exchange.prompt, any(node == engine.node for node, _ in exchange.coming)
        if prompt is None or exchange.keys is None or not engine.node or is_known:
            return
        first = (prompt.tokens - prompt.missing(engine.node)) // prompt.chunk_tokens
        exchange.coming.append((engine.node, self._coming.add(engine.node, exchange.keys, first)))

    def work(self, exchange: Exchange, engine: Engine, *, decodes: bool) -> Work:
        """The work this engine has with the prompt in a leg."""
        prompt = exchange.prompt
        if prompt is None or (decodes and exchange.mode is not Mode.ALONE):
            return NO_WORK
        self.chosen(exchange, engine)
        return prompt.work(engine.node, is_timed=prompt.chunk_tokens > 0 and (exchange.streams or not decodes))

    @staticmethod
    def told(exchange: Exchange, leg: Body, engine: Engine, *, decodes: bool) -> Body:
        """The leg's body for this engine, with where missing chunks can be fetched, and with hints about its chunks.

        Transfer parameters go only to engines known to run PDX, except in decode legs: other engines may reject them.
        """
        params: Body = {}
        is_pushed = decodes and "kv_transfer_params" in leg
        prefilled_at = exchange.planned.prefiller.node if exchange.planned is not None else ""
        if is_pushed and prefilled_at not in ("", engine.node):  # chunks that do not arrive can be fetched from there
            params["prefill_node"] = prefilled_at
        if engine.node and not engine.detached:
            better = exchange.prompt.better(engine.node) if exchange.prompt is not None else ""
            if better and not is_pushed:  # that node has more of the prompt than the engine's own
                params["prefix_node"] = better
            if exchange.hints.asks:
                params["pdx_hints"] = exchange.hints.as_object()
        return body.told(leg, params)

    def over(self, exchange: Exchange) -> None:
        """Record that the nodes of the request's engines now have its prompt, as far as it was answered."""
        for node, keys in exchange.coming:
            self._coming.over(node, keys)
        if exchange.hints.session and exchange.used and self._routing in (Routing.SESSION, Routing.PREFIX):
            tokens = exchange.timeline.prompt_tokens or (exchange.prompt.tokens if exchange.prompt is not None else 0)
            hits = {engine.node: tokens for engine in exchange.used.values() if engine.node}
            turn = Prompt(tokens, hits, urls=frozenset(exchange.used))
            remember(self._sessions, exchange.hints.session, turn, SESSIONS)
