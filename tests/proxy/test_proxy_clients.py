"""Clients that leave, lie, or send nonsense; and everything else a client can see of the proxy."""

import asyncio
import json
import logging
import re
import stat
from unittest import mock

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from proxy_harness import (
    BODY,
    CHAT,
    COMPLETIONS,
    FORWARDED,
    HALF,
    TALK,
    begin,
    cluster,
    dial,
    events,
    until,
    within,
)

from pdx.errors import ConfigError
from pdx.proxy.reply import allow_origins
from pdx.proxy.server import Server
from pdx.telemetry.env import Env
from pdx.telemetry.names import METRICS
from pdx.wire.proxy import PeerList

PHASES = {
    "prefill": ("prefill", "hang", COMPLETIONS, BODY),
    "decode": ("decode", "hang", COMPLETIONS, BODY),
    "decode of a stream, first token sent": ("decode", "hang_first", COMPLETIONS, {**BODY, "stream": True}),
    "in the middle of a chat": ("decode", "hang_mid", CHAT, {**TALK, "stream": True}),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_client_leaves(made, phase):
    leg, fault, path, body = PHASES[phase]
    engine = getattr(made, leg)
    engine.fault = fault
    request = asyncio.create_task(made.post(path, body))
    await within(engine.arrived.wait())
    if fault == "hang_mid":
        await within(engine.progress.wait())
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await within(engine.closed.wait())
    transfer = engine.bodies[-1]["kv_transfer_params"]["transfer_id"]
    assert await made.node.cancelled() == transfer
    assert await made.metric("pdx_proxy_requests_total", outcome="client_gone") == 1
    assert await made.metric("pdx_proxy_cancels_total", reason="client_gone") == 1
    assert (await made.timeline(transfer))["outcome"] == "client_gone"
    assert await made.metric("pdx_proxy_engine_in_flight", url=engine.url) == 0


async def test_client_leaves_while_one_engine_serves_alone(made):
    made.decode.fault = "hang"
    request = asyncio.create_task(made.post(COMPLETIONS, {**BODY, "best_of": 2}))
    await within(made.decode.arrived.wait())
    request.cancel()
    await within(made.decode.closed.wait())
    await until(lambda: request.done())
    assert await made.metric("pdx_proxy_cancels_total") == 0  # no transfer was ever announced


async def test_client_leaves_while_it_sends(made):
    _, writer = await begin(made.url, 1000)
    writer.write(b"{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await made.get("/health"))[0] == 200
    assert made.prefill.seen == []


async def test_closing_the_proxy_ends_requests_under_way():
    async with cluster() as made:
        made.prefill.fault = "hang"
        request = asyncio.create_task(made.post(COMPLETIONS, BODY))
        await within(made.prefill.arrived.wait())
    # The harness has closed client and proxy; `run` checks that nothing of the request is left.
    with pytest.raises(Exception):  # noqa: B017, PT011
        await request


LIMIT = "body is larger than 262144 bytes (0 MiB); pdx proxy --max-body raises this limit"
LONG = b"x" * 300_000


async def test_nonsense_is_refused_and_told_what_is_wrong():
    cases = [
        (b"", "application/json", 400, "not valid JSON"),
        (b'{"prompt" "a"}', "application/json", 400, "not valid JSON: Expecting ':' delimiter: line 1 column 11"),
        (b"[1]", "application/json", 400, "is a JSON list, and must be an object"),
        (b"\xff\xfe\xfa", "application/json", 400, ""),
        (b'{"prompt":"\xff"}', "application/json", 400, "is not UTF-8"),
        (b'{"a":' + b"[" * 200_000, "application/json", 400, ""),
        (b'{"prompt":"%b"}' % LONG, "application/json", 413, LIMIT),
        (b'{"prompt":"x"}', "text/plain", 400, "Content-Type is text/plain; send JSON, as application/json"),
    ]
    async with cluster(max_body_bytes=1 << 18) as made:
        for raw, kind, status, said in cases:
            async with made.client.post(made.url + CHAT, data=raw, headers={"Content-Type": kind}) as response:
                fault = (await response.json())["error"]
                assert (response.status, fault["code"]) == (status, status)
                assert fault["message"]
                assert said in fault["message"]
                assert "xxxx" not in fault["message"]
        assert made.prefill.seen == made.decode.seen == []
        assert await made.metric("pdx_proxy_requests_total", outcome="bad_request") == len(cases)


@pytest.mark.parametrize("more", ["; x*=idna''b", ";x*0*", " ;" + "(" * 9000])
async def test_what_nobody_asks_for_in_a_content_type_is_not_read(made, more):
    """Python's reader of such parameters fails on some of them, and takes ten seconds for 64 KiB of others."""
    headers = {"Content-Type": "Application/json" + more}
    made.decode.headers = {"Content-Type": "application/json" + more}
    for path, body in ((COMPLETIONS, {**BODY, "best_of": 2}), ("/v1/embeddings", {"input": "a"})):
        async with made.client.post(made.url + path, data=json.dumps(body), headers=headers) as response:
            assert (response.status, bool(await response.read())) == (200, True)


async def test_transfer_parameters_of_clients_go_nowhere(caplog):
    """CVE-2026-116176: addresses in clients' transfer parameters were dialled. Not even names of nodes pass here."""
    async with cluster() as made:
        mine = {"do_remote_prefill": True, "transfer_id": "mine", "remote_host": "10.0.0.1"}
        mine |= {"decode_node": "tcp://mine:1", "prefill_node": "tcp://mine:2"}
        for extra in ({}, {"best_of": 2}, {"logprobs": 1}):
            body = {**BODY, **extra, "kv_transfer_params": mine, "vllm_xargs": {"kv_transfer_params": "mine"}}
            await made.post(COMPLETIONS, body)
        await made.post(CHAT, {**TALK, "kv_transfer_params": mine})
        assert made.prefill.seen
        seen = json.dumps(made.prefill.bodies + made.decode.bodies)
        assert not any(word in seen for word in ("mine", "decode_node", "prefill_node"))
        assert await made.metric("pdx_proxy_stripped_total") == 4
    assert sum("transfer parameters" in record.message for record in caplog.records) == 1


async def test_headers(made):
    sent = {
        "Authorization": "Bearer key",
        "X-Request-Id": "trace-1",
        "X-data-parallel-rank": "3",
        "Cookie": "a=b",
        "X-Secret": "s",
    }
    _, headers, raw = await made.post(COMPLETIONS, BODY, headers=sent)
    assert json.loads(raw)["id"] == "cmpl-trace-1"
    for engine in (made.prefill, made.decode):
        passed = {name.lower(): value for name, value in engine.seen[-1][2].items()}
        assert passed["authorization"] == "Bearer key"
        assert passed["x-request-id"] == "trace-1"
        assert passed.get("x-data-parallel-rank") == ("3" if engine is made.decode else None)
        assert not {"cookie", "x-secret"} & set(passed)
    transfer = headers["x-pdx-transfer-id"]
    assert (len(transfer), transfer.startswith((await made.node.heard(PeerList)).tag)) == (40, True)
    _, headers, _ = await made.post(COMPLETIONS, BODY, headers={"X-Request-Id": "evil id\x80"})
    assert headers["x-pdx-transfer-id"] != transfer
    assert "evil" not in str(made.prefill.seen[-1][2])
    await made.post(COMPLETIONS, {**BODY, "request_id": "own"})
    assert "X-Request-Id" not in made.prefill.seen[-1][2]


async def test_one_engine_named_for_both_roles():
    async with (
        cluster(prefills=0) as made,
        cluster(prefills=0, decodes=0, named=False, prefill=(made.decode.url,), decode=(made.decode.url,)) as single,
    ):
        made.decode.settled = single.settled
        await single.node.report(("d", "both", made.decode.url))
        await single.metric_reaches(2, "pdx_proxy_reports_total")
        status, headers, raw = await single.post(COMPLETIONS, BODY)
        assert (status, headers["x-pdx-mode"]) == (200, "sampled")
        assert len(made.decode.seen) == 2
        _, headers, alone = await made.post(COMPLETIONS, BODY)
        assert headers["x-pdx-mode"] == "alone"
        assert json.loads(raw)["choices"][0]["text"] == json.loads(alone)["choices"][0]["text"]


async def test_surface(made):
    status, raw = await made.get("/v1/models")
    assert (status, json.loads(raw)["data"][0]["owner"]) == (200, "d0")
    status, raw = await made.get("/health")
    assert (status, json.loads(raw)) == (200, {"status": "ok", "decoders": 1, "prefillers": 1, "nodes": 1, "pairs": 1})
    _, headers, raw = await made.post(COMPLETIONS, {**BODY, "stream": True})
    assert events(raw)[-1] == "[DONE]"
    listed = json.loads((await made.tell("/pdx/requests"))[1])["requests"]
    assert [each["transfer_id"] for each in listed] == [headers["x-pdx-transfer-id"]]
    one = await made.timeline(headers["x-pdx-transfer-id"])
    assert one == listed[0]
    assert [moment["event"] for moment in one["moments"]] == [
        "received",
        "prefill_sent",
        "decode_sent",
        "prefill_answered",
        "first_token",
        "decode_first",
        "done",
    ]
    assert (one["mode"], one["prompt_tokens"]) == ("forward", len(FORWARDED) + 1)
    assert FORWARDED not in json.dumps(one)
    assert (await made.tell("/pdx/requests/unheard"))[0] == 404
    assert json.loads((await made.get("/nowhere"))[1])["error"]["code"] == 404
    labels = {"route": COMPLETIONS, "mode": "forward"}
    assert await made.metric("pdx_proxy_ttft_seconds_count", **labels) == 1
    assert await made.metric("pdx_proxy_request_seconds_count", **labels) == 1
    for leg in ("prefill", "decode"):
        assert await made.metric("pdx_proxy_leg_seconds_count", leg=leg) == 1
    assert 'pdx_proxy_requests_total{mode="sampled",outcome="ok"' in (await made.tell("/metrics"))[1].decode()
    assert await made.metric("pdx_proxy_requests_total", **labels, outcome="ok") == 1
    assert 1 <= await made.metric("pdx_proxy_itl_seconds_count", mode="forward") <= len(events(raw)) - 2


async def test_what_is_told_is_what_the_registry_names(made):
    text = (await made.tell("/metrics"))[1].decode()
    families = {each.name: each for each in text_string_to_metric_families(text)}
    own = {each for each in METRICS if "_node_" not in each and not each.startswith("vllm:")}
    assert {name for name in families if name.startswith("pdx_")} == own
    for name, about in METRICS.items():
        if name in families:
            assert (families[name].type, families[name].documentation) == (about.kind, about.text)
            assert {label for each in families[name].samples for label in each.labels} <= {*about.labels, "le"}
            assert families[name].samples, name
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20


async def test_each_request_is_one_line_without_its_text(made, caplog):
    caplog.set_level("INFO", logger="pdx.proxy.requests")
    _, headers, raw = await made.post(COMPLETIONS, {**BODY, "stream": True}, headers={"X-Request-Id": "mine"})
    await made.post(COMPLETIONS, {**BODY, "max_tokens": 1, "model": "a\nb"})
    streamed, other = [record for record in caplog.records if record.name == "pdx.proxy.requests"]
    told = streamed.fields
    assert told["transfer"] == headers["x-pdx-transfer-id"]
    assert (told["request"], told["route"], told["outcome"], told["mode"]) == ("mine", COMPLETIONS, "ok", "forward")
    assert 0 < told["ttft_ms"] <= told["ms"]
    assert (told["prefill"], told["decode"]) == ("p0", "d0")
    assert told["prompt_tokens"] == len(FORWARDED) + 1
    assert 1 <= told["pieces"] <= len(events(raw))
    assert {"ttft_ms", "request", "prefill", "pieces"}.isdisjoint(other.fields)
    for line in caplog.messages:
        assert FORWARDED not in line
        assert "\n" not in line
    caplog.clear()
    caplog.set_level("WARNING", logger="pdx.proxy.requests")
    await made.post(COMPLETIONS, BODY)
    assert not caplog.records


@pytest.mark.parametrize("decodes", [0, 1])
async def test_it_is_alive_and_with_a_decoder_ready(decodes):
    async with cluster(prefills=0, decodes=decodes) as made:
        for get in (made.get, made.tell):
            assert [(await get(path))[0] for path in ("/healthz", "/readyz")] == [200, 200 if decodes else 503]


async def test_clients_are_told_nothing_of_others():
    """Timelines say how much of a prompt was in a cache: whose key is refused by the engines could ask for them."""
    async with cluster(debug_headers=False) as made:
        for body in (BODY, {**BODY, "stream": True}):
            status, headers, _ = await made.post(COMPLETIONS, body)
            assert status == 200
            assert not [name for name in headers if name.lower().startswith("x-pdx")]
        for path in ("/metrics", "/pdx/requests", "/pdx/requests/x"):
            assert (await made.get(path))[0] == 404
            assert (await made.tell(path))[0] == (404 if path.endswith("x") else 200)
        assert (await made.tell("/v1/models"))[0] == 404


async def test_what_an_engine_tells_its_client_in_headers(made):
    told = {"Retry-After": "7", "WWW-Authenticate": "Bearer", "Set-Cookie": "a=b", "Server": "s"}
    kinds = [{**BODY, **more, "stream": stream} for more in ({}, {"prompt": HALF}, {"best_of": 2}) for stream in (0, 1)]
    made.decode.headers = told
    for body in kinds:
        _, headers, _ = await made.post(COMPLETIONS, body, headers={"X-Request-Id": "mine"})
        assert {name: headers.get(name) for name in told} == {**told, "Set-Cookie": None, "Server": "pdx"}
        assert headers["X-Request-Id"] == "mine"
    made.prefill.headers = {"Retry-After": "7"}  # it is asked last
    made.decode.fault = made.prefill.fault = 429
    for body in kinds:
        status, headers, _ = await made.post(COMPLETIONS, body)
        assert (status, headers["Retry-After"]) == (429, "7")


async def test_a_request_id_comes_back(made):
    for path in (COMPLETIONS, "/health", "/nowhere"):
        for sent, told in (("trace-1", "trace-1"), ("evil id", None)):
            async with made.client.post(made.url + path, data=b"{", headers={"X-Request-Id": sent}) as response:
                assert response.headers.get("X-Request-Id") == told


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,authorization"}
PAGE = "https://page.example"


@pytest.mark.parametrize(
    ("allowed", "origin", "told"),
    [((), PAGE, None), ((PAGE,), PAGE, PAGE), ((PAGE,), "https://other.example", None), (("*",), PAGE, "*")],
)
async def test_web_pages(allowed, origin, told):
    """Browsers ask before they send JSON to another origin than the page's."""
    async with cluster(allowed_origins=allowed) as made:
        url, sent = made.url + COMPLETIONS, {"Origin": origin}
        async with made.client.options(url, headers={**sent, **PREFLIGHT}) as response:
            assert response.status == (204 if told else 403 if allowed else 405)
            assert response.headers.get("Access-Control-Allow-Origin") == told
            if told:
                assert response.headers["Access-Control-Allow-Headers"] == "content-type,authorization"
                assert "POST" in response.headers["Access-Control-Allow-Methods"]
        for body in (BODY, {**BODY, "stream": True}, {}):
            _, headers, _ = await made.post(COMPLETIONS, body, headers=sent)
            assert headers.get("Access-Control-Allow-Origin") == told
            assert ("Vary" in headers) == (allowed not in ((), ("*",)))
        async with made.client.options(url) as response:
            assert response.status == 405


@pytest.mark.parametrize("said", [f"{PAGE}/", f"{PAGE}/chat", "page.example", "https://Page.example", ""])
def test_an_origin_that_no_page_has_is_refused_at_the_start(said):
    """Browsers would have kept its answers from the page, and nobody said why."""
    with pytest.raises(ConfigError, match=f"--allowed-origins '{said}': write .* https://example.org"):
        allow_origins(web.Application(), [PAGE, said])


async def test_prompts_are_not_logged(caplog):
    caplog.set_level(logging.DEBUG)
    async with cluster(prefills=2) as made:
        made.prefills[0].fault = 500
        made.prefills[1].fault = "nonsense"
        for _ in range(2):
            await made.post(COMPLETIONS, {**BODY, "prompt": "a-very-secret-prompt"})
        assert "secret" not in (await made.tell("/pdx/requests"))[1].decode()
        assert "secret" not in (await made.tell("/metrics"))[1].decode()
    assert any("prefill failed" in record.message for record in caplog.records)
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("path", "stream"), [(COMPLETIONS, False), (CHAT, True)])
async def test_one_token_comes_from_a_prefill_engine_alone(made, path, stream):
    body = {**(BODY if path == COMPLETIONS else TALK), "max_tokens": 1, "stream": stream}
    status, headers, _ = await made.post(path, body)
    assert (status, headers["x-pdx-mode"]) == (200, "alone")
    assert (len(made.prefill.seen), len(made.decode.seen)) == (1, 0)
    assert "kv_transfer_params" not in made.prefill.bodies[0]
    assert await made.metric("pdx_proxy_cancels_total") == 0
    await made.prefill.stop()
    assert (await made.post(path, body))[0] == 200  # somebody serves it all the same
    assert len(made.decode.seen) == 1


async def test_the_administrators_socket_is_this_users_alone(tmp_path):
    path = tmp_path / "private" / "admin.sock"
    async with cluster() as made:
        server = Server(made.proxy.admin_app(), made.proxy.env)
        await server.start(str(path))
        try:
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client,
                client.get("http://admin/metrics") as response,
            ):
                assert response.status == 200
            second = Server(made.proxy.admin_app(), made.proxy.env)
            with pytest.raises(ConfigError, match="another process listens"):
                await second.start(str(path))
        finally:
            await server.close()
            await server.close()
        assert not path.exists()


