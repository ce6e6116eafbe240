"""Saying hello to a real node: who is welcomed, who is not, and what the status shows."""

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from string import ascii_lowercase

import pytest
from node_harness import MIB, Wire, arenas_of, refused_node

from pdx.config import NodeConfig, node_name
from pdx.errors import ConfigError, NodeError
from pdx.memory.arena import GRANULE_BYTES
from pdx.node.daemon import Daemon
from pdx.node.service import MAX_DEGRADED, PROBE_BYTES
from pdx.node.sessions import MAX_OF_ONE_PROCESS, Sessions
from pdx.testing.waiting import wait_until
from pdx.wire.messages import VERSION, Admit, Admitted, Bye, Done, Hello, Ping, Refused, Welcome
from pdx.wire.verbs import Status

KEY = b"k" * 16


@pytest.fixture
def node(node_here):
    return node_here


@pytest.fixture
def wire(node):
    with Wire(node.address) as connection:
        yield connection


def test_welcome_says_what_to_map(node, wire):
    welcome = wire.hello()
    assert isinstance(welcome, Welcome)
    assert welcome.pid == node.pid
    assert welcome.epoch > 0
    assert welcome.arena_bytes == 8 * MIB + PROBE_BYTES
    assert os.stat(welcome.arena_path).st_size == welcome.arena_bytes + welcome.arena_bytes // GRANULE_BYTES * (8 + 2)


@contextlib.contextmanager
def another(command="sleep", **settings):
    """Another process: what the hello says that names it."""
    with subprocess.Popen([command, "60"], **settings) as process:
        if command == "true":
            process.wait()
        yield {"pid": process.pid}
        process.kill()


REFUSED = {
    **{
        f"version {each}": (partial(nullcontext, {"version": each}), f"version {VERSION}, the process {each}")
        for each in (0, VERSION + 1)
    },
    # it was believed: when the process that was named died, memory that the real one still wrote was freed
    **{
        who: (made, "did not send this hello; the sender is process {} here")
        for who, made in {
            "no such process": partial(nullcontext, {"pid": (1 << 31) - 1}),
            "it has ended": partial(another, "true"),
            "another user": partial(another, user=65_534),
            "another process": another,
        }.items()
    },
}


@pytest.mark.parametrize("who", REFUSED)
def test_who_is_refused_is_told_why(wire, who):
    if who == "another user" and os.getuid():
        pytest.skip("needs root to run a process as another user")
    made, text = REFUSED[who]
    with made() as said:
        refused = wire.hello(**said)
    assert (type(refused), refused.error) == (Refused, "ProtocolError")
    assert text.format(os.getpid()) in refused.text


@pytest.fixture
def sessions():
    made = Sessions()
    yield made
    made.close()


def test_a_process_can_attach_so_many_times_and_no_more(sessions):
    def attach(number):
        return sessions.attach(b"%d" % number, hello_of(os.getpid()), os.getpid(), 0.0)

    first, *_ = [attach(number) for number in range(MAX_OF_ONE_PROCESS)]
    with pytest.raises(NodeError, match=f"attached {MAX_OF_ONE_PROCESS} times already"):
        attach(MAX_OF_ONE_PROCESS)
    sessions.detach(first)
    attach(MAX_OF_ONE_PROCESS)


def test_who_has_ended_is_told_once_whoever_else_is_attached(sessions):
    others = [sessions.attach(b"o%d" % number, hello_of(os.getpid()), os.getpid(), 0.0) for number in range(100)]
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    try:
        died, detached, lives = (
            sessions.attach(b"c%d" % each.pid, hello_of(each.pid), each.pid, 0.0) for each in children
        )
        assert not select.select([sessions.fd], [], [], 0)[0]
        children[0].kill()
        assert select.select([sessions.fd], [], [], 30)[0]
        assert sessions.ended() == [died]
        assert sessions.ended() == []
        children[1].kill()
        assert select.select([sessions.fd], [], [], 30)[0]
        sessions.detach(detached)
        assert sessions.ended() == []
        sessions.detach(died)
        assert list(sessions) == [*others, lives]
    finally:
        for each in children:
            each.kill()
            each.wait()


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


