"""What the nodes say of a request: of its chunks, in the header `X-PDX-Why`, and of its hints, in `X-PDX-Hints`."""

from __future__ import annotations

import asyncio
from collections import Counter

from pdx.proxy.control import Control
from pdx.telemetry.faults import printable
from pdx.wire.base import MAX_NAME
from pdx.wire.hints import Verdict
from pdx.wire.messages import Explained, Explanation

WHY_S = 0.1  # that an answer may wait for what nodes say
MAX_ASKED = 256  # requests that wait for that at a time
_MAX_TOLD = 2000  # characters of up to 4 bytes: clients and proxies take about 8,000 bytes of a header
HEADER = "X-PDX-Why"


class Explainer:
    """Asks all nodes, and waits for one that knows. All calls on one event loop."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._asked: dict[str, asyncio.Future[list[Explanation]]] = {}

    def told(self, explained: Explained) -> None:
        """A node has answered: with nothing, if it does not know the request."""
        for name, future in self._asked.items():
            engines = {one.engine: one for one in reversed(explained.requests) if name in one.request}
            if engines and not future.done():
                future.set_result(list(engines.values()))

    async def why(self, request: str) -> str:
        """Of each engine of the node that answers first: hits, where they came from, and why the others are missing."""
        if self._is_full(request):
            return "too many ask"
        found = await self._explanations(request)
        return printable("; ".join(map(summary, found)), _MAX_TOLD) or "no node knows this request"

    async def verdicts(self, request: str) -> list[Verdict]:
        """What became of its hints: of all engines of the node that answers first. Empty: none answers."""
        if self._is_full(request) or not _is_told(request):
            return []
        found = await self._explanations(request)
        return [verdict for told in found for verdict in told.verdicts]

    def _is_full(self, request: str) -> bool:
        return len(self._asked) >= MAX_ASKED or request in self._asked

    async def _explanations(self, request: str) -> list[Explanation]:
        future: asyncio.Future[list[Explanation]] = asyncio.get_running_loop().create_future()
        self._asked[request] = future
        try:
            self._control.ask_why(request)
            async with asyncio.timeout(WHY_S):
                return await future
        except TimeoutError:
            return []
        finally:
            del self._asked[request]


def _is_told(request: str) -> bool:
    """Whether a message can say this name of a client's; an empty one would stand for all requests."""
    return 0 < len(request) <= MAX_NAME and not any("\ud800" <= one <= "\udfff" for one in request)


def summary(told: Explanation) -> str:
    """One engine's part in few words; names of other requests are nothing for a client."""
    hits: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for reason in told.reasons:
        (hits if reason.is_hit else missing)[reason.kind] += reason.count
    parts = [f"{what} {_counts(of)}" for what, of in (("from", hits), ("missing", missing)) if of]
    return printable(", ".join([f"{told.engine[:8]} {told.hits}/{told.chunks} chunks", *parts]))


def _counts(kinds: Counter[str]) -> str:
    return " ".join(f"{kind}:{count}" for kind, count in kinds.items())
