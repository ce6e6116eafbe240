"""A node and several proxies side by side, and workers of them; plain ROUTERs stand where these will."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter

import pytest
import zmq
from connection_stage import settled
from proxy_router import Proxy

from pdx.config import NodeConfig
from pdx.node.daemon import Daemon
from pdx.security.curve_keys import KeyPair
from pdx.security.gate import Gate
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Mark, encode
from pdx.wire.proxy import NodeReport, PeerEntry, PeerList

TRANSFERS = {name: f"{name}-tag-0123456789abcdef" for name in "ab"} | {"": "unknown-0123456789abcdef"}
TAGS = {name: f"{name}-tag-" for name in "ab"}


@pytest.fixture
def proxies(place):
    """Two of them, and the second worker of the first."""
    names = ("a.sock", "b.sock", "a.sock.1")
    made = [Proxy(f"ipc://{place}/{name}") for name in names]
    yield made
    for each in made:
        each.context.destroy(linger=0)
    for name in names:
        (place / name).unlink(missing_ok=True)


def tell(proxy, **fields):
    proxy.send(encode(PeerList(**{"peers": [], **fields})))


def test_each_proxy_and_each_worker_hears_of_engines_at_once(start_here, attach, proxies):
    a, b, worker = proxies
    node = start_here(proxy=f"{a.address}, {b.address}", report_s=60.0)
    assert a.report().node == b.report().node
    tell(b, workers=1)
    tell(a, workers=2)
    assert worker.report().engines == []
    attach(node, kind="scheduler", engine="e")
    for each in proxies:
        assert [engine.engine for engine in each.report_where(lambda report: report.engines).engines] == ["e"]
    with contextlib.closing(worker.router.get_monitor_socket(zmq.EVENT_DISCONNECTED)) as monitor:
        tell(a, workers=1)
        assert monitor.poll(30_000), "a worker that is none any more is not reported to"
        worker.router.disable_monitor()


def num_open():
    return len(os.listdir("/proc/self/fd"))


def test_workers_may_come_and_go_any_number_of_times(place, proxies, caplog):
    """Once a name that ZMQ had not let go of yet was given to the next one's monitor."""
    a, *_ = proxies
    with Daemon(NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=2 << 20, proxy=a.address)) as daemon:
        wait_until(lambda: daemon.turn(0.01) or a.router.poll(0), what="a report")
        a.report()
        before = num_open()
        for workers in (64, 1, 64, 1, 64):
            tell(a, workers=workers)
        wait_until(lambda: daemon.turn(0.01) or num_open() >= before + 2 * 63, what="each has its sockets")
        tell(a, workers=1)
        # ZMQ's own thread closes sockets later.
        wait_until(lambda: daemon.turn(0.01) or num_open() <= before + 16, what="no sockets are left")
    assert "is not reported to" not in caplog.text


def test_only_the_first_worker_says_how_many_there_are(start_here, attach, proxies):
    """Else one that is told of more of them would be believed, and so on."""
    a, _, worker = proxies
    node = start_here(proxy=a.address, report_s=60.0)
    a.report()
    tell(a, workers=2)
    worker.report()
    tell(worker, workers=1, tag="w")
    attach(node, kind="scheduler", engine="e")
    assert worker.report_where(lambda report: report.engines)


def test_a_mark_is_told_to_the_proxy_whose_transfer_it_is(start_here, attach, proxies):
    a, b, _ = proxies
    node = start_here(proxy=f"{a.address},{b.address}", report_s=60.0)
    for name, each in zip("ab", (a, b), strict=True):
        each.report()
        tell(each, tag=TAGS[name], peers=[PeerEntry(name, "ipc:///nowhere")])
    client = attach(node, kind="scheduler", engine="e")
    wait_until(lambda: {"a", "b"} <= {peer.name for peer in client.status().peers}, what="it has heard both")
    for transfer in TRANSFERS.values():
        client.tell(Mark(transfer, "event", 1))
    client.status()
    client.tell(Mark(TRANSFERS[""], "last", 1))
    for name, each in zip("ab", (a, b), strict=True):
        marks = []
        while not marks or marks[-1].event != "last":
            marks += each.report().marks
        assert [mark.transfer for mark in marks] == [TRANSFERS[name], TRANSFERS[""], TRANSFERS[""]]


