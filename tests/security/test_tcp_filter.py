"""The TCP port in front of ZMQ: what is passed on, and whom a flood of strangers keeps out."""

import contextlib
import os
import socket
import threading
import types
from collections import Counter

import pytest

from pdx.security import descriptors
from pdx.security import tcp_filter as module
from pdx.security.tcp_filter import MAX_YOUNG_OF_ADDRESS, SILENT_S, UNREAD_S, TcpFilter
from pdx.testing.waiting import wait_until

GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
YOUNG_S = 5.0


class Bed:
    """A filter, and in the place of ZMQ a socket that takes what is passed on."""

    def __init__(self):
        self.now = 1000.0
        self.counters = Counter()
        self.undo = contextlib.ExitStack()
        self.filter = TcpFilter("127.0.0.1", 0, young_s=YOUNG_S, counters=self.counters, clock=lambda: self.now)
        self.zmq = self.undo.enter_context(socket.socket(socket.AF_UNIX))
        self.zmq.bind(self.filter.inner.removeprefix("ipc://"))
        self.zmq.listen(128)
        self.zmq.settimeout(20)
        self.undo.callback(self._close)
        self.filter.start()

    def _close(self):
        self.filter.close()
        self.filter._thread.join()

    def dial(self, source="127.0.0.1"):
        host, _, port = self.filter.address.removeprefix("tcp://").rpartition(":")
        return self.undo.enter_context(socket.create_connection((host, int(port)), 20, (source, 0)))

    def accept(self):
        stream, _ = self.zmq.accept()
        stream.settimeout(20)
        return self.undo.enter_context(stream)

    def passed(self, source="127.0.0.1"):
        """Both ends of a connection that was passed on."""
        outer = self.dial(source)
        outer.sendall(GREETING)
        inner = self.accept()
        assert inner.recv(10) == GREETING
        return outer, inner

    def nobody_came(self):
        self.zmq.setblocking(False)
        with pytest.raises(BlockingIOError):
            self.zmq.accept()
        self.zmq.settimeout(20)


@pytest.fixture
def bed(monkeypatch):
    """Its clock stands still, so its filter does not pause between connections."""
    monkeypatch.setattr(module, "_PACE_S", 0.0)
    made = Bed()
    yield made
    made.undo.close()


def is_closed(stream):
    stream.setblocking(False)
    try:
        return stream.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def read(stream, nbytes):
    data = bytearray()
    while len(data) < nbytes and (piece := stream.recv(1 << 16)):
        data += piece
    return bytes(data)


def test_what_both_sides_say_goes_through_also_a_greeting_in_pieces(bed):
    outer = bed.dial()
    for byte in GREETING:
        outer.sendall(bytes([byte]))
    inner = bed.accept()
    assert read(inner, 10) == GREETING
    outer.sendall(b"a" * 1000)
    assert read(inner, 1000) == b"a" * 1000
    inner.sendall(b"b" * 1000)
    assert read(outer, 1000) == b"b" * 1000


def test_a_side_that_does_not_read_is_waited_for_and_nothing_is_lost(bed):
    outer, inner = bed.passed()
    data = os.urandom(1 << 20) * 8
    outer.settimeout(0.2)
    sent = 0
    with contextlib.suppress(TimeoutError):  # both sockets and the filter are full
        while True:
            sent += outer.send(data[sent : sent + 65_536])
    assert sent < len(data)
    assert read(inner, sent) == data[:sent]
    outer.settimeout(20)
    outer.sendall(b"more")
    assert read(inner, 4) == b"more"


def test_an_end_is_passed_on_after_what_was_said_before(bed):
    outer, inner = bed.passed()
    inner.sendall(b"refused" * 1000)
    inner.close()
    assert read(outer, 8000) == b"refused" * 1000
    wait_until(lambda: is_closed(outer))
    wait_until(lambda: not bed.filter._connections)


