"""The control socket beyond Unix sockets: CURVE keys, what nodes may say of engines, and the list of peers."""

from __future__ import annotations

import asyncio

import pytest
from control_stage import Members, control_stage
from proxy_harness import until

from pdx.errors import ConfigError
from pdx.proxy.control import Control
from pdx.security.curve_keys import KeyPair
from pdx.telemetry.env import Env
from pdx.telemetry.host import host_id
from pdx.wire.messages import Cancel
from pdx.wire.proxy import Order, PeerEntry, PeerList, Prefilled
from pdx.wire.verbs import Status

PEERS = [PeerEntry("one", "tcp://127.0.0.1:1"), PeerEntry("two", "ipc:///two")]


@pytest.fixture
def members(tmp_path):
    """See `Members`."""
    made = Members(tmp_path)
    return made.pairs, made.files, made.write


async def peers_of(node):
    """The next list of peers that a node is told."""
    return (await node.heard(PeerList)).peers


async def hears_nothing(node):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(node.socket.recv(), 0.05)


async def test_nodes_hear_of_their_peers_now_and_when_they_come(tmp_path):
    with control_stage(f"ipc://{tmp_path}/c/p.sock") as made:
        one = made.node("one")
        await one.report()
        await until(lambda: made.reports)
        made.control.send_peers(PEERS[:1])
        assert await peers_of(one) == PEERS[:1]
        two = made.node("two")
        await two.report()
        assert await peers_of(two) == PEERS[:1]
        made.control.send_peers(PEERS)
        assert await peers_of(one) == await peers_of(two) == PEERS
        await two.report()
        await until(lambda: len(made.reports) == 3)
        made.control.tell(Cancel("t" * 16), {""})
        assert isinstance(await two.heard(object), Cancel), "a list is told once"
        assert made.drops == []


async def test_who_is_not_in_the_roster_any_more_is_told_nothing(members):
    """Its connection may live on: its name, or another key of that name, is somebody else's now."""
    pairs, files, write = members
    with control_stage(**files) as made:
        former = made.node("one", pairs["one"], pairs["proxy"].public)
        await former.report()
        await until(lambda: made.reports)
        pairs["one"] = KeyPair.make()
        write("one", "two")
        assert made.control.members() == {"one", "two"}
        assert made.control.order("one", Order(1, Status())) == "it is not connected"
        made.control.tell(Prefilled("t" * 16), {""})
        made.control.send_peers(PEERS)
        await hears_nothing(former)
        now = made.node("one", pairs["one"], pairs["proxy"].public)
        await now.report()
        assert await peers_of(now) == PEERS


async def test_a_report_under_anothers_name_is_dropped(members):
    """CVE-2026-92972: a registration that was not authenticated poisoned the routing table."""
    pairs, files, _ = members
    with control_stage(**files) as made:
        liar = made.node("two", pairs["one"], pairs["proxy"].public)
        await liar.report()
        await until(lambda: made.drops)
        assert made.drops == ["not_its_name"]
        assert made.reports == []
        made.control.send_peers(PEERS)
        await hears_nothing(liar)


async def test_strangers_are_not_heard_until_the_roster_has_their_key(members):
    """CVE-2026-92972, CVE-2026-103765."""
    pairs, files, write = members
    with control_stage(**files) as made:
        await made.node("one").report()  # without a key
        await made.node("one", pairs["one"], pairs["stranger"].public).report()  # to another server
        stranger = made.node("stranger", pairs["stranger"], pairs["proxy"].public)
        await stranger.report()
        await until(lambda: made.env.counters["peers_denied"])
        await made.node("two", pairs["two"], pairs["proxy"].public).report()
        await until(lambda: made.reports)
        assert [report.node for report in made.reports] == ["two"]
        stranger.close()  # ZMQ tries again by itself, and its report would count
        write("one", "two", "stranger")
        fresh = made.node("stranger", pairs["stranger"], pairs["proxy"].public)
        await fresh.report()
        await until(lambda: len(made.reports) == 2)
        write("one")
        fresh_one = made.node("one", pairs["one"], pairs["proxy"].public)
        await fresh_one.report()
        await until(lambda: len(made.reports) == 3)
        await fresh.report()  # over the connection that it still has
        await until(lambda: made.drops)
        assert made.control.members() == {"one"}
        assert [report.node for report in made.reports] == ["two", "stranger", "one"]
        assert made.drops == ["not_its_name"]


