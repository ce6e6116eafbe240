"""What a node remembers of transfers: how much of it, for how long, and for whom."""

import math

import plain_chunk
import pytest
from traced import traced

from pdx.memory.slot import Slot
from pdx.store import transfers as module
from pdx.store.transfers import KEPT_S, Transfers
from pdx.telemetry.env import Env

MOST = 20  # transfers of one source


@pytest.fixture
def env():
    return Env()


@pytest.fixture
def counters(env):
    return env.counters


@pytest.fixture
def transfers(env):
    return Transfers(env)


def give_up(transfers, count, source, prefix):
    for number in range(count):
        assert transfers.give_up(f"{prefix} {number}", 0.0, source)


def test_of_one_source_the_oldest_are_forgotten_and_counted_and_of_others_none(
    transfers, counters, caplog, monkeypatch
):
    monkeypatch.setattr(module, "MAX_TRANSFERS", MOST)
    transfers.open("yours", [Slot(4096, 1, 0)], 600.0, "peer alpha")
    give_up(transfers, MOST + 5, "process 7", "mine")
    assert counters == {"transfers_crowded_out": 5}
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"process 7 has made more than {MOST} transfers known"
    ]
    assert [transfers.is_given_up(f"mine {number}") for number in (4, 5)] == [False, True]
    assert transfers.is_under_way("yours")
    assert transfers.expire(1.0) == [f"mine {number}" for number in range(5)], "their tails are to be dropped, too"
    assert transfers.expire(2.0) == []
    for number in range(MOST + 5):
        transfers.expect(f"offered {number}", 60.0, "peer alpha")
        transfers.open(f"reserved {number}", [], 60.0, "process 7")
    assert len(transfers) == MOST, "those that wait for a peer"
    assert transfers.expire(3.0)[-2:] == ["offered 4", "reserved 4"]
    assert len(transfers.expire(1e9)) == 2 * MOST, "all that were still there"
    counters.clear()
    give_up(transfers, MOST, "process 7", "second")
    assert not counters, "what is over makes place for its source again"


def test_the_count_of_those_under_way_follows_each_of_them(transfers):
    transfers.open("a", [Slot(4096, 1, 0)], 10.0, "process 7")
    transfers.expect("b", 20.0, "peer alpha")
    transfers.expect("b", 30.0, "peer alpha")
    transfers.open("c", [], 10.0, "process 7")
    assert len(transfers) == 2
    transfers.arrived("b", 1.0)
    assert transfers.is_under_way("b")
    transfers.arrived("b", 1.0)
    assert len(transfers) == 1
    assert transfers.give_up("a", 1.0, "the proxy")
    assert not transfers.give_up("a", 1.0, "the proxy")
    assert len(transfers) == 0
    transfers.expect("b", 100.0, "peer alpha")
    assert len(transfers) == 1
    assert set(transfers.expire(99.0)) == {"a", "c"}
    assert transfers.expire(100.0) == ["b"]
    assert len(transfers) == 0


@pytest.mark.parametrize("end", ["sealed", "given up", "late"])
def test_who_comes_when_a_transfer_is_forgotten_is_told_that_it_is_over(transfers, end):
    """Else a decode leg that stood in a queue for a minute would wait as if its prefill was still to begin."""
    (chunk,) = chunks_of(1)
    transfers.open("t", [chunk.slot], 100.0, "process 7")
    if end == "sealed":
        fill(transfers, [chunk], 4, 1.0)
        transfers.sealed([chunk], 1.0)
    elif end == "given up":
        transfers.give_up("t", 1.0, "process 7")
    assert transfers.expire(100.0) == ["t"]
    assert (transfers.is_known("t"), transfers.is_under_way("t"), transfers.is_given_up("t")) == (True, False, False)
    assert not transfers.is_known("another")
    transfers.prefilled("t", 101.0, "the proxy")
    assert not transfers.is_under_way("t")
    transfers.open("t", [chunk.slot], 900.0, "process 7")
    assert transfers.is_under_way("t"), "its engine begins it again"


def test_of_forgotten_transfers_so_many_names_are_left_and_nothing_else(transfers, env, monkeypatch):
    monkeypatch.setattr(module, "MAX_ENDED", 30)
    with traced() as held:
        for number in range(1040):
            transfers.give_up(f"t {number}", float(number), f"process {number}")
            transfers.expire(number + KEPT_S)
            env.news.clear()
        assert held() < 20_000
    assert [transfers.is_known(f"t {number}") for number in (1009, 1010)] == [False, True]


