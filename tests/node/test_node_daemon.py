"""The daemon in this process, turn by turn: events that come together, and starts that fail half way."""

import os
import resource
import select
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import zmq
from node_harness import MIB, Wire, arenas_of

from pdx.config import NodeConfig
from pdx.errors import ArenaTooSmall, ConfigError
from pdx.node.daemon import TICK_S, TOUCH_S, Daemon
from pdx.node.peers.connections import Connections
from pdx.node.peers.fetches import Fetches
from pdx.node.peers.inbound_pushes import InboundPushes
from pdx.node.peers.peer_tiers import PeerTiers
from pdx.node.proxies import Proxies
from pdx.security import descriptors
from pdx.security.roster import Roster
from pdx.security.socket_lock import Lock
from pdx.store.store import Store
from pdx.store.transfers import Transfers
from pdx.telemetry.env import Env
from pdx.telemetry.faults import Faults
from pdx.telemetry.mailbox import Mailbox
from pdx.testing.waiting import wait_until
from pdx.wire.burst import BURST_S
from pdx.wire.hints import Hints
from pdx.wire.messages import (
    VERSION,
    Admit,
    Admitted,
    Bye,
    Done,
    Expect,
    Fill,
    Hello,
    Ping,
    Refused,
    Release,
    ToNode,
    Welcome,
    encode,
)
from pdx.wire.proxy import Arriving
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import Status

POLICY = """
from pdx.store.policies.lru import Lru

fails = False


class Failing(Lru):
    def insert(self, chunk, before=None):
        if fails:
            raise RuntimeError("injected")
        super().insert(chunk, before)

    def hold(self, chunk):
        if fails:
            raise RuntimeError("injected")
        super().hold(chunk)


def make(total_bytes, argument):
    return Failing()
"""


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """An eviction policy of somebody else's, which does as it should until it is told to fail."""
    info = tmp_path / "failing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pdx.policies]\nfailing = a_failing_policy:make\n")
    (tmp_path / "a_failing_policy.py").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("a_failing_policy")
    del sys.modules["a_failing_policy"]


@pytest.fixture
def daemon(address, policy):
    with Daemon(NodeConfig(address=address, arena_bytes=MIB, policy="failing")) as made:
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


def asked(daemon, wire, ask):
    """Its answer."""
    wire.tell(ask, reply=True)
    return turn_until_answered(daemon, wire)


def hello(daemon, wire):
    assert isinstance(asked(daemon, wire, Hello(VERSION, os.getpid(), "client")), Welcome)


def seal(daemon, wire, key):
    granted = asked(daemon, wire, Admit([key], 1)).granted_slots
    assert asked(daemon, wire, Fill(granted, 0, 1, True)) == Done(1)


def arrived(daemon):
    wait_until(lambda: not daemon._process_socket.queue.admit_waiting() and daemon._process_socket.socket.poll(0))


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


def test_slots_of_one_life_of_a_node_are_not_current_in_the_next(address):
    seen = []
    for _ in range(2):
        with Daemon(NodeConfig(address=address, arena_bytes=MIB)) as daemon, Wire(address) as wire:
            hello(daemon, wire)
            [slot] = asked(daemon, wire, Admit([b"r" * 16], 1)).granted_slots
            seen.append(slot)
    assert seen[0].offset == seen[1].offset
    assert seen[0].generation != seen[1].generation, "one in two thousand millions may be equal"
    assert max(slot.generation for slot in seen) < 1 << 31


def test_while_the_machine_stands_still_the_node_is_not_idle(address):
    """Nobody could attach meanwhile."""
    now = 100.0
    with Daemon(NodeConfig(address=address, arena_bytes=MIB, exit_when_idle_s=2.0), Env(lambda: now)) as daemon:
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


SEALED, FILLING = b"s" * 16, b"r" * 16


def fail(*arguments, **settings):
    raise RuntimeError("injected")


def is_served(daemon, wire):
    return isinstance(asked(daemon, wire, Status()), NodeStatus)


@pytest.fixture
def other(daemon, address):
    """Another session of this process, which has sealed a chunk."""
    with Wire(address) as made:
        hello(daemon, made)
        seal(daemon, made, SEALED)
        yield made


