"""What a node publishes, over real sockets: to our subscriber, and to a reader like vLLM's own."""

import contextlib
import math
import random
import socket
import threading

import plain_chunk
import pytest
import zmq
from events_bed import EventsBed, key, names
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from publisher_stage import SHORT, Stage, as_ints, blocks_of, step

from pdx.client.events import Subscriber
from pdx.errors import ConfigError
from pdx.memory.slot import Slot
from pdx.node.events import publisher as publisher_module
from pdx.node.events.blocks import Blocks
from pdx.node.events.log import Batch, Change
from pdx.node.events.publisher import Publisher, Readers
from pdx.security.address import tcp_endpoint
from pdx.security.curve_keys import KeyPair
from pdx.security.tcp_filter import MAX_YOUNG_OF_ADDRESS
from pdx.testing.waiting import wait_until
from pdx.wire.kv_events import END_SEQ


@pytest.fixture
def stage(place):
    stages = []

    def make(**settings):
        stages.append(Stage(place, **settings))
        return stages[-1]

    yield make
    for each in stages:
        each.close()


@pytest.fixture
def own_ip():
    """An address of this machine that others may reach, too."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError as error:
            pytest.skip(f"this machine has loopback alone: {error}")
        return probe.getsockname()[0]


class Lossy(Subscriber):
    """Loses some of what comes, gets some twice, and some later."""

    def __init__(self, *arguments, rng, loss, check_s=0.05, **settings):
        super().__init__(*arguments, check_s=check_s, **settings)
        self.rng, self.loss, self.late = rng, loss, []

    def live(self, seq, payload):
        return any([super(Lossy, self).live(*each) for each in self._mangled((seq, payload))])

    def _replayed(self, seq, payload):
        if self.rng.random() >= self.loss:
            super()._replayed(seq, payload)

    def _mangled(self, message):
        if self.loss and self.rng.random() < 0.1:
            self.late.append(message)
            return []
        if self.rng.random() < self.loss:
            return []
        found = [message] * (1 + (self.loss > 0 and self.rng.random() < 0.1))
        if self.late and self.rng.random() < 0.3:
            found.append(self.late.pop(0))
        return found


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 1 << 30), loss=st.sampled_from([0.01, 0.3]))
def test_a_subscriber_that_loses_events_ends_with_the_right_index(tmp_path_factory, seed, loss):
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("stage")
    folder.chmod(0o700)
    stage = Stage(folder, max_kept=rng.choice([3, 1000]), max_queued=rng.choice([2, 1000]))
    try:
        for _ in range(rng.randrange(10)):
            step(stage, rng)
            stage.turn()
        with Lossy(stage.address, stage.replay, rng=rng, loss=loss) as subscriber:
            for _ in range(80):
                step(stage, rng)
                if rng.random() < 0.7:
                    stage.turn()
                subscriber.poll(rng.choice([0.0, 0.01]))  # now and then it has caught up
                if rng.random() < 0.02:  # the node starts again
                    stage.publisher.close()
                    stage.bed.log.seq += rng.choice([1 << 20, -(1 << 20)])  # its clock may have been set back
                    stage.start()
            subscriber.loss = 0.0  # how long it takes is otherwise a matter of luck
            stage.settle(subscriber)
    finally:
        stage.close()


def test_who_comes_late_knows_what_was_there(stage):
    stage = stage()
    stage.put(0, 1)
    stage.turn()
    stage.bed.disk.put(key(1))
    with Subscriber(stage.address, stage.replay) as subscriber:
        stage.settle(subscriber)
        assert subscriber.leading(as_ints(blocks_of(0) + blocks_of(1))) == {"host": 4}
        assert subscriber.leading(as_ints(blocks_of(1) + blocks_of(0))) == {"host": 4, "disk": 2}
        wait_until(lambda: stage.publisher.counts["events_snapshots"])


def test_a_node_that_starts_again_with_lower_numbers_is_asked_for_all(stage):
    stage = stage()
    with Subscriber(stage.address, stage.replay, check_s=0.05) as subscriber:
        stage.put(0, 1)
        stage.settle(subscriber)
        stage.publisher.close()
        stage.bed.store.delete([key(1)])
        stage.bed.log.seq -= 1000
        stage.start()  # and nothing happens there any more
        stage.settle(subscriber)
        assert subscriber.counters["restarts"] == 1


def test_chunks_without_names_are_told_of_when_they_get_them(stage):
    stage = stage()
    with Subscriber(stage.address, stage.replay) as subscriber:
        stage.bed.put(key(1))
        stage.bed.disk.put(key(1))
        stage.turn()
        stage.put(2)
        wait_until(lambda: stage.turn() or subscriber.poll(0.01) and len(subscriber.index) == 2)
        stage.bed.store.name(stage.bed.store.index.of(key(1)), key(0), blocks_of(1), 16)
        stage.settle(subscriber)
        assert subscriber.index.tiers(as_ints(blocks_of(1))[0]) == {"host", "disk"}


def test_nothing_is_encoded_while_nobody_subscribes(stage):
    stage = stage()
    stage.put(0, 1, 2)
    stage.turn()
    wait_until(lambda: stage.publisher.seq == stage.bed.log.seq)
    assert stage.publisher.counts["events_published"] == 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as asks:
        asks.connect(stage.replay)
        asks.send_multipart([b"", stage.bed.log.seq.to_bytes(8, "big")])
        wait_until(lambda: stage.turn() or asks.poll(10), what="it is answered")
    assert (stage.publisher.counts["events_snapshots"], stage.publisher.counts["events_replayed"]) == (1, 0)


def test_a_publisher_ends_while_it_encodes_what_is_there(stage, monkeypatch):
    pieces = []
    monkeypatch.setattr(Blocks, "everything", lambda blocks: iter(lambda: pieces.append(1) or [], None))
    stage = stage()
    with Subscriber(stage.address, stage.replay) as subscriber:

        def is_encoding():
            stage.turn()
            subscriber.poll(0.01)
            return pieces

        wait_until(is_encoding, what="it is asked for all that is there")
        stage.publisher.close()
    assert "pdx-events" not in [thread.name for thread in threading.enumerate()]


def subscribed(stage, reader, changes):
    """Until `reader` subscribes; the number of the next batch. `changes`: in turns, or nothing is told."""
    first = stage.bed.log.seq + 1

    def hears():
        nonlocal first
        stage.publisher.put(Batch(first, 0.0, [changes[first % 2]]))
        first += 1
        return reader.poll(10)

    wait_until(hears, what="it subscribes")
    return first


def test_a_subscriber_that_never_reads_costs_so_many_batches_at_most(stage, monkeypatch):
    monkeypatch.setattr(publisher_module, "HIGH_WATER", 100)
    stage = stage(max_kept=1)
    with zmq.Context() as context, context.socket(zmq.SUB) as unread:
        unread.setsockopt(zmq.RCVHWM, 1)
        unread.setsockopt(zmq.SUBSCRIBE, b"")
        unread.connect(stage.address)
        chunks = [
            plain_chunk.chunk(key(number), Slot(0, 0, 1), 1, blocks=names(*range(1000 * number, 1000 * number + 1000)))
            for number in range(8)
        ]
        keys = [chunk.key for chunk in chunks]
        changes = [
            Change("host", is_stored, keys, chunks) for is_stored in (False, True)
        ]  # in turns, or nothing is told
        first = subscribed(stage, unread, changes)
        for number in range(first, first + 1000):
            stage.publisher.put(Batch(number, 0.0, [changes[number % 2]]))
            if number % 100 == 0:
                wait_until(lambda number=number: stage.publisher.seq == number, what="they are published")
        count = 0
        while unread.poll(1000):
            unread.recv_multipart()
            count += 1
    assert count < 500


def test_a_reader_that_does_not_read_has_one_large_answer_at_a_time(stage):
    """It asked again and again, and for each answer ZMQ kept a copy of all that was there."""
    stage = stage()
    many = 400_000
    stage.bed.put(key(0), blocks=names(*range(many)), chunk_blocks=many, parent=b"root", block_tokens=16)
    publisher, made = stage.publisher, set()
    asked = [b"", (1).to_bytes(8, "big")]
    with zmq.Context() as context, context.socket(zmq.DEALER) as unread, context.socket(zmq.DEALER) as reads:
        unread.setsockopt(zmq.RCVHWM, 1)
        for client in (unread, reads):
            client.connect(stage.replay)
        reads.send_multipart(asked)
        wait_until(lambda: stage.turn() or reads.poll(10), what="it is taken in")
        while reads.recv_multipart()[-2] != END_SEQ:
            pass
        rounds, before = 12, publisher.counts["events_snapshots"]
        for _ in range(rounds):
            unread.send_multipart(asked)
            reads.send_multipart(asked)  # and when it has its answer, the other one was heard, too
            assert reads.poll(20_000)
            while (answer := reads.recv_multipart())[-2] != END_SEQ:
                assert len(answer[-1]) > 1 << 20
                made.add(answer[-1])
        unheard = before + rounds
        assert publisher.counts["events_snapshots"] - unheard <= 4  # what its own side takes, and one
        assert len(made) == 1, "it has the time in it"
        answers = 0
        while answers < publisher.counts["events_snapshots"] - unheard:  # what is there for it comes
            assert unread.poll(20_000)
            answers += unread.recv_multipart()[-2] != END_SEQ
        unread.send_multipart(asked)
        assert unread.poll(20_000)


def test_who_reads_its_replay_late_gets_all_of_it(stage, monkeypatch):
    monkeypatch.setattr(publisher_module, "REPLAY_HIGH_WATER", 1)
    stage = stage()
    blocks = names(*range(1000))
    chunk = plain_chunk.chunk(key(0), Slot(0, 0, 1), 1, blocks=blocks)
    changes = [Change("host", is_stored, [key(0)], [chunk]) for is_stored in (True, False)]
    with zmq.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.DEALER) as late:
        live.setsockopt(zmq.SUBSCRIBE, b"")
        live.connect(stage.address)
        first = subscribed(stage, live, changes)
        for number in range(first, first + 200):
            stage.publisher.put(Batch(number, 0.0, [changes[number % 2]]))
        wait_until(lambda: stage.publisher.seq == first + 199, what="they are published")
        late.setsockopt(zmq.RCVHWM, 1)
        late.connect(stage.replay)
        late.send_multipart([b"", first.to_bytes(8, "big")])
        assert late.poll(20_000)
        assert stage.publisher.counts["events_replayed"] < 200, "it takes no more"
        numbers = []
        while not numbers or numbers[-1] != END_SEQ:
            assert late.poll(20_000)
            numbers.append(late.recv_multipart()[-2])
    assert numbers == [*((first + number).to_bytes(8, "big") for number in range(200)), END_SEQ]


def test_no_snapshot_is_made_while_too_much_is_unread(stage, monkeypatch):
    stage = stage()
    publisher = stage.publisher
    wait_until(lambda: publisher._is_whole, what="it is taken in")
    publisher.close()  # the test is its thread from here on
    monkeypatch.setattr(publisher_module, "MAX_UNREAD_BYTES", 100)
    payload = bytes(100)
    publisher._unread = {b"a": (None, payload), b"b": (None, payload)}
    assert publisher._snapshot() is None
    publisher._unread = {b"a": (None, payload[:99]), b"b": (None, payload[:0])}
    assert publisher._snapshot() == publisher._snapshot()
    publisher.counts["events_seq"] += 1
    publisher._whole_from = math.inf  # one took long a moment ago
    assert publisher._snapshot() is None
    assert publisher._answer(1) is None


@pytest.mark.parametrize(
    ("address", "helps"),
    [("tcp://10.0.0.1:5557", True), ("tcp://*:5557", False), ("ipc://relative", False), ("udp://127.0.0.1:1", False)],
)
def test_nobody_beyond_this_host_is_told_without_keys(place, address, helps):
    """The error names the option that does without keys only where that helps."""
    bed = EventsBed(place)
    for settings_ in ({"address": address}, {"address": f"ipc://{place}/e.sock", "replay": address}):
        with pytest.raises(ConfigError, match="--events") as refused:
            Publisher(bed.log, **settings_)
        assert ("--events-open" in str(refused.value)) is helps
    assert bed.store.index.changed_keys is None
    bed.close()


def test_who_subscribes_to_ever_more_topics_is_cut_off(stage):
    """ZMQ keeps each of them: 500 MB a second were taken by one stranger."""
    made = stage(ip="127.0.0.1")
    counters = made.bed.counters
    with zmq.Context() as context, context.socket(zmq.SUB) as talker:
        talker.setsockopt(zmq.LINGER, 0)
        talker.connect(made.publisher.sockets.address)
        for number in range(100):
            talker.setsockopt(zmq.SUBSCRIBE, number.to_bytes(900, "big"))
        wait_until(lambda: counters["strangers_dropped"])
        with Subscriber(made.publisher.sockets.address, made.publisher.sockets.replay, check_s=0.2) as subscriber:
            made.put(0, 1)
            made.settle(subscriber)


def test_what_is_put_while_the_thread_falls_asleep_is_published(stage, monkeypatch):
    """However the two take turns: it need not wake up by itself for that."""
    monkeypatch.setattr(publisher_module, "_LATER_MS", 3_600_000)
    mine = stage()
    with Subscriber(mine.address, mine.replay) as subscriber:
        mine.settle(subscriber)
        for number in range(200):
            if number % 2:
                wait_until(lambda: mine.publisher._is_asleep, pause_s=0.0005, what="it has nothing to do")
            mine.put(number % SHORT)
            mine.turn()
            wait_until(lambda: mine.publisher.seq == mine.bed.log.seq, pause_s=0.0005, what="it is published")


def test_beyond_this_host_readers_need_a_key_that_the_roster_lets_in(stage, own_ip, tmp_path, caplog):
    files = {name: str(KeyPair.make().save(tmp_path, name)[0]) for name in ("node", "reader", "other")}
    own, reader, other = (KeyPair.load(file) for file in files.values())
    let_in = [frozenset({reader.public, other.public})]
    made = stage(ip=own_ip, readers=Readers(own, lambda: let_in[0], handshake_s=5.0))
    counters = made.bed.counters
    where = (made.publisher.sockets.address, made.publisher.sockets.replay)
    assert own_ip in where[0]
    made.put(0, 1)
    keys = {"server_key": own.public, "check_s": 0.2}
    with (
        Subscriber(*where, keys=files["reader"], **keys) as good,
        Subscriber(*where, keys=files["other"], **keys) as removed,
        Subscriber(*where, check_s=0.2) as stranger,
    ):
        made.settle(good)
        made.settle(removed)
        let_in[0] = frozenset({reader.public})
        wait_until(lambda: counters["peers_denied"], what="who was taken out dials again, in vain")
        made.put(2)
        made.settle(good, "who is still in has missed nothing")
        before = removed.last
        made.put(3)
        made.settle(good)
        for each in (removed, stranger):
            while each.poll(0.0):
                pass
        assert removed.last == before
        assert stranger.last is None
    assert f"{other.public} at {own_ip} is not in the roster" in caplog.text


def test_readers_need_no_key_where_that_was_said(stage, own_ip):
    made = stage(ip=own_ip, readers=Readers(is_open=True))
    with Subscriber(made.publisher.sockets.address, made.publisher.sockets.replay, check_s=0.2) as subscriber:
        made.put(0, 1)
        made.settle(subscriber)


def test_a_flood_of_connections_does_not_keep_readers_out(stage):
    """Nor uses up the node's descriptors: each takes one until it has to speak ZMQ, and few may be so young."""
    made = stage(ip="127.0.0.1")
    counters = made.bed.counters
    where = tcp_endpoint(made.publisher.sockets.address)
    with contextlib.ExitStack() as flood:
        for _ in range(200):
            flood.enter_context(contextlib.closing(socket.create_connection(where)))
        with Subscriber(made.publisher.sockets.address, made.publisher.sockets.replay, check_s=0.2) as subscriber:
            made.put(0, 1)
            made.settle(subscriber)
        wait_until(lambda: counters["strangers_dropped"] >= 200 - MAX_YOUNG_OF_ADDRESS)