async def test_what_is_no_address():
    for address in ("", "8001", ":8001", "::1:8001", "127.0.0.1:", "127.0.0.1:70000", "[::1]"):
        with pytest.raises(ConfigError, match="is not an address"):
            await Server(web.Application(), Env()).start(address)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nosuchhost.invalid:0", "'nosuchhost.invalid:0' names no host"),
        (f"{'long' * 20}:0", "long:0' names no host"),
        ("no\udcffhost:0", "host:0' names no host"),
        ("203.0.113.7:0", "'203.0.113.7:0' cannot be had"),
        (f"/tmp/{'long' * 30}/admin.sock", "long/admin.sock' cannot be had: AF_UNIX path too long"),
    ],
)
async def test_an_address_that_cannot_be_had_is_named(address, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        await Server(web.Application(), Env()).start(address)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(made, path):
    """It has no other end, though its client would keep the connection: that one waited for 75 s."""
    made.decode.gives = 200, {"Content-Type": "application/octet-stream"}, [b"bytes"]
    body = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST {path} HTTP/1.0\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
    reader, writer = await dial(made.url)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert (await within(reader.read())).endswith((b"data: [DONE]\n\n", b"\r\n\r\nbytes"))
    writer.close()


async def test_an_error_of_the_proxy_is_logged_once_and_counted(caplog):
    """A client that has found one could fill the disk with traces."""
    async with cluster() as made:
        with mock.patch.object(aiohttp.ClientSession, "request", side_effect=ZeroDivisionError):
            for _ in range(20):
                assert (await made.get("/v1/models"))[0] == 500
        assert made.proxy.env.counters["internal_errors"] == 20
    assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_an_error_of_the_proxy_in_the_middle_of_a_stream_ends_it(caplog):
    """Its client has a status already, and would wait for ever."""
    async with cluster() as made:
        with mock.patch("pdx.proxy.answer.Forwarded.event", side_effect=ZeroDivisionError):
            status, headers, raw = await made.post(COMPLETIONS, {**BODY, "stream": True})
        assert (status, headers["x-pdx-mode"]) == (200, "forward")
        assert events(raw)[0]["choices"]
        assert events(raw)[-1]["error"]["code"] == 500
        assert made.proxy.env.counters["internal_errors"] == 1
        assert await made.metric("pdx_proxy_requests_total", outcome="internal") == 1
        assert (await made.post(COMPLETIONS, BODY))[0] == 200
    assert len([record for record in caplog.records if record.exc_info]) == 1
