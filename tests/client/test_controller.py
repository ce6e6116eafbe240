"""`Controller` against two real nodes of this host, at their sockets and through a real proxy; and odd answers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from cache_bed import CHUNK, LAYOUT, MODEL, NODES, SHAPE, bed, prompt
from click.testing import CliRunner
from http_server import Canned, answering
from node_harness import attached
from raw_engine import Engine

from pdx.cli.main import main
from pdx.cli.ports import free_ports
from pdx.client.connection import Connection
from pdx.client.controller import Controller
from pdx.client.results import Place
from pdx.errors import (
    ConfigError,
    JobConflict,
    JobUnknown,
    NodeError,
    NodeUnavailable,
    NoEngine,
    PdxError,
    ProtocolError,
    ProxyError,
    SelectionError,
    TierUnknown,
)
from pdx.testing.waiting import wait_until
from pdx.wire.hints import Hints
from pdx.wire.prompt import Prompt
from pdx.wire.tokens import chunk_keys
from pdx.wire.verbs import MAX_EVICTED, Find, Kept

TOKEN = secrets.token_hex(16)


@contextlib.contextmanager
def proxy(control: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
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
    """Two nodes (see `cache_bed`) behind a proxy, whose `url` and `token_file` these are: its verbs need a token."""
    place = tmp_path_factory.mktemp("two")
    control, admin = f"ipc://{place}/control/p.sock", f"127.0.0.1:{free_ports(1)[0]}"
    (place / "control").mkdir(mode=0o700)
    (place / "token").write_text(TOKEN)
    (place / "token").chmod(0o600)
    with (
        bed(place, proxy=control) as made,
        proxy(control, "--admin", admin, "--cache-token-file", str(place / "token")),
        Controller(proxy=f"http://{admin}", token=TOKEN) as cache,
    ):
        made.url, made.token_file = f"http://{admin}", str(place / "token")

        def is_known():
            with contextlib.suppress(PdxError):
                return cache.instances == list(NODES) and bool(cache.find(prompt()).tiers)

        wait_until(is_known, timeout_s=60.0, what="the proxy knows both nodes and their engines")
        yield made


@pytest.fixture(params=["sockets", "proxy"])
def cache(two, request):
    """A controller of both, which reaches them one way or the other."""
    with Controller(*two.addresses) if request.param == "sockets" else Controller(proxy=two.url, token=TOKEN) as made:
        yield made


@pytest.fixture
def local(two):
    """A controller of both at their sockets."""
    with Controller(*two.addresses) as made:
        yield made


def _keys(tokens):
    return chunk_keys(MODEL, tokens)


# ---- looking ------------------------------------------------------------------------------------


def test_a_lookup_says_how_many_tokens_each_tier_of_each_node_has(two, cache):
    tokens = prompt(chunks=4, more=3)
    two.save("alpha", tokens)
    cache.wait(cache.move("alpha/host", "beta/disk", tokens[: 2 * CHUNK], keep=True))
    assert cache.lookup(tokens) == {"alpha": {"host": 64, "disk": 0}, "beta": {"host": 0, "disk": 32}}
    assert cache.lookup(tokens, ["beta"]) == {"beta": {"host": 0, "disk": 32}}
    assert cache.find(tokens).tokens == 64
    cache.pin(tokens[:CHUNK], "alpha", "host")
    assert cache.find(tokens).pinned == {"alpha": {"host": 16}}
    cache.unpin(tokens[:CHUNK], "alpha", "host")


# ---- changing -----------------------------------------------------------------------------------


def test_move_says_what_it_would_do_and_does_it(two, cache):
    tokens = prompt()
    contents = two.save("alpha", tokens)
    keys = _keys(tokens)
    planned = cache.move(("alpha", "host"), ("beta", "host"), tokens, dry_run=True)
    assert (planned.name, planned.status.state, planned.status.chunks) == ("", "planned", 4)
    assert cache.lookup(tokens)["beta"]["host"] == 0
    seen = []
    done = cache.wait(cache.move(Place("alpha", "host"), ("beta", "host"), tokens), seen.append)
    assert (done.instance, done.status.state, done.status.chunks_done) == ("alpha", "done", 4)
    assert seen[-1].status == done.status
    assert cache.lookup(tokens) == {"alpha": {"host": 0, "disk": 0}, "beta": {"host": 64, "disk": 0}}
    assert two.engines["beta"].look(keys) == contents
    assert cache.check_finish(done.name).status.state == "done"
    assert done.name in [job.name for job in cache.jobs()["alpha"]]
    with pytest.raises(SelectionError, match="only planned"):
        cache.check_finish(planned)


def test_evict_asks_until_a_node_has_evicted_what_it_was_asked_for(two, cache):
    """A node evicts so many chunks at a time, for the others that wait for it."""
    small, some = 4 << 10, MAX_EVICTED // 2
    (cleared,) = cache.clear(None, "beta", "host", everything=True).values()
    assert cache.wait(cleared).status.state == "done"
    contents = {number.to_bytes(16, "big"): b"." * small for number in range(1, 1 + 3 * some)}
    two.engines["beta"].save(contents, hints=Hints("", priority=1))
    assert cache.evict(2, 2 * some * small + 1, "beta")["beta"].tiers == [
        Kept("host", most := 2 * some + 1, most * small)
    ]
    assert cache.evict(2, 1 << 40, "*")["beta"].tiers == [Kept("host", some - 1, (some - 1) * small)]


def test_a_job_is_cancelled(two):
    """What is to be moved there waits behind a peer that is stopped."""
    tokens = prompt(chunks=8)
    two.save("alpha", tokens)
    two.cluster.nodes["beta"].signal(signal.SIGSTOP)
    try:
        with Controller(two.address("alpha")) as alone:
            job = alone.move("alpha/host", "beta/disk", tokens)
            assert alone.wait(job, timeout_s=0.1).status.state == "running"
            with pytest.raises(JobConflict, match=job.status.job):
                alone.clear(tokens, "alpha")
            assert alone.cancel(job).status.state == "cancelled"
            assert alone.wait(job.name).is_over
            assert alone.lookup(tokens)["alpha"]["host"] == 8 * CHUNK, "nothing is lost"
    finally:
        two.cluster.nodes["beta"].signal(signal.SIGCONT)
    wait_until(lambda: two.cluster.peer("alpha", "beta").state == "ready", what="the peer is back")


# ---- what cannot be -----------------------------------------------------------------------------


def test_what_is_wrong_is_named(two, cache):
    tokens = prompt()
    two.save("alpha", tokens)
    selection = (
        (lambda: cache.lookup(tokens, ["gamma"]), "no node 'gamma' is known here; there are alpha, beta"),
        (lambda: cache.clear(tokens), "say which node of alpha, beta, or \\* for all"),
        (lambda: cache.move("alpha/", "alpha/disk", tokens), "no tier behind its slash"),
        (lambda: cache.lookup(tokens[:15]), "15 tokens fill no chunk .* one has 16 tokens"),
        (lambda: cache.lookup([*tokens, 100_000]), "knows 100,000 tokens; are these ids of another"),
        (lambda: cache.lookup(Prompt(tokens=tokens, model="llama")), "is, or has, the model 'llama'"),
        (lambda: cache.cancel("gamma:1-1"), "no node 'gamma'"),
        (lambda: cache.compress(tokens, "alpha", "disk", "zip9"), "no codec 'zip9': there are none, lossless"),
        (lambda: cache.lookup(Prompt()), "by one of tokens, text.*, not by nothing"),
        (lambda: cache.clear(tokens, "beta", everything=True), "everything and no tokens"),
    )
    for ask, error, words in (
        *((ask, SelectionError, words) for ask, words in selection),
        (lambda: cache.clear(tokens, "alpha", "tape"), TierUnknown, "no tier 'tape'; it has 'host', 'disk'"),
        (lambda: cache.move("alpha/host", "alpha/tape", tokens), TierUnknown, "it has 'host', 'disk'"),
        (lambda: cache.lookup("a text"), (SelectionError, NoEngine), "serves.* HTTP.*give (token )?ids"),
        (lambda: cache.check_finish("alpha:1-1"), JobUnknown, "of another life of this node"),
        (lambda: cache.check_finish("yesterday"), JobUnknown, "is no job's name, which is NODE:EPOCH-NUMBER"),
        (lambda: cache.compress(tokens, "alpha", "host", "lossless"), NodeError, "as engines read them"),
        (lambda: cache.move("alpha/host", "alpha/host", tokens), ProtocolError, r"\Ahost is moved to itself"),
    ):
        with pytest.raises(error, match=words):
            ask()
    with contextlib.suppress(SelectionError):  # a proxy knows the nodes
        done = cache.wait(cache.move("alpha/host", "gamma/host", tokens))
        assert done.status.state == "failed"
        assert "gamma" in done.status.why
    assert cache.lookup(tokens)["alpha"]["host"] == 64, "nothing came of any of that"


def test_two_nodes_of_one_name_are_refused(two):
    with pytest.raises(SelectionError, match="are both 'alpha'"):
        Controller(two.addresses[0], two.addresses[0])


def test_engines_that_make_other_keys_have_to_be_told_apart(two, local):
    tokens = prompt()
    two.save("alpha", tokens)
    with contextlib.ExitStack() as undo:
        other = undo.enter_context(
            attached(two.address("beta"), kind="scheduler", engine="f" * 16, layout=b"m" * 16, shape=SHAPE)
        )
        assert other
        with pytest.raises(SelectionError, match="of which model the tokens are: engine 'eeee.*; engine 'ffff"):
            local.lookup(tokens)
        assert local.lookup(Prompt(tokens=tokens, model="e" * 16))["alpha"]["host"] == 64
        assert local.lookup(Prompt(tokens=tokens, model=LAYOUT.hex()[:8]))["alpha"]["host"] == 64
        assert local.lookup(Prompt(tokens=tokens, model="f" * 16))["alpha"]["host"] == 0


def test_without_an_engine_nobody_knows_the_keys(node_here):
    with Controller(node_here.address) as cache:
        with pytest.raises(SelectionError, match="no engine is attached"):
            cache.lookup(list(range(1000)))
        assert cache.health(cache.instances[0])[cache.instances[0]].troubles == []


def test_no_node_and_a_node_that_dies(address, start_node):
    with pytest.raises(NodeUnavailable, match="start one with: pdx node"):
        Controller(address, timeout_s=0.2)
    node = start_node()
    with Controller(address) as cache:
        node.kill()
        (name,) = cache.instances
        with pytest.raises(NodeUnavailable, match="has died"):
            cache.jobs(name)
        assert "has died" in cache.health()[name].troubles[0]
    start_node()  # which removes what the dead one has left


def test_a_node_that_does_not_answer_and_others_do(two, local, monkeypatch):
    call_for = Connection.call_for

    def silent(self, *asked):
        if self.node_name == "beta":
            raise NodeUnavailable("it does not answer")
        return call_for(self, *asked)

    tokens = prompt()
    two.save("alpha", tokens)
    monkeypatch.setattr(Connection, "call_for", silent)
    found = local.find(tokens)
    assert found.tiers == {"alpha": {"host": 64, "disk": 0}}
    assert found.errors == {"beta": "it does not answer"}
    done = local.clear(tokens, "*")
    assert (done["alpha"].chunks, done["beta"].error) == (4, "NodeUnavailable")


# ---- texts --------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Canned]:
    """What vLLM answers to who wants a text's tokens: here the code points."""
    server = Canned(lambda asked: json.dumps({"count": 1, "tokens": [ord(each) for each in asked["prompt"]]}).encode())
    with answering(server):
        yield server


