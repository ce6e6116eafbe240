"""Which chunks a prompt needs of each cache group: against the tokens that attention looks at, one by one."""

import itertools

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pdx.memory.rules import ALL, Rule, lengths, needed

C = 4  # tokens of a chunk


def window(tokens):
    """Attention to the last `tokens` tokens, the one that is computed among them."""
    return Rule(reach=-(-(tokens - 1) // C), tail_reach=-(-(tokens - 1) // C))


def chunks_looked_at(seen, end):
    """Of chunks, those that the next tokens behind `end` may look at, where token `at` looks at `seen(at)` … `at`."""
    return {token // C for at in range(end, end + C * 8) for token in range(max(0, seen(at)), end)}


@pytest.mark.parametrize("tokens", range(1, 18))
def test_a_window_needs_the_chunks_of_the_tokens_that_it_looks_at(tokens):
    rule = window(tokens)
    for end in range(8):
        looked_at = chunks_looked_at(lambda at: at - tokens + 1, end * C)
        assert set(range(rule.first(end), end)) == looked_at


@pytest.mark.parametrize("tokens", range(1, 18))
@pytest.mark.parametrize("left", range(1, C))
def test_behind_a_tail_a_window_needs_no_more_than_it_says(tokens, left):
    """The tail of a prompt has `left` tokens: a window behind it may reach one chunk less far than behind a chunk."""
    rule = window(tokens)
    for end in range(1, 8):
        looked_at = chunks_looked_at(lambda at: at - tokens + 1, (end - 1) * C + left)
        needs = set(range(rule.first(end, has_tail=True), end))
        assert looked_at <= needs
        assert len(needs - looked_at - {end - 1}) <= 1


@pytest.mark.parametrize("period", range(1, 5))
def test_chunked_local_attention_needs_the_part_of_the_prompt_that_goes_on(period):
    rule = Rule(period=period)
    for end in range(12):
        looked_at = chunks_looked_at(lambda at: at - at % (period * C), end * C)
        assert set(range(rule.first(end), end)) == looked_at
        for left in range(1, C):
            looked_at = chunks_looked_at(lambda at: at - at % (period * C), end * C + left)
            assert set(range(rule.first(end + 1, has_tail=True), end + 1)) == looked_at


def test_full_attention_needs_all_and_a_state_the_last_one():
    for end in range(1, 6):
        assert (Rule().first(end), Rule().first(end, has_tail=True)) == (0, 0)
        assert Rule(reach=1, tail_reach=0).first(end) == end - 1
        assert Rule(reach=1, tail_reach=0).first(end, has_tail=True) == end - 1
    assert [rule.first(0) for rule in (Rule(), Rule(reach=1), Rule(period=3))] == [0, 0, 0]


rules = st.one_of(
    st.just(Rule()),
    st.builds(Rule, reach=st.integers(0, 4), tail_reach=st.integers(0, 4)),
    st.builds(Rule, period=st.integers(1, 4)),
)


@settings(max_examples=examples(300))
@given(st.data())
def test_lengths_are_those_whose_chunks_are_there(data):
    groups = data.draw(st.lists(rules, min_size=1, max_size=3))
    count, has_tail = data.draw(st.integers(0, 7)), data.draw(st.booleans())
    absent = data.draw(st.sets(st.tuples(st.integers(0, len(groups) - 1), st.integers(0, 6))))
    asked = []

    def is_there(group, chunk):
        asked.append((group, chunk))
        return (group, chunk) not in absent

    found = list(lengths(groups, is_there, count, has_tail=has_tail))
    assert len(set(asked)) == len(asked) <= count * len(groups)
    places = list(itertools.product(range(len(groups)), range(count)))
    expected = [
        end
        for end in range(count, 0, -1)
        if all(places[at] not in absent for at in needed(groups, count, end, has_tail=has_tail))
    ]
    assert found == expected


def test_what_is_needed_is_said_group_behind_group():
    groups = [Rule(), Rule(reach=2, tail_reach=1), Rule(reach=1, tail_reach=0), Rule(period=4)]
    assert needed(groups, 6, 5, has_tail=False) == [0, 1, 2, 3, 4, 9, 10, 16, 22]
    assert needed(groups, 6, 6, has_tail=True) == [0, 1, 2, 3, 4, 5, 10, 11, 17, 22, 23]
    assert needed(groups, 6, 4, has_tail=True) == [0, 1, 2, 3, 8, 9, 15], "where a part ends there is nothing to keep"
    assert needed(groups, 6, 0, has_tail=True) == []
    assert needed([Rule(reach=ALL)], 3, 3, has_tail=False) == [0, 1, 2]
