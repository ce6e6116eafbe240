"""Who may say verbs over HTTP, and what a request may look like."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from types import SimpleNamespace

import aiohttp
import pytest
from cache_stage import KEY, SHAPE, TOKEN, refused, stage
from proxy_harness import until
from yarl import URL

from pdx.errors import ConfigError, RequestRefused
from pdx.proxy.app import Proxy
from pdx.proxy.cache import access, routes
from pdx.proxy.config import ProxyConfig
from pdx.proxy.server import Server
from pdx.telemetry.env import Env
from pdx.wire.verbs import JobStatus

RUNNING = JobStatus("a:3f-7", "move", "running", 4)
SAID = {"what": {"keys": [KEY]}}


async def test_without_the_token_nothing_is_told_and_nothing_done(one, caplog):
    wrong = ("", "x" * 32, TOKEN[:-1], TOKEN + "x", "é" * 16)
    for token in wrong:
        for verb in ("clear", "health", "nonsense"):
            status, answer = await one.post(verb, SAID, node="a", token=token)
            assert (status, answer["error"]["type"]) == (401, "RequestRefused")
        assert not token or token not in caplog.text
    assert one.nodes["a"].verbs == []
    assert one.counters["controllers_denied"] == 3 * len(wrong)
    assert TOKEN not in caplog.text


async def test_the_token_is_read_again_when_its_file_changes(one, tmp_path, caplog):
    file, other = tmp_path / "token", secrets.token_hex(32)
    fresh = tmp_path / "fresh"
    fresh.write_text(other)
    fresh.chmod(0o600)
    fresh.replace(file)
    assert (await one.listed())[0] == 401
    assert (await one.listed(token=other))[0] == 200
    file.chmod(0o644)  # others can read it: it is worth nothing
    status, answer = await one.listed(token=other)
    assert (status, answer["error"]["message"]) == (503, "the proxy's token file cannot be used; see its log")
    file.unlink()
    assert (await one.listed(token=other))[0] == 503
    assert "nobody may say verbs: token file" in caplog.text
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("short", 0o600, "holds no token"),
        ("", 0o600, "holds no token"),
        ("a token of several words, which no header has", 0o600, "holds no token"),
        ("x" * 2000, 0o600, "holds no token"),
        ("x" * 32, 0o604, "nobody but user"),
        (None, 0, "No such file"),
    ],
)
def test_a_token_file_that_is_wrong_is_refused_at_the_start(tmp_path, text, mode, why):
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=why) as raised:
        Proxy(ProxyConfig(control=f"ipc://{tmp_path}/p.sock", cache_token_file=str(file)), Env())
    assert not text or text not in str(raised.value)


async def test_wrong_tokens_of_one_address_are_bounded(one, monkeypatch):
    monkeypatch.setattr(access, "MAX_FAILED", 3)
    for _ in range(3):
        assert (await one.post("health", token="x" * 32))[0] == 401
    assert (await one.post("health", token="y" * 32))[0] == 429
    assert (await one.post("health"))[0] == 429, "or guesses would go on"
    one.made.pass_time(access.WINDOW_S)
    assert (await one.listed())[0] == 200


def test_addresses_that_fail_are_forgotten_the_oldest_first(monkeypatch, tmp_path):
    monkeypatch.setattr(access, "MAX_FAILED", 1)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    made = access.Access(str(tmp_path / "token"), Env(lambda: 0.0))

    def status(address):
        with pytest.raises(RequestRefused) as refused:
            made.check(SimpleNamespace(remote=address, headers={}, transport=None))
        return refused.value.status

    assert {status(address) for address in range(2000)} == {401}
    assert [status(address) for address in (1999, 0)] == [429, 401]


async def get_at(path, url="http://pdx/cache", **headers):
    """The status, by a Unix socket."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as client,
        client.get(url, headers=headers) as response,
    ):
        return response.status


@pytest.mark.parametrize("has_token", [False, True])
async def test_without_a_token_verbs_are_for_this_users_unix_socket_alone(tmp_path, has_token):
    async with stage(tmp_path, "a", **({} if has_token else {"cache_token_file": ""})) as made:
        if not has_token:
            for token in ("", TOKEN):
                status, answer = await made.post("health", token=token)
                assert status == 403
                assert "--cache-token-file" in answer["error"]["message"]
                assert "--admin /path" in answer["error"]["message"]
        folder = tmp_path / "admin"
        server = Server(made.made.proxy.admin_app(), made.made.proxy.env)
        await server.start(f"{folder}/s.sock")
        assert await get_at(f"{folder}/s.sock") == (401 if has_token else 200)
        assert await get_at(f"{folder}/s.sock", Authorization=f"Bearer {TOKEN}") == 200
        await server.close()