def test_what_does_not_speak_zmq_is_closed_and_never_seen_by_it(bed):
    stranger = bed.dial()
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    wait_until(lambda: is_closed(stranger))
    bed.nobody_came()


def test_who_says_nothing_is_closed_and_who_was_passed_on_is_not(bed):
    stranger = bed.dial()
    outer, inner = bed.passed()
    bed.now += SILENT_S + 0.5
    wait_until(lambda: is_closed(stranger))
    assert bed.counters["strangers_dropped"] == 1
    bed.now += 100 * YOUNG_S
    wait_until(lambda: not bed.filter.newcomers())
    outer.sendall(b"still here")
    assert read(inner, 10) == b"still here"


def test_of_one_address_the_oldest_that_said_nothing_goes(bed):
    outer, inner = bed.passed()
    flood = [bed.dial() for _ in range(MAX_YOUNG_OF_ADDRESS - 1)]
    last = bed.dial()
    wait_until(lambda: is_closed(flood[0]))
    assert not any(is_closed(one) for one in flood[1:])
    last.setblocking(True)
    last.sendall(GREETING)
    assert read(bed.accept(), 10) == GREETING
    outer.sendall(b"first")
    assert read(inner, 5) == b"first"


def test_a_flood_from_many_addresses_keeps_nobody_out(bed):
    bed.filter._max_young = 32
    flood = [bed.dial(f"127.0.1.{number}") for number in range(1, 33)]
    crowd = [bed.dial("127.0.2.1") for _ in range(8)]
    outer, inner = bed.passed("127.0.3.1")
    outer.sendall(b"served")
    assert read(inner, 6) == b"served"
    wait_until(lambda: bed.counters["strangers_dropped"] == 9)
    wait_until(lambda: sum(is_closed(one) for one in flood + crowd) == 9)
    assert bed.filter._num_young == 32


def test_under_a_flood_it_pauses_so_that_its_process_can_do_other_work(bed, monkeypatch):
    """Else a thread that takes thousands of connections in a second keeps the interpreter's lock from all others."""
    outer, inner = bed.passed()
    monkeypatch.setattr(module, "_PACE_S", 0.01)
    real, all_here = socket.socket.accept, threading.Event()

    def accept(listener):
        assert listener is not bed.filter._listener or all_here.wait(20)
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    flood = [bed.dial() for _ in range(40)]
    all_here.set()
    wait_until(lambda: bed.filter._count == 1 + 16)
    for _ in range(3):  # rounds in which nobody is taken
        outer.sendall(b"a")
        assert read(inner, 1) == b"a"
    assert bed.filter._count == 1 + 16

    def are_taken():
        bed.now += 0.01
        return bed.filter._count == 1 + len(flood)

    wait_until(are_taken)
    flood[-1].sendall(GREETING)
    assert read(bed.accept(), 10) == GREETING


def test_beyond_the_most_connections_or_without_descriptors_new_ones_are_refused(bed, monkeypatch):
    outer, inner = bed.passed()
    with monkeypatch.context() as patch:
        patch.setattr(bed.filter, "_max_connections", 1)
        refused = bed.dial()
        wait_until(lambda: is_closed(refused))
    monkeypatch.setattr(descriptors, "left", lambda: 0)
    refused = bed.dial()
    refused.sendall(GREETING)
    wait_until(lambda: is_closed(refused))
    bed.nobody_came()
    outer.sendall(b"served")
    assert read(inner, 6) == b"served"


def test_with_no_descriptor_at_all_it_rests_and_goes_on(bed, monkeypatch):
    real, failed = socket.socket.accept, []

    def accept(listener):
        if listener is bed.filter._listener and not failed:
            failed.append(1)
            raise OSError(24, "Too many open files")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    outer = bed.dial()
    wait_until(lambda: failed)
    bed.now += 1.0
    outer.sendall(GREETING)
    assert read(bed.accept(), 10) == GREETING


