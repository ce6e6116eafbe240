"""What it is worth that a prompt was seen before: medians, ratios inside a round, and requests that are not what they
should be."""

import pytest
from breakdown_samples import overhead, result

from pdx.bench.breakdown import figures as breakdown_figures
from pdx.bench.breakdown import reuse as reuse_figures
from pdx.bench.breakdown.records import Again, Found, Kind

FOUND = {
    Kind.COLD: Found(4000, 0, 0),
    Kind.OWN: Found(32, 3968, 0),
    Kind.HIT: Found(160, 0, 3840),
    Kind.LOST: Found(4000, 0, 0),
}


def again(system, kind, ttft_ms, round_=0, *, tokens=4000, found=None, is_same=True):
    is_compared = kind in (Kind.OWN, Kind.HIT)
    return Again(system, round_, tokens, kind, ttft_ms, found or FOUND[kind], is_same if is_compared else None)


def measured(*requests):
    names = dict.fromkeys(each.system for each in requests)
    return result([], again=list(requests), systems=dict.fromkeys(names), traces=[], copies=[], overhead=overhead())


def three_rounds():
    """Everything takes longer from round to round."""
    for round_, factor in enumerate((1.0, 2.0, 4.0)):
        times = {
            "pdx-both": {Kind.COLD: 12_000, Kind.OWN: 300, Kind.HIT: 1_000},
            "lmcache": {Kind.COLD: 13_200, Kind.OWN: 300, Kind.HIT: 1_200},
            "plain": {Kind.COLD: 12_000, Kind.OWN: 300, Kind.LOST: 12_000},
        }
        for system, kinds in times.items():
            yield from (again(system, kind, factor * ms, round_) for kind, ms in kinds.items())


def figures_of(found):
    return {figure.name.removeprefix("4,000 tokens, seen before: "): figure for figure in reuse_figures.figures(found)}


def test_ratios_are_those_of_a_round():
    found = {name: figure.value for name, figure in figures_of(measured(*three_rounds())).items()}
    assert found == {
        "pdx-both: TTFT, nobody has seen the prompt": 24_000,
        "pdx-both: TTFT, its own prefix cache has the prompt": 600,
        "pdx-both: TTFT, what it keeps has the document": 2_000,
        "pdx-both: tokens found by what it keeps": 3840,
        "lmcache: TTFT, nobody has seen the prompt": 26_400,
        "lmcache: TTFT, its own prefix cache has the prompt": 600,
        "lmcache: TTFT, what it keeps has the document": 2_400,
        "lmcache: tokens found by what it keeps": 3840,
        "plain: TTFT, nobody has seen the prompt": 24_000,
        "plain: TTFT, its own prefix cache has the prompt": 600,
        "plain: TTFT, nothing has the document any more": 24_000,
        "pdx-both: cold / hit": 12,
        "pdx-both: hit / own prefix cache": pytest.approx(3.3333),
        "lmcache: cold / hit": 11,
        "lmcache: hit / own prefix cache": 4,
        "cold, pdx-both / plain": 1,
        "cold, lmcache / plain": pytest.approx(1.1),
        "hit, lmcache / pdx-both": pytest.approx(1.2),
        "computed again / hit, plain / pdx-both": 12,
        "requests whose tokens were found where they should be": 1,
        "answers to prompts that were seen before, the same as computed": 1,
    }


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Kind.COLD, Found(160, 0, 3840)),  # somebody knew it
        (Kind.COLD, Found(32, 3968, 0)),
        (Kind.OWN, Found(4000, 0, 0)),  # evicted
        (Kind.OWN, Found(32, 128, 3840)),
        (Kind.HIT, Found(4000, 0, 0)),  # a miss
        (Kind.HIT, Found(32, 3968, 0)),  # the own cache was not emptied
        (Kind.LOST, Found(32, 3968, 0)),
    ],
)
def test_a_request_whose_tokens_came_from_elsewhere_is_counted_and_not_averaged(kind, found):
    system = "plain" if kind is Kind.LOST else "pdx-both"
    one = figures_of(measured(again(system, kind, 100.0, found=found), again(system, kind, 200.0, 1)))
    assert one[f"{system}: {reuse_figures.TITLES[kind]}"].value == 200.0
    check = one["requests whose tokens were found where they should be"]
    assert (check.value, check.is_met, check.note) == (0.5, False, "1 of 2")


def test_a_wrong_answer_misses_its_goal():
    found = figures_of(measured(again("pdx-both", Kind.HIT, 100.0, is_same=False), again("pdx-both", Kind.OWN, 50.0)))
    same = found["answers to prompts that were seen before, the same as computed"]
    assert (same.value, same.is_met, same.note) == (0.5, False, "1 of 2")


def test_a_run_about_reuse_lacks_no_goal_of_pairs():
    found = measured(*three_rounds())
    assert breakdown_figures.missing(found) == []
    asked_for = measured(*three_rounds())
    asked_for.not_run["pdx"] = "no room"
    assert "all goals: pdx did not run (no room)" in breakdown_figures.missing(asked_for)
