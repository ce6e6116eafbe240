"""Fixtures of the tests of a node's service."""

import pytest
from service_stage import Clock


@pytest.fixture
def clock():
    return Clock()
