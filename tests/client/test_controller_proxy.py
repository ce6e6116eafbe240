"""`Controller` through a real proxy's HTTP, with its token, in front of two real nodes; and answers that are none."""

from __future__ import annotations

import contextlib
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cache_bed import CHUNK, prompt
from click.testing import CliRunner
from http_server import answering
from proxied_bed import TOKEN, proxied_bed, proxy

from pdx.cli.main import main
from pdx.client.controller import Controller
from pdx.errors import (
    ConfigError,
    JobUnknown,
    NodeError,
    ProtocolError,
    ProxyError,
    SelectionError,
)
from pdx.testing.waiting import wait_until


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """See `proxied_bed`."""
    with proxied_bed(tmp_path_factory.mktemp("two")) as made:
        yield made


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
    return json.dumps({"nodes": {"a": {"type": "JobStatus", "job": "a:1-1", **fields}}})


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (200, "[1]", ProtocolError, "does not answer /cache/check_finish so"),
        (404, "<html>", ProxyError, "/cache/check_finish answers 404, and not as a proxy's --admin address does"),
        (302, "", ProxyError, "answers 302"),
        (502, '{"error": {"type": "SystemExit", "message": "no"}}', NodeError, "SystemExit: no"),
        (502, '{"error": {"type": "os", "message": "no"}}', NodeError, "os: no"),
        (429, '{"error": {"type": "RequestRefused", "message": "later"}}', ProxyError, "later"),
        (404, '{"error": {"type": "JobUnknown", "message": "gone"}}', JobUnknown, "gone"),
        (200, '{"nodes": {}, "errors": {"a": {"type": "JobUnknown", "message": "gone"}}}', JobUnknown, "gone"),
        (200, job(verb="move", state="asleep", chunks=1), ProtocolError, "Invalid enum value 'asleep'"),
        (200, job(verb="move", chunks=1), ProtocolError, "missing required field `state`"),
        (200, job(verb="move", state="done", chunks=-1), ProtocolError, "`int` >= 0"),
        (200, '{"nodes": {"a": {"type": "Welcome"}}}', ProtocolError, "Invalid value 'Welcome'"),
        (200, '{"nodes": [1]}', ProtocolError, "Expected `object`"),
        (200, '{"nodes": {"a": {"type": "Effect", "tiers": []}}}', ProtocolError, "answers Effect to CheckFinish"),
    ],
)
def test_what_is_no_answer_is_no_surprise(odd, status, body, error, words):
    odd.status, odd.body = status, body.encode()
    with (
        Controller(proxy=f"http://127.0.0.1:{odd.server_port}") as cache,
        pytest.raises(error, match=words),
    ):
        cache.check_finish("a:1-1")


def test_urls_that_are_none(odd):
    for url, error in (("ftp://h", ConfigError), ("http://", ConfigError), (f"/{os.getpid()}/none", ProxyError)):
        with Controller(proxy=url) as cache, pytest.raises(error):
            cache.jobs()
    with pytest.raises(SelectionError, match="not both"):
        Controller("ipc:///x", proxy="http://h")
