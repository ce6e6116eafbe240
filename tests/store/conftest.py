"""What the tests of remote stores share."""

import pytest
from remote_bed import Bed, made


@pytest.fixture
def beds(tmp_path):
    beds = []

    def make(url, **settings):
        beds.append(Bed(tmp_path / f"bed{len(beds)}", url, **settings))
        return beds[-1]

    yield make
    for bed in beds:
        bed.close()


@pytest.fixture
def redis(tmp_path):
    server = made("redis", tmp_path / "redis").start()
    yield server
    server.kill()
