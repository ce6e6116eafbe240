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
def serve(monkeypatch):
    """Starts a server, whose client finds it by the environment, until the test is over."""
    servers = []

    def start(server):
        servers.append(server)
        server.start()
        for name, value in server.env().items() if hasattr(server, "env") else ():
            monkeypatch.setenv(name, value)
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def redis(tmp_path, serve):
    return serve(made("redis", tmp_path / "redis"))
