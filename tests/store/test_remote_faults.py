"""A remote store that is down, slow, full, or refuses us costs misses and counters, and never the control loop."""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter

import pytest
from remote_bed import HANGS_S, Relay, S3Handler, connections, free_port, key, made, opened, running, s3_answers

from pdx.errors import TierError
from pdx.store.health import PAUSE_S
from pdx.store.remote import redis_backend
from pdx.store.remote.catalog import NOT_THERE_S
from pdx.store.remote.redis_backend import RedisBackend
from pdx.store.remote.tier import HEAD_BYTES, THREADS
from pdx.testing.waiting import wait_until

LOOP_S = 0.25  # what a call of the control loop takes at most: no deadline here is as short


def asked_for(bed, numbers):
    """Those of these chunks that somebody has asked for and that there is no answer to yet."""
    bed.now += 0.1
    return [number for number in numbers if bed.tier.asked_s(key(number))]


@pytest.mark.parametrize("kind", ["redis", pytest.param("s3", marks=pytest.mark.long)])
def test_a_store_that_is_down_at_the_start_is_a_miss_until_it_answers(beds, tmp_path, caplog, monkeypatch, kind):
    server = made(kind, tmp_path / "server")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    bed = beds(server.url)
    assert bed.store(1) == "left out"
    assert bed.sought([1]) == 0
    bed.paused("unreachable")
    assert "nothing is asked of it for 10 s" in caplog.text
    assert "unreachable" in bed.tier.status().state
    with running(server, monkeypatch):
        assert bed.sought([1]) == 0
        assert not bed.tier.takes_stores, "the pause is not over"
        bed.now += PAUSE_S
        assert not bed.tier.takes_stores, "it has not answered yet"
        bed.until(lambda: bed.tier.takes_stores)
        assert bed.store(1) is None
        assert bed.tier.status().state == "ok"


def test_a_store_that_is_down_is_not_asked_all_the_time(beds):
    bed = beds(f"valkey://127.0.0.1:{free_port()}")
    bed.paused("unreachable")
    for _ in range(100):
        bed.sought([1, 2])
        assert not bed.tier.takes_stores
        bed.now += PAUSE_S / 1000
    assert bed.is_quiet
    bed.now += PAUSE_S
    assert not any(bed.tier.takes_stores for _ in range(100)), "one call finds out"
    bed.until(lambda: bed.counters["remote_paused"] == 2)
    assert bed.counters["remote_unreachable"] == 2


def test_a_store_that_takes_few_connections_is_used_by_those(beds, tmp_path, serve):
    server = serve(made("redis", tmp_path / "server", "--maxclients", "2"))
    bed = beds(server.url).opened()
    assert bed.store(1) is None
    assert bed.sought([1]) == 1
    assert bed.load(1) is None


def test_a_connection_that_ended_with_a_question_is_made_anew_before_the_next(beds, redis):
    """To make one to a store that is far away takes longer than a question has, so that no later one would end well."""
    bed = beds(redis.url, timeout_s=60.0, lookup_s=0.3).opened()
    assert connections(redis) == THREADS
    redis.stop()
    assert bed.sought([1]) == 0
    redis.go_on()
    assert bed.counters["remote_timeout"] == 1
    bed.until(lambda: connections(redis) == THREADS)


def test_a_question_waits_no_longer_than_for_connections_that_are_made_anew(over_memory, memory, gate):
    bed = over_memory().opened()
    connect = gate("connect", memory)
    for number in range(2 * THREADS - 1):
        memory.fails = "" if number % 2 else "timeout"
        assert bed.sought([number]) == 0
    assert bed.counters["remote_timeout"] == THREADS, "all threads for questions make connections now"
    bed.answers.clear()
    assert bed.tier.seeks([key(99)], 1)
    connect.open()
    bed.settle()
    assert key(99) in bed.answers


def test_a_store_that_dies_amid_copies_ends_each_job_once(beds, redis):
    bed = beds(redis.url).opened()
    assert [bed.store(number) for number in range(4)] == [None] * 4
    assert bed.sought(range(4)) == 4
    copies = [bed.start("store", number, at=number % 8) for number in range(10, 26)]
    copies += [bed.start("load", number, at=8 + number) for number in range(4)]
    bed.end(copies[0])
    redis.kill()
    kinds = {error.kind for copy in copies if (error := bed.end(copy)) is not None}
    assert kinds <= {"unreachable", "timeout", "failed", "paused"}
    bed.settle()
    while bed.counters["remote_paused"] == 0:
        bed.store(99)
    assert bed.sought(range(4)) == 0
    assert bed.store(100) == "left out"
    assert bed.longest_s < HANGS_S / 4, "no call of the control loop waits for it"
    redis.start()
    bed.now += PAUSE_S
    assert not bed.tier.takes_stores
    bed.until(lambda: bed.tier.takes_stores)
    assert bed.store(100) is None