async def test_what_makes_no_sense_is_refused_in_words_and_reaches_no_node(tmp_path):
    cases = [
        (b"not json", 400),
        (b"[]", 400),
        (b'{"what": {"keys": ["ab"]}}', 400),
        (b'{"what": {"keys": "' + b"ab" * 16 + b'"}}', 400),
        (b'{"what": {"keys": []}}', 400),
        *((b'{"what": {"tokens": [' + bad + b"]}}", 400) for bad in (b"1.5", b"true", b"-1", b"9" * 20, b'"1"')),
        (b'{"unknown": 1, "what": {"tokens": [1]}}', 400),
        (b'{"what": {"tokens": [1], "unknown": 1}}', 400),
        (b'{"what": {"text": "\xff"}}', 400),
        (b'{"what": {"text": ' + b"[" * 100_000, 400),
        (b"{}", 400),
        (b"", 400),
        (b'{"what": {"text": "a", "request": "b"}}', 400),
        (b'{"what": {"tokens": [1], "text": ""}}', 400),  # a text that is empty is one
        (b'{"what": {"tokens": [' + b"1," * 600_000 + b"1]}}", 413),
        (b'{"what": {"keys": [' + b",".join([b'"' + b"ab" * 16 + b'"'] * 16_385) + b"]}}", 400),
    ]
    async with stage(tmp_path, "a", max_body_bytes=1 << 20) as made:
        for raw, status in cases:
            got, answer = await made.post("lookup", raw=raw)
            assert got == status, (raw[:40], answer)
            assert answer["error"]["type"] in ("RequestRefused", "SelectionError")
            assert answer["error"]["message"]
        for how, status, said in (
            *(({"query": [("wait_s", each)]}, 400, "node=NAME and wait_s") for each in ("1e9", "nan", "x")),
            ({"query": [("at", "a/host")]}, 400, "node=NAME and wait_s"),
            ({"headers": {"Content-Type": "text/plain"}}, 415, "application/json"),  # which a page may post unasked
            ({"headers": {"Content-Encoding": "gzip", "Content-Type": "application/json;a*0*"}}, 415, "sent unpacked"),
        ):
            got, answer = await made.post("clear", SAID, node="a", **how)
            assert (got, said in answer["error"]["message"]) == (status, True)
        assert made.nodes["a"].verbs == []
        assert made.counters["internal_errors"] == 0


async def test_what_is_not_there_is_named_with_what_there_is(tmp_path):
    async with stage(tmp_path, "a", "b/c") as made:
        for verb, said, error, text in (
            ("lookup", {**SAID, "node": "x"}, "SelectionError", "no node 'x' is known here; there are a, b/c"),
            ("clear", {**SAID, "tier": "host"}, "SelectionError", "say at which node"),
            ("move", {**SAID, "node": "a", "source": "host"}, "RequestRefused", "missing required field `target`"),
            ("lookup", {"what": {"tokens": [1]}}, "SelectionError", "no engine is attached"),
            ("compress", {**SAID, "node": "a", "tier": "disk", "codec": "fp8"}, "SelectionError", "get other keys"),
            ("check_finish", {"job": "yesterday"}, "RequestRefused", "job"),
            ("check_finish", {"job": ""}, "JobUnknown", "is no job's name"),
            ("check_finish", {"job": "x:3f-7"}, "SelectionError", "no node 'x' is known here"),
            ("dance", {}, "RequestRefused", "there is no such verb; there are lookup"),
        ):
            status, kind, message = await made.error(verb, **said)
            assert (kind, 400 <= status < 500, text in message) == (error, True, True), message
        assert all(node.verbs == [] for node in made.nodes.values())


async def test_a_move_goes_to_no_node_that_is_not_there(two):
    two.made.pass_time(601)
    await two.reported("a")
    move = {**SAID, "source": "host", "target": "host"}
    for node, why in (("x", (400, "SelectionError")), ("b", (504, "NodeUnavailable"))):
        status, answer = await two.post("move", {**move, "target_node": node}, node="a")
        assert (status, answer["error"]["type"]) == why
    assert two.nodes["a"].verbs == []


async def test_a_nodes_refusal_keeps_its_class(one):
    for error, told, status in (
        ("JobUnknown", "JobUnknown", 404),
        ("TierUnknown", "TierUnknown", 404),
        ("ArenaFull", "ArenaFull", 409),
        ("ProtocolError", "ProtocolError", 400),
        ("system", "NodeError", 409),
    ):
        one.nodes["a"].answers = lambda _, error=error: refused(error, "so there")
        assert await one.error("check_finish", job="a:3f-7") == (status, told, "so there")
        assert await one.made.metric("pdx_proxy_verbs_total", verb="check_finish", outcome=told) == 1


