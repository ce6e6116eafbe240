"""The TCP port in front of ZMQ: what is passed on, and whom a flood of strangers keeps out."""

import contextlib
import errno
import math
import os
import resource
import select
import socket
import stat
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from pdx.security import tcp_filter as module
from pdx.security.tcp_filter import BATCH, MAX_YOUNG_OF_ADDRESS, SILENT_S, UNREAD_S, TcpFilter
from pdx.testing.waiting import wait_until

GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
YOUNG_S = 5.0


class Counters(Counter):
    """Counts no strangers while `fails`."""

    fails, failed = False, 0

    def __missing__(self, name):
        if self.fails and name == "strangers_dropped":
            self.failed += 1
            raise ZeroDivisionError
        return 0


class Epoll:
    """The kernel's, whose answers are kept; it takes nothing new while it is `full`."""

    def __init__(self, kernels):
        self.kernels, self.answers, self.full = kernels, [], False
        self.modify, self.close = kernels.modify, kernels.close

    def register(self, *args):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.kernels.register(*args)

    def poll(self, timeout):
        self.answers.append(self.kernels.poll(timeout))
        return self.answers[-1]


class Bed:
    """A filter, and in the place of ZMQ a socket that takes what is passed on."""

    def __init__(self, most_bytes=0):
        self.now = 1000.0
        self.counters = Counters()
        self.undo = contextlib.ExitStack()
        self.filter = TcpFilter(
            "127.0.0.1", 0, young_s=YOUNG_S, counters=self.counters, most_bytes=most_bytes, clock=lambda: self.now
        )
        self.zmq = self.undo.enter_context(socket.socket(socket.AF_UNIX))
        self.zmq.bind(self.filter.inner.removeprefix("ipc://"))
        self.zmq.listen(128)
        self.zmq.settimeout(20)
        self.undo.callback(self.filter.close)
        self.filter.start()

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
def make_bed(monkeypatch):
    """A bed with these bounds. Its clock stands still, so its filter does not pause between connections."""
    with contextlib.ExitStack() as undo:

        def make(most_bytes=0, **bounds):
            for name, value in {"PACE_S": 0.0, **bounds}.items():
                monkeypatch.setattr(module, name, value)
            made = Bed(most_bytes)
            undo.enter_context(made.undo)
            return made

        yield make


@pytest.fixture
def bed(make_bed):
    return make_bed()


@pytest.fixture
def epoll(monkeypatch):
    """That of the next filter."""
    made = Epoll(select.epoll())
    monkeypatch.setattr(select, "epoll", lambda: made)
    return made


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
    outer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # else the system's may take all of it
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


def test_an_end_is_passed_on_after_what_was_said_before_and_its_place_is_free(make_bed):
    bed = make_bed(MAX_CONNECTIONS=1)
    outer, inner = bed.passed()
    inner.sendall(b"refused" * 1000)
    inner.close()
    assert read(outer, 8000) == b"refused" * 1000
    wait_until(lambda: is_closed(outer))
    bed.passed()


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


def test_a_flood_from_many_addresses_keeps_nobody_out(make_bed):
    bed = make_bed(MAX_YOUNG=32)
    flood = [bed.dial(f"127.0.1.{number}") for number in range(1, 33)]
    crowd = [bed.dial("127.0.2.1") for _ in range(8)]
    outer, inner = bed.passed("127.0.3.1")
    outer.sendall(b"served")
    assert read(inner, 6) == b"served"
    wait_until(lambda: bed.counters["strangers_dropped"] == 9)
    wait_until(lambda: sum(is_closed(one) for one in flood + crowd) == 9)
    gone = next(number for number, one in enumerate(flood, 1) if not is_closed(one))
    flood[gone - 1].close()
    wait_until(lambda: f"127.0.1.{gone}" not in bed.filter.newcomers())
    bed.passed("127.0.4.1")
    assert bed.counters["strangers_dropped"] == 9, "its place was free"
    bed.passed("127.0.5.1")
    assert bed.counters["strangers_dropped"] == 10


def test_under_a_flood_it_pauses_so_that_its_process_can_do_other_work(make_bed, monkeypatch):
    """Else a thread that takes thousands of connections in a second keeps the interpreter's lock from all others."""
    bed = make_bed(SILENT_S=math.inf)  # however far the clock has come when the last are taken
    outer, inner = bed.passed()
    monkeypatch.setattr(module, "PACE_S", 0.01)
    real, all_here = socket.socket.accept, threading.Event()

    def accept(listener):
        assert listener.family != socket.AF_INET or all_here.wait(20)
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    flood = [bed.dial(f"127.0.1.{number}") for number in range(1, 41)]
    all_here.set()
    wait_until(lambda: len(bed.filter.newcomers()) == 1 + BATCH)
    for _ in range(3):  # rounds in which nobody is taken
        outer.sendall(b"a")
        assert read(inner, 1) == b"a"
    assert len(bed.filter.newcomers()) == 1 + BATCH

    def are_taken():
        bed.now += 0.01
        return len(bed.filter.newcomers()) == 1 + len(flood)

    wait_until(are_taken)
    flood[-1].sendall(GREETING)
    assert read(bed.accept(), 10) == GREETING


