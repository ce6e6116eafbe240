"""Figures of the reuse bench, of values that were worked out by hand."""

import pytest

from pdx.bench.reuse import records
from pdx.bench.reuse.figures import Reached, figures, found_as_expected, reached
from pdx.bench.reuse.records import BURST, DOCUMENTS, FIRST, SESSIONS, Asked, Point, Result
from pdx.bench.systems.engine_metrics import Found
from pdx.bench.systems.plan import SystemFacts

TOKENS, BLOCK = 1000, 128
KNOWN = 896  # of 1,000 tokens, in whole blocks


def asked(ttft_ms, *, due_s=0.0, end_s=1.0, session=0, turn=0, prompt_tokens=1032, is_same=None):
    return Asked(session, turn, due_s, end_s, ttft_ms, [10.0, 30.0], prompt_tokens, [1, 2, 3], is_same)


def point(system, load, ttfts, *, per_s=1.0, rate=None, repeat=0, workload=DOCUMENTS, found=None, **more):
    """Of so many requests a second: one for each of `ttfts`."""
    each = [asked(ttft, end_s=len(ttfts) / per_s, session=number) for number, ttft in enumerate(ttfts)]
    found = found or Found(1032.0 * len(ttfts), 0.0, 0.0)
    return Point(system, workload, repeat, load, rate, found, each, **more)


def result(points, targets=(2.0,)):
    return Result(
        machine={"cpu": "a CPU", "cpus": 2},
        model={"name": "tiny", "block_tokens": BLOCK, "kv_bytes_per_token": 65536},
        settings={"targets": targets, "workloads": [DOCUMENTS], "tokens": TOKENS},
        systems={name: SystemFacts(name, {}, []) for name in dict.fromkeys(point.system for point in points)},
        not_run={},
        points=points,
        is_complete=True,
    )


def named(found):
    return {figure.name: figure for figure in found}


def test_what_a_target_allows():
    curve = [(1.0, 100.0), (2.0, 200.0), (3.0, 800.0)]
    assert reached(curve, 50.0) is None
    assert reached(curve, 800.0) == Reached(3.0, is_least=True)
    between = reached(curve, 400.0)
    assert (between.per_s, between.is_least) == (pytest.approx(2.5), False)  # half of the way in powers of two
    assert reached([], 1.0) is None


def test_a_load_is_raised_until_one_misses():
    """One that meets the target again is chance, also where no lower one has met it."""
    assert reached([(1.0, 400.0), (2.0, 100.0)], 200.0) is None
    assert reached([(1.0, 100.0), (2.0, 400.0), (3.0, 100.0)], 200.0).per_s == pytest.approx(1.5)
    # More requests came, and fewer were answered: the target allows what the load before answered.
    assert reached([(2.0, 100.0), (1.9, 400.0)], 200.0).per_s == pytest.approx(2.0)
    assert reached([(2.0, 100.0), (1.9, 150.0)], 200.0) == Reached(2.0, is_least=True)


def test_requests_at_equal_ttft_and_their_ratio_within_a_repeat():
    points = []
    for repeat, slow in ((0, 1.0), (1, 2.0)):  # the machine is half as fast in the second one
        for system, per_s in (("recompute", 1.0), ("pdx-both", 6.0)):
            points += [
                point(system, FIRST, [100.0 * slow], repeat=repeat),
                point(system, records.KNOWN, [100.0 * slow / per_s], repeat=repeat),
                point(system, BURST, [1000.0 * slow] * 4, per_s=per_s / slow, repeat=repeat),
                point(system, "1", [200.0 * slow] * 4, per_s=per_s / slow, rate=per_s, repeat=repeat),
            ]
    found = named(figures(result(points)))
    name = "documents, TTFT p50 within 2 × computing alone"
    assert found[f"{name}: pdx-both"].value == pytest.approx(4.5)  # 6 and 3
    assert found[f"{name}: pdx-both / recompute"].value == pytest.approx(6.0)
    assert found[f"{name}: pdx-both / recompute"].note.startswith("median of 2; 6.00 to 6.00")
    assert found["documents, all at once: answered per second, pdx-both / recompute"].value == pytest.approx(6.0)
    assert found["documents, one at a time, known: TTFT p50, recompute / pdx-both"].value == pytest.approx(6.0)
    assert found["documents, recompute, load 1: TTFT p90"].value == pytest.approx(300.0)
    assert found["documents, recompute, load 1: ITL p50"].value == pytest.approx(20.0)


