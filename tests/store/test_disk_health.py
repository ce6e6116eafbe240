"""A disk whose calls fail again and again, or do not return, is left alone, keeps nobody waiting, is tried again."""

import errno
import logging
import os
import threading
import time

import pytest
from disk_bed import key

from pdx.store.disk import tier
from pdx.store.disk.files import SILENT_S, THREADS
from pdx.store.disk.tier import JOIN_S
from pdx.store.health import MAX_ERRORS, PAUSE_S
from pdx.store.tier import Job, Part

# ---- it fails ------------------------------------------------------------------------------


def fail_reads(patch, fake=errno.EIO, *, only=None):
    """Reading fails from now on, or reading files with `only` in their names; the numbers of the calls that did."""
    real, failed = os.preadv, []

    def failing(fd, *args):
        if only is not None and only not in os.readlink(f"/proc/self/fd/{fd}"):
            return real(fd, *args)
        failed.append(fd)
        raise OSError(fake, os.strerror(fake))

    patch.setattr(os, "preadv", failing)
    return failed


@pytest.mark.parametrize(("fake", "kind"), [(errno.EIO, "read_failed"), (errno.EPERM, "denied")])
def test_a_fake_read_error_costs_a_miss_and_no_file(bed, monkeypatch, fake, kind):
    assert bed.store(1)
    assert bed.store(2)
    with monkeypatch.context() as patch:
        fail_reads(patch, fake)
        assert bed.load(1).kind == kind
    assert bed.counters[f"disk_{kind}"] == 1
    assert not bed.has(1), "whoever waits for it would have it loaded at once again"
    assert bed.load(2) is None
    bed.now += PAUSE_S
    assert bed.load(1) is None
    assert bed.tier.used_bytes == 2 * bed.charge


def test_a_shard_that_fails_by_a_fake_error_again_and_again_while_others_are_read_is_removed(bed, monkeypatch):
    for shard in range(2):
        assert bed.store(1, shard, shards=2)
    assert bed.store(2)
    fail_reads(monkeypatch, only=f"{key(1).hex()}-0-")
    assert bed.load(1, 0).kind == "read_failed"
    bed.now += PAUSE_S
    assert bed.load(1, 0).kind == "read_failed"
    assert bed.file(1).exists(), "nothing else was read meanwhile: it may be the disk"
    assert bed.load(1, 1, at=2) is None
    assert not bed.has(1, 2), "whoever waits for it would have both loaded at once again"
    bed.now += PAUSE_S
    assert bed.has(1, 2)
    assert bed.load(1, 0).kind == "read_failed"
    assert bed.files == [bed.file(2)]
    assert bed.tier.used_bytes == bed.charge
    assert bed.tier.status().state == "ok"


def test_a_disk_that_reads_nothing_by_a_fake_error_keeps_its_files_and_is_tried_again(bed, monkeypatch, caplog):
    for number in range(8):
        assert bed.store(number)
    with monkeypatch.context() as patch:
        failed = fail_reads(patch)
        assert [bed.load(number).kind for number in range(MAX_ERRORS)] == ["read_failed"] * MAX_ERRORS
        for _ in range(3):
            assert not any(bed.has(number) for number in range(8))
            assert not bed.store(9)
            bed.settle()
            assert bed.tier.status().state == "paused: reads failed"
            assert len(failed) <= MAX_ERRORS
            failed.clear()
            bed.now += PAUSE_S
    assert not bed.has(7), "a probe is made, which no request waits for"
    bed.settle()
    assert bed.tier.status().state == "ok"
    bed.now += PAUSE_S
    assert [bed.load(number) for number in range(8)] == [None] * 8
    assert sum("cannot be read" in one.message for one in caplog.records) == 1


def test_loads_that_wait_when_a_disk_begins_to_fail_are_not_tried(bed, monkeypatch):
    for number in range(3 * THREADS):
        assert bed.store(number)
    may_fail = threading.Semaphore(MAX_ERRORS)
    failed = fail_reads(monkeypatch)
    failing = os.preadv

    def late(*args):
        assert may_fail.acquire(timeout=60)
        failing(*args)

    monkeypatch.setattr(os, "preadv", late)
    copies = [bed.start_load(number, at=number % 16) for number in range(3 * THREADS)]
    while bed.tier.status().state == "ok":
        bed.turn()
    may_fail.release(3 * THREADS)
    kinds = [bed.end(copy).kind for copy in copies]
    assert set(kinds) == {"read_failed", "paused"}
    assert kinds.count("read_failed") == len(failed) <= MAX_ERRORS + THREADS
    assert len(bed.files) == 3 * THREADS


