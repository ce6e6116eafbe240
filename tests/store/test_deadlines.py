"""Deadlines against a dict that is searched whole."""

import math

from hypothesis import given
from hypothesis import strategies as st
from traced import traced

from pdx.store.deadlines import Deadlines

NAMES = st.integers(0, 5)
TIMES = st.sampled_from([1.0, 2.0, 2.5, 3.0, 7.0, math.inf])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), NAMES, TIMES),
            st.tuples(st.just("discard"), NAMES, TIMES),
            st.tuples(st.just("take"), st.just(0), TIMES),
        )
    )
)
def test_what_ends_is_taken_once_and_in_time(steps):
    deadlines, model = Deadlines(), {}
    for verb, name, time in steps:
        if verb == "set":
            if name in model:
                deadlines.discard(name, model[name])
            model[name] = time
            deadlines.add([name], time)
        elif verb == "discard":
            deadlines.discard(name, time)
            if model.get(name) == time:
                del model[name]
        else:
            late = deadlines.take(time)
            expected = {name for name, end in model.items() if end <= time and end < math.inf}
            assert set(late) == expected
            assert len(late) == len(expected)
            ends = [model.pop(name) for name in late]
            assert ends == sorted(ends)
    assert len(deadlines.take(100.0)) == sum(end < math.inf for end in model.values())


def test_what_is_renewed_for_ever_leaves_nothing_behind():
    deadlines = Deadlines()
    deadlines.add(["lease"], 0.0)
    with traced() as held:
        for turn in range(10_000):
            deadlines.discard("lease", float(turn))
            deadlines.add(["lease"], float(turn + 1))
        assert held() < 20_000
    assert deadlines.take(9_999.0) == []
    assert deadlines.take(10_000.0) == ["lease"]