def test_an_exception_in_a_message_ends_its_session_and_nothing_else(daemon, wire, other, policy):
    hello(daemon, wire)
    lease = asked(daemon, wire, Admit([SEALED], lease_s=60.0)).lease
    assert isinstance(asked(daemon, wire, Admit([FILLING], 1)), Admitted)
    policy.fails = True
    answer = asked(daemon, wire, Release(lease))
    policy.fails = False
    assert isinstance(answer, Refused)
    assert "internal error" in answer.text
    assert daemon.service.counters["internal_errors"] == 1
    assert "internal error" in asked(daemon, wire, Ping()).text, "the session is over"
    assert is_served(daemon, other)
    assert census(daemon) == {"filling": 1, "sealed": 1}, "its process lives and may still write"
    assert isinstance(asked(daemon, wire, Bye()), Done)
    hello(daemon, wire)
    assert is_served(daemon, wire)
    assert census(daemon) == {"sealed": 1}


def census(daemon):
    return daemon.service.store.index.census()[0]


def test_what_a_session_holds_that_an_exception_has_ended_is_kept_until_its_process_is_gone(
    daemon, child, other, policy
):
    attach(daemon, child)
    child.tell(Admit([FILLING], 1))
    child.tell(Admit([SEALED], lease_s=60.0))
    wait_until(lambda: daemon.turn(0.01) or daemon.service.store.num_leases)
    policy.fails = True
    child.tell(Release(1))  # the first lease of this node
    wait_until(lambda: daemon.turn(0.01) or daemon.service.counters["internal_errors"])
    policy.fails = False
    assert is_served(daemon, other)
    assert census(daemon)["filling"] == 1
    child.kill()
    wait_until(lambda: daemon.turn(0.01) or daemon.service.counters["deaths"])
    assert len(daemon.service.sessions) == 1
    assert census(daemon) == {"sealed": 1}


@pytest.mark.parametrize(("part", "farewell"), [("questions", "bye"), ("chunks", "death")])
def test_an_exception_at_the_end_of_a_session_leaves_nothing_of_it_that_is_polled(
    daemon, child, other, part, farewell, policy
):
    before = polled(daemon)
    attach(daemon, child)
    assert polled(daemon) == before + 1
    child.tell(Expect("a request", [SEALED]) if part == "questions" else Admit([SEALED], lease_s=60.0))
    child.tell(Admit([FILLING], 1))
    wait_until(lambda: daemon.turn(0.01) or census(daemon).get("filling"))
    policy.fails = True
    if farewell == "bye":
        child.tell(Bye())
    else:
        child.kill()
    wait_until(lambda: daemon.turn(0.01) or daemon.service.counters["internal_errors"])
    assert not any(session.hello.pid == child.pid for session in daemon.service.sessions)
    assert polled(daemon) == before
    assert census(daemon).get("filling", 0) == (part == "chunks")
    policy.fails = False
    assert is_served(daemon, other)


def polled(daemon):
    """How many processes are watched."""
    return Path(f"/proc/self/fdinfo/{daemon.service.sessions.fd}").read_text().count("tfd:")


def test_a_late_answer_that_fails_is_a_miss_and_keeps_no_other_back(daemon, wire, other, policy):
    hello(daemon, wire)
    keys = [bytes([number]) * 16 for number in range(2)]
    transfer = "t" * 16
    assert isinstance(asked(daemon, wire, Admit(keys, 1, transfer=transfer, part="writes")), Admitted)
    for run in ([SEALED, keys[0]], keys[1:]):
        wire.tell(Admit(run, transfer=transfer, wait_s=60.0), reply=True)
    assert asked(daemon, wire, Ping()) == Done(), "the two wait"
    policy.fails = True
    daemon.service.cancel(transfer, "the proxy")
    answers = [turn_until_answered(daemon, wire) for _ in keys]
    assert answers == [Admitted()] * 2
    assert daemon.service.counters["internal_errors"] == 1


