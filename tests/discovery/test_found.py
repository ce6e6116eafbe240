"""Nodes whose roster has keys alone find each other, and what was found carries chunks."""

from __future__ import annotations

import socket

import pytest
from etcd_bed import needs_etcd
from found_bed import api as api
from found_bed import crosses, is_connected, settings
from found_bed import etcd as etcd
from found_bed import keys as keys
from kubernetes_standin import SERVICE, endpoint

from pdx.config import NodeConfig
from pdx.errors import ConfigError
from pdx.node.daemon import Daemon
from pdx.proxy.control import Control
from pdx.security.curve_keys import KeyPair
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until

pytestmark = pytest.mark.long  # nodes dial again every few seconds


@needs_etcd
def test_nodes_find_each_other_by_etcd_without_a_proxy(start_here, place, keys, etcd):
    discover = f"etcd:{etcd.url}/pdx"
    alpha, beta = (start_here(**settings(place, keys, name, discover)) for name in ("alpha", "beta"))
    wait_until(lambda: is_connected(alpha) and is_connected(beta), what="they are connected")
    assert crosses(alpha, beta, "x")
    etcd.kill()  # and it is needed no more
    assert crosses(alpha, beta, "y")
    beta.close()
    wait_until(lambda: not is_connected(alpha))


def test_nodes_find_each_other_by_kubernetes(start_here, place, keys, api):
    nodes = [start_here(**settings(place, keys, name, f"kubernetes:{SERVICE}")) for name in ("alpha", "beta")]
    ports = [int(each.daemon.service.peers.connections.address.rpartition(":")[2]) for each in nodes]
    api.put("a", endpoint("127.0.0.1", "alpha"), node=ports[0])
    api.put("b", endpoint("127.0.0.1", "pod-of-a-daemonset", "beta"), node=ports[1])
    wait_until(lambda: all(map(is_connected, nodes)), what="they are connected")
    assert crosses(*nodes, "x")
    connection = nodes[0].status().peers[0]
    for number in range(20):  # the cluster errs, and is not needed any more
        api.put("b", endpoint("127.0.0.9", "beta"), node=1 + number)
        api.delete("b")
        api.put("b", endpoint("127.0.0.1", "beta"), node=ports[1])
    assert crosses(*nodes, "y")
    after = nodes[0].status().peers[0]
    assert (after.state, after.name) == (connection.state, connection.name) == ("ready", "beta")
    assert "peers_lost" not in nodes[0].status().counters


def test_a_node_that_has_not_answered_is_dialled_where_it_is_found_by_then(start_here, place, keys, api):
    nodes = [start_here(**settings(place, keys, name, f"kubernetes:{SERVICE}")) for name in ("alpha", "beta")]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        api.put("b", endpoint("127.0.0.1", "beta"), node=silent.getsockname()[1])
        wait_until(lambda: [each.state for each in nodes[0].status().peers] == ["dialing"])
        address = nodes[1].daemon.service.peers.connections.address
        api.put("b", endpoint("127.0.0.1", "beta"), node=int(address.rpartition(":")[2]))
        wait_until(lambda: nodes[0].status().counters.get("peers_lost"), what="it is waited for there no more")
        wait_until(lambda: is_connected(nodes[0]), what="they are connected")


def test_who_is_found_without_the_key_gets_nowhere(start_here, place, keys, api):
    """A cluster that lies costs a connection, and nothing else."""
    alpha = start_here(**settings(place, keys, "alpha", f"kubernetes:{SERVICE}"))
    stranger = str(KeyPair.make().save(place / "keys", "stranger")[0])
    liar = start_here(
        **settings(place, keys | {"alpha": {**keys["alpha"], "keys": stranger}}, "alpha", "")
        | {"name": "gamma", "address": f"ipc://{place}/liar.sock"}
    )
    where = liar.daemon.service.peers.connections.address
    api.put("b", endpoint("127.0.0.1", "beta"), node=int(where.rpartition(":")[2]))
    roster = alpha.daemon.service.peers.connections.roster
    wait_until(lambda: "beta" in roster.names)
    alpha.daemon.env.mailbox.post(lambda: alpha.daemon.service.peers.connections.dial("beta"))
    wait_until(lambda: [each for each in alpha.status().peers if each.state == "dialing"])
    assert not is_connected(alpha)
    assert not is_connected(liar)


def test_discovery_needs_keys(place):
    with pytest.raises(ConfigError, match="needs --keys"):
        Daemon(NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=2 << 20, discover="etcd:http://h:1/x"))
    with pytest.raises(ConfigError, match="needs --keys"):
        Control(f"ipc://{place}/p.sock", Env(), print, discover="etcd:http://h:1/x")
