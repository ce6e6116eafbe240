"""The daemon in this process, turn by turn: events that come together, and starts that fail half way."""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from node_harness import MIB, Wire, arenas_of

from pdx.config import NodeConfig
from pdx.errors import ArenaTooSmall, ConfigError
from pdx.node import daemon as module
from pdx.node.daemon import TICK_S, Daemon
from pdx.node.proxy_line import ProxyLine
from pdx.security import descriptors
from pdx.telemetry.faults import Faults
from pdx.telemetry.mailbox import Mailbox
from pdx.testing.waiting import wait_until
from pdx.wire.burst import BURST_S
from pdx.wire.messages import (
    VERSION,
    Admit,
    Admitted,
    Bye,
    Cancel,
    Done,
    Hello,
    Ping,
    Refused,
    Release,
    ToNode,
    Welcome,
    encode,
)
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import Status


@pytest.fixture
def daemon(address):
    with Daemon(NodeConfig(address=address, arena_bytes=MIB)) as made:
        yield made


@pytest.fixture
def wire(address):
    connection = Wire(address)
    yield connection
    connection.close()


SAY = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
socket.connect(sys.argv[1])
for line in sys.stdin:
    socket.send(bytes.fromhex(line))
"""


class Child:
    """Another process that connects and says what it is told to."""

    def __init__(self, address):
        self.process = subprocess.Popen([sys.executable, "-c", SAY, address], stdin=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self._seq = 0

    def tell(self, body):
        self._seq += 1
        self.process.stdin.write(encode(ToNode(self._seq, False, body)).hex() + "\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def child(address):
    made = Child(address)
    yield made
    made.kill()
    made.process.communicate()


def turn_until_answered(daemon, wire):
    def answer():
        daemon.turn(0.01)
        return wire.answer(0)

    return wait_until(answer)[1]


def hello(daemon, wire, kind="client"):
    wire.tell(Hello(VERSION, os.getpid(), kind), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Welcome)


def arrived(daemon):
    wait_until(lambda: not daemon._process_socket.queue.heed() and daemon._process_socket.socket.poll(0))


@contextlib.contextmanager
def filled_up_to(number):
    """No descriptor below `number` is free, so one that is closed is the next that is opened."""
    fillers = [os.dup(2)]
    while fillers[-1] < number:
        fillers.append(os.dup(2))
    os.close(fillers.pop())
    yield
    for filler in fillers:
        os.close(filler)


def attach(daemon, child):
    child.tell(Hello(VERSION, child.pid, "client"))

    def session():
        daemon.turn(0.01)
        return next((one for one in daemon.service.sessions if one.hello.pid == child.pid), None)

    return wait_until(session)


def test_a_process_that_says_bye_and_dies_before_the_next_turn(daemon, child):
    attach(daemon, child)
    child.tell(Bye())
    arrived(daemon)
    child.kill()
    daemon.turn(0.0)
    assert len(daemon.service.sessions) == 0
    assert daemon.service.counters["deaths"] == 0


def test_a_death_is_not_taken_for_that_of_the_process_which_came_next(daemon, wire, child, monkeypatch):
    """The new session's pidfd has the number of the one that just ended; the event was for the old one."""
    old_fd = attach(daemon, child).pidfd
    child.tell(Bye())
    arrived(daemon)
    deliveries = [daemon._process_socket.receive()]
    wire.tell(Hello(VERSION, os.getpid(), "client"))
    arrived(daemon)
    deliveries.append(daemon._process_socket.receive())
    wire.tell(Ping())
    arrived(daemon)
    child.kill()
    with filled_up_to(old_fd), monkeypatch.context() as patched:
        patched.setattr(daemon._process_socket, "receive", lambda: deliveries.pop(0) if deliveries else None)
        daemon.turn(0.0)
    wire.tell(Status(), reply=True)
    status = turn_until_answered(daemon, wire)
    assert [attached.pid for attached in status.attached] == [os.getpid()]
    assert next(iter(daemon.service.sessions)).pidfd == old_fd, "the number was reused, or this tests nothing"


def test_slots_of_one_life_of_a_node_are_not_current_in_the_next(address):
    seen = []
    for _ in range(2):
        with Daemon(NodeConfig(address=address, arena_bytes=MIB)) as daemon:
            generations = set(daemon.service.store.pools[0]._generations)
            assert len(generations) == 1
            seen.append(generations.pop())
    assert seen[0] != seen[1], "one in two thousand millions may be equal"
    assert max(seen) < 1 << 31


