"""Links behind CURVE keys, for real: who is not in the roster, or not who they say, gets nowhere."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import zmq
from connection_stage import TIMEOUT_S, Raw, key_files, settled, write_roster, zmq_events

from pdx.errors import ConfigError, PeerUnknown
from pdx.node.peers import connections
from pdx.node.peers.connection import Ending
from pdx.security import descriptors
from pdx.security.curve_keys import KeyPair
from pdx.security.peer_socket import PeerSocket
from pdx.wire.messages import Bye, Push, Refused


class Cluster:
    """alpha and beta, each with keys, and a roster that names both."""

    def __init__(self, stage, listen):
        self.stage = stage
        self.files = key_files(stage.place, "alpha", "beta", "stranger")
        self.keys = {name: KeyPair.load(path) for name, path in self.files.items()}
        self.roster = stage.place / "roster.toml"
        self.where = {name: listen.format(place=stage.place, name=name) for name in ("alpha", "beta")}
        self.write({name: self.keys[name].public for name in self.where})
        self.alpha, self.beta = self.node("alpha", 11), self.node("beta", 22)
        self.where = {node.name: node.connections.address for node in (self.alpha, self.beta)}  # with their ports
        self.write({name: self.keys[name].public for name in self.where})
        self.tick()

    def write(self, keys):
        def at(name):  # while the ports are not known yet
            return self.where[name].replace(":0", ":1") if self.where[name].endswith(":0") else self.where[name]

        write_roster(self.roster, {name: (at(name), key) for name, key in keys.items()})

    def node(self, name, epoch):
        return self.stage.node(name, epoch, listen=self.where[name], keys=self.files[name], roster=str(self.roster))

    def tick(self):
        for node in self.stage.nodes:
            node.connections.tick()

    def raw(self, own, **settings):
        peer = Raw(self.stage, self.beta, own=own, server_key=self.beta.connections.public_key, **settings)
        return self.stage.undo.enter_context(peer)


@pytest.fixture(params=["tcp://127.0.0.1:0", "ipc://{place}/{name}.sock"], ids=["tcp", "ipc"])
def cluster(request, stage):
    return Cluster(stage, request.param)


@pytest.fixture
def loopback(stage):
    return Cluster(stage, "tcp://127.0.0.1:0")


def test_who_is_in_both_rosters_is_let_in(cluster):
    alpha, beta = cluster.alpha, cluster.beta
    alpha.connections.dial("beta")
    beta.connections.dial("alpha")
    cluster.stage.until(lambda: alpha.core.saw("ready") and beta.core.saw("ready"))
    alpha.connections.of("beta").send(Push([]), 1)
    cluster.stage.until(lambda: beta.core.saw("heard"))
    assert beta.connections.peers[0].key == alpha.connections.public_key == cluster.keys["alpha"].public
    assert not alpha.counters
    assert not beta.counters


def test_a_key_that_is_not_in_the_roster_gets_nowhere(stage, caplog, monkeypatch):
    """CVE-2026-92972, CVE-2026-103765: membership is proven."""
    impatient = {"timeout_s": 0.3}  # who was not let in tries again when ZMQ has hung up
    monkeypatch.setattr(connections, "PeerSocket", lambda *said, **more: PeerSocket(*said, **{**more, **impatient}))
    loopback = Cluster(stage, "tcp://127.0.0.1:0")
    with caplog.at_level(logging.WARNING):
        stranger, plain = loopback.raw(loopback.keys["stranger"]), loopback.raw(None)
        for each in (stranger, plain):
            each.hello(name="alpha")
        loopback.stage.until(lambda: loopback.beta.counters["peers_denied"])
    assert not loopback.beta.core.events
    assert stranger.hear() is plain.hear() is None
    denials = [record for record in caplog.records if loopback.keys["stranger"].public in record.message]
    assert len(denials) == 1
    loopback.write({"alpha": loopback.keys["stranger"].public})
    loopback.beta.connections.tick()
    loopback.stage.until(stranger.hear, "it is let in as soon as the roster has its key")


def test_the_right_key_with_the_wrong_name_is_refused(cluster):
    """CVE-2026-92972: nobody speaks for another."""
    liar = cluster.raw(cluster.keys["alpha"])
    liar.hello(name="gamma")
    assert cluster.stage.until(liar.hear) == Refused("PeerRefused", "the key is that of 'alpha', not of 'gamma'")
    assert not cluster.beta.core.events


def test_a_wrong_key_of_the_server_is_no_link(loopback):
    stage, alpha, beta = loopback.stage, loopback.alpha, loopback.beta
    loopback.write({"alpha": loopback.keys["alpha"].public, "beta": loopback.keys["stranger"].public})
    alpha.connections.tick()  # beta's roster stays right
    alpha.connections.dial("beta")
    stage.pass_time(TIMEOUT_S + 1.0)
    ((_, step, why),) = alpha.core.saw("over")
    assert step is Ending.LOST
    assert "does its roster have this node's key?" in why
    assert not beta.core.events


def test_a_key_taken_from_the_roster_is_worth_nothing_from_then_on(cluster):
    stage, alpha, beta = cluster.stage, cluster.alpha, cluster.beta
    peer = cluster.raw(cluster.keys["alpha"])
    peer.hello(name="alpha")
    stage.until(peer.hear)
    cluster.write({"beta": cluster.keys["beta"].public})
    beta.connections.tick()
    assert beta.core.saw("over")[0][1] is Ending.LOST
    assert stage.until(peer.hear) == Refused("PeerRefused", "the roster has changed")
    peer.hello(name="alpha")  # over the connection that still stands
    assert "nobody in the roster" in stage.until(peer.hear).text
    assert len(beta.core.saw("hello")) == 1
    with pytest.raises(PeerUnknown):
        beta.connections.dial("alpha")
    assert alpha.connections.peers == []


def test_a_key_is_exchanged_while_the_node_runs_and_the_old_one_is_worth_nothing_then(cluster, monkeypatch, caplog):
    """As soon as the roster has the new one; what fails then, say for want of a descriptor, is tried again."""
    stage, alpha, beta, new = cluster.stage, cluster.alpha, cluster.beta, KeyPair.make()
    old = cluster.keys["beta"]
    alpha.connections.dial("beta")
    stage.until(lambda: alpha.core.saw("ready") and beta.core.saw("ready"))
    path = Path(cluster.files["beta"])
    path.write_text(f'secret-key = "{new.secret}"\n')
    settled(path)
    cluster.tick()
    assert "new key is not used yet" in caplog.text
    keys = {"alpha": cluster.keys["alpha"].public, "beta": f'{old.public}"\nnext_key = "{new.public}'}
    cluster.write(keys)

    def full(*_, **__):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as short:
        short.setattr(os, "open", full)
        beta.connections.tick()
    assert beta.connections.public_key == old.public, "that one is proved still"
    assert not beta.counters["internal_errors"]
    path.write_text(f'secret-key = "{old.secret}"\n')
    settled(path)
    cluster.tick()
    assert beta.connections.public_key == old.public
    assert cluster.where["beta"].startswith("tcp:") or Path(cluster.where["beta"][len("ipc://") :]).is_socket()
    path.write_text(f'secret-key = "{new.secret}"\n')
    settled(path)
    with monkeypatch.context() as short:
        short.setattr(descriptors, "left", lambda: 2)
        beta.connections.tick()
    assert beta.connections.public_key == old.public, "it was not begun, or each try would keep a descriptor"
    cluster.tick()
    assert beta.connections.public_key == new.public
    assert not alpha.core.saw("over"), "the connection stays"
    alpha.connections.leave(alpha.connections.of("beta"))
    stage.until(lambda: beta.core.saw("over"))
    alpha.connections.dial("beta")  # by the key that it proved last, and then by the other one
    stage.pass_time(TIMEOUT_S + 1.0)
    alpha.connections.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)
    cluster.write({**keys, "beta": new.public})
    cluster.tick()
    assert alpha.connections.of("beta").key == new.public
    assert [step for _, step, _ in alpha.core.saw("over")] == [Ending.LOST], "that was the first try"
    cluster.write({**keys, "beta": old.public})
    alpha.connections.tick()
    assert alpha.core.saw("over")[1][1:] == (Ending.LOST, "the roster has changed")


def test_a_route_of_another_is_not_taken_over(loopback):
    """CVE-2026-112266, CVE-2026-96762: a session belongs to a key, not to a route that others can have."""
    stage, beta = loopback.stage, loopback.beta
    third = KeyPair.make()
    loopback.where["third"] = "tcp://127.0.0.1:9"
    loopback.write({name: loopback.keys[name].public for name in ("alpha", "beta")} | {"third": third.public})
    beta.connections.tick()

    first = loopback.raw(loopback.keys["alpha"], routing_id=b"same")
    first.hello(name="alpha")
    stage.until(first.hear)
    with zmq_events(beta) as wait_for:
        first.close()
        wait_for(zmq.EVENT_DISCONNECTED)

    thief = loopback.raw(third, routing_id=b"same")
    thief.send(Push([]), 1, seq=100)
    thief.send(Bye(), seq=101)
    stage.until(lambda: beta.counters["messages_dropped"] == 2)
    assert not beta.core.saw("heard")
    assert not beta.core.saw("over")
    assert beta.connections.peers[0].name == "alpha"


def test_keys_need_a_roster_and_other_addresses_need_keys(stage):
    files = key_files(stage.place, "alpha")
    with pytest.raises(ConfigError, match="keys need a roster"):
        stage.node("alpha", keys=files["alpha"])
    with pytest.raises(ConfigError, match="beyond this host"):
        stage.node("alpha", listen="tcp://10.0.0.1:7700")
    with pytest.raises(ConfigError, match="beyond this host"):
        stage.node("alpha", listen="tcp://10.0.0.1:7700", keys=files["alpha"])
    with pytest.raises(ConfigError, match="all interfaces"):
        stage.node("alpha", listen="tcp://*:1", keys=files["alpha"], roster=str(stage.place / "roster.toml"))
    assert {path.name for path in stage.place.iterdir()} == {"keys"}


def test_the_way_to_the_proxy_is_secured_by_the_roster(loopback):
    keys, alpha = loopback.keys, loopback.alpha
    where = {name: (loopback.where[name], keys[name].public) for name in loopback.where}
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as local:
            alpha.connections.roster.secure_proxy(local, alpha.connections.own, "ipc:///run/pdx/proxy.sock")
            assert local.getsockopt(zmq.MECHANISM) == zmq.NULL
            for address in ("tcp://127.0.0.1:7600", "tcp://10.0.0.9:7600"):
                with pytest.raises(ConfigError, match="has to be in the roster"):
                    alpha.connections.roster.secure_proxy(local, alpha.connections.own, address)
        write_roster(loopback.roster, where, proxy=("tcp://127.0.0.1:7600", keys["stranger"].public))
        alpha.connections.tick()
        with context.socket(zmq.DEALER) as remote:
            alpha.connections.roster.secure_proxy(remote, alpha.connections.own, "tcp://127.0.0.1:7600")
            assert remote.getsockopt(zmq.MECHANISM) == zmq.CURVE
        write_roster(loopback.roster, where, proxy=("ipc:///run/pdx/proxy.sock", keys["stranger"].public))
        alpha.connections.tick()
        with context.socket(zmq.DEALER) as named:
            alpha.connections.roster.secure_proxy(named, alpha.connections.own, "ipc:///run/pdx/proxy.sock")
            assert named.getsockopt(zmq.MECHANISM) == zmq.CURVE
    finally:
        context.term()
