"""The socket that processes attach to: it takes nobody while descriptors are short, and loses nobody."""

import contextlib
import os
import select
import socket
from collections import Counter
from pathlib import Path

import pytest
import zmq

from pdx.node.process_socket import ProcessSocket
from pdx.security import descriptors
from pdx.testing.waiting import wait_until


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def counters():
    return Counter()


@pytest.fixture
def process_socket(context, place, counters):
    made = ProcessSocket(context, place / "node.sock", counters)
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


def receive(process_socket):
    return wait_until(lambda: not process_socket.queue.admit_waiting() and process_socket.receive())[1][0].bytes


def test_while_descriptors_are_short_who_comes_waits_and_who_is_here_is_served(
    process_socket, dial, counters, monkeypatch
):
    first = dial()
    first.send(b"first")
    assert receive(process_socket) == b"first"
    with monkeypatch.context() as short:
        short.setattr(descriptors, "left", lambda: 10)
        process_socket.queue.admit_waiting()
        process_socket.queue.admit_waiting()
        second = dial()
        second.send(b"second")
        for number in range(20):
            first.send(b"again")
            assert receive(process_socket) == b"again", number
        short.setattr(descriptors, "left", descriptors.reserve)
        process_socket.queue.admit_waiting()
        assert not process_socket.queue._is_open, "it opens when there are some more than it closes at"
    process_socket.queue.admit_waiting()
    assert receive(process_socket) == b"second"
    assert counters["descriptors_short"] == 1


def test_a_connection_wakes_whoever_polls(process_socket, dial, place, monkeypatch):
    dealer = dial()
    dealer.send(b"x")
    assert receive(process_socket) == b"x"
    assert not select.select([process_socket.queue.fd], [], [], 0)[0], "ZMQ took it"
    with monkeypatch.context() as short, socket.socket(socket.AF_UNIX) as second:  # which does not try again
        short.setattr(descriptors, "left", lambda: 0)
        process_socket.queue.admit_waiting()
        second.connect(str(place / "node.sock"))
        wait_until(lambda: select.select([process_socket.queue.fd], [], [], 0)[0])
        process_socket.queue.admit_waiting()
        assert not select.select([process_socket.queue.fd], [], [], 0)[0], "it was turned away"


def test_zmq_takes_nobody_whom_the_control_loop_has_not_let_in(process_socket, dial, place):
    known = dial()
    known.send(b"known")
    assert receive(process_socket) == b"known"
    with contextlib.ExitStack() as undo:
        for _ in range(20):
            stranger = undo.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect(str(place / "node.sock"))
        before = descriptors.left()
        for number in range(20):  # all the time the thread of ZMQ works
            known.send(b"again")
            assert wait_until(process_socket.receive)[1][0].bytes == b"again", number
        assert descriptors.left() == before
        assert select.select([process_socket.queue.fd], [], [], 0)[0]
        process_socket.queue.admit_waiting()
        wait_until(lambda: not process_socket.queue.admit_waiting() and descriptors.left() == before - 20)


def test_who_found_the_queue_of_before_does_not_wait_in_it(process_socket, dial, place):
    """Nobody took it from there: it tried again when its handshake had lasted for 30 s."""
    before = os.open(place / "node.sock", os.O_PATH)
    try:
        dial().send(b"x")
        assert receive(process_socket) == b"x"
        wait_until(lambda: not process_socket.queue.admit_waiting())
        with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
            late.connect(f"/proc/self/fd/{before}")
    finally:
        os.close(before)


def test_a_path_that_cannot_be_renewed_turns_away_who_waits(process_socket, dial, monkeypatch):
    dealer = dial()
    dealer.send(b"x")
    wait_until(lambda: select.select([process_socket.queue.fd], [], [], 0)[0])
    with monkeypatch.context() as full:
        full.setattr(Path, "rename", no_space)
        with pytest.raises(OSError, match="no space"):
            process_socket.queue.admit_waiting()
    assert receive(process_socket) == b"x"


def no_space(*_):
    raise OSError(28, "no space")


def test_free_numbers_below_others_that_are_in_use_count_once(place):
    with contextlib.ExitStack() as undo:
        low = os.open("/dev/null", os.O_RDONLY)
        for _ in range(50):
            undo.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        before = descriptors.left()
        os.close(low)
        assert descriptors.left() == before + 1


def test_the_limit_of_files_is_what_the_system_allows_and_stays_where_it_must_not_be_raised(monkeypatch):
    limits = [(100, 4000)]
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert descriptors.raise_limit() == 4000
    assert descriptors.raise_limit() == 4000
    assert len(limits) == 2
    limits.append((100, 1 << 30))
    assert descriptors.raise_limit() == 1 << 20

    def forbidden(*_):
        raise OSError(1, "forbidden")

    limits.append((100, 4000))
    monkeypatch.setattr(descriptors.resource, "setrlimit", forbidden)
    assert descriptors.raise_limit() == 100
