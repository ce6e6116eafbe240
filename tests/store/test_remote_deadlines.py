"""What the deadline of one call to a remote store holds: all addresses of a name, a second try, many names at once."""

import contextlib
import http.server
import itertools
import re
import socket
import threading
import time
import tomllib
from pathlib import Path

import pytest
from remote_bed import S3Handler, opened, s3_answers

from pdx.errors import ConfigError, TierError
from pdx.store.remote import redis_backend
from pdx.store.remote.s3_backend import S3Backend

DEADLINE_S = 1.0
ADDRESSES = 6  # of one name


@pytest.fixture
def silent():
    """A port of this host at which nobody takes connections: what is sent there is dropped."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("0.0.0.0", 0))
        stack.enter_context(taking_none(listener))
        yield listener.getsockname()[1]


@contextlib.contextmanager
def taking_none(listener):
    """Nobody can make a connection to this one: its queue is full, and is not emptied."""
    with contextlib.ExitStack() as stack:
        listener.listen(0)
        for _ in range(3):  # until its queue is full
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waits.connect(("127.0.0.1", listener.getsockname()[1]))
        yield


def named(monkeypatch, port):
    """A name with several addresses: the store's."""
    real = socket.getaddrinfo

    def resolved(host, *settings, **more):
        if host != "store.test":
            return real(host, *settings, **more)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (f"127.0.0.{last}", port))
            for last in range(1, ADDRESSES + 1)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["valkey", "valkeys"])
def test_a_name_with_several_addresses_has_one_deadline(monkeypatch, silent, scheme):
    named(monkeypatch, silent)
    backend = opened(f"{scheme}://store.test:{silent}", timeout_s=DEADLINE_S)
    started_at = time.monotonic()
    with pytest.raises(TierError) as raised:
        backend.connect(1)
    backend.close()
    assert raised.value.kind == "timeout"
    assert time.monotonic() - started_at < DEADLINE_S * ADDRESSES / 2, "not one for each address"


def test_the_limit_of_a_connection_is_not_that_of_the_call_that_made_it(redis):
    """A question makes it, with little time left; a load uses it later."""
    backend = opened(redis.url, timeout_s=60.0, lookup_s=2.0)
    assert backend.heads(["x"], 100) == [None]
    redis.cli("CLIENT", "PAUSE", "2500")
    assert backend.read("x", []) is None
    backend.close()


def test_a_client_whose_calls_cannot_be_bounded_is_refused(monkeypatch):
    """It would be used with a deadline for each read alone."""
    monkeypatch.delattr(redis_backend.redis.Connection, "_connect", raising=False)
    monkeypatch.delattr(redis_backend.redis.connection.AbstractConnection, "_connect", raising=False)
    with pytest.raises(ConfigError, match=r"redis-py [0-9.]+ .* pip install 'redis\[hiredis\]>=5.2,<9'"):
        opened("valkey://127.0.0.1")


def test_the_client_that_is_supported_is_the_one_that_is_installed_with_pdx():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["optional-dependencies"]["redis"] == [redis_backend.SUPPORTED]


class ObjectStore(S3Handler):
    """S3 as far as one call needs it. `busy_s` after the first request it says that it is busy, and then nothing more;
    each request to remove takes `removes_s`. A `busy_s` of None: until the test is over."""

    busy_s = removes_s = 0.0
    status = 503
    connections = 0
    requests: list
    is_over: threading.Event
    at: http.server.HTTPServer

    def setup(self):
        type(self).connections += 1
        super().setup()

    def do_GET(self):
        self.requests.append(self.path)
        self.is_over.wait(self.busy_s if len(self.requests) == 1 else None)
        self.say(self.status)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        names = re.findall("<Key>([^<]*)</Key>", body)
        self.requests.append(names)
        self.is_over.wait(self.removes_s)
        self.say(
            200, f"<DeleteResult>{''.join(f'<Deleted><Key>{name}</Key></Deleted>' for name in names)}</DeleteResult>"
        )


@pytest.fixture
def object_store(monkeypatch):
    class Own(ObjectStore):
        requests, is_over = [], threading.Event()

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with s3_answers(Own, monkeypatch) as Own.at:
        yield Own
        Own.is_over.set()


@pytest.mark.long
@pytest.mark.parametrize(("busy_share", "tries"), [(0.0, 2), (0.9, 1)])
def test_a_second_try_does_not_double_the_deadline(object_store, busy_share, tries):
    """A store that is busy is asked once more, if it said so at once."""
    limit_s = 4 * DEADLINE_S
    object_store.busy_s = busy_share * limit_s
    backend = opened("s3://bucket", timeout_s=limit_s)
    started_at = time.monotonic()
    with pytest.raises(TierError):
        backend.read("x", [])
    took_s = time.monotonic() - started_at
    backend.close()
    assert len(object_store.requests) == tries
    assert took_s < 1.5 * limit_s


def test_an_answer_of_s3_that_comes_too_late_leaves_its_connection(object_store, monkeypatch):
    """To make one to a store that is far away takes longer than a question has, so that no later one would end well.
    Here none can be made. (Where one can, the client begins to make one when it is asked again at once: the thread of
    the request has the answer a moment before the connection is free. It takes what is there first.)"""
    monkeypatch.setattr(S3Backend, "most", 1)  # one thread: there is one request, whose answer is late
    object_store.busy_s, object_store.status, object_store.protocol_version = None, 404, "HTTP/1.1"
    backend = opened("s3://bucket", timeout_s=60.0, lookup_s=0.2)
    while not object_store.requests:  # a question may end before the thread begins
        with pytest.raises(TierError, match="no answer to all of a question"):
            backend.heads(["x"], 100)
    object_store.at.shutdown()  # it accepts no connection; the one that there is has a thread
    with taking_none(object_store.at.socket):
        time.sleep(0.2)  # nor does the client end the request soon afterwards
        object_store.is_over.set()
        assert backend.read("y", []) is None
        backend.close()
    assert [len(object_store.requests), object_store.connections] == [2, 1]


def test_many_names_are_removed_by_few_requests(object_store):
    object_store.removes_s = 0.3
    backend = opened("s3://bucket", timeout_s=60.0)
    names = [str(number) for number in range(1500)]
    backend.remove(names)
    backend.close()
    assert len(object_store.requests) == 2
    assert sorted(itertools.chain.from_iterable(object_store.requests)) == sorted(names)
