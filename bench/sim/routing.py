"""Which engine a request of a trace gets: by the rules of `pdx proxy --routing`, from what it knows of engines."""

from __future__ import annotations

from collections.abc import Sequence

from pdx.bench.sim.engine import Served, SimulatedEngine
from pdx.bench.sim.node import SimulatedNode
from pdx.proxy.config import Routing
from pdx.proxy.engines import Engine
from pdx.proxy.health import Record, Use, Work
from pdx.proxy.placing import Prompt, cost


class Router:
    """Engines with both roles, each on one of the nodes. An index of chunks that is never late."""

    def __init__(
        self, routing: Routing, nodes: Sequence[SimulatedNode], engines: Sequence[SimulatedEngine], block_tokens: int
    ) -> None:
        """As many engines of each node, in the order of the nodes."""
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
        self._turns = 0

    def place(self, served: Served) -> SimulatedEngine:
        """The engine that it is for."""
        prompt = self._prompt(served)
        ranks = [
            (cost(self._routing, engine, record, prompt), record.last_used)
            for engine, record in zip(self._known, self._records, strict=True)
        ]
        at = ranks.index(min(ranks))
        self._turns += 1
        missing = prompt.missing(self._known[at].node) if prompt is not None else 0
        found = prompt.tokens - missing if prompt is not None else 0
        work = Work(missing, found, is_timed=True)
        served.use = Use(self._records[at], self._turns, is_planned=False, work=work)
        if served.request.session:
            self._sessions[served.request.session] = Prompt(served.request.tokens, urls=frozenset({str(at)}))
        return self._engines[at]

    def _prompt(self, served: Served) -> Prompt | None:
        if self._routing is Routing.SESSION:
            return self._sessions.get(served.request.session)
        if self._routing is not Routing.PREFIX:
            return None
        leading = (node.leading(served.request.keys) for node in self._nodes)
        hits = {str(at): count * self._block_tokens for at, count in enumerate(leading) if count}
        return Prompt(served.request.tokens, hits, is_exact=True)
