"""The breakdown of one request's time."""

from pdx.telemetry.timeline import Event, Moment, breakdown

MS = 1_000_000


def test_spans_bytes_and_tokens_of_a_whole_transfer():
    moments = [
        Moment(Event.RECEIVED, 0),
        Moment(Event.PREFILL_SENT, 1 * MS),
        Moment(Event.ADMITTED, 2 * MS, tokens=512),
        Moment(Event.PREFILL_END, 101 * MS, nbytes=96),
        Moment(Event.SEALED, 103 * MS, nbytes=128),
        Moment(Event.LOAD_START, 104 * MS),
        Moment(Event.LOAD_END, 106 * MS, nbytes=128),
        Moment(Event.RUNNABLE, 107 * MS),
        Moment(Event.DECODE_FIRST, 120 * MS),
    ]
    result = breakdown(list(reversed(moments)))
    assert result.prefill_ms == 100.0
    assert result.handoff_ms == 6.0
    assert result.load_ms == 2.0
    assert result.first_decode_ms == 13.0
    assert result.moved_bytes == 128
    assert result.hidden_share == 0.75
    assert result.reused_tokens == 512


def test_with_several_shards_the_last_one_counts_and_bytes_add_up():
    moments = [
        Moment(Event.PREFILL_SENT, 0),
        Moment(Event.PREFILL_END, 20 * MS, nbytes=10),
        Moment(Event.PREFILL_END, 10 * MS, nbytes=30),
        Moment(Event.SEALED, 30 * MS, nbytes=40),
        Moment(Event.SEALED, 25 * MS, nbytes=40),
    ]
    result = breakdown(moments)
    assert result.prefill_ms == 20.0
    assert result.moved_bytes == 80
    assert result.hidden_share == 0.5


def test_between_two_nodes_what_counts_is_what_is_across():
    moments = [
        Moment(Event.PREFILL_END, 100 * MS, nbytes=128),
        Moment(Event.ACROSS, 100 * MS, nbytes=90),
        Moment(Event.SEALED, 101 * MS, nbytes=128),
        Moment(Event.PUSHED, 104 * MS, nbytes=100),  # the other node had the rest
        Moment(Event.LANDED, 105 * MS, nbytes=100),
    ]
    result = breakdown(moments)
    assert result.push_ms == 5.0
    assert (result.moved_bytes, result.pushed_bytes, result.hidden_share) == (128, 100, 0.9)
    unseen = breakdown([each for each in moments if each.event != Event.LANDED])
    assert (unseen.push_ms, unseen.pushed_bytes) == (4.0, 100)
    fetched = breakdown([each for each in moments if each.event not in (Event.ACROSS, Event.PUSHED)])
    assert (fetched.push_ms, fetched.pushed_bytes, fetched.hidden_share) == (5.0, 100, 1.0)


def test_a_push_that_ends_before_prefill_leaves_nothing_and_has_a_lead():
    """The last layer is gathered in the last step; what is behind its attention in that step takes time, too."""
    moments = [Moment(Event.LANDED, 55 * MS, nbytes=100), Moment(Event.PREFILL_END, 100 * MS, nbytes=128)]
    result = breakdown(moments)
    assert (result.push_ms, result.push_lead_ms) == (0.0, 45.0)
    late = breakdown([Moment(Event.PREFILL_END, 100 * MS), Moment(Event.LANDED, 105 * MS)])
    assert (late.push_ms, late.push_lead_ms) == (5.0, 0.0)
    assert breakdown([Moment(Event.LANDED, 1)]).push_lead_ms is None


def test_a_push_of_nothing_hides_nothing():
    moments = [Moment(Event.PREFILL_END, 1), Moment(Event.ACROSS, 1), Moment(Event.PUSHED, 2)]
    assert breakdown(moments).hidden_share is None


def test_a_moment_that_was_not_seen_makes_no_number_up():
    assert (
        breakdown([]) == breakdown([Moment(Event.PREFILL_END, 5)]) == breakdown([Moment("a future event", 5, nbytes=7)])
    )
    empty = breakdown([])
    assert (empty.prefill_ms, empty.handoff_ms, empty.load_ms, empty.hidden_share) == (None,) * 4
    assert (empty.moved_bytes, empty.pushed_bytes, empty.reused_tokens, empty.push_ms) == (0, 0, 0, None)
