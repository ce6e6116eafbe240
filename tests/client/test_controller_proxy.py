"""`Controller` through a real proxy's HTTP, with its token, in front of two real nodes; and answers that are none."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cache_bed import CHUNK, NODES, bed, prompt
from click.testing import CliRunner
from http_server import answering
from raw_engine import CHUNK_BYTES

from pdx.cli.main import main
from pdx.cli.ports import free_ports
from pdx.client.controller import Controller
from pdx.client.prompt import Job, Prompt
from pdx.errors import (
    ChunkMissing,
    ConfigError,
    JobUnknown,
    NodeError,
    PdxError,
    ProtocolError,
    ProxyError,
    SelectionError,
    TierUnknown,
)
from pdx.testing.waiting import wait_until
from pdx.wire.verbs import Effect, Kept

TOKEN = secrets.token_hex(16)


@contextlib.contextmanager
def proxy(control, *options):
    """A `pdx proxy` in a process of its own."""
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "proxy", "--port", str(port), "--control", control, *options]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two nodes behind a proxy whose verbs need a token."""
    place = tmp_path_factory.mktemp("two")
    control = f"ipc://{place}/control/p.sock"
    (place / "control").mkdir(mode=0o700)
    (port,) = free_ports(1)
    (place / "token").write_text(TOKEN)
    (place / "token").chmod(0o600)
    with bed(place, proxy=control) as made:
        admin = f"127.0.0.1:{port}"
        with proxy(control, "--admin", admin, "--cache-token-file", str(place / "token")):
            made.url, made.token_file = f"http://{admin}", str(place / "token")
            with Controller(proxy=made.url, token=TOKEN) as cache:
                wait_until(lambda: _knows(cache), timeout_s=60.0, what="the proxy knows both nodes and their engines")
            yield made


def _knows(cache):
    with contextlib.suppress(PdxError):
        return cache.instances == list(NODES) and bool(cache.find(prompt()).tiers)
    return False


@pytest.fixture
def cache(two):
    """A controller of both."""
    with Controller(proxy=two.url, token=TOKEN) as made:
        yield made


def test_all_verbs_go_through_the_proxy(two, cache):
    tokens = prompt()
    two.save("alpha", tokens, request="cmpl-proxy-0", session="dave")
    found = cache.find(tokens)
    assert (found.tokens, found.hits) == (64, {"alpha": 64, "beta": 0})
    assert cache.lookup(tokens, ["alpha"]) == {"alpha": {"host": 64, "disk": 0}}
    assert cache.find(Prompt(request="cmpl-proxy"), ["alpha"]).tiers == {"alpha": {"host": 4, "disk": 0}}
    assert cache.query_ip(["beta"]) == {"beta": f"{two.address('beta')}.peers"}
    assert [each.status.name for each in cache.health().values()] == list(NODES)
    assert cache.health("alpha")["alpha"].troubles == []
    assert [(kept.name, kept.chunks) for kept in cache.ls("alpha", session="dave")["alpha"].sessions] == [("dave", 4)]
    assert cache.why("cmpl-proxy-0", "alpha")["alpha"].requests[0].reasons[0].count == 4

    assert cache.pin(tokens, "alpha", "host", dry_run=True)["alpha"].dry_run
    assert cache.pin(tokens, "alpha", "host") == {"alpha": Effect([Kept("host", 4, 4 * CHUNK_BYTES)])}
    assert cache.find(tokens).pinned == {"alpha": {"host": 64}}
    assert cache.unpin(tokens, "alpha", "host")["alpha"].chunks == 4

    planned = cache.move("alpha/host", "beta/disk", tokens, dry_run=True)
    assert (planned.name, planned.status.state, planned.status.chunks) == ("", "planned", 4)
    done = cache.wait(cache.move("alpha/host", "beta/disk", tokens))
    assert (done.instance, done.status.state, done.status.chunks_done) == ("alpha", "done", 4)
    assert cache.check_finish(done.name).status.state == "done"
    assert cache.cancel(done).status.state == "done"
    assert done.name in [job.name for job in cache.jobs()["alpha"]]
    assert cache.lookup(tokens) == {"alpha": {"host": 0, "disk": 0}, "beta": {"host": 0, "disk": 64}}

    assert cache.wait(cache.verify("beta", "disk")).status.state == "done"
    assert cache.clear(tokens, "*")["beta"].chunks == 4
    two.save("alpha", tokens)
    assert cache.evict(1, 2 * CHUNK_BYTES, "alpha", dry_run=True)["alpha"].chunks == 2
    (job,) = cache.clear(None, "alpha", "host", everything=True).values()
    assert isinstance(job, Job)
    assert cache.wait(job).status.state == "done"
    assert cache.lookup(tokens)["alpha"] == {"host": 0, "disk": 0}


