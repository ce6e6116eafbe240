"""One process's connection to its node: what must not be lost is not, and no thread waits for another's answer."""

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
import zmq
from node_harness import MIB, attached, is_stopped

from pdx.client.connection import Connection
from pdx.errors import NodeUnavailable, StaleSlot
from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.keys import named_key
from pdx.security import descriptors
from pdx.testing.waiting import wait_until
from pdx.wire import messages
from pdx.wire.verbs import Status

SLOTS = 1500
TRANSFER = "t" * 16


@pytest.fixture(autouse=True)
def _hearts_beat_fast(monkeypatch):
    monkeypatch.setattr("pdx.client.connection.HEARTBEAT_S", 0.05)


@pytest.fixture
def connect():
    """Opens connections to an address; closes them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda address: stack.enter_context(
            Connection(address, messages.Hello(messages.VERSION, os.getpid(), "client"))
        )


@pytest.fixture
def connection(node, connect):
    made = connect(node.address)
    assert made.attach(30.0)
    return made


def test_a_process_with_hardly_a_descriptor_left_is_told_so_and_goes_on(connect, address):
    """With two to four left, ZMQ would end it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors.limit() - descriptors.left() + 1, hard))
    try:
        with pytest.raises(NodeUnavailable, match=r"of \d+ file descriptors are left.*ulimit -n"):
            connect(address)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_of_each_reason_the_first_is_a_warning_and_all_are_counted(node, connection, caplog):
    with caplog.at_level(logging.DEBUG, "pdx"):
        for reason in ("late", "lost", "late"):
            connection.count(reason, "request %s: %s", "r", reason)
        connection.count("lost", times=3)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [("WARNING", "request r: late"), ("WARNING", "request r: lost"), ("DEBUG", "request r: late")]
    wait_until(
        lambda: [node.status().counters.get(f"degraded_{each}") for each in ("late", "lost")] == [2, 4],
        what="the node was told of all",
    )


def keys(count, first=0):
    return [named_key(str(number)) for number in range(first, first + count)]


def stop(node):
    node.signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(node.pid))


def deafen(connection):
    """Tell a node that does not read more than its queues take, and what the system holds, if one write sends many."""
    for number in range(10_000):
        connection.tell(messages.Mark(TRANSFER, "event", number))


def test_what_gives_back_reaches_a_node_that_did_not_read(node, connection, caplog):
    """Its writer stays attached, so nothing else would give the slots back before the process ends."""
    slots = connection.call(messages.Admit(keys(SLOTS), GRANULE_BYTES), 30.0).granted_slots
    connection.call(messages.Fill(slots[:100], seal=True), 30.0)
    leases = [connection.call(messages.Admit([key], lease_s=100.0), 30.0).lease for key in keys(100)]
    stop(node)
    try:
        deafen(connection)
        for slot in slots[100:200]:
            connection.tell(messages.Fill([slot], seal=True))
        for slot in slots[200:]:
            connection.tell(messages.Abort([slot]))
        for lease in leases:
            connection.tell(messages.Release(lease))
        connection.tell(messages.Cancel(TRANSFER))
    finally:
        node.signal(signal.SIGCONT)

    def is_given_back():
        status = connection.call(Status(), 30.0)
        return (status.chunks, status.leases) == ({"sealed": 200}, 0) and status

    status = wait_until(is_given_back)
    assert len(status.attached) == 1, "its writer is still there"
    assert status.counters["transfers_given_up"] == 1
    wait_until(lambda: connection.call(Status(), 30.0).counters.get("degraded_message_dropped", 0) > 0)
    assert caplog.text.count("does not read") == 1


def test_what_a_caller_gave_up_waiting_for_is_given_back_all_the_same(node, connection):
    slots = connection.call(messages.Admit(keys(2), GRANULE_BYTES), 30.0).granted_slots
    stop(node)
    try:
        deafen(connection)
        with pytest.raises(NodeUnavailable):
            connection.call(messages.Abort(slots), 0.0)
    finally:
        node.signal(signal.SIGCONT)
    wait_until(lambda: connection.call(Status(), 30.0).chunks == {})


