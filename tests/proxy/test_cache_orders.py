"""What is known of nodes that controllers name, whose answer to a verb counts, and which connection is told."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest
from cache_stage import KEY, LAYOUT, SHAPE
from control_stage import ControlStage, Members, control_stage
from proxy_harness import until

from pdx.errors import NodeUnavailable, SelectionError
from pdx.proxy import control as control_module
from pdx.proxy.cache import verbs
from pdx.proxy.cache.orders import Orders
from pdx.proxy.cache.verbs import FORGET_S, Instances
from pdx.telemetry.env import Env
from pdx.wire import messages
from pdx.wire.messages import VERSION, Mark
from pdx.wire.proxy import EngineReport, NodeReport, Order, Reply
from pdx.wire.status import Explained
from pdx.wire.verbs import Find, Found, Selection

SILENT_S = 5.0
FIND = Find(Selection([bytes.fromhex(KEY)]))


class Stage(ControlStage):
    """A control socket, and the orders that go by it."""

    def __init__(self, address, **files):
        super().__init__(address, **files)
        self.orders = Orders(self.control, self.env)

    def take(self, node, message):
        super().take(node, message)
        if isinstance(message, Reply):
            self.orders.replied(node, message)

    async def reporting(self, name, *keys, **how):
        """A node that has reported."""
        made = self.node(name, *keys, **how)
        await self.report(made)
        return made

    async def report(self, node):
        count = len(self.reports)
        await node.report()
        await until(lambda: len(self.reports) > count)


async def answering(node, outcome):
    """The node carries out one order."""
    await node.socket.send(messages.encode(Reply((await node.heard(Order)).number, outcome)))


async def test_an_answer_with_another_key_than_the_nodes_is_none(tmp_path):
    """Whoever takes the route of a node that has left is not that node."""
    members = Members(tmp_path)
    pairs = members.pairs
    with control_stage(kind=Stage, **members.files) as made:
        one = await made.reporting("one", pairs["one"], pairs["proxy"].public, route=b"route")
        asked = asyncio.create_task(made.orders.ask("one", FIND, 60.0))
        number = (await one.heard(Order)).number
        one.close()

        async def is_taken():
            """ZMQ lets nobody else have it before it knows that the node has left."""
            other = made.node("one", pairs["two"], pairs["proxy"].public, route=b"route")
            for answer in (Reply(number, Found(1, 1, {})), Reply(0, Explained([], 0))):
                await other.socket.send(messages.encode(answer))
            with suppress(TimeoutError):
                await until(lambda: len(made.drops) >= 2, 0.2)
            return made.drops

        await until(is_taken)
        assert set(made.drops) == {"not_its_name"}
        assert (asked.done(), len(made.took)) == (False, 1), "it has reported"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert len(made.orders) == 0


async def test_of_two_connections_with_one_name_the_last_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(control_module, "MAX_PEERS", 2)
    with control_stage(f"ipc://{tmp_path}/c/p.sock", Stage) as made:
        lives = [await made.reporting("one") for _ in range(2)]
        for life in (lives[1], lives[0]):
            await made.report(life)
            asked = asyncio.create_task(made.orders.ask("one", FIND, 60.0))
            await answering(life, Found(1, 1, {}))
            assert await asked == Found(1, 1, {})
        others = {name: await made.reporting(name) for name in ("two", "three")}
        with pytest.raises(NodeUnavailable, match="it is not connected"):
            await made.orders.ask("one", FIND, 60.0)
        for name, node in others.items():
            asked = asyncio.create_task(made.orders.ask(name, FIND, 60.0))
            await answering(node, Found(1, 1, {}))
            assert await asked == Found(1, 1, {})
        assert len(made.orders) == 0


async def test_an_answer_to_a_proxys_last_life_is_none_to_this_one():
    sent = []
    for _ in range(2):
        orders = Orders(SimpleNamespace(order=lambda _, order: sent.append(order) or "it is gone"), Env())
        with pytest.raises(NodeUnavailable, match="node 'a' was not asked: it is gone"):
            await orders.ask("a", FIND, 60.0)
        assert len(orders) == 0
    assert abs(sent[1].number - sent[0].number) > 1000


class Bed:
    """Instances with a clock and a roster that a test sets."""

    def __init__(self, members=None):
        self.now = 100.0
        self.members = members
        self.instances = Instances(
            SimpleNamespace(members=lambda: self.members), Env(lambda: self.now), silent_s=SILENT_S
        )

    def heard(self, name):
        self.instances.check_heard(self.instances.get(name))

    def report(self, name, *engines, epoch=1):
        return self.instances.report(NodeReport(VERSION, name, epoch, 1, 1, list(engines), []))


def test_a_node_that_is_silent_is_known_until_it_is_forgotten():
    bed = Bed()
    assert not bed.report("a")
    bed.heard("a")
    bed.now += SILENT_S
    with pytest.raises(NodeUnavailable, match="node 'a' has not been heard of for 5 s"):
        bed.heard("a")
    assert not bed.report("a")
    bed.heard("a")
    assert bed.report("a", epoch=2), "another life"
    bed.now += FORGET_S + 1
    with pytest.raises(SelectionError, match="there are none"):
        bed.heard("a")


def test_the_roster_says_which_nodes_there_are():
    bed = Bed({"a", "b"})
    bed.report("a")
    bed.report("x")
    assert list(bed.instances.all()) == ["a", "b"]
    with pytest.raises(NodeUnavailable, match="is in the roster, and has not reported"):
        bed.heard("b")
    bed.members = {"b"}
    with pytest.raises(SelectionError, match="no node 'a' is known here; there are b"):
        bed.heard("a")


def test_how_many_are_known_is_bounded_and_their_marks_are_not_kept(monkeypatch):
    monkeypatch.setattr(verbs, "MAX_NODES", 2)
    bed = Bed()
    mark = Mark("t" * 16, "sealed", 1, 0, 0, "")
    bed.instances.report(NodeReport(VERSION, "a", 1, 1, 1, [], [mark]))
    for name in ("b", "c"):
        bed.report(name)
    assert list(bed.instances.all()) == ["a", "b"]
    assert bed.instances.all()["a"].report.marks == []
    bed.now += FORGET_S / 2
    bed.report("b")
    bed.now += FORGET_S / 2 + 1
    bed.report("c")
    assert list(bed.instances.all()) == ["b", "c"]


def engine(name, layout=LAYOUT, shape=SHAPE):
    return EngineReport(name, "both", f"http://{name}:1", 0, layout=layout, shape=shape)


def test_models_are_those_of_nodes_that_were_heard_of_lately():
    bed = Bed()
    bed.report("a", engine("e"), engine("untold", layout=b"", shape={}))
    bed.report("b", engine("f"))
    assert [model.engine for model in bed.instances.models()] == ["e", "f"]
    bed.report("b")
    bed.now += SILENT_S
    assert bed.instances.models() == []