def test_a_ratio_of_what_is_at_least_says_what_it_is():
    """1 and 2 requests/s against 0.5 and 1, of which one side or both held the target at the highest load."""
    name, notes = "documents, TTFT p50 within 2 × computing alone: pdx-both / recompute", []
    for ours_ms, theirs_ms in ((150.0, 400.0), (400.0, 150.0), (150.0, 150.0), (400.0, 400.0)):
        points = [point("recompute", FIRST, [100.0])]
        for system, per_s, ms in (("pdx-both", 1.0, ours_ms), ("recompute", 0.5, theirs_ms)):
            points += [point(system, "1", [100.0], per_s=per_s, rate=1.0), point(system, BURST, [ms], per_s=2 * per_s)]
        notes.append(named(figures(result(points)))[name].note.partition("; ")[2].partition("; ")[2])
    assert notes == ["at least", "at most", "of the highest loads: both held the target", ""]


def test_a_repeat_in_which_a_target_was_missed_is_told():
    """A median of the others alone would be too good."""
    points = []
    for repeat, ours_ms in ((0, 150.0), (1, 900.0), (2, 900.0)):
        points += [
            point("recompute", FIRST, [100.0], repeat=repeat),
            point("recompute", BURST, [150.0], repeat=repeat),
            point("pdx-both", BURST, [ours_ms], per_s=2.0, repeat=repeat),
            point("plain", BURST, [900.0], per_s=2.0, repeat=repeat),
        ]
    found = named(figures(result(points)))
    head = "documents, TTFT p50 within 2 × computing alone: "
    assert found[f"{head}pdx-both"].note.endswith("; not even at the lowest load in 2 of 3 repeats")
    assert found[f"{head}recompute"].note == "at least: 1.00 to 1.00"
    assert found[f"{head}pdx-both / recompute"].note.endswith("; without 2 repeats in which pdx-both missed the target")
    assert (found[f"{head}plain"].value, found[f"{head}plain"].note) == (
        0.0,
        "not even at the lowest load in 3 of 3 repeats",
    )


@pytest.mark.parametrize(
    ("system", "local", "external", "is_meant"),
    [
        ("recompute", 0, 0, True),
        ("recompute", 128, 0, False),
        ("plain", 0, 0, True),
        ("plain", 128, 128, False),
        ("own-cache", KNOWN, 0, True),
        ("own-cache", KNOWN / 2, 0, False),
        ("own-cache", 0, KNOWN, False),
        ("pdx-both", 0, KNOWN, True),
        ("pdx-both", 256, KNOWN - 256, True),
        ("pdx-both", KNOWN, 0, False),
        ("lmcache-128", 0, KNOWN / 2, False),
    ],
)
def test_tokens_are_where_the_system_is_to_have_them(system, local, external, is_meant):
    one = point(system, BURST, [1.0], found=Found(1032.0 - local - external, local, external))
    assert found_as_expected(result([one]), one) is is_meant


def test_of_a_session_what_it_asked_before_is_known():
    each = [asked(1.0, session=3, turn=turn, prompt_tokens=tokens) for turn, tokens in ((0, 500), (1, 700), (2, 900))]
    known = 3 * BLOCK + 5 * BLOCK  # of 500 and of 700 tokens
    for found, is_meant in ((known, True), (known // 2, False)):
        one = Point("pdx-both", SESSIONS, 0, BURST, None, Found(2100.0 - found, 0.0, found), each)
        assert found_as_expected(result([one]), one) is is_meant


def test_what_must_hold_is_a_figure():
    wrong = [asked(1.0, is_same=True), asked(1.0, is_same=False)]
    one = Point("pdx-both", DOCUMENTS, 0, BURST, None, Found(2064.0, 0.0, 0.0), wrong)
    found = named(figures(result([one])))
    assert (
        found["answers that are those of the reference"].value,
        found["answers that are those of the reference"].is_met,
    ) == (
        0.5,
        False,
    )
    assert found["loads whose tokens were found where they should be"].value == 0.0
