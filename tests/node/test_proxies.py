"""A node and several proxies side by side, and workers of them; plain ROUTERs stand where these will."""

from __future__ import annotations

import contextlib
import os

import pytest
import zmq
from test_node_proxy import Proxy

from pdx.config import NodeConfig
from pdx.node.daemon import Daemon
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


def test_workers_may_come_and_go_any_number_of_times(place, proxies):
    """Once a name that ZMQ had not let go of yet was given to the next one's monitor."""
    a, *_ = proxies
    with Daemon(NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=2 << 20, proxy=a.address)) as daemon:
        wait_until(lambda: daemon.turn(0.01) or a.router.poll(0), what="a report")
        a.report()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            for workers in (64, 1):
                tell(a, workers=workers)
                wait_until(lambda workers=workers: daemon.turn(0.01) or len(daemon._proxies._all) == workers)
        # ZMQ's own thread closes sockets later.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 16, what="no sockets are left")


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
    config = NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=2 << 20, proxy=f"{a.address},{b.address}")
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
