"""What the tests of remote stores share."""

import contextlib
import itertools

import pytest
from disk_bed import closing_all
from remote_bed import Bed, made, running


@pytest.fixture
def beds(tmp_path):
    folders = (tmp_path / f"bed{number}" for number in itertools.count())
    with closing_all(lambda url, **settings: Bed(next(folders), url, **settings)) as make:
        yield make


@pytest.fixture
def serve(monkeypatch):
    """Starts a server, whose client finds it by the environment, until the test is over."""
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(running(server, monkeypatch))


@pytest.fixture
def redis(tmp_path, serve):
    return serve(made("redis", tmp_path / "redis"))
