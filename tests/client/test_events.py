"""The subscriber's order of batches, without sockets: gaps, answers with holes, repetitions, other lives."""

import msgspec
import pytest

from pdx.client.events import HOLES, Tracker
from pdx.errors import ProtocolError
from pdx.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode_batch, encode_batch


def stored(ts, *blocks, tier="host"):
    return encode_batch(EventBatch(ts, [BlockStored(list(blocks), None, [], 16, medium=tier)]))


def everything(ts, *blocks):
    return encode_batch(EventBatch(ts, [AllBlocksCleared(), BlockStored(list(blocks), None, [], 16, medium="host")]))


def known(tracker):
    return set(tracker.index.as_dict())


def started(*blocks):
    """A tracker that has asked for all, and got it with number 10."""
    tracker = Tracker(can_ask=True)
    assert tracker.asking == 0
    tracker.replayed(10, everything(10.0, *blocks))
    tracker.answered()
    assert (tracker.asking, tracker.last, tracker.is_complete) == (None, 10, True)
    return tracker


def test_what_comes_while_the_answer_is_awaited_is_taken_in_behind_it():
    tracker = Tracker(can_ask=True)
    tracker.live(11, stored(11.0, 2))
    tracker.live(9, stored(9.0, 9))
    tracker.replayed(10, everything(10.0, 1))
    tracker.answered()
    assert (known(tracker), tracker.last, tracker.asking) == ({1, 2}, 11, None)


def test_a_gap_is_asked_for_and_an_answer_with_a_hole_asked_for_again():
    tracker = started(1)
    tracker.live(14, stored(14.0, 5))
    assert (tracker.asking, known(tracker), tracker.is_complete) == (11, {1}, False)
    tracker.replayed(11, stored(11.0, 2))
    tracker.replayed(13, stored(13.0, 4))
    tracker.answered()
    assert (tracker.asking, known(tracker)) == (12, {1, 2})
    tracker.replayed(12, stored(12.0, 3))
    tracker.replayed(13, stored(13.0, 4))
    tracker.answered()
    assert (known(tracker), tracker.last, tracker.is_complete) == ({1, 2, 3, 4, 5}, 14, True)


def test_what_was_heard_already_changes_nothing():
    tracker = started(1)
    assert tracker.live(11, encode_batch(EventBatch(11.0, [BlockRemoved([1], "host")])))
    assert not tracker.live(10, everything(10.0, 1)), "it is no news"
    assert (known(tracker), tracker.counters["repeated"], tracker.counters["restarts"]) == (set(), 1, 0)


def test_a_lower_number_at_a_later_time_is_another_life():
    tracker = started(1)
    tracker.live(0, stored(20.0, 7))
    assert (known(tracker), tracker.asking, tracker.counters["restarts"]) == (set(), 0, 1)
    tracker.replayed(0, stored(20.0, 7))
    tracker.answered()
    assert (known(tracker), tracker.is_complete) == ({7}, True)


@pytest.mark.parametrize("waiting", [(), (13, 14)])
def test_all_that_is_there_with_a_lower_number_is_of_another_life(waiting):
    """What waits is of the life that is over, and dropped."""
    tracker = started(1)
    tracker.ask()
    for number in waiting:
        tracker.live(number, stored(float(number), number))
    tracker.replayed(5, everything(20.0, 7))
    tracker.answered()
    assert (known(tracker), tracker.last, tracker.is_complete, tracker.counters["restarts"]) == ({7}, 5, True, 1)
    assert tracker.live(6, stored(20.5, 8))
    assert known(tracker) == {7, 8}


def test_what_nobody_knows_any_more_is_not_asked_for_without_end():
    tracker = started(1)
    tracker.live(30, stored(30.0, 3))
    tracker.replayed(15, everything(20.0, 7))
    tracker.answered()
    assert tracker.asking == 16
    tracker.live(32, stored(32.0, 4))
    tracker.answered()
    assert tracker.asking == 16  # the answer may be older than what has come since
    tracker.answered()
    assert (known(tracker), tracker.asking, tracker.is_complete) == ({7}, None, True)


def test_a_number_that_no_batch_has_ends_nobody():
    last = (1 << 64) - 1  # it stands for the end of an answer
    tracker = Tracker(can_ask=True)
    tracker.replayed(last - 1, everything(10.0, 1))
    tracker.answered()
    tracker.live(last, stored(11.0, 2))
    tracker.ask()
    assert tracker.asking == last
    assert (known(tracker), tracker.counters["malformed"]) == ({1}, 1)


def test_what_a_publisher_has_not_kept_is_said_to_be_missing():
    tracker = Tracker(can_ask=True)
    for _ in range(HOLES):
        assert tracker.asking == 0
        tracker.replayed(5, stored(5.0, 1))
        tracker.answered()
    assert (known(tracker), tracker.asking, tracker.is_complete, tracker.counters["lost"]) == ({1}, None, False, 5)


def test_the_form_of_releases_before():
    event = ["BlockStored", [1, 2], None, [3], 16, None, "GPU"]
    of_map = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [3]}
    of_map |= {"block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, "locality": "LOCAL"}
    encode = msgspec.msgpack.encode
    for payload in (
        encode([1.0, [event, ["Another", 1]]]),
        encode([1.0, [[*event, None, [["a salt"]], 1]]]),
        encode([1.0, [of_map, {"type": "Another"}], 0]),
        encode({"ts": 1.0, "events": [of_map]}),
    ):
        (found,) = decode_batch(payload).events
        assert (list(found.block_hashes), found.medium, found.block_size) == ([1, 2], "GPU", 16)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x92\x01\x91\x01"])
def test_what_is_no_batch_is_refused_and_counted(payload):
    with pytest.raises(ProtocolError):
        decode_batch(payload)
    tracker = started(1)
    tracker.live(11, payload)
    assert (tracker.counters["malformed"], tracker.is_complete, tracker.last) == (1, False, 11)