def test_after_some_write_errors_there_is_a_pause(bed, monkeypatch, caplog):
    assert bed.store(0)
    calls = []

    def fake(*args):
        calls.append(args)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fake)
        assert not any(bed.store(number) for number in range(1, 10))
        assert len(calls) == bed.counters["disk_write_failed"] == MAX_ERRORS
        assert bed.counters["disk_paused"] == 9 - MAX_ERRORS
        assert bed.tier.history.why(key(2)).text.endswith("cannot be written: Input/output error")
        why = "not stored: reads or writes failed, and none are tried for some seconds, 0.0 s ago"
        assert bed.tier.history.why(key(9)).sentence(bed.now) == why
        assert bed.load(0) is None
        bed.now += PAUSE_S
        assert not any(bed.store(number) for number in range(1, 10))
        assert len(calls) == MAX_ERRORS + 1  # one attempt, and the next pause
    bed.now += PAUSE_S
    assert all(bed.store(number) for number in range(1, 5))
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 2  # one of each kind in a minute


# ---- it does not answer --------------------------------------------------------------------


class Hang:
    """Calls of `os.preadv` and `os.pwritev` do not return before `end`, as far as it has room for them."""

    def __init__(self, patch, room=1 << 30, names=("preadv", "pwritev")):
        self.room = room
        self.begun = threading.Semaphore(0)
        self.num_begun = 0
        self._ended = threading.Event()
        for name in names:
            patch.setattr(os, name, self._late(getattr(os, name)))

    def _late(self, real):
        def call(*args, **settings):
            if self.room:
                self.room -= 1
                self.num_begun += 1
                self.begun.release()
                assert self._ended.wait(60)
            return real(*args, **settings)

        return call

    def end(self):
        self.room = 0
        self._ended.set()


@pytest.fixture
def hang(monkeypatch):
    hangs = []

    def make(**settings):
        hangs.append(Hang(monkeypatch, **settings))
        return hangs[-1]

    yield make
    for one in hangs:
        one.end()


def test_a_disk_that_does_not_answer_is_said_and_keeps_nobody_waiting(bed, hang, caplog):
    for number in range(4):
        assert bed.store(number)
    disk = hang()
    first = bed.start_load(1)
    assert disk.begun.acquire(timeout=60)
    bed.tier.cancel(first)
    bed.now += SILENT_S / 2
    assert bed.has(2)
    assert bed.tier.status().state == "ok"
    bed.now += SILENT_S
    assert not bed.has(2)
    assert bed.tier.status().state == "does not answer"
    assert bed.end(bed.start_load(2, at=3)).kind == "paused"
    assert bed.start_store(9) is None
    assert bed.counters["disk_silent"] == 1
    assert disk.num_begun == 1
    for _ in range(5):
        bed.now += PAUSE_S
        assert not bed.has(2)
    assert disk.begun.acquire(timeout=60)
    assert disk.num_begun == 2, "one more is tried, and no other as long as that is under way"
    disk.end()
    bed.end(first)
    bed.settle()
    assert bed.tier.status().state == "ok"
    assert bed.load(2) is None
    assert bed.store(9)
    assert len(bed.files) == 5
    assert sum("does not answer" in one.message for one in caplog.records) == 1


def test_a_disk_that_removes_many_files_one_after_the_other_answers(bed, monkeypatch):
    for number in range(8):
        assert bed.store(number)
    turns, reached, real = threading.Semaphore(0), threading.Semaphore(0), os.unlink

    def slow(*args, **settings):
        reached.release()
        assert turns.acquire(timeout=60)
        real(*args, **settings)

    monkeypatch.setattr(os, "unlink", slow)
    assert bed.tier.evict([key(number) for number in range(8)]) == 8
    try:
        for _ in range(8):
            assert reached.acquire(timeout=60)
            bed.now += 0.6 * SILENT_S
            assert bed.tier.status().state == "ok", "no system call takes so long"
            turns.release()
        bed.settle()
    finally:
        turns.release(8)
    assert not bed.files