def test_answers_that_nobody_reads_for_a_while_are_not_dropped(start_node, connect, monkeypatch):
    """What they grant could not be given back. The node drops answers to a process that takes none."""
    monkeypatch.setattr("pdx.client.connection.HEARTBEAT_S", 600.0)  # so that no thread of this process reads
    node = start_node(arena_bytes=16 * MIB)
    connection = connect(node.address)
    assert connection.attach(30.0)
    seqs = []
    with attached(node.address) as wire:
        for key in keys(4000):
            seqs.append(connection.ask(messages.Admit([key], GRANULE_BYTES)))
            if len(seqs) % 250 == 0:  # the node's own queue for this process, of a thousand, is not what fills up
                wait_until(lambda: wire.status().chunks == {"filling": len(seqs)})
    for seq in seqs:
        connection.forget(seq)
    wait_until(lambda: connection.call(Status(), 30.0).chunks == {})


def test_what_cannot_be_sealed_is_given_back(node, connection):
    """A seal that the node refuses is the writer's last word: the room does not stay its own."""
    slots = connection.call(messages.Admit(keys(2), 2 * GRANULE_BYTES, layers=2), 30.0).granted_slots
    connection.tell(messages.Fill(slots, first_layer=1, seal=True))
    wait_until(lambda: connection.call(Status(), 30.0).chunks == {})
    wait_until(lambda: connection.call(Status(), 30.0).counters.get("degraded_seal_refused") == 1)


def test_a_fill_that_is_repeated_is_refused_where_the_slot_is_anothers(node, connection, connect):
    other = connect(node.address)
    assert other.attach(30.0)
    old = connection.call(messages.Admit(keys(1), 8 * MIB), 30.0).granted_slots
    connection.call(messages.Abort(old), 30.0)
    new = other.call(messages.Admit(keys(1), 8 * MIB), 30.0).granted_slots
    assert (new[0].offset, new[0].nbytes) == (old[0].offset, old[0].nbytes)
    for slots in (old, new):  # by generation, and by owner
        with pytest.raises(StaleSlot):
            connection.call(messages.Fill(slots, seal=True), 30.0)
        connection.tell(messages.Fill(slots, seal=True))
        connection.tell(messages.Abort(slots))
        connection.tell(messages.Abort(slots, unused=True))
    assert connection.call(Status(), 30.0).chunks == {"filling": 1}
    assert other.call(messages.Fill(new, seal=True), 30.0) == messages.Done(1)


class Scripted:
    """A node that answers what the test tells it to."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self.route = b""

    def read(self, kind):
        """The next message of this kind."""
        while self.socket.poll(30_000):
            self.route, frame = self.socket.recv_multipart()
            envelope = messages.decode_to_node(frame)
            if isinstance(envelope.body, kind):
                return envelope
        raise AssertionError(f"no {kind.__name__} came")

    def answer(self, seq, body):
        self.socket.send_multipart([self.route, messages.encode(messages.FromNode(seq, body))])

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
def scripted(address):
    made = Scripted(address)
    yield made
    made.close()
    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


@contextlib.contextmanager
def waiting(*seqs, connection, **how):
    """Threads that wait for these answers, which come with their numbers into the list; an error comes in their place.

    Each has begun to wait before the next one starts.
    """
    answers, threads = [], []

    def wait(seq):
        try:
            answers.append((seq, connection.collect(seq, 600.0, **how)))
        except NodeUnavailable as error:
            answers.append((seq, error))

    def waits(thread):
        frame, names = sys._current_frames().get(thread.ident), set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        return "collect" in names

    for seq in seqs:
        threads.append(threading.Thread(target=wait, args=(seq,)))
        threads[-1].start()
        wait_until(lambda: waits(threads[-1]))
    yield answers
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_message_is_told_while_another_thread_waits_for_an_answer(address, scripted, connect):
    """The answer comes only after that message: a lock that is held while waiting would be held to the end."""
    connection = connect(address)
    seq = connection.ask(Status())
    with waiting(seq, connection=connection) as answers:
        connection.tell(messages.Mark(TRANSFER, "event", 7))
        scripted.read(messages.Mark)
        scripted.answer(seq, messages.Done(5))
    assert answers == [(seq, messages.Done(5))]


def test_a_thread_is_answered_by_a_node_while_another_one_waits_for_it(node, connection):
    """The other one's answer is kept back, so a lock that it held would be held longer than the test has."""
    seq = connection.ask(messages.Admit(keys(1, 77), transfer=TRANSFER, part="expects", wait_s=3600.0))
    with waiting(seq, connection=connection) as answers:
        for _ in range(100):
            assert connection.call(messages.Ping(), 30.0) == messages.Done()
        assert answers == []
        connection.call(messages.Cancel(TRANSFER), 30.0)
    assert answers == [(seq, messages.Admitted())]