def test_a_text_is_made_tokens_of_by_the_engine_once_however_often_tiers_are_asked(node_here, served, monkeypatch):
    text = "the quick brown fox jumps over the lazy dog"
    engine = Engine(node_here.address, layout=LAYOUT, shape=SHAPE, url=served.url)
    call_for, asked = Connection.call_for, []

    def late(self, body, *rest):
        asked.extend([body] if isinstance(body, Find) else [])
        found = call_for(self, body, *rest)
        is_late = isinstance(body, Find) and len(asked) < 3
        return msgspec.structs.replace(found, asking=["remote"]) if is_late else found

    monkeypatch.setattr(Connection, "call_for", late)
    try:
        engine.save({key: bytes(1024) for key in _keys([ord(letter) for letter in text])})
        with Controller(node_here.address) as cache:
            assert [tiers["host"] for tiers in cache.lookup(text).values()] == [32]
            assert (len(asked), served.asked) == (3, ["/tokenize"])
            served.status = 500
            with pytest.raises(SelectionError, match="answers 500 to /tokenize"):
                cache.lookup(text)
            served.shutdown()
            served.socket.close()
            with pytest.raises(SelectionError, match="makes no tokens of a text: .*refused"):
                cache.lookup(text)
    finally:
        engine.close()


# ---- through a proxy ----------------------------------------------------------------------------


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


