"""A proxy that nodes find by their cluster, that tells them of each other, and what it believes."""

import asyncio
import socket

import pytest
from control_stage import control_stage
from etcd_bed import needs_etcd
from found_bed import api as api
from found_bed import crosses, is_connected, settings
from found_bed import etcd as etcd
from found_bed import keys as keys
from kubernetes_standin import SERVICE, endpoint
from proxy_harness import until

from pdx.security.curve_keys import KeyPair
from pdx.wire.proxy import PeerEntry

pytestmark = pytest.mark.long  # connections are lost, and made again, in real time


@needs_etcd
async def test_a_proxy_is_found_and_one_that_is_connected_stays(start_here, place, keys, etcd):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        at = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        etcd.put("/pdx/proxies/stranger", at)  # of whom the roster has no key
        with control_stage(**keys["proxy"]) as first, control_stage(**keys["proxy"]) as second:
            etcd.put("/pdx/proxies/proxy", first.control.address)
            alpha = await asyncio.to_thread(start_here, **settings(place, keys, "alpha", f"etcd:{etcd.url}/pdx"))
            await until(lambda: first.reports)
            etcd.put("/pdx/proxies/proxy", second.control.address)
            await until(lambda: second.reports)
            count = len(first.reports)
            await until(lambda: len(first.reports) > count + 1)  # it is there, whatever the cluster says
        with control_stage(**keys["proxy"]) as third:
            etcd.put("/pdx/proxies/proxy", third.control.address)
            await until(lambda: third.reports)
            with control_stage(first.control.address, **keys["proxy"]) as again:
                count = len(third.reports)
                await until(lambda: len(third.reports) > count + 3)
                assert again.reports == [], "one that has gone, and is found no more, is forgotten"
        await asyncio.to_thread(alpha.close)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()


@needs_etcd
async def test_a_proxy_writes_where_it_is_under_the_name_that_the_roster_has(keys, etcd):
    with control_stage(**keys["proxy"], discover=f"etcd:{etcd.url}/pdx") as made:
        await until(lambda: etcd.entries() == {"/pdx/proxies/proxy": made.control.address})
        with control_stage(**keys["proxy"], discover=f"etcd:{etcd.url}/pdx", is_found=False):
            pass
    assert etcd.entries() == {}


async def test_by_the_proxys_word_nodes_without_addresses_find_each_other(start_here, place, keys):
    """The roster has keys of nodes alone, and there is no cluster but the proxy."""
    with control_stage(**keys["proxy"]) as made:
        roster = place / "roster.toml"
        at = f'[proxies.proxy]\naddress = "{made.control.address}"'
        roster.write_text(roster.read_text().replace("[proxies.proxy]", at))
        nodes = [
            await asyncio.to_thread(start_here, **settings(place, keys, name, ""), proxy=made.control.address)
            for name in ("alpha", "beta")
        ]
        await until(lambda: {each.node for each in made.reports} == {"alpha", "beta"})
        made.control.send_peers([PeerEntry(each.node, each.listen, each.public_key) for each in made.reports[-2:]])
        await until(lambda: asyncio.to_thread(lambda: all(map(is_connected, nodes))))
        assert await asyncio.to_thread(crosses, *nodes, "x")
        for each in nodes:
            await asyncio.to_thread(each.close)


async def test_a_proxy_believes_the_host_that_kubernetes_says(place, keys, api):
    api.put("a", endpoint("10.0.0.1", "alpha"), node=7700)
    with control_stage(**keys["proxy"], discover=f"kubernetes:{SERVICE}") as made:
        own, server = KeyPair.load(keys["alpha"]["keys"]), KeyPair.load(keys["proxy"]["keys"])
        node = made.node("alpha", own, server.public)
        urls = ("http://10.0.0.1:8100", "http://10.0.0.2:8100")

        async def are_believed():
            count, engines = len(made.reports), [(f"e{number}", "both", url) for number, url in enumerate(urls)]
            await node.report(*engines, listen="tcp://10.0.0.2:1")
            await until(lambda: made.control.members() and len(made.reports) > count)
            return made.reports[-1].engines

        await until(are_believed)  # once Kubernetes has said where the node is
        assert [each.url for each in made.reports[-1].engines] == ["http://10.0.0.1:8100"]
        assert set(made.drops) == {"not_its_host"}