PARTS = [
    (Store, "expire"),
    (Transfers, "expire"),
    (Connections, "tick"),
    (Roster, "refresh"),
    (InboundPushes, "tick"),
    (InboundPushes, "turn"),
    (Fetches, "tick"),
    (PeerTiers, "forget_strangers"),
    (Proxies, "report"),
    (Lock, "touch"),
]


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=[f"{kind.__name__}.{name}" for kind, name in PARTS])
def test_an_exception_in_a_part_of_a_tick_ends_that_part_only(address, wire, clock, monkeypatch, kind, name):
    """What a tick does first and last is done all the same: a lease ends, and the lock is touched."""
    lock = Path(f"{address.removeprefix('ipc://')}.lock")
    with Daemon(NodeConfig(address=address, arena_bytes=MIB), Env(clock)) as daemon:
        hello(daemon, wire)
        seal(daemon, wire, SEALED)
        assert asked(daemon, wire, Admit([SEALED], lease_s=1.0)).lease
        os.utime(lock, (0, 0))
        assert daemon.service.counters["internal_errors"] == 0
        with monkeypatch.context() as patched:
            patched.setattr(kind, name, fail)
            clock.now += TOUCH_S
            daemon.turn(0.0)
        assert daemon.service.counters["internal_errors"] >= 1
        assert asked(daemon, wire, Status()).leases == (kind is Store)
        assert (lock.stat().st_mtime == 0) == (kind is Lock)


@pytest.fixture
def proxied(address, place, policy):
    """A daemon and the socket of its proxy, which has its first report."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        proxy.linger = 0
        proxy.rcvhwm = 1
        proxy.bind(f"ipc://{place}/proxy.sock")
        config = NodeConfig(address=address, arena_bytes=MIB, proxy=f"ipc://{place}/proxy.sock", policy="failing")
        with Daemon(config) as daemon:
            wait_until(lambda: daemon.turn(0.01) or proxy.poll(0))
            yield daemon, proxy
    (place / "proxy.sock").unlink()


def test_an_exception_in_what_the_proxy_says_or_hears_does_not_end_the_node(proxied, wire, policy):
    daemon, proxy = proxied
    route, _ = proxy.recv_multipart()
    hello(daemon, wire)
    seal(daemon, wire, SEALED)
    asked(daemon, wire, Release(asked(daemon, wire, Admit([SEALED], lease_s=60.0, hints=Hints("a session"))).lease))
    policy.fails = True
    for frame, counter in (encode(Arriving("a session")), "internal_errors"), (b"\xc1", "messages_dropped"):
        proxy.send_multipart([route, frame])
        wait_until(lambda counter=counter: daemon.turn(0.01) or daemon.service.counters[counter])


def test_reports_that_a_proxy_leaves_unread_are_counted(proxied):
    daemon, _ = proxied

    def is_one_dropped():
        daemon.service.has_news = True
        daemon.turn(0.0)
        return daemon.service.counters["reports_dropped"]

    wait_until(is_one_dropped)


# ---- bounds of a turn ---------------------------------------------------------------------------


def test_a_burst_ends_in_time_whatever_a_message_costs(address):
    env = Env(lambda: 100.0 + 0.6 * BURST_S * env.counters["degraded_slow"])
    served = []

    def turn():
        before = env.counters["degraded_slow"]
        daemon.turn(0.01)
        served.append(env.counters["degraded_slow"] - before)
        return served[-1] > 1

    def tell():
        for _ in range(3):
            wire.tell(Ping(degraded={"slow": 1}))
        told.append(3)

    told = []
    with Daemon(NodeConfig(address=address, arena_bytes=MIB), env) as daemon, Wire(address) as wire:
        hello(daemon, wire)
        wait_until(lambda: tell() or turn(), what="it has found more than one at a time")
        wait_until(lambda: turn() and False or sum(served) == sum(told))
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


def test_what_is_kept_for_the_node_itself_is_not_for_processes_that_attach(daemon, wire, other):
    assert "say hello first" in asked(daemon, wire, Ping()).text
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors.limit() - descriptors.left() + 8, hard))
    try:
        refused = asked(daemon, wire, Hello(VERSION, os.getpid(), "client"))
        assert "no file descriptor left" in refused.text
        assert is_served(daemon, other)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    hello(daemon, wire)
