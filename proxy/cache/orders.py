"""Requests to nodes that are not answered yet: numbers, deadlines, and whose answer counts."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from weakref import WeakValueDictionary

from pdx.errors import NodeUnavailable, ProtocolError
from pdx.proxy.control import Control
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.wire.base import MAX_NAME
from pdx.wire.hints import Verdict
from pdx.wire.messages import Outcome, Refused
from pdx.wire.proxy import Order, Reply
from pdx.wire.status import Explained
from pdx.wire.verbs import AnyVerb, Why

AT_A_TIME = 32  # per node; it can have 64 answers queued to the proxy, reports included
WHY_S = 0.1  # how long a client's answer may wait for what nodes say about its hints
MAX_WHY = 256  # client requests that wait for that at a time
_OF_ALL = 0  # number of a request to all nodes


class Orders:
    """Requests in flight. All calls on one event loop.

    `counters` counts rejected replies: `replies_late` (also duplicates), `replies_misplaced` (from a node that was not
    asked), `replies_wrong` (of another type than the verb's).
    """

    def __init__(self, control: Control, env: Env) -> None:
        self._control = control
        self._counters = env.counters
        self._faults = env.faults
        # Not from 1: an answer to this proxy's previous life must not match.
        self._numbers = itertools.count(secrets.randbits(60) + 1)
        self._under_way: dict[int, tuple[str, AnyVerb, asyncio.Future[Outcome]]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # kept while in use
        self._whys: dict[str, asyncio.Future[list[Verdict]]] = {}  # by client request

    def __len__(self) -> int:
        return len(self._under_way)

    async def ask(self, node: str, verb: AnyVerb, wait_s: float) -> Outcome:
        """A node's answer, which may be `Refused`. Waiting for a turn counts towards `wait_s`.

        :raises NodeUnavailable: the node is unreachable, did not answer within `wait_s`, or was restarted.
        :raises ProtocolError: the answer has another type.
        """
        turn = self._turns.setdefault(node, asyncio.Semaphore(AT_A_TIME))
        try:
            async with asyncio.timeout(wait_s), turn:
                return await self._ask(node, verb)
        except TimeoutError as error:
            text = f"node {node!r} has not answered for {wait_s:g} s; whether it has done it is not known"
            raise NodeUnavailable(text) from error

    async def _ask(self, node: str, verb: AnyVerb) -> Outcome:
        number = next(self._numbers)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._under_way[number] = node, verb, answer
        try:
            if problem := self._control.order(node, Order(number, verb)):
                raise NodeUnavailable(f"node {node!r} was not asked: {problem}")
            return await answer
        finally:
            del self._under_way[number]

    async def verdicts(self, request: str) -> list[Verdict]:
        """What became of the hints of a client's request, for all engines of the first node that knows it and answers.
        Empty if none answers within WHY_S, or too many requests are waiting."""
        if len(self._whys) >= MAX_WHY or request in self._whys or not _can_be_said(request):
            return []
        self._whys[request] = asyncio.get_running_loop().create_future()
        try:
            self._control.tell(Order(_OF_ALL, Why(request)), {""})
            async with asyncio.timeout(WHY_S):
                return await self._whys[request]
        except TimeoutError:
            return []
        finally:
            del self._whys[request]

    def replied(self, node: str, reply: Reply) -> None:
        if reply.number == _OF_ALL:
            if isinstance(reply.outcome, Explained):
                self._explained(reply.outcome)
            return
        asked, verb, answer = self._under_way.get(reply.number, ("", None, None))
        if verb is None or answer is None or answer.done():
            self._drop("replies_late", node, "its answer comes too late, or again")
        elif asked != node:
            self._drop("replies_misplaced", node, f"it answers what node {asked!r} was asked")
        elif not isinstance(reply.outcome, (Refused, *verb.answers)):
            text = f"node {node!r} answered {type(verb).__name__} with {type(reply.outcome).__name__}"
            self._drop("replies_wrong", node, text)
            answer.set_exception(ProtocolError(text))
        else:
            answer.set_result(reply.outcome)

    def _explained(self, explained: Explained) -> None:
        """A node's explanation; without verdicts if it does not know the request."""
        for request, waiting in self._whys.items():
            # Engines put a prefix and suffixes around the client's id; "1" is no part of "cmpl-21-0".
            own = [one for one in explained.requests if f"-{request}-" in f"-{one.request}-"]
            engines = {one.engine: one for one in reversed(own)}
            if engines and not waiting.done():
                waiting.set_result([verdict for one in engines.values() for verdict in one.verdicts])

    def lost(self, node: str, why: str) -> None:
        """This node will not answer what it was sent before."""
        for asked, _, answer in self._under_way.values():
            if asked == node and not answer.done():
                answer.set_exception(NodeUnavailable(f"node {node!r} {why}; whether it has done it is not known"))

    def _drop(self, counter: str, node: str, text: str) -> None:
        self._counters[counter] += 1
        self._faults.warn(f"{counter} {node}", printable(f"an answer of node {node!r} is dropped: {text}"))


def _can_be_said(request: str) -> bool:
    """Whether a message can contain this client's name; an empty one would stand for all requests."""
    return 0 < len(request) <= MAX_NAME and not any("\ud800" <= one <= "\udfff" for one in request)
