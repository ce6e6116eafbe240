"""The daemon in this process, turn by turn: events that come together, and starts that fail half way."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from node_harness import MIB, Wire, arenas_of, wait_until

from pdx.config import NodeConfig
from pdx.errors import ArenaTooSmall, ConfigError, NodeRunning
from pdx.messages import VERSION, Bye, Done, Hello, Status, Welcome
from pdx.node import daemon as module
from pdx.node.daemon import TICK_S, Daemon


@pytest.fixture
def daemon(address):
    with Daemon(NodeConfig(address=address, arena_bytes=MIB)) as made:
        yield made


@pytest.fixture
def wire(address):
    connection = Wire(address)
    yield connection
    connection.close()


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def turn_until_answered(daemon, wire):
    def answer():
        daemon.turn(0.01)
        return wire.answer(0)

    return wait_until(answer)[1]


def arrived(daemon):
    wait_until(lambda: daemon._router.poll(0))


def test_a_process_that_says_bye_and_dies_before_the_next_turn(daemon, wire, child):
    wire.tell(Hello(VERSION, child.pid, "client"), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Welcome)
    wire.tell(Bye())
    arrived(daemon)
    child.kill()
    child.wait()
    daemon.turn(0.0)
    assert len(daemon.service.sessions) == 0
    assert daemon.service.counters["deaths"] == 0


def test_a_death_is_not_taken_for_that_of_the_process_which_came_next(daemon, wire, child):
    """The new session's pidfd has the number of the one that just ended; the event was for the old one."""
    wire.tell(Hello(VERSION, child.pid, "client"), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Welcome)
    old_fd = next(iter(daemon.service.sessions)).pidfd
    wire.tell(Bye())
    wire.tell(Hello(VERSION, os.getpid(), "client"))
    arrived(daemon)
    child.kill()
    child.wait()
    daemon.turn(0.0)
    wire.tell(Status(), reply=True)
    status = turn_until_answered(daemon, wire)
    assert [attached.pid for attached in status.attached] == [os.getpid()]
    assert next(iter(daemon.service.sessions)).pidfd == old_fd, "the number was reused, or this tests nothing"


def test_many_messages_do_not_keep_deadlines_waiting(daemon, wire):
    wire.tell(Hello(VERSION, os.getpid(), "client"), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Welcome)
    for _ in range(600):
        wire.tell(Status(), reply=True)
    arrived(daemon)
    answered = []
    while sum(answered) < 600:
        daemon.turn(0.0)
        answered.append(0)
        while wire.answer(0.02):
            answered[-1] += 1
    assert len(answered) >= 3
    assert max(answered) <= 256, "one turn is one burst"


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


def test_a_second_node_does_not_touch_what_the_first_one_has(address, daemon, wire):
    with pytest.raises(NodeRunning, match=f"process {os.getpid()}"):
        Daemon(NodeConfig(address=address, arena_bytes=MIB))
    wire.tell(Hello(VERSION, os.getpid(), "client"), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Welcome)


def test_close_is_idempotent_and_leaves_nothing(address):
    daemon = Daemon(NodeConfig(address=address, arena_bytes=MIB))
    with Wire(address) as wire:
        wire.tell(Hello(VERSION, os.getpid(), "client"), reply=True)
        assert isinstance(turn_until_answered(daemon, wire), Welcome)
        daemon.close()
        daemon.close()
    assert not arenas_of(address)
    assert not os.path.exists(address.removeprefix("ipc://"))


def test_bye_ends_the_session_and_is_answered(daemon, wire):
    wire.tell(Hello(VERSION, os.getpid(), "client"), reply=True)
    turn_until_answered(daemon, wire)
    wire.tell(Bye(), reply=True)
    assert isinstance(turn_until_answered(daemon, wire), Done)
    assert len(daemon.service.sessions) == 0