@pytest.fixture
def odd() -> Iterator[Canned]:
    """A server that is no proxy."""
    server = Canned(lambda asked: b"{}")
    with answering(server):
        yield server


def job(**fields):
    return json.dumps({"nodes": {"a": {"type": "JobStatus", "job": "a:1-1", **fields}}})


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (200, "[1]", ProtocolError, "does not answer /cache/check_finish so"),
        (404, "<html>", ProxyError, "/cache/check_finish answers 404, and not as a proxy's --admin address does"),
        (502, '{"error": {"type": "SystemExit", "message": "no"}}', NodeError, "SystemExit: no"),
        (429, '{"error": {"type": "RequestRefused", "message": "later"}}', ProxyError, "later"),
        (404, '{"error": {"type": "JobUnknown", "message": "gone"}}', JobUnknown, "gone"),
        (200, '{"nodes": {}, "errors": {"a": {"type": "JobUnknown", "message": "gone"}}}', JobUnknown, "gone"),
        (200, job(verb="move", state="asleep", chunks=1), ProtocolError, "Invalid enum value 'asleep'"),
        (200, '{"nodes": {"a": {"type": "Welcome"}}}', ProtocolError, "Invalid value 'Welcome'"),
        (200, '{"nodes": {"a": {"type": "Effect", "tiers": []}}}', ProtocolError, "answers Effect to CheckFinish"),
    ],
)
def test_what_is_no_answer_is_no_surprise(odd, status, body, error, words):
    odd.status, odd.reply = status, lambda asked: body.encode()
    with (
        Controller(proxy=odd.url) as cache,
        pytest.raises(error, match=words),
    ):
        cache.check_finish("a:1-1")


def test_urls_that_are_none(odd):
    for url, error in (("ftp://h", ConfigError), ("http://", ConfigError), (f"/{os.getpid()}/none", ProxyError)):
        with Controller(proxy=url) as cache, pytest.raises(error):
            cache.jobs()
    with pytest.raises(SelectionError, match="not both"):
        Controller("ipc:///x", proxy="http://h")
