"""A node that may open few files, under floods of strangers and of its own user's processes."""

import contextlib
import os
import resource
import socket

import pytest
import zmq
from connection_stage import key_files, write_roster
from node_harness import MIB, NodeProcess, Wire, attached

from pdx.config import NodeConfig
from pdx.security.curve_keys import KeyPair
from pdx.testing.waiting import wait_until
from pdx.wire.messages import VERSION, Admit, Admitted, Done, Hello, PeerFrame, Ping, Welcome, encode

pytestmark = pytest.mark.long

LIMIT = 256


@pytest.fixture(params=["plain", "curve"])
def node(request, address, place):
    """It may open 256 files."""
    settings = {}
    if request.param == "curve":
        files = key_files(place, "alpha")
        key = KeyPair.load(files["alpha"]).public
        roster = write_roster(place / "roster.toml", {"alpha": ("tcp://127.0.0.1:1", key)})
        settings = {"keys": files["alpha"], "roster": roster}
    made = NodeProcess(
        NodeConfig(address=address, arena_bytes=MIB, name="alpha", listen="tcp://127.0.0.1:0", **settings)
    )
    try:
        made.wait_ready()
        resource.prlimit(made.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        yield made
    finally:
        made.close()


def endpoint(node):
    host, _, port = node.status().listen.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def serves(wire):
    answer = wire.ask(Admit([os.urandom(16)], 1))
    return isinstance(answer, Admitted) and answer.granted == [0]


def test_strangers_at_the_tcp_port_do_not_end_the_node(node):
    """Once a thousand connections without a key ended it: the next process that attached made ZMQ abort."""
    where = endpoint(node)
    with attached(node.address) as engine, contextlib.ExitStack() as flood:
        for number in range(2 * LIMIT):
            flood.enter_context(contextlib.closing(socket.create_connection(where, 30)))
            if number % 64 == 0:
                assert serves(engine)
        context = flood.enter_context(zmq.Context())
        for number in range(64):
            dealer = flood.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.connect(f"tcp://{where[0]}:{where[1]}")
            hello = Hello(VERSION, 1, "peer", f"stranger-{number}", epoch=number + 1, host="h", schemes=["tcp"])
            dealer.send(encode(PeerFrame(1, 0, hello)))
        assert serves(engine)
        with attached(node.address) as late:
            assert serves(late)
            wait_until(lambda: late.status().counters.get("strangers_dropped", 0) >= LIMIT)
    assert node.process.poll() is None
    assert not node.status().counters.get("internal_errors")


@pytest.mark.parametrize("node", ["plain"], indirect=True)
def test_more_processes_than_files_wait_until_others_leave(node):
    """Once ZMQ ended the node where it had no descriptor left for a connection."""
    with contextlib.ExitStack() as undo:
        wires = []

        def is_short():
            return bool(wires) and wires[0].status().counters.get("descriptors_short", 0) > 0

        for _ in range(LIMIT):
            wire = undo.enter_context(Wire(node.address))
            wire.tell(Hello(VERSION, os.getpid(), "client"), reply=True)
            if (answer := wait_until(lambda wire=wire: wire.answer(0) or is_short())) is True:
                break
            assert isinstance(answer[1], Welcome)
            wire.node_pid = node.pid
            wires.append(wire)
        assert 32 <= len(wires) < LIMIT
        assert all(serves(one) for one in wires[:: len(wires) // 8])
        assert wires[0].status().counters["descriptors_short"] >= 1
        for one in wires[: len(wires) // 2]:
            one.close()
        answer = wire.answer(30.0)
        assert answer is not None
        assert isinstance(answer[1], Welcome)
        wire.node_pid = node.pid
    assert node.process.poll() is None


@pytest.mark.parametrize("node", ["plain"], indirect=True)
def test_connections_of_this_user_that_say_nothing_do_not_end_the_node(node):
    path = node.address.removeprefix("ipc://")
    with attached(node.address) as engine, contextlib.ExitStack() as flood:
        for number in range(2 * LIMIT):
            stream = flood.enter_context(socket.socket(socket.AF_UNIX))
            stream.connect(path)  # waits where the queue is full: ZMQ's thread may not have had its turn
            assert isinstance(engine.ask(Ping()), Done), number  # so the loop has had its turn
        assert engine.status().counters["descriptors_short"] >= 1
    assert node.process.poll() is None
    with attached(node.address) as late:
        assert serves(late)