def test_a_store_that_dies_within_an_answer_is_believed_so_far(beds, redis):
    """Questions go in batches; of the second one comes a half."""
    with contextlib.closing(Relay(redis.port)) as relay:
        bed = beds(redis.url.replace(str(redis.port), str(relay.port))).opened()
        batch = RedisBackend.batch
        assert [bed.store(number) for number in range(2 * batch)] == [None] * (2 * batch)
        relay.on_cut, relay.cut_after = redis.kill, batch * HEAD_BYTES * 3 // 2
        assert bed.sought(range(2 * batch)) == batch
        assert relay.cut_after < 0, "it died amid the answer"
        assert bed.counters["remote_unreachable"] == 1
        assert asked_for(bed, range(2 * batch)) == []
        assert bed.load(0).kind == "unreachable"


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_an_answer_from_before_it_was_stored_says_nothing(over_memory, memory, is_asked_again):
    bed = over_memory().opened()
    memory.late = goes_on = threading.Event()
    assert bed.tier.seeks([key(1)], 1)
    wait_until(lambda: memory.late is None)
    assert bed.store(1) is None
    if is_asked_again:
        assert bed.tier.seeks([key(1)], 1)
    goes_on.set()
    while not bed.tier.is_idle:
        bed.turn()
        assert bed.tier.holds(key(1))
    assert bed.sought([1]) == 1
    assert asked_for(bed, [1]) == []


@pytest.mark.long
def test_a_cluster_that_loses_a_member_is_missed_until_it_is_back(beds, tmp_path, serve):
    server = serve(made("cluster", tmp_path / "cluster"))
    bed = beds(server.url, timeout_s=2.0, lookup_s=1.0).opened()
    assert [bed.store(number) for number in range(30)] == [None] * 30
    assert bed.sought(range(30)) == 30
    dead = server.members[1]
    lost = {name for name in dead.names() if name.startswith("v")}
    assert 0 < len(lost) < 30
    dead.kill()
    while bed.counters["remote_paused"] == 0:
        bed.now += 100.0
        assert bed.sought(range(30)) < 30
    assert bed.longest_s < LOOP_S
    dead.start()
    server.wait_until_one()

    def is_open():
        bed.now += PAUSE_S
        return bed.tier.takes_stores or bed.turn()

    wait_until(is_open, what="it answers again")
    errors = [bed.load(number) for number in range(30)]
    gone = {number for number, error in enumerate(errors) if error is not None}
    assert {errors[number].kind for number in gone} == {"missing"}
    assert len(gone) == len(lost), "the others are there still"
    assert [bed.store(number) for number in gone] == [None] * len(gone)
    assert bed.sought(range(30)) == 30


@pytest.fixture(params=["redis", "s3"])
def trickling(request, tmp_path, monkeypatch, beds, serve):
    """A tier over a store behind a relay, and the relay; the chunks 1 and 2 are in the store, and 1 is known."""
    server = serve(made(request.param, tmp_path / "server"))
    with contextlib.closing(Relay(server.port)) as relay:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value.replace(str(server.port), str(relay.port)))
        bed = beds(server.url.replace(str(server.port), str(relay.port)), timeout_s=2.0, lookup_s=0.5).opened()
        assert [bed.store(1), bed.store(2)] == [None, None]
        assert bed.sought([1]) == 1
        relay.trickles.set()
        yield bed, relay


@pytest.mark.long
def test_a_store_that_trickles_costs_its_deadline_and_no_more(trickling):
    """Each byte comes in time, and the last of them in hours."""
    bed, relay = trickling
    started_at = time.monotonic()
    loads = [bed.start("load", 1, at=at) for at in range(THREADS)]
    assert bed.sought([2]) == 0
    assert not any(load.number in bed.over for load in loads), "a question does not wait for loads"
    assert {bed.end(load).kind for load in loads} == {"timeout"}
    assert time.monotonic() - started_at < 5 * 2.0
    assert bed.counters["remote_timeout"] == 1 + THREADS + bed.counters["remote_paused"]
    assert bed.counters["remote_paused"] == 1
    assert bed.tier.status().state.startswith("timeout")
    bed.now += PAUSE_S
    assert not bed.tier.takes_stores
    bed.until(lambda: bed.counters["remote_paused"] == 2)
    relay.trickles.clear()
    bed.now += PAUSE_S
    bed.tier.seeks([key(1)], 1)
    bed.until(lambda: bed.tier.status().is_up)
    assert bed.sought([1, 2]) == 2
    assert bed.load(2) is None


class Slow(S3Handler):
    """Has nothing, and takes a while to say so."""

    def do_GET(self):
        time.sleep(0.3)
        self.say(404)