def test_nodes_of_which_any_proxy_tells_are_there(place, proxies):
    a, b, _ = proxies
    both = f"{a.address},{b.address}"
    config = NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=2 << 20, proxy=both, report_s=0.05)
    with Daemon(config) as daemon:
        roster = daemon.service.peers.connections.roster

        def settled(names):
            daemon.turn(0.05)
            return sorted(roster.names) == names

        def hears(proxy, *names):
            wait_until(lambda: daemon.turn(0.05) or proxy.router.poll(0), what="a report")
            proxy.report()
            tell(proxy, peers=[PeerEntry(name, f"ipc:///{name}") for name in names])

        hears(a, "one", "two")
        wait_until(lambda: settled(["one", "two"]))
        hears(b, "two", "three")
        wait_until(lambda: settled(["one", "three", "two"]))
        hears(a, "two")
        wait_until(lambda: settled(["three", "two"]))
        b.context.destroy(linger=0)
        hears(a, "two", "four")
        wait_until(lambda: settled(["four", "two"]), what="of one that is gone nothing counts where another is there")


def test_a_proxy_hears_of_the_nodes_new_key_and_is_left_when_the_roster_has_it_no_more(place, monkeypatch, caplog):
    context, keys = zmq.Context(), {name: KeyPair.make() for name in ("proxy", "old", "new", "other")}
    gate = Gate(context, keys["proxy"], admits={each.public for each in keys.values()}, counters=Counter(), filters=[])
    router = context.socket(zmq.ROUTER)
    gate.guard(router)
    address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    roster, key = place / "roster.toml", place / "key"

    def tell(own, proxy):
        key.write_text(f'secret-key = "{own.secret}"\n')
        text = f'[nodes.n]\nkey = "{own.public}"\n'
        roster.write_text(text + (f'[proxy]\naddress = "{address}"\nkey = "{proxy.public}"\n' if proxy else ""))
        for path in (key, roster):
            path.chmod(0o600)
            settled(path)

    def heard():
        """By which key a report has come."""
        daemon.turn(0.05)
        gate.answer()
        return str(router.recv_multipart(copy=False)[-1].get("User-Id")) if router.poll(0) else ""

    def no_descriptor(*_):
        raise zmq.ZMQError(errno.EMFILE)

    tell(keys["old"], keys["proxy"])
    config = NodeConfig(
        address=f"ipc://{place}/n.sock", name="n", arena_bytes=2 << 20, proxy=address, roster=str(roster), keys=str(key)
    )
    try:
        with Daemon(config) as daemon:
            wait_until(lambda: heard() == keys["old"].public, what="it reports")
            with monkeypatch.context() as short:  # no descriptor is left for another line: it is tried again
                short.setattr(zmq.Socket, "monitor", no_descriptor)
                tell(keys["new"], keys["proxy"])
                wait_until(
                    lambda: heard() and "not with the node's new key" in caplog.text, what="it goes on as before"
                )
            wait_until(lambda: heard() == keys["new"].public, what="it reports by its new key")
            for proxy in (keys["other"], None):
                tell(keys["new"], proxy)
                wait_until(lambda: heard() or not [each for each in daemon._proxies._all.values() if each.is_up])
                assert not any(each.key == keys["proxy"].public for each in daemon._proxies._all.values())
    finally:
        router.close(0)
        gate.close()
        context.term()


def test_who_comes_back_hears_of_everything_at_once(start_here, attach, proxies):
    a, b, _ = proxies
    node = start_here(proxy=f"{a.address},{b.address}", report_s=600.0)
    attach(node, kind="scheduler", engine="e")
    for each in (a, b):
        each.report_where(lambda report: report.engines)
    b.context.destroy(linger=0)
    again = Proxy(b.address)
    try:
        assert isinstance(again.report(), NodeReport), "though the next report is due in ten minutes"
    finally:
        again.context.destroy(linger=0)
