"""What the nodes say of a request's hints, for the header `X-PDX-Hints`."""

from __future__ import annotations

import asyncio

from pdx.proxy.control import Control
from pdx.wire.base import MAX_NAME
from pdx.wire.explained import Explained, Explanation
from pdx.wire.hints import Verdict

WHY_S = 0.1  # that an answer may wait for what nodes say
MAX_ASKED = 256  # requests that wait for that at a time


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