@pytest.mark.parametrize("end", ["sealed", "given up"])
def test_a_transfer_that_is_over_keeps_no_room_for_what_it_waited_for(transfers, end):
    """It is remembered for a minute, and a dict that was emptied keeps its table."""
    chunks = [plain_chunk.chunk(bytes(16), Slot(number << 20, 1 << 20, 1), 1, transfer="t") for number in range(1000)]
    with traced() as held:
        transfers.open("t", [chunk.slot for chunk in chunks], 100.0, "process 7")
        assert held() > 30_000
        if end == "sealed":
            transfers.sealed(chunks, 1.0)
        else:
            transfers.give_up("t", 1.0, "process 7")
        assert held() < 10_000
    assert not transfers.is_under_way("t")


def test_only_a_chunk_that_it_waits_for_ends_a_transfer_when_it_is_aborted(transfers, env):
    needed, other = chunks_of(2)
    transfers.open("t", [needed.slot], 100.0, "process 7")
    transfers.aborted([other], 1.0)
    assert transfers.is_under_way("t")
    assert not env.news
    transfers.aborted([other, needed], 1.0)
    assert transfers.is_given_up("t")
    assert env.news == ["t"]


# ---- how long the rest takes -------------------------------------------------------------------


def chunks_of(count, layers=4):
    return [
        plain_chunk.chunk(bytes(16), Slot(number << 20, 1 << 20, 1), layers, transfer="t") for number in range(count)
    ]


def fill(transfers, chunks, layers, now):
    for chunk in chunks:
        chunk.filled |= (1 << layers) - 1
    return transfers.filled(chunks, now)


def test_how_long_the_rest_takes_is_known_by_the_pace_of_what_was_filled(transfers):
    chunks = chunks_of(4)
    assert transfers.left_s("t") == math.inf, "nobody knows it"
    transfers.open("t", [chunk.slot for chunk in chunks], 100.0, "process 7")
    assert transfers.left_s("t") == math.inf, "nothing has come"
    assert fill(transfers, chunks[:2], 4, 10.0) == {"t"}
    assert transfers.left_s("t") == math.inf, "what came first says nothing of how long it took"
    fill(transfers, chunks[2:], 1, 11.0)
    assert transfers.left_s("t") == pytest.approx(3.0), "half a chunk a second, and one and a half are left"
    fill(transfers, chunks[2:], 1, 12.0)
    assert transfers.left_s("t") == pytest.approx(6.0), "nothing new for a second"
    fill(transfers, chunks[2:], 3, 13.0)
    assert transfers.left_s("t") == pytest.approx(1.0)
    transfers.sealed(chunks[:2], 13.0)
    assert transfers.left_s("t") == pytest.approx(1.0), "what is sealed was filled before"
    fill(transfers, chunks[2:], 4, 14.0)
    assert transfers.left_s("t") == 0
    transfers.sealed(chunks[2:], 14.0)
    assert transfers.left_s("t") == math.inf, "it waits for nothing"


def test_what_is_sealed_without_a_word_before_counts_as_filled_then(transfers):
    chunks = chunks_of(3)
    transfers.open("t", [chunk.slot for chunk in chunks], 100.0, "process 7")
    for at, chunk in enumerate(chunks[:2]):
        chunk.filled = 15
        transfers.sealed([chunk], 1.0 + at)
    assert transfers.left_s("t") == pytest.approx(1.0)


def test_of_what_will_not_come_nothing_is_said(transfers):
    chunks = chunks_of(2)
    transfers.open("t", [chunk.slot for chunk in chunks], 100.0, "process 7")
    fill(transfers, chunks, 1, 1.0)
    fill(transfers, chunks, 2, 2.0)
    assert transfers.left_s("t") < math.inf
    other = plain_chunk.chunk(bytes(16), Slot(9 << 20, 1 << 20, 1), 4, transfer="another")
    assert fill(transfers, [other], 1, 3.0) == set()
    transfers.give_up("t", 2.0, "process 7")
    assert transfers.left_s("t") == math.inf


def test_a_transfer_comes_near_once_when_little_time_is_left(transfers):
    chunks = chunks_of(6)
    transfers.open("t", [chunk.slot for chunk in chunks], 100.0, "process 7")
    assert not transfers.comes_near("t")
    fill(transfers, chunks, 1, 10.0)
    assert not transfers.comes_near("t"), "it has no pace yet"
    fill(transfers, chunks, 2, 11.0)
    assert not transfers.comes_near("t"), "two seconds are left"
    fill(transfers, chunks[:5], 4, 11.2)
    assert [transfers.comes_near("t") for _ in range(2)] == [True, False]


def test_a_transfer_of_which_little_is_to_be_computed_is_near_from_the_start(transfers):
    transfers.open("t", [chunk.slot for chunk in chunks_of(2)], 100.0, "process 7")
    assert transfers.comes_near("t")
    assert not transfers.comes_near("another"), "nobody knows it"
    transfers.open("gone", [chunk.slot for chunk in chunks_of(1)], 100.0, "process 7")
    transfers.give_up("gone", 1.0, "process 7")
    assert not transfers.comes_near("gone")
