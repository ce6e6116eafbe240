"""Verbs that nodes were told to carry out and have not answered yet: numbers, deadlines, and whose answer counts."""

from __future__ import annotations

import asyncio
import itertools
import secrets

from pdx.errors import NodeUnavailable, ProtocolError
from pdx.proxy.control import Control
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.wire.messages import Outcome, Refused
from pdx.wire.proxy import Order, Reply
from pdx.wire.verbs import (
    AnyVerb,
)

AT_A_TIME = 32  # of one node; it can leave 64 answers unread by the proxy, reports included


class _Asked:
    """An order under way, of the node `node`."""

    def __init__(self, node: str, verb: AnyVerb) -> None:
        self.node = node
        self.verb = verb
        self.answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()


class _Turns:
    """Who waits for a turn at one node, or has one."""

    def __init__(self) -> None:
        self.semaphore = asyncio.Semaphore(AT_A_TIME)
        self.users = 0


class Orders:
    """The orders under way. All calls on one event loop.

    `counters` counts what was not taken in: `replies_late` (also a second one), `replies_misplaced` (of a node that was
    not asked), `replies_wrong` (of another type than the verb has).
    """

    def __init__(self, control: Control, env: Env) -> None:
        self._control = control
        self._counters = env.counters
        self._faults = env.faults
        # Not from 1: an answer to this proxy's last life is no answer to this one.
        self._numbers = itertools.count(secrets.randbits(60))
        self._under_way: dict[int, _Asked] = {}
        self._turns: dict[str, _Turns] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    async def ask(self, node: str, verb: AnyVerb, wait_s: float) -> Outcome:
        """What the node answers, which may be `Refused`. Waiting for a turn counts, too.

        :raises NodeUnavailable: it cannot be reached, or has not answered in `wait_s`, or was started again.
        :raises ProtocolError: it answered with something else.
        """
        turns = self._turns.setdefault(node, _Turns())
        turns.users += 1
        try:
            async with asyncio.timeout(wait_s):
                async with turns.semaphore:
                    return await self._ask(node, verb)
        except TimeoutError as error:
            text = f"node {node!r} has not answered for {wait_s:g} s; whether it has done it is not known"
            raise NodeUnavailable(text) from error
        finally:
            turns.users -= 1
            if not turns.users:
                del self._turns[node]

    async def _ask(self, node: str, verb: AnyVerb) -> Outcome:
        number = next(self._numbers)
        asked = self._under_way[number] = _Asked(node, verb)
        try:
            if problem := self._control.order(node, Order(number, verb)):
                raise NodeUnavailable(f"node {node!r} was not asked: {problem}")
            return await asked.answer
        finally:
            del self._under_way[number]

    def replied(self, node: str, reply: Reply) -> None:
        """A node has answered."""
        asked = self._under_way.get(reply.number)
        if asked is None or asked.answer.done():
            self._drop("replies_late", node, "its answer comes too late, or again")
        elif asked.node != node:
            self._drop("replies_misplaced", node, f"it answers what node {asked.node!r} was asked")
        elif not isinstance(reply.outcome, (Refused, *asked.verb.answers)):
            text = f"node {node!r} answered {type(asked.verb).__name__} with {type(reply.outcome).__name__}"
            self._drop("replies_wrong", node, text)
            asked.answer.set_exception(ProtocolError(text))
        else:
            asked.answer.set_result(reply.outcome)

    def lost(self, node: str, why: str) -> None:
        """What this node was told is not answered any more."""
        for asked in self._under_way.values():
            if asked.node == node and not asked.answer.done():
                asked.answer.set_exception(NodeUnavailable(f"node {node!r} {why}; whether it has done it is not known"))

    def _drop(self, counter: str, node: str, text: str) -> None:
        self._counters[counter] += 1
        self._faults.warn(f"{counter} {node}", printable(f"an answer of node {node!r} is dropped: {text}"))
