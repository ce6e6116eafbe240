"""A proxy that nodes find by their cluster, that tells them of each other, and what it believes."""

import asyncio

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
    etcd.put("/pdx/proxies/stranger", "tcp://127.0.0.1:9")  # of whom the roster has no key
    with control_stage(**keys["proxy"]) as made:
        etcd.put("/pdx/proxies/proxy", made.control.address)
        alpha = await asyncio.to_thread(start_here, **settings(place, keys, "alpha", f"etcd:{etcd.url}/pdx"))
        proxies = alpha._daemon._proxies
        await until(lambda: made.reports)
        assert list(proxies._all) == [made.control.address]
        etcd.delete("/pdx/proxies/proxy")
        roster = alpha._daemon.service.peers.connections.roster
        await until(lambda: roster.proxies == [])
        count = len(made.reports)
        await until(lambda: len(made.reports) > count + 1)
        assert list(proxies._all) == [made.control.address], "it is there, whatever the cluster says"
    await until(lambda: not proxies._all)
    await asyncio.to_thread(alpha.close)


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
        await until(lambda: made.control.members() and made.control._roster.host_of("alpha"))
        own, server = KeyPair.load(keys["alpha"]["keys"]), KeyPair.load(keys["proxy"]["keys"])
        node = made.node("alpha", own, server.public)
        urls = ("http://10.0.0.1:8100", "http://10.0.0.2:8100")
        await node.report(*((f"e{number}", "both", url) for number, url in enumerate(urls)), listen="tcp://10.0.0.2:1")
        await until(lambda: made.reports)
        assert [each.url for each in made.reports[0].engines] == ["http://10.0.0.1:8100"]
        assert made.drops == ["not_its_host"]