@pytest.mark.long
def test_a_question_of_many_names_has_one_deadline(monkeypatch):
    """Where each name is a request of its own, each is answered in time, and all of them are not."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with s3_answers(Slow, monkeypatch):
        backend = opened("s3://bucket", timeout_s=60.0, lookup_s=0.5)
        started_at = time.monotonic()
        with pytest.raises(TierError) as raised:
            backend.heads([str(number) for number in range(100 * backend.batch)], 100)
        backend.close()
    assert raised.value.kind == "timeout"
    assert time.monotonic() - started_at < 20 * 0.5, "not 100 times 0.3 s"


@pytest.mark.long
def test_closing_waits_no_longer_for_a_store_that_trickles_than_its_deadline(trickling):
    bed, _ = trickling
    copies = [bed.start("load", 1, at=at) for at in range(2 * THREADS)]
    copies += [bed.start("store", 10 + at, at=at) for at in range(2 * THREADS)]
    bed.tier.seeks([key(2)], 1)
    started_at = time.monotonic()
    bed.tier.close()
    assert time.monotonic() - started_at < 5 * 2.0
    assert {bed.end(copy).kind for copy in copies} <= {"timeout", "cancelled"}


@pytest.mark.long
def test_what_waits_for_a_thread_ends_with_the_pause(beds, redis):
    """Not each with a deadline of its own, one after the other."""
    bed = beds(redis.url, timeout_s=1.0, lookup_s=0.5).opened()
    assert bed.store(1) is None
    redis.stop()
    try:
        copies = [bed.start("load", 1, at=at % 8) for at in range(20 * THREADS)]
        copies += [bed.start("store", 2, at=8) for _ in range(20 * THREADS)]
        started_at = time.monotonic()
        kinds = Counter(bed.end(copy).kind for copy in copies)
        assert time.monotonic() - started_at < 10 * 1.0
    finally:
        redis.go_on()
    assert kinds.keys() == {"timeout", "paused"}
    assert kinds["timeout"] <= 4 * THREADS
    assert bed.counters["remote_not_asked"] + bed.counters["remote_left_out"] == kinds["paused"]


def test_a_store_that_is_full_takes_nothing_and_gives_what_it_has(beds, tmp_path, serve):
    server = serve(made("redis", tmp_path / "redis", "--maxmemory", "2mb", "--maxmemory-policy", "noeviction"))
    bed = beds(server.url).opened()
    stored = 0
    while (error := bed.store(stored)) is None:
        stored += 1
    assert error.kind == "full"
    assert bed.counters["remote_full"] == 1
    assert not bed.tier.takes_stores
    assert bed.store(stored) == "left out"
    assert bed.sought(range(stored)) == stored
    assert [bed.load(number) for number in range(stored)] == [None] * stored
    server.cli("CONFIG", "SET", "maxmemory", "64mb")
    bed.now += PAUSE_S
    assert bed.store(stored) is None


def _lacks_replicas(server):
    server.cli("CONFIG", "SET", "min-replicas-to-write", "1")


def _cannot_save(server):
    server.cli("CONFIG", "SET", "save", "3600 1")
    (server.folder / "data").rmdir()
    server.cli("BGSAVE")
    wait_until(lambda: b"rdb_last_bgsave_status:err" in server.cli("INFO", "persistence"), what="the save has failed")


@pytest.mark.parametrize("refuse_writes", [_lacks_replicas, _cannot_save])
def test_a_server_that_refuses_writes_alone_is_read(beds, tmp_path, serve, refuse_writes):
    """Also by a node that starts meanwhile."""
    server = made("redis", tmp_path / "redis", "--dir", str(tmp_path / "redis" / "data"))
    (server.folder / "data").mkdir()
    bed = beds(serve(server).url).opened()
    assert bed.store(1) is None
    refuse_writes(server)
    assert bed.store(2).kind == "read_only"
    assert not bed.tier.takes_stores
    for each in (bed, beds(server.url).opened()):
        assert each.sought([1]) == 1
        assert each.load(1) is None


def test_a_chunk_that_is_larger_than_a_server_takes_costs_no_reads(beds, redis, monkeypatch):
    """It ends the connection of who sends one."""
    monkeypatch.setattr(redis_backend, "MOST_BYTES", 1 << 20)
    redis.cli("CONFIG", "SET", "proto-max-bulk-len", str(1 << 20))
    bed = beds(redis.url, slot_bytes=2 << 20).opened()
    error = bed.store(1)
    assert error.kind == "full"
    assert "proto-max-bulk-len" in str(error)
    assert not bed.tier.takes_stores
    assert bed.tier.status().is_up
    assert bed.sought([1]) == 0


def test_who_is_no_store_at_all(beds, caplog):
    """Somebody who accepts and says nothing sensible."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bed = beds(f"valkey://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5, lookup_s=0.3)
        bed.paused("timeout")


def test_one_bug_of_a_client_costs_one_question(over_memory, memory, caplog):
    bed = over_memory().opened()
    assert bed.store(1) is None
    memory.fails = RuntimeError("a defect")
    assert bed.sought([1]) == 0
    assert any(record.levelno == logging.ERROR for record in caplog.records)
    memory.fails = ""
    bed.now += NOT_THERE_S + 0.1
    assert bed.sought([1]) == 1
