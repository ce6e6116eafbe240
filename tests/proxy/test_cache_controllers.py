"""A controller is a kind of session at the control socket, with a key and rights of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from cache_stage import KEY
from proxy_harness import Node, run, until, within

from pdx.errors import NodeUnavailable
from pdx.proxy import control as control_module
from pdx.proxy.cache import controllers as controllers_module
from pdx.proxy.cache import orders as orders_module
from pdx.proxy.cache.controllers import Controllers
from pdx.proxy.cache.instances import Instances
from pdx.proxy.cache.orders import ANSWERS, Orders
from pdx.proxy.control import Control
from pdx.security.curve_keys import KeyPair, secure_client
from pdx.security.peer_socket import Arrival
from pdx.security.roster import RIGHTS_TO
from pdx.telemetry.faults import Faults
from pdx.wire import messages
from pdx.wire.messages import (
    Bye,
    Explained,
    Hello,
    Kind,
    NodeReport,
    Order,
    PeerEntry,
    PeerList,
    Ping,
    Refused,
    Reply,
    Welcome,
)
from pdx.wire.verbs import Clear, Effect, Find, Found, Selection

FIND = Find(Selection([bytes.fromhex(KEY)]))
CLEAR = Clear(Selection([bytes.fromhex(KEY)]), "host")


class Controller(Node):
    """A raw session of the kind."""

    async def say(self, message):
        await self.socket.send(messages.encode(message))

    async def hear(self):
        return messages.decode_to_controller(await within(self.socket.recv()))

    async def hello(self, kind: Kind = "controller", version=messages.VERSION):
        await self.say(Hello(version, 1, kind, "ops"))
        return await self.hear()

    async def attach(self):
        """And hear of the nodes."""
        welcome = await self.hello()
        assert isinstance(welcome, Welcome), welcome
        return (await self.hear()).peers

    async def order(self, verb, node="one", number=7):
        """The outcome."""
        await self.say(Order(number, verb, node))
        while not isinstance(reply := await self.hear(), Reply):
            pass
        assert reply.number == number
        return reply.outcome


class Stage:
    """The parts of a proxy that have to do with controllers, and who connects to them."""

    def __init__(self, address, **files):
        self.reports, self.drops, self.counters, self.explained = [], [], Counter(), []
        faults = Faults(self.counters)
        self.control = Control(
            address,
            on_report=self._report,
            on_explained=self.explained.append,
            on_reply=lambda node, reply: self.orders.replied(node, reply),
            on_controller=lambda *said: self.controllers.said(*said),
            on_drop=self.drops.append,
            counters=self.counters,
            **files,
        )
        clock = asyncio.get_running_loop().time
        self.instances = Instances(members=self.control.members, silent_s=600.0, clock=clock)
        self.orders = Orders(self.control.order, counters=self.counters, faults=faults)
        self.controllers = Controllers(self.control, self.instances, self.orders, counters=self.counters, faults=faults)
        self.connected = []

    def _report(self, report):
        self.reports.append(report)
        self.instances.report(report)

    def connect(self, name, own=None, server_key=None):
        made = Controller("inproc://nowhere-yet", name)
        made.socket.disconnect("inproc://nowhere-yet")
        secure_client(made.socket, own=own, server_key=server_key)
        made.socket.connect(self.control.address)
        self.connected.append(made)
        return made


@contextlib.asynccontextmanager
async def stage(address="tcp://127.0.0.1:0", **files):
    made = Stage(address, **files)
    made.control.start()
    try:
        yield made
    finally:
        await made.controllers.close()
        for each in made.connected:
            each.close()
        made.control.close()


@pytest.fixture
def members(tmp_path):
    """Key pairs, and the settings of a proxy that knows a node and a controller."""
    pairs = {name: KeyPair.make() for name in ("one", "ops", "proxy", "stranger")}
    secret, _ = pairs["proxy"].save(tmp_path / "keys", "proxy")
    roster = tmp_path / "roster.toml"

    def write(*names, may=None):
        parts = []
        if "one" in names:
            parts.append(f'[nodes.one]\naddress = "tcp://10.0.0.1:1"\nkey = "{pairs["one"].public}"\n')
        if "ops" in names:
            rights = "" if may is None else f"may = {may}\n"
            parts.append(f'[controllers.ops]\nkey = "{pairs["ops"].public}"\n{rights}')
        roster.write_text("".join(parts))
        roster.chmod(0o644)

    write("one", "ops")
    return pairs, {"keys": str(secret), "roster": str(roster)}, write


async def reporting(made, pairs):
    """The node, which has said how it is."""
    node = made.connect("one", pairs["one"], pairs["proxy"].public)
    await node.report()
    return node


async def answering(node, outcome):
    """The node carries out one order."""
    while not isinstance(message := messages.decode_from_proxy(await within(node.socket.recv())), Order):
        pass
    await node.socket.send(messages.encode(Reply(message.number, outcome)))
    return message


def test_a_controller_with_its_key_hears_of_the_nodes_and_says_verbs(members):
    pairs, files, _ = members

    async def main():
        async with stage(**files) as made:
            node = await reporting(made, pairs)
            await until(lambda: made.reports)
            ops = made.connect("ops", pairs["ops"], pairs["proxy"].public)
            assert await ops.attach() == []
            made.controllers.send_peers([PeerEntry("one", "tcp://10.0.0.1:1")])
            assert await ops.hear() == PeerList([PeerEntry("one", "tcp://10.0.0.1:1")])
            await ops.say(Ping())
            carried_out = asyncio.create_task(answering(node, Found(1, 1, {"host": 1})))
            assert await ops.order(FIND) == Found(1, 1, {"host": 1})
            order = await carried_out
            assert (order.verb, order.node) == (FIND, "")
            assert made.drops == []

    run(main)


def test_a_controller_may_say_nothing_that_a_node_may_say(members):
    pairs, files, _ = members

    async def main():
        async with stage(**files) as made:
            ops = made.connect("ops", pairs["ops"], pairs["proxy"].public)
            for name in ("one", "ops"):
                ops.name = name
                await ops.report()
            await until(lambda: made.drops == ["not_its_name"] * 2)
            await ops.say(Explained([], 0))
            await ops.say(Reply(1, Effect([])))
            await ops.attach()
            assert made.reports == []
            assert made.explained == []
            assert made.counters["replies_late"] == 0

    run(main)


def test_a_nodes_key_may_say_no_verbs(members):
    pairs, files, _ = members

    async def main():
        async with stage(**files) as made:
            node = await reporting(made, pairs)
            for message in (Hello(messages.VERSION, 1, "controller"), Order(1, CLEAR, "one"), Bye()):
                await node.say(message)
            await until(lambda: made.drops == ["not_a_controller"] * 3)
            assert len(made.orders) == 0
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(node.socket.recv(), 0.05)

    run(main)


def test_an_answer_with_another_key_than_the_nodes_is_none(members):
    """Whoever takes the route of a node that has left is not that node."""
    pairs, files, _ = members

    async def main():
        async with stage(**files) as made:
            await reporting(made, pairs)
            await until(lambda: made.reports)
            (route,) = made.control._peers
            asked = asyncio.create_task(made.orders.ask("one", FIND, 60.0))
            await until(lambda: len(made.orders) == 1)
            (number,) = made.orders._under_way
            for answer in (Reply(number, Found(1, 1, {})), Explained([], 0)):
                made.control._take(Arrival(route, messages.encode(answer), pairs["ops"].public))
            await asyncio.sleep(0)
            assert made.drops == ["not_its_name"] * 2
            assert (asked.done(), made.explained) == (False, [])
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    run(main)


def test_a_key_that_was_taken_from_the_roster_is_worth_nothing(members):
    pairs, files, write = members

    async def main():
        async with stage(**files) as made:
            node = await reporting(made, pairs)
            await until(lambda: made.reports)
            ops = made.connect("ops", pairs["ops"], pairs["proxy"].public)
            await ops.attach()
            await ops.say(Order(1, FIND, "one"))
            await until(lambda: len(made.orders) == 1)
            write("one")
            await answering(node, Found(1, 1, {}))
            await until(lambda: len(made.orders) == 0)
            await ops.say(Order(2, FIND, "one"))
            await until(lambda: made.drops == ["not_a_controller"])
            made.controllers.send_peers([PeerEntry("one", "tcp://10.0.0.1:1")])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ops.socket.recv(), 0.1)

    run(main)


@pytest.mark.parametrize("left", [None, ["health"]])
def test_what_waits_for_its_turn_when_a_right_is_taken_away_is_not_done(members, monkeypatch, left):
    monkeypatch.setattr(orders_module, "AT_A_TIME", 1)
    pairs, files, write = members

    async def main():
        async with stage(**files) as made:
            node = made.connect("one", pairs["one"], pairs["proxy"].public)
            await node.report()
            await until(lambda: made.reports)
            ops = made.connect("ops", pairs["ops"], pairs["proxy"].public)
            await ops.attach()
            for number in range(2):
                await ops.say(Order(number, FIND if number == 0 else CLEAR, "one"))
            await until(lambda: len(made.controllers._tasks) == 2 and len(made.orders) == 1)
            write("one", *(["ops"] if left else []), **({"may": left} if left else {}))
            await answering(node, Found(1, 1, {}))
            await until(lambda: not made.controllers._tasks)
            asked = asyncio.create_task(made.orders.ask("one", FIND, 60.0))
            assert isinstance((await answering(node, Found(1, 1, {}))).verb, Find), "nothing came before"
            await asked

    run(main)


def test_it_says_only_what_the_roster_lets_it_say(members):
    pairs, files, write = members
    write("one", "ops", may=["lookup"])

    async def main():
        async with stage(**files) as made:
            node = await reporting(made, pairs)
            await until(lambda: made.reports)
            ops = made.connect("ops", pairs["ops"], pairs["proxy"].public)
            await ops.attach()
            refused = await ops.order(CLEAR)
            assert (refused.error, "'clear'" in refused.text) == ("PeerRefused", True)
            carried_out = asyncio.create_task(answering(node, Found(1, 1, {})))
            assert isinstance(await ops.order(FIND), Found)
            await carried_out
            write("one", "ops", may=[])
            assert (await ops.order(FIND)).error == "PeerRefused"
            assert made.counters["controllers_denied"] == 2

    run(main)


def test_who_is_in_no_roster_is_not_let_in(members):
    pairs, files, _ = members

    async def main():
        async with stage(**files) as made:
            stranger = made.connect("ops", pairs["stranger"], pairs["proxy"].public)
            await stranger.say(Hello(messages.VERSION, 1, "controller"))
            await until(lambda: made.counters["peers_denied"])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stranger.socket.recv(), 0.05)

    run(main)


def test_at_a_unix_socket_this_user_is_a_controller(tmp_path):
    async def main():
        async with stage(f"ipc://{tmp_path}/c/p.sock") as made:
            node = made.connect("one")
            await node.report()
            await until(lambda: made.reports)
            ops = made.connect("ops")
            await ops.attach()
            carried_out = asyncio.create_task(answering(node, Effect([])))
            assert await ops.order(CLEAR) == Effect([])
            await carried_out

    run(main)


def test_a_hello_comes_first_and_of_the_right_kind_and_version(tmp_path):
    async def main():
        async with stage(f"ipc://{tmp_path}/c/p.sock") as made:
            ops = made.connect("ops")
            refused = await ops.order(FIND)
            assert (refused.error, refused.text) == ("PeerRefused", "say hello first")
            assert (await ops.hello("scheduler")).error == "PeerRefused"
            assert (await ops.hello(version=1)).error == "ProtocolError"
            await ops.attach()
            assert (await ops.order(FIND, node="x")).error == "SelectionError"
            assert (await ops.order(FIND, node="")).error == "SelectionError"
            await ops.say(Bye())
            assert (await ops.order(FIND)).text == "say hello first"
            assert made.reports == []

    run(main)


def test_what_one_controller_has_under_way_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(controllers_module, "AT_A_TIME", 3)
    monkeypatch.setattr(controllers_module, "MAX_CONTROLLERS", 2)

    async def main():
        async with stage(f"ipc://{tmp_path}/c/p.sock") as made:
            node = made.connect("one")
            await node.report()
            await until(lambda: made.reports)
            ops, other = made.connect("ops"), made.connect("other")
            await ops.attach()
            for number in range(3):
                await ops.say(Order(number, FIND, "one"))
            assert (await ops.order(FIND, number=9)).error == "Exhausted"
            await other.attach()
            carried_out = asyncio.create_task(answer_all(node, 4))
            assert isinstance(await other.order(FIND, number=5), Found)
            assert sorted([(await ops.hear()).number for _ in range(3)]) == [0, 1, 2]
            await carried_out
            third = made.connect("third")
            await third.attach()
            assert (await ops.order(FIND)).text == "say hello first", "it was silent for longest"

    async def answer_all(node, count):
        for _ in range(count):
            await answering(node, Found(1, 1, {}))

    run(main)


@pytest.mark.parametrize("says_bye", [False, True])
def test_who_says_hello_again_has_no_more_under_way(tmp_path, monkeypatch, says_bye):
    monkeypatch.setattr(controllers_module, "AT_A_TIME", 3)

    async def main():
        async with stage(f"ipc://{tmp_path}/c/p.sock") as made:
            node = made.connect("one")
            await node.report()
            await until(lambda: made.reports)
            ops = made.connect("ops")
            for _ in range(4):
                if says_bye:
                    await ops.say(Bye())
                await ops.say(Hello(messages.VERSION, 1, "controller", "ops"))
                for number in range(3):
                    await ops.say(Order(number, FIND, "one"))
            refused = []
            while len(refused) < 9:
                if isinstance(reply := await ops.hear(), Reply):
                    refused.append(reply.outcome.error)
            assert refused == ["Exhausted"] * 9
            for _ in range(3):
                await answering(node, Found(1, 1, {}))
            await until(lambda: not made.controllers._under_way)
            await ops.say(Order(1, FIND, "one"))
            await answering(node, Found(1, 1, {}))

    run(main)


@pytest.mark.parametrize("message", [Hello(messages.VERSION, 1, "controller", "ops"), Order(1, FIND, "nobody"), Ping()])
def test_a_flood_of_a_controllers_messages_is_taken_in_bursts_between_which_others_have_their_turn(tmp_path, message):
    async def main():
        async with stage(f"ipc://{tmp_path}/c/p.sock") as made:
            ops = made.connect("ops")
            await ops.attach()
            taken, bursts = 0, [0]
            take, serve = made.control._take, made.control._serve

            def take_one(arrival):
                nonlocal taken
                taken += 1
                take(arrival)

            def serve_some():
                bursts[-1] += 1
                serve()

            made.control._take, made.control._serve = take_one, serve_some
            for _ in range(1000):
                await ops.say(message)
            async with asyncio.timeout(30):
                while taken < 1000:
                    bursts.append(0)
                    await asyncio.sleep(0)
            assert max(bursts) <= 3, "one for each socket that the loop looks at, and one that was put off"

    run(main)


def test_a_controller_that_has_gone_costs_nothing(tmp_path):
    async def main():
        async with stage(f"ipc://{tmp_path}/c/p.sock") as made:
            node = made.connect("one")
            await node.report()
            await until(lambda: made.reports)
            ops = made.connect("ops")
            await ops.attach()
            await ops.say(Order(1, FIND, "one"))
            await until(lambda: len(made.orders) == 1)
            ops.close()
            made.connected.remove(ops)
            await answering(node, Found(1, 1, {}))
            await until(lambda: len(made.orders) == 0 and not made.controllers._tasks)
            assert made.counters["internal_errors"] == 0
            await until(lambda: not has_any(made))

    def has_any(made):
        made.controllers.send_peers([])
        return made.controllers._attached

    run(main)


def test_of_two_connections_with_one_name_the_one_heard_of_last_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(control_module, "MAX_PEERS", 2)

    async def main():
        async with stage(f"ipc://{tmp_path}/c/p.sock") as made:
            lives = [made.connect("one") for _ in range(2)]
            for count, life in enumerate([*lives, lives[0]], 1):
                await life.report()
                await until(lambda count=count: len(made.reports) == count)
                asked = asyncio.create_task(made.orders.ask("one", FIND, 60.0))
                await answering(life, Found(1, 1, {}))
                assert await asked == Found(1, 1, {})
            for count, name in enumerate(("two", "three"), 4):
                await made.connect(name).report()
                await until(lambda count=count: len(made.reports) == count)
            with pytest.raises(NodeUnavailable, match="it is not connected"):
                await made.orders.ask("one", FIND, 60.0)
            assert set(made.control._routes) == {"two", "three"}

    run(main)


def test_every_verb_has_a_right_and_an_answer():
    verbs = set(messages.get_args(messages.Verb))
    assert set(RIGHTS_TO) == set(ANSWERS) == verbs
    assert len(set(RIGHTS_TO.values())) == len(verbs)
    outcomes = set(messages.get_args(messages.Outcome)) - {Refused}
    assert {kind for kinds in ANSWERS.values() for kind in kinds} == outcomes
    assert NodeReport not in outcomes
