"""Fixtures of the tests of links. Tests of other parts of a node have a `stage` of their own."""

import pytest
from connection_stage import Raw, Stage


@pytest.fixture
def stage(place):
    made = Stage(place)
    yield made
    made.close()


@pytest.fixture
def raw(stage):
    """Dials a node and says anything."""
    return lambda node: stage.undo.enter_context(Raw(stage, node))