@pytest.mark.parametrize(
    ("entry", "here", "taken"),
    [
        ({}, False, ["http://10.0.0.1:8100", "http://[::ffff:10.0.0.1]:8101"]),
        ({}, True, ["http://10.0.0.1:8100", "http://[::ffff:10.0.0.1]:8101"]),
        ({"more": 'engine_hosts = ["10.0.0.2", "Beta"]'}, False, [
            "http://10.0.0.1:8100", "http://[::ffff:10.0.0.1]:8101", "http://10.0.0.2:1", "https://beta:8100",
        ]),
        ({"address": "tcp://127.0.0.1:1"}, True, ["http://127.0.0.1:8100", "http://localhost:1", "http://[::1]:1"]),
        ({"address": "tcp://127.0.0.1:1"}, False, []),
        ({"address": "ipc:///run/one"}, True, ["http://127.0.0.1:8100", "http://localhost:1", "http://[::1]:1"]),
        ({"address": "tcp://beta:1"}, False, ["https://beta:8100"]),
        ({"more": 'engine_hosts = ["10.0.0.2/31", "beta"]'}, False, [
            "http://10.0.0.1:8100", "http://[::ffff:10.0.0.1]:8101", "http://10.0.0.2:1", "https://beta:8100",
        ]),
        ({"address": ""}, True, []),
        ({"address": "", "more": 'engine_hosts = ["10.0.0.0/30"]'}, False, [
            "http://10.0.0.1:8100", "http://[::ffff:10.0.0.1]:8101", "http://10.0.0.2:1",
        ]),
    ],
)  # fmt: skip
async def test_an_engine_lies_on_its_nodes_host(members, entry, here, taken, caplog):
    """One host that was broken into must not get the prompts meant for others, nor those of the proxy's own host."""
    pairs, files, write = members
    write("one", **entry)
    urls = [
        "http://10.0.0.1:8100", "http://[::ffff:10.0.0.1]:8101", "http://10.0.0.2:1", "http://127.0.0.1:8100",
        "http://localhost:1", "http://[::1]:1", "http://127.1:8100", "http://10.0.0.1.example:1", "https://beta:8100",
        "http://0.0.0.0:8100",
    ]  # fmt: skip
    with control_stage(**files) as made:
        engines = [(f"e{number}", "both", url) for number, url in enumerate(urls)]
        node = made.node("one", pairs["one"], pairs["proxy"].public)
        await node.report(*engines, host=host_id() if here else "another kernel")
        await until(lambda: made.reports)
        assert [engine.url for engine in made.reports[0].engines] == taken
        assert made.drops == ["not_its_host"] * (len(urls) - len(taken))
    said = [record.getMessage() for record in caplog.records if "is not believed" in record.getMessage()]
    assert len(said) == (1 if len(taken) < len(urls) else 0), "of each node once in a minute"


async def test_a_roster_that_is_lost_meanwhile_takes_no_engine_away(members):
    """A file with a mistake in it changes nothing."""
    pairs, files, write = members
    with control_stage(**files) as made:
        node = made.node("one", pairs["one"], pairs["proxy"].public)
        write("one", more="engine_hosts = 7")
        await node.report(("e", "both", "http://10.0.0.1:1"))
        await until(lambda: made.reports)
        assert len(made.reports[0].engines) == 1


@pytest.mark.parametrize(
    ("address", "with_files", "why"),
    [("tcp://0.0.0.0:7600", True, "all interfaces"), ("tcp://127.0.0.1:7600", False, "every user of this host")],
)
def test_addresses_that_are_refused(members, address, with_files, why):
    """CVE-2026-103765, CVE-2026-107205: all interfaces, and no authentication."""
    with pytest.raises(ConfigError, match=why):
        Control(address, Env(), print, **(members[1] if with_files else {}))


async def test_an_address_that_is_taken_leaves_nothing_open(members):
    with control_stage(**members[1]) as made:
        second = Control(made.control.address, Env(), print, **members[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            second.start()
        second.close()
