"""Requests that go whole to one engine: which there are, where they go, and that nothing is made of them on the way."""

import ast
import asyncio
import gzip
import importlib.util
import json
from pathlib import Path

import aiohttp
import pytest
from proxy_harness import COMPLETIONS, cluster, dial, until, within

from pdx.proxy.body import form_text
from pdx.proxy.outline import at_once
from pdx.proxy.routes import FORMS, GENERATING, PASSED, RESPONSE

JSON = {"model": "hash", "input": ["a", "b"], "odd": 1e30}
OURS = {"/health", "/readyz", "/v1/models", "/ping", "/load"}
# Routes of vLLM that no client of the proxy reaches: they are for who runs an engine, or reveal what it is.
NOT_PASSED = {
    *("/collective_rpc", "/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory", "/server_info"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/start_profile", "/stop_profile"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/fault_tolerance/apply", "/fault_tolerance/status", "/pause", "/resume", "/is_paused", "/abort_requests"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/get_world_size", "/weight_info"),
    *("/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update"),
    *("/update_weight_version", "/weight_checker", "/kv_event_sources", "/ready", "/docs"),
    "/inference/v1/generate",  # its sampling parameters may steer transfers
    "/v1/realtime",  # a WebSocket
}


def form(model="hash"):
    """A recording, with the name of its model behind it."""
    made = aiohttp.FormData()
    made.add_field("file", b"RIFF\x00\xff" * 1000, filename="a.wav", content_type="audio/wav")
    made.add_field("model", model)
    return made


def named(path):
    return path.replace(RESPONSE, "/v1/responses/resp_1")


async def ask(made, path, body=JSON, method="POST", **how):
    sent = {} if method == "GET" or path.endswith("/cancel") else {"data": form()} if path in FORMS else {"json": body}
    async with made.client.request(method, made.url + path, **sent, **how) as response:
        return response.status, response.headers, await within(response.read())


async def test_what_an_engine_answers_is_the_clients():
    told = {"Content-Type": "application/octet-stream", "metadata": "m" * 100_000, "Server": "uvicorn"}
    async with cluster(prefills=0) as made:
        made.decode.has = {"resp_1"}
        made.decode.gives = 207, told, [bytes(range(256))]
        made.decode.tokens = None
        for method, path in [(method, each) for method, row in PASSED.items() for each in row]:
            sent = {"Authorization": "Bearer k", "Cookie": "c"}
            status, headers, raw = await ask(made, named(path), method=method, headers=sent)
            if path == "/tokenize":  # the stand-in has one of its own
                assert (status, made.decode.tokenized[0][0]) == (500, JSON)
                continue
            assert (status, raw) == (207, bytes(range(256))), path
            assert (headers["Content-Type"], headers["metadata"]) == (told["Content-Type"], told["metadata"])
            assert headers["Server"] == "pdx"
            got_method, got_path, got, body = made.decode.done[-1]
            assert (got_method, got_path) == (method, named(path))
            assert (got["Authorization"], "Cookie" in got) == ("Bearer k", False)
            if path in FORMS:
                assert at_once(form_text(body, got["Content-Type"], "model")) == "hash"
                assert b"RIFF\x00\xff" * 1000 in body
            elif method == "POST" and not path.endswith("/cancel"):
                assert body == json.dumps(JSON).encode()


def test_every_route_of_vllm_is_decided_on():
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("there is no vLLM here")
    found = set()
    for file in (Path(spec.submodule_search_locations[0]) / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_route = node.func.attr in ("get", "post", "put", "delete", "websocket", "api_route")
                owner = getattr(node.func.value, "id", "")
                if is_route and (owner.endswith("router") or owner == "app") and isinstance(node.args[0], ast.Constant):
                    found.add(node.args[0].value)
    passed = {each.replace(RESPONSE, "/v1/responses/{response_id}") for row in PASSED.values() for each in row}
    assert "/v1/responses/{response_id}/cancel" in found
    assert found - {*passed, *GENERATING, *OURS, *NOT_PASSED} == set()
    assert not NOT_PASSED & {*passed, *GENERATING, *OURS}


async def test_what_is_not_for_clients_is_not_there(made):
    for path in NOT_PASSED:
        assert {(await ask(made, path, method=method))[0] for method in ("POST", "GET")} == {404}, path
    for path in ("/v1/responses/..", "/v1/responses/%2e%2e/cancel", "/v1/responses/..%2f..%2fsleep"):
        reader, writer = await dial(made.url)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert b" 404 " in (await within(reader.read())).split(b"\r\n")[0], path
        writer.close()
    assert made.prefill.done == made.decode.done == []


async def test_requests_go_to_engines_of_the_model_that_they_name():
    async with cluster(prefills=0, decodes=2, models={"d0": ["a"], "d1": ["b", "adapter"]}) as made:
        for name in ("a", "b", "adapter", "b"):
            for path in ("/v1/embeddings", "/rerank"):
                assert (await ask(made, path, {**JSON, "model": name}))[0] == 200
            async with made.client.post(f"{made.url}/v1/audio/transcriptions", data=form(name)) as response:
                assert response.status == 200
        assert (await ask(made, "/version", method="GET"))[0] == 200
        assert [len(engine.done) for engine in made.decodes] == [4, 9]


async def test_only_the_proxy_says_how_kv_travels(made):
    params = {"transfer_id": "t" * 32, "do_remote_prefill": True}
    body = {**JSON, "kv_transfer_params": params, "vllm_xargs": {"kv_transfer_params": params, "x": 1}}
    assert (await ask(made, "/invocations", body))[0] == 200
    assert json.loads(made.decode.done[-1][3]) == {**JSON, "vllm_xargs": {"x": 1}}
    assert await made.metric("pdx_proxy_stripped_total") == 1


async def test_a_stream_comes_as_it_is_made(made):
    made.decode.gives = 200, {"Content-Type": "text/event-stream"}, [b"event: a\ndata: 1\n\n", b"event: b\n"]
    async with made.client.post(f"{made.url}/cohere/v2/chat", json={**JSON, "stream": True}) as response:
        assert response.content_type == "text/event-stream"
        assert await within(response.content.readany()) == made.decode.gives[2][0]
        made.decode.released.set()
        assert await within(response.content.read()) == made.decode.gives[2][1]


async def test_a_compressed_answer_comes_unpacked_and_whole(made):
    """Some gateways pack what nobody asked them to; once its client had as many bytes as the packed answer has."""
    whole = json.dumps({"data": "a" * 5000}).encode()
    packed = gzip.compress(whole)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", "Content-Length": str(len(packed))}
    made.decode.gives = 200, headers, [packed]
    assert (await ask(made, "/v1/embeddings"))[2] == whole


async def test_an_answer_that_breaks_off_is_none():
    async with cluster(prefills=0) as made:
        made.decode.fault = "reset_mid"
        made.decode.gives = 200, {"Content-Type": "application/json"}, [b'{"a": ', b"1}"]
        async with made.client.post(f"{made.url}/pooling", json=JSON) as response:
            assert await within(response.content.readany()) == b'{"a": '
            made.decode.released.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await within(response.read())
        assert await made.metric("pdx_proxy_requests_total", route="whole", outcome="broken") == 1


async def test_another_engine_is_asked():
    async with cluster(prefills=0, decodes=2) as made:
        made.decode.fault = 500
        for _ in range(2):
            assert (await ask(made, "/v1/embeddings"))[0] == 200
        assert len(made.decodes[1].done) == 2


async def test_what_a_model_cannot_do_is_no_fault_of_its_engine():
    async with cluster(prefills=0) as made:
        made.decode.fault = 501
        for _ in range(3):
            status, _, raw = await ask(made, "/v1/embeddings")
            assert (status, json.loads(raw)["error"]["message"]) == (501, "as the test wishes")
        assert await made.metric("pdx_proxy_engine_ready", url=made.decode.url) == 1
        assert await made.metric("pdx_proxy_engine_failures_total") == 0


@pytest.mark.parametrize(("method", "path"), [("GET", "?stream=true&starting_after=3"), ("POST", "/cancel")])
async def test_a_response_is_asked_of_the_engine_that_keeps_it(method, path):
    async with cluster(prefills=1, decodes=3) as made:
        made.decodes[2].has = {"resp_7"}
        for _ in range(4):
            assert (await ask(made, f"/v1/responses/resp_7{path}", method=method))[0] == 200
        whole = [each[:2] for each in made.decodes[2].done if each[1] != "/v1/responses/resp_7"]
        assert whole == [(method, f"/v1/responses/resp_7{path}")] * 4
        status, _, raw = await ask(made, f"/v1/responses/resp_8{path}", method=method)
        assert (status, json.loads(raw)["error"]["code"]) == (404, 404)


async def test_what_the_proxy_says_of_itself():
    async with cluster(probe_s=0.05) as made:
        for method in ("GET", "POST"):
            assert (await ask(made, "/ping", method=method))[0] == 200
        assert json.loads((await ask(made, "/load", method="GET"))[2]) == {"server_load": 0}
        made.decode.fault = "hold"
        request = asyncio.create_task(made.post(COMPLETIONS, {"prompt": "a", "best_of": 2}))
        await within(made.decode.arrived.wait())
        assert json.loads((await ask(made, "/load", method="GET"))[2]) == {"server_load": 1}
        made.decode.released.set()
        assert (await request)[0] == 200
        made.decode.health = made.prefill.health = 503

        async def is_ill():
            return (await ask(made, "/ping", method="GET"))[0] == 503

        await until(is_ill)


async def test_what_no_engine_is_asked():
    async with cluster(max_body_bytes=4096) as made:
        for path, kind, raw, wanted in (
            ("/v1/embeddings", "text/plain", b"{}", 400),
            ("/v1/audio/translations", "application/json", b"{}", 400),
            ("/v1/embeddings", "application/json", b"[1]", 400),
            ("/v1/embeddings", "application/json", b'{"a": "' + b"a" * 5000 + b'"}', 413),
        ):
            async with made.client.post(made.url + path, data=raw, headers={"Content-Type": kind}) as response:
                assert response.status == wanted
        assert made.prefill.done == made.decode.done == []


BOUNDARY = "multipart/form-data; boundary=xx"
PART = b'--xx\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


@pytest.mark.parametrize(
    ("kind", "raw", "text"),
    [
        (BOUNDARY, PART % (b"model", b"a") + b"--xx--\r\n", "a"),
        (BOUNDARY, PART % (b"file", b"--xy model") + PART % (b"model", "\u00e9".encode()) + b"--xx--\r\n", "\u00e9"),
        (BOUNDARY, PART % (b"x", b"a") * 70 + PART % (b"model", b"a") + b"--xx--\r\n", None),
        (BOUNDARY, PART % (b"models", b"a") + b"--xx--\r\n", None),
        (BOUNDARY, PART % (b"model", b"a" * 5000) + b"--xx--\r\n", None),
        (BOUNDARY, PART % (b"model", b"a"), None),
        (BOUNDARY, b"", None),
        (BOUNDARY, PART % (b"file", bytes(3 << 20)) + PART % (b"model", b"a") + b"--xx--\r\n", "a"),
        ('multipart/form-data; a=";";Boundary="xx" ; b', PART % (b"model", b"a") + b"--xx--\r\n", "a"),
        ("multipart/form-data; boundary*=idna''x", PART % (b"model", b"a") + b"--xx--\r\n", None),
        ("multipart/form-data; \udc80é", PART % (b"model", b"a") + b"--xx--\r\n", None),
    ],
)
def test_a_field_of_a_form(kind, raw, text):
    assert at_once(form_text(bytearray(raw), kind, "model")) == text