@pytest.mark.parametrize("call", ["socket", "register"])
def test_where_one_connection_cannot_be_served_the_others_are(bed, monkeypatch, call):
    """Others took the last descriptor, or place in the epoll, just now."""
    failed = []

    def fail(*_):
        failed.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        if call == "socket":
            patch.setattr(module, "socket", types.SimpleNamespace(**{**vars(socket), "socket": fail}))
        else:
            epoll = bed.filter._epoll
            patch.setattr(bed.filter, "_epoll", types.SimpleNamespace(poll=epoll.poll, register=fail))
        outer = bed.dial()
        outer.sendall(GREETING)
        wait_until(lambda: failed and is_closed(outer))
    assert bed.counters["strangers_dropped"] == 1
    assert bed.filter._count == 0
    assert not bed.filter._connections
    bed.passed()


@pytest.mark.parametrize("part", ["_take", "_drop_oldest", "_watch", "_grow_up"])
def test_an_internal_error_ends_one_connection_and_the_others_are_served(bed, monkeypatch, part):
    failed = []

    def fail(*_):
        failed.append(1)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        if part == "_drop_oldest":
            patch.setattr(module, "MAX_YOUNG_OF_ADDRESS", 0)
        patch.setattr(bed.filter, part, fail)
        outer = bed.dial()
        outer.sendall(GREETING)
        bed.now += 1
        wait_until(lambda: failed and (part == "_grow_up" or is_closed(outer)))
    wait_until(lambda: bed.counters["internal_errors"] == len(failed))
    if part == "_watch":  # it had been passed on
        bed.accept()
    if part != "_grow_up":  # the client's side is closed before ZMQ's is forgotten
        wait_until(lambda: bed.filter._count == 0 and not bed.filter._connections)
    bed.passed()


def test_who_says_more_than_a_reader_has_to_say_is_closed(bed):
    bed.filter._most_bytes = 100
    talker, inner = bed.passed()
    reader, other = bed.passed()
    talker.sendall(b"x" * 90)
    assert read(inner, 90) == b"x" * 90, "with the greeting these are as many as it may"
    other.sendall(b"y" * 5000)
    assert read(reader, 5000) == b"y" * 5000, "what it is told does not count"
    talker.sendall(b"x")
    wait_until(lambda: is_closed(talker) and is_closed(inner))
    assert bed.counters["strangers_dropped"] == 1
    reader.sendall(b"z")
    assert read(other, 1) == b"z"


def test_a_reader_that_does_not_read_is_closed_and_one_that_has_nothing_to_read_is_not(bed):
    bed.filter._most_bytes = 100
    (_, unread), (idle, _) = bed.passed(), bed.passed()
    unread.setblocking(False)
    began = bed.now

    def is_dropped():
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while not bed.counters["strangers_dropped"]:
                unread.send(bytes(1 << 20))
        bed.now += 1  # it looks once more
        return bed.counters["strangers_dropped"]

    wait_until(is_dropped, what="it is closed")
    assert bed.now - began >= UNREAD_S
    bed.now += 2 * UNREAD_S
    assert not is_closed(idle)
    assert bed.counters["strangers_dropped"] == 1


def test_all_are_dropped_on_demand_and_may_come_again(bed, monkeypatch):
    """Also where the thread looks after it was told so and before it is woken, and comes to rest afterwards."""
    young = bed.dial()
    outer, inner = bed.passed()
    write, real, rounds = os.eventfd_write, bed.filter._epoll, []

    def poll(timeout):
        rounds.append(real.poll(timeout))
        return rounds[-1]

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "eventfd_write", lambda *_: wait_until(lambda: is_closed(outer)) and write(*_))
        bed.filter.drop()
        wait_until(lambda: is_closed(young) and not bed.filter._connections)
        assert bed.filter._count == 0
        patch.setattr(bed.filter, "_epoll", types.SimpleNamespace(poll=poll, modify=real.modify))
        wait_until(lambda: len(rounds) > 3)
    assert [] in rounds, "it does not turn without end"
    bed.passed()
