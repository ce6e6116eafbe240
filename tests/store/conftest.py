"""What the tests of remote stores share."""

import itertools

import pytest
from disk_bed import closing_all
from remote_bed import Bed, made


@pytest.fixture
def beds(tmp_path):
    folders = (tmp_path / f"bed{number}" for number in itertools.count())
    with closing_all(lambda url, **settings: Bed(next(folders), url, **settings)) as make:
        yield make


@pytest.fixture
def redis(tmp_path):
    server = made("redis", tmp_path / "redis").start()
    yield server
    server.kill()