def test_a_death_is_not_taken_for_that_of_the_process_which_came_next(sessions):
    """The new session's pidfd has the number of the one that just ended."""
    child = subprocess.Popen(["sleep", "600"])
    old = sessions.attach(b"old", hello_of(child.pid), child.pid, 0.0)
    child.kill()
    child.wait()
    assert select.select([sessions.fd], [], [], 30)[0]
    with filled_up_to(old.pidfd):
        sessions.detach(old)
        new = sessions.attach(b"new", hello_of(os.getpid()), os.getpid(), 0.0)
    assert new.pidfd == old.pidfd, "the number was reused, or this tests nothing"
    assert sessions.ended() == []
    assert list(sessions) == [new]


def hello_of(pid):
    return Hello(VERSION, pid, "client", name="x")


def test_connections_that_say_nothing_never_take_the_last_descriptors(start_node):
    """Neither where processes attach, nor where peers of this host do."""
    node = start_node()
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (300, 300))
    with Wire(node.address) as wire, contextlib.ExitStack() as undo:
        assert isinstance(wire.hello(), Welcome)
        gaps = [Wire(node.address) for _ in range(3)]  # what leaves makes room below what stays
        for gap in gaps:
            assert isinstance(gap.hello(), Welcome)
        rounds, is_short = 5, False  # once it is short; how many a round brings is the kernel's and the node's matter
        while rounds:
            os.kill(node.pid, signal.SIGSTOP)
            for number in range(100):
                stranger = undo.enter_context(socket.socket(socket.AF_UNIX))
                stranger.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    stranger.connect(node.address.removeprefix("ipc://") + ".peers" * (number % 2))
            os.kill(node.pid, signal.SIGCONT)
            assert isinstance(wire.ask(Ping()), Done)
            if gaps:
                gaps.pop().close()
            is_short = is_short or "descriptors_short" in wire.status().counters
            rounds -= is_short
        undo.close()
        with Wire(node.address) as late:
            assert isinstance(late.hello(), Welcome)


def test_an_engine_has_one_scheduler_half_and_a_shard_one_worker_and_the_next_ones_when_these_are_gone(node, attach):
    """A second server with the same `engine_id` would be told of chunks that its workers do not get."""
    scheduler = attach(node, kind="scheduler", engine="e")
    first = attach(node, kind="worker", engine="e", shard=1)
    attach(node, kind="worker", engine="another", shard=1)
    attach(node, kind="worker", engine="e", shard=2, shards=2)
    with Wire(node.address) as second:
        for shard, taken in ((1, 1), (3, 3)):
            refused = second.hello(kind="worker", engine="e", shard=shard)
            assert f"'e' has a worker of shard {taken} already" in refused.text
        assert "'e' has a scheduler already: give each" in second.hello(kind="scheduler", engine="e").text
        refused = second.hello(kind="worker", engine="e", shard=1023, shards=2)
        assert "shards 1023 to 1025, where 1024 are the most" in refused.text
        first.ask(Bye())
        assert isinstance(second.hello(kind="worker", engine="e", shard=1), Welcome)
    scheduler.ask(Bye())
    attach(node, kind="scheduler", engine="e")
    with Wire(node.address) as reader:
        assert isinstance(reader.hello(kind="worker", engine="e", shard=3, shards=0), Welcome), "which only reads it"


def test_hello_comes_first_and_once_and_again_after_bye(wire):
    for ask in (Status(), Admit([KEY]), Admit([KEY], 1), Ping(), Bye()):
        assert "hello" in wire.ask(ask).text
    wire.hello(name="first")
    assert isinstance(wire.ask(Hello(VERSION, os.getpid(), "client", name="second")), Refused)
    assert [attached.name for attached in wire.status().attached] == ["first"]
    assert isinstance(wire.ask(Bye()), Done)
    assert isinstance(wire.ask(Status()), Refused)
    assert isinstance(wire.hello(), Welcome)


def test_the_status_shows_who_is_attached_and_what_is_held(node, attach):
    scheduler = attach(node, kind="scheduler", engine="e", role="prefill", url="http://127.0.0.1:8000", name="P")
    attach(node, kind="worker", engine="e", shard=0)
    scheduler.tell(Ping(running=3))
    reserved = scheduler.ask(Admit([KEY], 5000))
    assert isinstance(reserved, Admitted)
    status = scheduler.status()
    assert (status.name, status.pid, status.arena_bytes) == (node_name(node.config), node.pid, 8 * MIB)
    assert status.free_bytes == 8 * MIB - 2 * GRANULE_BYTES
    assert (status.chunks, status.chunk_bytes) == ({"filling": 1}, {"filling": 5000})
    assert (status.leases, status.pins, status.transfers) == (0, 0, 0)
    shown = {attached.kind: attached for attached in status.attached}
    assert set(shown) == {"scheduler", "worker"}
    assert (shown["scheduler"].role, shown["scheduler"].url) == ("prefill", "http://127.0.0.1:8000")
    assert (shown["scheduler"].running, shown["scheduler"].pid) == (3, os.getpid())
    assert 0 <= shown["worker"].silent_s < 60
    assert status.uptime_s > 0


