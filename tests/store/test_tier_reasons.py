"""What a tier says of keys that it does not find: that it cannot know, or what became of them."""

import contextlib
import errno
import os

import disk_bed
import pytest
from disk_bed import key

from pdx.store.health import PAUSE_S
from pdx.store.remote import catalog
from pdx.store.remote.catalog import NOT_THERE_S


def said(bed, number):
    """Of one key: why it may be there, and what became of it."""
    gone = bed.tier.history.why(key(number))
    return bed.tier.why_not(key(number)), gone and gone.sentence(bed.now)


# ---- a disk ---------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    bed = disk_bed.Bed(tmp_path)
    yield bed
    bed.close()


def test_what_made_room_for_others_was_removed_then(disk):
    disk.limit_bytes = 2 * disk.charge
    disk.restart()
    for number in (1, 2, 3):
        assert disk.store(number)
    disk.now += 3.0
    assert said(disk, 1) == ("", "removed to make room, 3.0 s ago")
    assert said(disk, 2) == ("", None)
    disk.tier.evict([key(2)])
    assert said(disk, 2) == ("", "deleted, or broken, 0.0 s ago")


@pytest.mark.parametrize("fake", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_disk_that_a_load_has_failed_on_is_not_read_for_a_while(disk, monkeypatch, fake):
    assert disk.store(1)
    real = os.open

    def failing(path, *args, **settings):
        if os.fspath(path).endswith(".chunk"):
            raise OSError(fake, os.strerror(fake))
        return real(path, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        assert disk.load(1).kind == "exhausted"
    assert not disk.has(1), "nobody asks for it again and again"
    assert said(disk, 1)[0] == "is not read for some seconds, because a load failed"
    assert said(disk, 2)[0] == ""
    assert not disk.tier.status().is_up
    disk.now += PAUSE_S
    assert said(disk, 1)[0] == ""
    assert disk.tier.status().is_up
    assert disk.load(1) is None


def test_a_chunk_that_is_larger_than_the_cap_is_not_stored_for_that(tmp_path):
    with contextlib.closing(disk_bed.Bed(tmp_path, limit_bytes=1000)) as bed:
        assert not bed.store(1)
        assert said(bed, 1) == ("", "not stored: a chunk is larger than all of the cap, 0.0 s ago")
        assert bed.tier.tally.dropped == 1


# ---- a store that nodes share ---------------------------------------------------------------


def test_a_store_that_has_not_answered_yet_or_does_not_any_more_says_so(over_memory, memory):
    remote = over_memory()
    assert said(remote, 1) == ("does not answer: no answer yet", None)
    assert remote.store(2) == "left out"
    assert said(remote, 2)[1] == "not stored: it did not answer, 0.0 s ago"
    remote.opened()
    assert remote.sought([1]) == 0
    assert said(remote, 1) == ("", None)
    memory.fails = "unreachable"
    while remote.counters["remote_paused"] == 0:
        remote.store(9)
    why, gone = said(remote, 9)
    assert why.startswith("does not answer: unreachable: ")
    assert gone.startswith("not stored: ")
    assert said(remote, 1)[0] == why


def test_a_question_that_is_under_way_or_has_failed_or_was_not_asked(over_memory, memory, monkeypatch, gate):
    monkeypatch.setattr(catalog, "MAX_SOUGHT", 1)
    remote = over_memory().opened()
    memory.fails = "timeout"
    heads = gate("heads", memory)
    assert remote.tier.seeks([key(1), key(2)], 1)
    assert said(remote, 1)[0] == said(remote, 2)[0] == "was asked, and had not answered yet"
    assert not remote.tier.seeks([key(3)], 1)
    assert said(remote, 3)[0] == "was not asked, because too many questions wait for it"
    heads.open()
    remote.settle()
    for number in (1, 2):
        assert said(remote, number)[0].startswith("did not say whether it has it: timeout: ")
    remote.now += 2 * NOT_THERE_S
    assert said(remote, 1)[0] == ""
