"""Storms, whose events Hypothesis chooses and makes fewer where one fails. `PDX_STORM_EXAMPLES=1000` runs longer;
`--part=long` plays others each time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from connector_storm import (
    COUNTS,
    NODE_TROUBLE,
    REQUESTS,
    SHAPES,
    TROUBLE,
    Event,
    Storm,
    StormNode,
    modes_of,
    storm_bed,
)
from exact_engine import Engine
from exact_kinds import EVERY_DAY, KINDS
from exact_releases import missing
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("PDX_STORM_EXAMPLES", examples(20)))  # of each mode


def requests(trouble: tuple[str, ...]) -> st.SearchStrategy[Event]:
    """Some of each sort, and trouble among them."""
    return st.builds(
        Event,
        kind=st.sampled_from(REQUESTS * 3 + trouble),
        after=st.integers(0, 30),
        engine=st.integers(0, 3),
        base=st.integers(0, 12),
        cut=st.just(0) | st.integers(0, 700),
        tail=st.integers(0, 150),
        tail_seed=st.integers(0, 5),
        count=st.integers(0, len(COUNTS) - 1),
        pick=st.integers(0, 60),
        beside=st.integers(0, 3),
    )


_names = itertools.count()


PLAYED = [(mode, kind) for kind in KINDS for mode in modes_of(kind)]


def _is_long(mode: str, kind: str) -> bool:
    """Engines of the mode "mixed" are those of "sync" and "async" on one node."""
    return mode in ("sync", "async") or (kind not in EVERY_DAY and mode != "ranks")


@pytest.fixture(
    params=[
        pytest.param(played, id="-".join(played), marks=pytest.mark.long if _is_long(*played) else [])
        for played in PLAYED
    ]
)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[Engine], StormNode]]:
    mode, kind = request.param
    for shape in SHAPES[mode]:
        if why := missing(shape):
            pytest.skip(why)
    with storm_bed(mode, tmp_path, kind) as bed:
        yield bed


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(played=st.lists(requests(TROUBLE * 2 + NODE_TROUBLE), min_size=1, max_size=20))
def test_every_token_is_right_and_nothing_is_left(made: tuple[list[Engine], StormNode], played: list[Event]) -> None:
    storm = Storm(f"storm-{next(_names)}", *made)
    storm.play(played)
    storm.settle()