def test_while_the_machine_stands_still_the_node_is_not_idle(address, monkeypatch):
    """Nobody could attach meanwhile."""
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    with Daemon(NodeConfig(address=address, arena_bytes=MIB, exit_when_idle_s=2.0)) as daemon:
        now += 1000.0
        turns = 0
        while not daemon.is_idle_too_long():
            now += TICK_S
            turns += 1
    assert turns in (8, 9), "2 s less two ticks that the standstill counts for, with rounding"


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"arena_bytes": 1 << 45}, ArenaTooSmall), ({"proxy": "tcp://0.0.0.0:1"}, ConfigError)],
)
def test_a_start_that_fails_leaves_nothing(address, settings, error):
    with pytest.raises(error):
        Daemon(NodeConfig(**{"address": address, "arena_bytes": MIB, **settings}))
    assert not arenas_of(address)
    with Daemon(NodeConfig(address=address, arena_bytes=MIB)):
        assert len(arenas_of(address)) == 1


# ---- exceptions that nobody expected ------------------------------------------------------------


def fail(*arguments, **settings):
    raise RuntimeError("injected")


def is_served(daemon, wire):
    wire.tell(Status(), reply=True)
    answer = turn_until_answered(daemon, wire)
    return isinstance(answer, NodeStatus)


@pytest.fixture
def other(daemon, address):
    """Another session of this process."""
    with Wire(address) as made:
        hello(daemon, made)
        yield made
        made._node_pid = 0


def test_an_exception_in_a_message_ends_its_session_and_nothing_else(daemon, wire, other, monkeypatch):
    hello(daemon, wire)
    wire.tell(Admit([b"r" * 16], 1), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Admitted)
    with monkeypatch.context() as patched:
        patched.setitem(daemon.service._handlers, Release, fail)
        wire.tell(Release(1), reply=True)
        answer = turn_until_answered(daemon, wire)
    assert isinstance(answer, Refused)
    assert "internal error" in answer.text
    assert daemon.service.counters["internal_errors"] == 1
    wire.tell(Ping(), reply=True)
    assert "internal error" in turn_until_answered(daemon, wire).text, "the session is over"
    assert is_served(daemon, other)
    assert daemon.service.store.index.census()[0] == {"filling": 1}, "its process lives and may still write"
    wire.tell(Bye(), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Done)
    hello(daemon, wire)
    assert is_served(daemon, wire)
    assert daemon.service.store.index.census()[0] == {}


def test_an_exception_in_a_bye_keeps_what_is_held_until_the_process_is_gone(daemon, child, other, monkeypatch):
    attach(daemon, child)
    with monkeypatch.context() as patched:
        patched.setitem(daemon.service._handlers, Bye, fail)
        child.tell(Bye())
        wait_until(lambda: daemon.turn(0.01) or daemon.service.counters["internal_errors"])
    assert is_served(daemon, other)
    child.kill()
    wait_until(lambda: daemon.turn(0.01) or daemon.service.counters["deaths"])
    assert len(daemon.service.sessions) == 1


@pytest.mark.parametrize(("part", "farewell"), [("admissions", "bye"), ("store", "death")])
def test_an_exception_at_the_end_of_a_session_leaves_nothing_of_it_that_is_polled(
    daemon, child, other, part, farewell, monkeypatch
):
    before = polled(daemon)
    attach(daemon, child)
    assert polled(daemon) == before + 1
    child.tell(Admit([b"r" * 16], 1))
    wait_until(lambda: daemon.turn(0.01) or daemon.service.store.index.census()[0])
    monkeypatch.setattr(getattr(daemon.service, part), "end_session", fail)
    if farewell == "bye":
        child.tell(Bye())
    else:
        child.kill()
    wait_until(lambda: daemon.turn(0.01) or daemon.service.counters["internal_errors"])
    assert not any(session.hello.pid == child.pid for session in daemon.service.sessions)
    assert polled(daemon) == before
    assert daemon.service.store.index.census()[0].get("filling", 0) == (part == "store")
    monkeypatch.undo()
    assert is_served(daemon, other)


def polled(daemon):
    """How many processes are watched."""
    return Path(f"/proc/self/fdinfo/{daemon.service.sessions.fd}").read_text().count("tfd:")


def test_a_late_answer_that_fails_is_a_miss_and_keeps_no_other_back(daemon, wire, monkeypatch):
    hello(daemon, wire)
    keys = [bytes([number]) * 16 for number in range(2)]
    transfer = "t" * 16
    wire.tell(Admit(keys, 1, transfer=transfer, part="writes"), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Admitted)
    for key in keys:
        wire.tell(Admit([key], transfer=transfer, wait_s=60.0), reply=True)
    wait_until(lambda: daemon.turn(0.01) or len(daemon.service.admissions._waiting) == 2)
    look = daemon.service.admissions._look
    monkeypatch.setattr(
        daemon.service.admissions,
        "_look",
        lambda session, ask, waited_s: fail() if ask.keys == keys[:1] else look(session, ask, waited_s),
    )
    daemon.service.cancel(transfer, "the proxy")
    answers = [turn_until_answered(daemon, wire) for _ in keys]
    assert answers == [Admitted()] * 2
    assert daemon.service.counters["internal_errors"] == 1


