"""Chooses the engine for each request of a trace as `pdx proxy --routing` does, from what a proxy knows of engines."""

from __future__ import annotations

from collections.abc import Sequence

from pdx.bench.sim.engine import Served, SimulatedEngine
from pdx.bench.sim.node import SimulatedNode
from pdx.proxy.config import Routing
from pdx.proxy.engines import Engine
from pdx.proxy.health import NO_WORK, Record, Use
from pdx.proxy.placing import Coming, Keys, Prompt, cost, paced


class Router:
    """Routes to engines with both roles, each on one of the nodes. Its index of chunks is never out of date."""

    def __init__(
        self, routing: Routing, nodes: Sequence[SimulatedNode], engines: Sequence[SimulatedEngine], block_tokens: int
    ) -> None:
        """`engines`: as many per node, in the order of the nodes."""
        self._routing = routing
        self._nodes = nodes
        self._engines = engines
        self._block_tokens = block_tokens
        share = len(engines) // len(nodes)
        self._known = [
            Engine(url=str(at), name=str(at), prefills=True, decodes=True, named=True, node=str(at // share))
            for at in range(len(engines))
        ]
        self._records = [Record(str(at), 0.0, 0.0) for at in range(len(engines))]
        self._sessions: dict[str, Prompt] = {}
        self._begun: dict[bytes, set[int]] = {}  # first key -> the nodes that have been given prompts with it
        self._coming = Coming()
        self._given: dict[int, tuple[str, list[bytes]]] = {}
        self._turns = 0

    def place(self, served: Served) -> SimulatedEngine:
        """Choose the request's engine, and count it as that engine's load."""
        prompt = self._prompt(served)
        ranks = [
            (cost(self._routing, engine, record, prompt), record.last_used)
            for engine, record in zip(self._known, self._records, strict=True)
        ]
        at = ranks.index(min(ranks))
        self._turns += 1
        node = self._known[at].node
        for key in (served.request.keys[0], *served.request.answer_keys[:1]):  # the prompt may have been under a block
            self._begun.setdefault(key, set()).add(int(node))
        work = prompt.work(node, is_timed=True) if prompt is not None else NO_WORK
        served.use = Use(self._records[at], self._turns, is_planned=False, work=work)
        coming = self._coming.add(node, Keys(iter(served.request.keys)), work.found // self._block_tokens)
        self._given[served.number] = node, coming
        if served.request.session:
            self._sessions[served.request.session] = Prompt(served.request.tokens, urls=frozenset({str(at)}))
        return self._engines[at]

    def _prompt(self, served: Served) -> Prompt | None:
        if self._routing is Routing.SESSION:
            return self._sessions.get(served.request.session)
        if self._routing is not Routing.PREFIX:
            return None
        keys = Keys(iter(served.request.keys))
        asked = served.request.keys
        there = dict.fromkeys(map(str, range(len(self._nodes))), 0)
        begun = {str(at): self._nodes[at] for at in sorted(self._begun.get(asked[0], ()))}
        there |= {name: node.leading(asked) for name, node in begun.items()}
        leads = self._coming.leads(keys, there, lambda name, key: name in begun and begun[name].leading([key]) > 0)
        hits = {node: lead * self._block_tokens for node, lead in leads.items()}
        return paced(Prompt(served.request.tokens, hits), self._records)

    def end(self, served: Served) -> None:
        """The request is over: stop counting it."""
        assert served.use is not None
        served.use.end()
        self._coming.over(*self._given.pop(served.number))
