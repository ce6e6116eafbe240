"""The socket that processes attach to: it takes nobody while descriptors are short, and loses nobody."""

import contextlib
import select
from collections import Counter

import pytest
import zmq
from node_harness import wait_until

from pdx import descriptors
from pdx.node.desk import Desk


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def counters():
    return Counter()


@pytest.fixture
def desk(context, place, counters):
    made = Desk(context, place / "node.sock", counters)
    yield made
    made.close()
    assert not (place / "node.sock").exists()


@pytest.fixture
def dial(place):
    with zmq.Context() as context, contextlib.ExitStack() as undo:

        def connect():
            dealer = undo.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.connect(f"ipc://{place}/node.sock")
            return dealer

        yield connect


def receive(desk):
    return wait_until(desk.receive).frames[0].bytes


def test_while_descriptors_are_short_who_comes_waits_and_who_is_here_is_served(desk, dial, counters, monkeypatch):
    first = dial()
    first.send(b"first")
    assert receive(desk) == b"first"
    with monkeypatch.context() as short:
        short.setattr(descriptors, "left", lambda: 10)
        desk.heed_descriptors()
        desk.heed_descriptors()
        second = dial()
        second.send(b"second")
        for number in range(20):
            first.send(b"again")
            assert receive(desk) == b"again", number
        short.setattr(descriptors, "left", descriptors.reserve)
        desk.heed_descriptors()
        assert not desk._is_open, "it opens when there are some more than it closes at"
    desk.heed_descriptors()
    assert receive(desk) == b"second"
    assert counters["descriptors_short"] == 1


def test_a_connection_wakes_whoever_polls(desk, dial, monkeypatch):
    dealer = dial()
    dealer.send(b"x")
    assert receive(desk) == b"x"
    assert not select.select([desk.fd], [], [], 0)[0], "ZMQ took it"
    with monkeypatch.context() as short:
        short.setattr(descriptors, "left", lambda: 0)
        desk.heed_descriptors()
        second = dial()
        wait_until(lambda: select.select([desk.fd], [], [], 0)[0])
        desk.heed_descriptors()
        assert not select.select([desk.fd], [], [], 0)[0], "it was turned away"
        second.close()


def test_the_limit_of_files_is_what_the_system_allows(monkeypatch):
    limits = [(100, 4000)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert descriptors.raise_limit() == 4000
    assert descriptors.raise_limit() == 4000
    assert len(limits) == 2
    limits.append((100, 1 << 30))
    assert descriptors.raise_limit() == 1 << 20


def test_where_it_must_not_be_raised_it_stays(monkeypatch):
    def forbidden(*_):
        raise OSError(1, "forbidden")

    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (100, 4000))
    monkeypatch.setattr(descriptors.resource, "setrlimit", forbidden)
    assert descriptors.raise_limit() == 100