def test_who_waits_for_news_is_woken_by_an_answer_to_another_question(address, scripted, connect):
    connection = connect(address)
    seqs = [connection.ask(Status()) for _ in range(2)]
    with waiting(seqs[0], connection=connection, or_another=True) as answers:
        scripted.read(Status)
        scripted.answer(seqs[1], messages.Done(2))
    assert answers == [(seqs[0], None)]
    scripted.answer(seqs[0], messages.Done(1))
    assert [connection.collect(seq, 30.0) for seq in seqs] == [messages.Done(1), messages.Done(2)]


def test_each_of_many_waiting_threads_gets_its_answer(address, scripted, connect):
    """In the opposite order, each only when the one before has been collected: no answer is slept through."""
    connection = connect(address)
    seqs = [connection.ask(Status()) for _ in range(8)]
    with waiting(*seqs, connection=connection) as answers:
        scripted.read(Status)
        for count, seq in enumerate(reversed(seqs), 1):
            connection.tell(messages.Mark(TRANSFER, "event", seq))  # a send takes notice of what has come, too
            scripted.answer(seq, messages.Done(seq))
            wait_until(lambda count=count: len(answers) == count)
    assert answers == [(seq, messages.Done(seq)) for seq in reversed(seqs)]


def test_what_was_lost_is_told_again_and_what_was_answered_is_not(address, scripted, connect):
    """An answer to what was told later says that an earlier one is not coming."""
    connection = connect(address)
    connection.tell(messages.Release(1))
    connection.tell(messages.Release(2))
    first, second = scripted.read(messages.Release), scripted.read(messages.Release)
    assert (first.body, second.body, first.reply) == (messages.Release(1), messages.Release(2), True)
    scripted.answer(second.seq, messages.Done(1))
    seq = connection.ask(Status())
    scripted.answer(seq, messages.Done())
    connection.collect(seq, 30.0)
    connection.tell(messages.Release(3))
    again = [scripted.read(messages.Release) for _ in range(2)]
    assert [each.body for each in again] == [messages.Release(1), messages.Release(3)]
    for each in again:
        scripted.answer(each.seq, messages.Done(1))


def test_a_node_is_silent_while_it_owes_an_answer_and_says_nothing(address, scripted, connect):
    connection = connect(address)
    scripted.answer(scripted.read(messages.Hello).seq, messages.Done())
    wait_until(lambda: connection.silent_s() == 0.0, what="it has answered to the hello")
    connection.tell(messages.Mark(TRANSFER, "event", 7))
    assert connection.silent_s() == 0.0, "that wants no answer"
    first, second = connection.ask(Status()), connection.ask(Status())
    wait_until(lambda: connection.silent_s() > 0.01, what="it owes one")
    scripted.answer(second, messages.Done())
    wait_until(lambda: connection.silent_s() == 0.0, what="any answer is a sign of life")
    connection.key_by(b"f" * 16)
    wait_until(lambda: connection.silent_s() > 0.01, what="heartbeats are answered, too")
    scripted.answer(first, messages.Done())
    wait_until(lambda: connection.silent_s() == 0.0)


def test_counts_that_did_not_get_through_are_told_later(node, connection):
    connection.count("no_room")
    stop(node)
    try:
        deafen(connection)
        for _ in range(2):
            connection.key_by(b"f" * 16)
    finally:
        node.signal(signal.SIGCONT)
    wait_until(lambda: connection.call(Status(), 30.0).counters.get("degraded_no_room") == 1)


def test_its_threads_may_use_all_cpus_whatever_their_numbers_are(address, connect, monkeypatch):
    """A container may have CPU 1 alone: then there is one CPU, and it is not CPU 0."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})  # as an engine may be
    try:
        before = {*os.listdir("/proc/self/task")}
        connect(address)
    finally:
        os.sched_setaffinity(0, allowed)

    def may_use():
        made = {*os.listdir("/proc/self/task")} - before
        named = [each for each in made if "ZMQ" in Path(f"/proc/self/task/{each}/comm").read_text()]
        return [os.sched_getaffinity(int(each)) for each in named]

    wait_until(lambda: (found := may_use()) and all(each == allowed for each in found))


def test_closing_wakes_whoever_waits(address, scripted, connect):
    connection = connect(address)
    seqs = [connection.ask(Status()) for _ in range(3)]
    with waiting(*seqs, connection=connection) as answers:
        for kind in (messages.Hello, Status):  # closing waits a moment only for what is not sent yet
            assert scripted.read(kind).reply
        connection.close()
    assert [type(answer) for _, answer in answers] == [NodeUnavailable] * 3