def test_a_disk_whose_one_call_never_returns_is_used_again_when_others_do(bed, hang):
    for number in range(4):
        assert bed.store(number)
    disk = hang(room=1)
    hung = bed.start_load(1)
    assert disk.begun.acquire(timeout=60)
    bed.now += 2 * SILENT_S
    assert not bed.has(2)
    bed.now += PAUSE_S
    while not bed.has(2):
        bed.turn()
    assert bed.end(bed.start_load(2, at=3)) is None
    assert bed.tier.status().state == "ok"
    assert hung.number not in bed.over


def test_what_waits_for_a_disk_that_does_not_answer_is_given_up(bed, hang):
    for number in range(THREADS + 4):
        assert bed.store(number)
    disk = hang()
    loads = [bed.start_load(number, at=number) for number in range(THREADS + 4)]
    for _ in range(THREADS):
        assert disk.begun.acquire(timeout=60)
    stored = bed.start_store(99, at=15)
    bed.now += 2 * SILENT_S
    assert not bed.has(1)
    assert [bed.end(copy).kind for copy in [*loads[THREADS:], stored]] == ["paused"] * 5
    assert not any(copy.number in bed.over for copy in loads[:THREADS]), "the disk may still write there"
    disk.end()
    assert [bed.end(copy) for copy in loads[:THREADS]] == [None] * THREADS


def test_what_was_deleted_is_removed_when_a_disk_answers_again(bed, hang):
    """It was to make room for a store that was given up; the next node would find it."""
    bed.limit_bytes = (THREADS + 1) * bed.charge
    bed.restart()
    for number in range(THREADS + 1):
        assert bed.store(number)
    disk = hang()
    loads = [bed.start_load(number, at=number) for number in range(1, THREADS + 1)]
    for _ in loads:
        assert disk.begun.acquire(timeout=60)
    stored = bed.start_store(99, at=15)
    assert bed.tier.evict([key(0)]) == 0, "it is the oldest, and not found any more"
    bed.now += 2 * SILENT_S
    assert not bed.has(1)
    assert bed.end(stored).kind == "paused"
    disk.end()
    assert [bed.end(copy) for copy in loads] == [None] * THREADS
    bed.settle()
    assert not bed.file(0).exists()
    assert bed.tier.used_bytes == THREADS * bed.charge
    assert bed.store(0), "and is stored anew"


def test_nothing_waits_for_a_disk_that_reads_and_whose_writes_do_not_return(bed, hang):
    assert bed.store(1)
    used_ns = bed.file(1).stat().st_mtime_ns
    disk = hang(names=["pwritev", "utime"])
    copies = [bed.start_store(number, at=number) for number in range(2, THREADS + 1)]
    for _ in copies:
        assert disk.begun.acquire(timeout=60)
    bed.now += 2 * SILENT_S
    assert not bed.has(1)
    bed.now += PAUSE_S
    while not bed.has(1):
        bed.turn()
    for _ in range(3):
        assert bed.end(bed.start_load(1, at=15)) is None, "that it was loaded is written later"
    assert not bed.tier.takes_stores
    assert bed.tier.status().state == "writes do not return"
    assert bed.start_store(20, at=12) is None
    slot = bed.slot(12)
    bed.tier.store(Job(99, [Part(key(20), 0, 4, 0, 4, slot)], slot.nbytes))
    while 99 not in bed.over:
        bed.turn()
    assert bed.over[99].kind == "paused", "what was admitted before keeps no memory, either"
    disk.end()
    assert [bed.end(copy) for copy in copies] == [None] * len(copies)
    assert bed.tier.status().state == "ok"
    assert bed.store(20)
    bed.restart()
    assert bed.file(1).stat().st_mtime_ns > used_ns


def test_a_disk_that_does_not_answer_keeps_no_node_from_ending(bed, hang, monkeypatch):
    monkeypatch.setattr(tier, "SILENT_JOIN_S", 0.1)
    assert bed.store(1)
    disk = hang()
    bed.start_load(1)
    assert disk.begun.acquire(timeout=60)
    bed.now += 2 * SILENT_S
    begin = time.monotonic()
    bed.close_tier()
    assert time.monotonic() - begin < JOIN_S / 2