def test_beyond_the_most_connections_or_without_descriptors_new_ones_are_refused(make_bed, caplog):
    bed = make_bed(MAX_CONNECTIONS=2)
    (outer, inner), second = bed.passed(), bed.dial("127.0.1.1")
    refused = bed.dial()
    wait_until(lambda: is_closed(refused))
    assert "2 connections are here already" in caplog.text
    second.close()
    wait_until(lambda: bed.filter.newcomers() == ["127.0.0.1"])
    bed.now += 100  # so that it says why again
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
        refused = bed.dial()
        wait_until(lambda: is_closed(refused))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "no file descriptor is left" in caplog.text
    bed.nobody_came()
    outer.sendall(b"served")
    assert read(inner, 6) == b"served"
    bed.passed()


def test_with_no_descriptor_at_all_it_rests_and_goes_on(epoll, bed, monkeypatch):
    real, failed = socket.socket.accept, []

    def accept(listener):
        if listener.family == socket.AF_INET and not failed:
            failed.append(len(epoll.answers))
            raise OSError(24, "Too many open files")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    outer = bed.dial()
    wait_until(lambda: failed and len(epoll.answers) > failed[0])  # it rests
    bed.now += 1.0
    outer.sendall(GREETING)
    assert read(bed.accept(), 10) == GREETING


@pytest.mark.parametrize("call", ["connect", "register outside", "register inside"])
def test_where_one_connection_cannot_be_served_the_others_are(epoll, make_bed, monkeypatch, call):
    """Others took the last descriptor, or place in the epoll, just now."""
    bed = make_bed(MAX_CONNECTIONS=1)

    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    epoll.full = call == "register outside"
    outer = bed.dial()
    if not epoll.full:
        wait_until(bed.filter.newcomers)
    with monkeypatch.context() as patch:
        if call == "connect":
            patch.setattr(socket.socket, "connect", fail)
        epoll.full = call != "connect"
        outer.sendall(GREETING)
        wait_until(lambda: is_closed(outer))
    epoll.full = False
    assert bed.counters["strangers_dropped"] == 1
    if call == "register inside":
        bed.accept()  # it had come to ZMQ's socket
    bed.passed()


@pytest.mark.parametrize("part", ["taking", "dropping", "moving", "looking"])
def test_an_internal_error_ends_one_connection_and_the_others_are_served(make_bed, monkeypatch, part):
    bed = make_bed(MAX_CONNECTIONS=1)

    def fail(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        if part == "dropping":
            patch.setattr(module, "MAX_YOUNG_OF_ADDRESS", 0)
        elif part != "looking":
            patch.setattr(socket.socket, {"taking": "setblocking", "moving": "send"}[part], fail)
        bed.counters.fails = True
        outer = bed.dial()
        if part == "looking":
            wait_until(bed.filter.newcomers)
            bed.now += SILENT_S + 1
        else:
            outer.sendall(GREETING)
        wait_until(lambda: bed.counters["internal_errors"])
    bed.counters.fails = False
    bed.now += 1
    if part == "moving":
        bed.accept()  # it had been passed on
    wait_until(lambda: is_closed(outer))
    assert bed.counters["internal_errors"] == 1
    bed.passed()


def test_who_says_more_than_a_reader_has_to_say_is_closed(make_bed):
    bed = make_bed(most_bytes=100)
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


def test_a_reader_that_does_not_read_is_closed_and_one_that_has_nothing_to_read_is_not(make_bed):
    bed = make_bed(most_bytes=100)
    (_, unread), (idle, _) = bed.passed(), bed.passed()
    unread.setblocking(False)
    began = bed.now

    def is_dropped():
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while not bed.counters["strangers_dropped"]:
                unread.send(bytes(1 << 20))
        bed.now += 1  # it looks once more
        return bed.counters["strangers_dropped"]

    wait_until(is_dropped, what="it is closed")
    assert bed.now - began >= UNREAD_S
    bed.now += 2 * UNREAD_S
    assert not is_closed(idle)
    assert bed.counters["strangers_dropped"] == 1


def test_all_are_dropped_on_demand_and_may_come_again(epoll, make_bed, monkeypatch):
    """Also where the thread looks after it was told so and before it is woken, and comes to rest afterwards."""
    bed = make_bed(MAX_CONNECTIONS=2)
    young = bed.dial()
    outer, inner = bed.passed()
    write = os.eventfd_write
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_write", lambda *_: wait_until(lambda: is_closed(outer)) and write(*_))
        bed.filter.drop()
        wait_until(lambda: is_closed(young))
    seen = len(epoll.answers)
    wait_until(lambda: len(epoll.answers) > seen + 3)
    assert [] in epoll.answers[seen:], "it does not turn without end"
    bed.passed()
    bed.passed()


def test_who_makes_a_folder_while_it_is_bound_anew_can_enter_it(bed, tmp_path):
    """A node's key is exchanged while the threads of its disks work."""

    def bind(inner):
        other = bed.undo.enter_context(socket.socket(socket.AF_UNIX))
        other.bind(inner.removeprefix("ipc://"))
        (tmp_path / "made").mkdir(mode=0o700)
        assert stat.S_IMODE(os.stat(os.path.dirname(inner.removeprefix("ipc://"))).st_mode) == 0o700

    bed.filter.bind(SimpleNamespace(setsockopt=lambda *_: None, bind=bind))
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