async def test_engines_that_name_chunks_differently_have_to_be_named(two):
    await two.reported("a", ("ea", ""), layout=b"a" * 16)
    await two.reported("b", ("eb", ""), layout=b"b" * 16, shape={**SHAPE, "model": "other"})
    tokens = list(range(32))
    _, kind, text = await two.error("lookup", what={"tokens": tokens})
    assert kind == "SelectionError"
    assert "say of which model" in text
    assert ("ea" in text, "eb" in text) == (True, True)
    for model in ("ea", (b"a" * 16).hex(), (b"a" * 16).hex()[:6], "m"):
        assert await two.answers("lookup", what={"tokens": tokens, "model": model})
    _, _, text = await two.error("lookup", what={"tokens": tokens, "model": "llama"})
    assert "no engine here is, or has, the model 'llama'" in text
    _, kind, text = await two.error("lookup", what={"tokens": [500] * 32, "model": "ea"})
    assert kind == "SelectionError"
    assert "another model" in text
    _, kind, _ = await two.error("clear", what={"tokens": [1, 2], "model": "ea"}, node="a")
    assert kind == "SelectionError", "less than a chunk is never all chunks"


async def test_a_conversation_of_any_depth_is_no_internal_error(one):
    """What is just not too deep to be read may be too deep to be written."""
    await one.reported("a", ("engine", "http://127.0.0.1:1"))
    found = set()
    for depth in range(900, 1000):
        raw = b'{"what": {"messages": [{"content": ' + b"[" * depth + b"]" * depth + b"}]}}"
        found.add((await one.post("lookup", raw=raw))[0])
    assert found == {400, 503}
    assert one.counters["internal_errors"] == 0


async def test_too_many_verbs_are_refused_with_when_to_come_back(one, monkeypatch):
    monkeypatch.setattr(routes, "AT_A_TIME", 1)
    node = one.nodes["a"]
    node.answers = lambda _: None
    first = asyncio.create_task(one.post("check_finish", {"job": "a:3f-7"}, wait_s=60))
    await until(lambda: node.orders)
    status, answer = await one.post("why")
    assert (status, answer["error"]["type"]) == (503, "RequestRefused")
    await node.reply(node.orders[0].number, RUNNING)
    assert (await first)[0] == 200
    assert (await one.listed())[0] == 200


async def test_one_dead_node_does_not_hold_up_the_others(two):
    a, b = two.nodes.values()
    a.answers = lambda _: None
    b.answers = lambda _: JobStatus("b:3f-7", "move", "running", 4)
    dead = [asyncio.create_task(two.post("check_finish", {"job": "a:3f-7"}, wait_s=60)) for _ in range(50)]
    await until(lambda: len(a.orders) == 32)
    assert (await two.answers("check_finish", job="b:3f-7"))["b"]["job"] == "b:3f-7"
    await a.report(epoch=9)  # it died, and another life began
    await until(lambda: sum(task.done() for task in dead) == 32)  # whichever these were
    assert {task.result()[0] for task in dead if task.done()} == {504}
    for task in dead:
        task.cancel()
    await asyncio.gather(*dead, return_exceptions=True)
    a.answers = lambda _: RUNNING
    again = [two.answers("check_finish", job="a:3f-7") for _ in range(33)]
    assert all(await asyncio.gather(*again)), "nobody keeps a turn"


async def test_a_page_of_elsewhere_whose_name_leads_here_is_told_nothing(made):
    """DNS rebinding: to a browser this is that page's own server."""
    own = socket.gethostname()  # which leads to 127.0.1.1 where the system is Debian's
    strange = ("evil.example:8001", "evil.example", "", "127.0.0.1.evil.example", "localhost.example", f"{own}.example")
    names = ("localhost:8001", "localhost.:8001", "pdx.localhost", f"{own.upper()}:8001")
    addresses = ("127.0.0.1", "[::1]:8001", "0.0.0.0:8001", "10.0.0.9:8001")  # through a tunnel, say
    for host in (*strange, *names, *addresses):
        for path in ("/", "/status.json", "/metrics", "/pdx/requests"):
            async with made.client.get(made.admin + path, headers={"Host": host}) as response:
                assert response.status == (403 if host in strange else 200), (host, path)
    where = URL(made.admin)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")  # no browser leaves its name out
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    await writer.wait_closed()


async def test_neither_tokens_nor_texts_are_logged(one, caplog):
    caplog.set_level(logging.DEBUG)
    await one.post("lookup", {"what": {"text": "confidential", "tokens": [8675309]}})
    await one.post("lookup", {"what": {"tokens": [8675309] * 40}})
    await one.post("lookup", raw=b'{"what": {"text": "confidential"')
    assert "confidential" not in caplog.text
    assert "8675309" not in caplog.text