# ---- too many nodes ---------------------------------------------------------------


def test_a_node_whose_lock_was_removed_keeps_its_socket_and_its_memory(start_node):
    node = start_node()
    Path(f"{node.address.removeprefix('ipc://')}.lock").unlink()
    second = refused_node(node.address)
    assert second.returncode == 1
    assert f"process {node.pid}" in second.stderr
    assert node.status().pid == node.pid
    assert len(arenas_of(node.address)) == 1


@pytest.mark.parametrize("setting", ["address", "listen"])
def test_a_file_where_a_socket_should_be_is_left_alone(place, setting):
    file = place / "precious"
    file.write_text("data")
    addresses = {"address": f"ipc://{place}/node.sock", setting: f"ipc://{file}"}
    with pytest.raises(ConfigError, match="is no socket"):
        Daemon(NodeConfig(arena_bytes=MIB, **addresses))
    assert file.read_text() == "data"


def test_engines_of_one_model_that_cannot_share_are_named_with_what_differs(start_here, caplog):
    """A miss of every lookup is not silent: one warning, a counter, and a line in the status."""
    node = start_here()
    shape = {"model": "m", "num_shards": "1", "backend": "FLASH_ATTN"}
    hellos = {
        "first": shape,
        "same": shape,
        "other model": {**shape, "model": "n", "num_shards": "4"},
        "wider": {**shape, "num_shards": "2", "order": "x" * 200},
        "wider, too": {**shape, "num_shards": "2", "order": "x" * 200},
        "as the first": shape,
    }
    with contextlib.ExitStack() as stack:
        for engine, told in hellos.items():
            wire = stack.enter_context(Wire(node.address))
            assert isinstance(wire.hello(kind="scheduler", engine=engine, shape=told), Welcome)
        status = node.status()
        unshared = {one.engine: one.unshared for one in status.attached if one.unshared}
        assert set(unshared) == {"wider", "as the first"}
        apart = "num_shards '2' and '1' (--tensor-parallel-size, or shards), order 'xxx"
        assert unshared["wider"].startswith(f"with engine 'same': {apart}")
        assert len(unshared["wider"]) < 250
        assert status.counters["engine_layouts_differ"] == 2
        (line,) = [line for line in caplog.messages if "shares no chunks" in line]
        assert "engine 'wider' shares no chunks with engine 'same'" in line
    wait_until(lambda: len(node.status().attached) == 1, what="all engines are gone")
    with Wire(node.address) as wire:
        wire.hello(kind="scheduler", engine="next", shape={**shape, "num_shards": "8"})
        assert node.status().counters["engine_layouts_differ"] == 2, "there is nobody to share with"


def test_reasons_that_a_process_invents_are_not_all_counted_by_name(node):
    """The status had them for ever, and was too long for a message in the end."""
    with Wire(node.address) as wire:
        wire.hello()
        for first in ascii_lowercase[:10]:
            assert isinstance(wire.ask(Ping(degraded={f"{first}{each}": 2 for each in ascii_lowercase})), Done)
        assert isinstance(wire.ask(Ping(degraded={"aa": 1})), Done)
        counters = wire.status().counters
    degraded = {name: count for name, count in counters.items() if name.startswith("degraded_")}
    assert len(degraded) == MAX_DEGRADED + 1
    assert degraded["degraded_aa"] == 3
    assert degraded["degraded_others"] == 2 * (260 - MAX_DEGRADED)


def test_an_engine_that_joins_and_leaves_is_logged_once_each(start_here, attach, caplog):
    caplog.set_level("INFO", logger="pdx.node")
    node = start_here()
    engine, worker = attach(node, kind="scheduler", engine="an\nengine"), attach(node, kind="worker")
    assert isinstance(engine.ask(Bye()), Done)
    assert isinstance(worker.ask(Bye()), Done)
    told = [message for message in caplog.messages if "engine" in message]
    assert told == [f"joined: engine an\\nengine (process {os.getpid()})", "left: engine an\\nengine"]