def test_what_nodes_and_the_proxy_refuse_is_raised_as_what_it_is(two, cache):
    tokens = prompt()
    two.save("alpha", tokens)
    for ask, error, words in (
        (lambda: cache.lookup(tokens, ["gamma"]), SelectionError, "gamma.*alpha, beta"),
        (lambda: cache.lookup(tokens[:9]), SelectionError, "one has 16 tokens"),
        (lambda: cache.lookup([*tokens, 100_000]), SelectionError, "knows 100,000 tokens"),
        (lambda: cache.clear(tokens, "alpha", "tape"), TierUnknown, "'host', 'disk'"),
        (lambda: cache.move("beta/disk", "beta/host", tokens), ChunkMissing, "none of 4 chunks is in disk"),
        (lambda: cache.verify("alpha", "host"), NodeError, "host is no disk"),
        (lambda: cache.check_finish("alpha:1-1"), JobUnknown, "another life"),
        (lambda: cache.check_finish("gamma:1-1"), SelectionError, "gamma"),
        (lambda: cache.find(Prompt(request="r" * 300)), PdxError, "request"),
    ):
        with pytest.raises(error, match=words):
            ask()


def test_without_the_token_nothing_is_said(two):
    for token in ("", "x" * 32):
        with Controller(proxy=two.url, token=token) as cache, pytest.raises(ProxyError, match="token"):
            cache.jobs()


def test_the_command_shows_the_token_in_a_file(two, tmp_path):
    tokens = prompt()
    two.save("beta", tokens)
    ids = ",".join(map(str, tokens))

    def run(*arguments):
        return CliRunner().invoke(main, ["cache", *arguments, "--proxy", two.url])

    done = run("move", "beta/host", "alpha/disk", "--ids", ids, "--token-file", two.token_file)
    assert (done.exit_code, done.stdout[:29]) == (0, "done: move 4 of 4 chunks from"), done.output
    done = run("lookup", "--ids", ids, "--json", "--token-file", two.token_file)
    assert json.loads(done.stdout)["tiers"]["alpha"] == {"host": 0, "disk": 4 * CHUNK}
    assert "token" in run("jobs").stderr
    open_file = tmp_path / "open"
    open_file.write_text(TOKEN)
    open_file.chmod(0o644)
    done = run("jobs", "--token-file", str(open_file))
    assert "chmod 600" in done.stderr
    assert TOKEN not in done.stderr


def test_a_proxy_at_a_unix_socket_asks_for_no_token(tmp_path):
    for name in ("control", "admin"):
        (tmp_path / name).mkdir(mode=0o700)
    socket = tmp_path / "admin" / "s.sock"
    with proxy(f"ipc://{tmp_path}/control/p.sock", "--admin", str(socket)):
        wait_until(lambda: _answers(socket), timeout_s=60.0, what="the proxy serves")
        with Controller(proxy=str(socket)) as cache:
            assert cache.instances == []
            with pytest.raises(SelectionError, match="say which node of none"):
                cache.clear(list(range(100)))


def _answers(socket):
    with Controller(proxy=str(socket)) as cache, contextlib.suppress(ProxyError):
        return cache.instances == []
    return False


# ---- answers that are none ----------------------------------------------------------------------


class Odd(ThreadingHTTPServer):
    """Answers everything alike."""

    daemon_threads = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.body = 200, b"{}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_):
        pass


@pytest.fixture
def odd():
    """A server that is no proxy."""
    server = Odd()
    with answering(server):
        yield server


def job(**fields):
    return json.dumps({"type": "JobStatus", "job": "a:1-1", "instance": "a", **fields})


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (200, "[1]", ProxyError, "not as a proxy's --admin address does"),
        (404, "<html>", ProxyError, "answers 404"),
        (302, "", ProxyError, "answers 302"),
        (502, '{"error": {"type": "SystemExit", "message": "no"}}', NodeError, "SystemExit: no"),
        (502, '{"error": {"type": "os", "message": "no"}}', NodeError, "os: no"),
        (429, '{"error": {"type": "RequestRefused", "message": "later"}}', ProxyError, "later"),
        (404, '{"error": {"type": "JobUnknown", "message": "gone"}}', JobUnknown, "gone"),
        (200, job(verb="move", state="asleep", chunks=1), ProtocolError, "JobStatus is none"),
        (200, job(verb="move", chunks=1), ProtocolError, "JobStatus lacks state"),
        (200, job(verb="move", state="done", chunks=-1), ProtocolError, "JobStatus is none"),
        (200, '{"type": "Welcome", "instance": "a"}', ProtocolError, "answers 'Welcome'"),
        (200, '{"type": "os", "instance": "a"}', ProtocolError, "answers 'os'"),
        (200, '{"type": "Effect", "tiers": [], "instance": "a"}', ProtocolError, "answers Effect and no JobStatus"),
    ],
)
def test_what_is_no_answer_is_no_surprise(odd, status, body, error, words):
    odd.status, odd.body = status, body.encode()
    with (
        Controller(proxy=f"http://127.0.0.1:{odd.server_port}") as cache,
        pytest.raises(error, match=words),
    ):
        cache.check_finish("a:1-1")


def test_entries_that_are_none_and_urls_that_are_none(odd):
    odd.body = b'{"instances": [1]}'
    with (
        Controller(proxy=f"http://127.0.0.1:{odd.server_port}/") as cache,
        pytest.raises(ProtocolError, match="by nodes"),
    ):
        cache.jobs()
    for url, error in (("ftp://h", ConfigError), ("http://", ConfigError), (f"/{os.getpid()}/none", ProxyError)):
        with Controller(proxy=url) as cache, pytest.raises(error):
            cache.jobs()
    with pytest.raises(SelectionError, match="not both"):
        Controller("ipc:///x", proxy="http://h")