PARTS = {
    "store": lambda daemon: (daemon.service.store, "expire"),
    "transfers": lambda daemon: (daemon.service.transfers, "expire"),
    "connections": lambda daemon: (daemon._peers.connections, "tick"),
    "roster": lambda daemon: (daemon._peers.connections.roster, "refresh"),
    "receiver": lambda daemon: (daemon._peers.inbound, "tick"),
    "pushes": lambda daemon: (daemon._peers.inbound, "turn"),
    "fetches": lambda daemon: (daemon._peers.fetches, "tick"),
    "warm up": lambda daemon: (daemon._peers, "_warm_up"),
    "report": lambda daemon: (daemon._proxies, "report"),
    "lock": lambda daemon: (daemon._lock, "touch"),
}


def test_an_exception_in_a_part_of_a_tick_ends_that_part_only(daemon, other, monkeypatch):
    monkeypatch.setattr(module, "TICK_S", 0.0)
    counters, expire = daemon.service.counters, daemon.service.store.expire
    expired = []
    monkeypatch.setattr(daemon.service.store, "expire", lambda: expired.append(1) or expire())
    for name, part in PARTS.items():
        with monkeypatch.context() as patched:
            patched.setattr(*part(daemon), fail)
            daemon._peers._warm_up_at = daemon._next_touch = daemon._next_tick = 0.0
            before = len(expired), counters["internal_errors"]
            daemon.turn(0.0)
            daemon.turn(0.0)
            assert counters["internal_errors"] > before[1], name
            assert len(expired) - before[0] == (2 if name != "store" else 0), name
    assert is_served(daemon, other)


@pytest.fixture
def proxied(address, place):
    """A daemon and the socket of its proxy, which has its first report."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        proxy.linger = 0
        proxy.bind(f"ipc://{place}/proxy.sock")
        with Daemon(NodeConfig(address=address, arena_bytes=MIB, proxy=f"ipc://{place}/proxy.sock")) as daemon:
            wait_until(lambda: daemon.turn(0.01) or proxy.poll(0))
            yield daemon, proxy
    (place / "proxy.sock").unlink()


def test_an_exception_in_what_the_proxy_says_or_hears_does_not_end_the_node(proxied, monkeypatch):
    daemon, proxy = proxied
    route, _ = proxy.recv_multipart()
    monkeypatch.setattr(daemon.service, "cancel", fail)
    for frame, counter in (encode(Cancel("t" * 16)), "internal_errors"), (b"\xc1", "messages_dropped"):
        proxy.send_multipart([route, frame])
        wait_until(lambda counter=counter: daemon.turn(0.01) or daemon.service.counters[counter])


def test_reports_that_a_proxy_leaves_unread_are_counted(proxied, monkeypatch):
    daemon, _ = proxied
    monkeypatch.setattr(ProxyLine, "send", lambda line, report: False)
    daemon.service.has_news = True
    daemon.turn(0.0)
    assert daemon.service.counters["reports_dropped"] == 1


# ---- bounds of a turn ---------------------------------------------------------------------------


def test_a_burst_ends_in_time_whatever_a_message_costs(daemon, wire, monkeypatch):
    hello(daemon, wire)
    now = [time.monotonic()]
    served = []

    def serve_slowly(session, ask):
        now[0] += 0.6 * BURST_S
        served[-1] += 1
        return Done()

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setitem(daemon.service._handlers, Ping, serve_slowly)
    for _ in range(50):
        wire.tell(Ping())
    while sum(served) < 50:
        arrived(daemon)
        served.append(0)
        daemon.turn(0.0)
    assert max(served) == 2


def test_results_of_threads_are_bounded_in_time_too(address):
    now, made = [100.0], []
    mailbox = Mailbox(Faults(Counter(), lambda: now[0]))

    def one():
        now[0] += 0.6 * BURST_S
        made.append(1)

    for _ in range(5):
        mailbox.post(one)
    for expected in (2, 4, 5):
        assert select.select([mailbox.fd], [], [], 0)[0], "what is left keeps it readable"
        mailbox.deliver()
        assert len(made) == expected
    assert not select.select([mailbox.fd], [], [], 0)[0]
    mailbox.close()


def test_one_result_that_fails_leaves_the_others(address):
    counters, made = Counter(), []
    mailbox = Mailbox(Faults(counters))
    for call in (fail, lambda: made.append(1)):
        mailbox.post(call)
    wait_until(lambda: mailbox.deliver() or made, what="both were called, in one burst or in two")
    assert (made, counters["internal_errors"]) == ([1], 1)
    mailbox.close()


def test_what_is_kept_for_the_node_itself_is_not_for_processes_that_attach(daemon, wire, other, monkeypatch):
    wire.tell(Ping(), reply=True)
    assert "say hello first" in turn_until_answered(daemon, wire).text
    hello = Hello(VERSION, os.getpid(), "client")
    with monkeypatch.context() as short:
        short.setattr(descriptors, "left", lambda: descriptors.reserve() // 2 - 1)
        wire.tell(hello, reply=True)
        assert "no file descriptor left" in turn_until_answered(daemon, wire).text
    assert is_served(daemon, other)
    wire.tell(hello, reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Welcome)
