"""What the tests of disks and remote stores share."""

import contextlib
import functools
import itertools

import disk_bed
import pytest
from disk_bed import closing_all
from gate import Gate
from memory_store import MemoryBed, MemoryStore
from remote_bed import Bed, made, running

from pdx.store.disk import chunk_file


@pytest.fixture
def make(tmp_path):
    """Makes disk tiers over one folder."""
    with closing_all(functools.partial(disk_bed.Bed, tmp_path)) as make_bed:
        yield make_bed


@pytest.fixture
def bed(make):
    """As the file makes them."""
    return make()


@pytest.fixture
def gate(monkeypatch):
    """Makes gates, which are open in the end."""
    with contextlib.ExitStack() as undo:

        def make(name, of=chunk_file, **settings):
            made = Gate(monkeypatch, of, name, **settings)
            undo.callback(made.open)
            return made

        yield make


@pytest.fixture
def beds(tmp_path):
    folders = (tmp_path / f"bed{number}" for number in itertools.count())
    with closing_all(lambda url, **settings: Bed(next(folders), url, **settings)) as make:
        yield make


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """SeaweedFS, which takes seconds to start; each test uses other chunks."""
    server = made("s3", tmp_path_factory.mktemp("s3") / "server").start()
    yield server
    server.kill()


@pytest.fixture
def memory():
    return MemoryStore()


@pytest.fixture
def over_memory(tmp_path, memory):
    """Makes tiers over one store within this process."""
    folders = (tmp_path / f"over{number}" for number in itertools.count())
    with closing_all(lambda **settings: MemoryBed(next(folders), memory, **settings)) as make:
        yield make


@pytest.fixture
def serve(monkeypatch):
    """Starts a server, whose client finds it by the environment, until the test is over."""
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(running(server, monkeypatch))


@pytest.fixture
def redis(tmp_path, serve):
    return serve(made("redis", tmp_path / "redis"))
