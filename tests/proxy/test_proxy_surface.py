"""What a client of plain vLLM is used to, at the proxy: sizes, headers, paths, methods, forms of numbers, errors."""

import json

import pytest
from proxy_harness import BODY, COMPLETIONS, ENDED, begin, cluster, dial, within

from pdx.proxy.body import as_engines_read
from pdx.proxy.plan import SWITCHES, WHOLE


async def test_the_rest_of_a_body_that_was_answered_early_is_no_head():
    """Clients that send all before they read must get the answer, too."""
    size = 16 << 20
    async with cluster(max_body_bytes=2 << 20) as made:
        reader, writer = await begin(made.url, size)
        for _ in range(size >> 16):
            writer.write(b"a" * (1 << 16))
            await writer.drain()
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()
        await writer.wait_closed()
        assert made.proxy.env.counters["heads_too_large"] == 0


async def test_a_long_token_is_passed_on(made):
    token = f"Bearer {'t' * 40_000}"
    status, _, _ = await made.post(COMPLETIONS, BODY, headers={"Authorization": token, "Cookie": "c" * 40_000})
    assert status == 200
    assert {engine.seen[-1][2]["Authorization"] for engine in (made.prefill, made.decode)} == {token}


async def test_the_size_of_headers_is_an_option():
    header = {"Authorization": f"Bearer {'t' * 100_000}"}
    for size, status in ((64 << 10, 400), (128 << 10, 200)):
        async with (
            cluster(served={"field_bytes": size}) as made,
            made.client.get(f"{made.url}/health", headers=header) as response,
        ):
            assert response.status == status


async def talk(url, said):
    """The head and the beginning of the body that come back for these bytes."""
    reader, writer = await dial(url)
    try:
        writer.write(said)
        return await within(reader.read(4096))
    finally:
        writer.close()


async def test_too_long_a_header_is_refused_in_the_form_of_all_errors(made):
    said = await talk(made.url, b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000 + b"\r\n\r\n")
    head, _, content = said.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"aiohttp" not in head
    assert json.loads(content)["error"]["code"] == 400


async def test_a_head_without_end_is_cut_off(made):
    line = b"A" * 100 + b": " + b"a" * 60_000 + b"\r\n"
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + line * ((2 << 20) // len(line)) + b"\r\n"
    with pytest.raises((ConnectionError, AssertionError)):
        assert await talk(made.url, head)
    assert made.proxy.env.counters["heads_too_large"] == 1
    assert (await made.get("/health"))[0] == 200


@pytest.mark.parametrize("more", [{}, {"best_of": 2}, {"stream": True}, {"max_tokens": 1}], ids=str)
async def test_a_rank_is_one_of_the_engine_that_answers(made, more):
    """The prefill engine has ranks of its own."""
    made.prefill.ranks, made.decode.ranks = (4, 2) if "max_tokens" in more else (2, 4)
    answers = made.prefill if "max_tokens" in more else made.decode
    mode = "alone" if "best_of" in more or "max_tokens" in more else "sampled"
    status, headers, _ = await made.post(COMPLETIONS, {**BODY, **more}, headers={"X-data-parallel-rank": "3"})
    assert (status, headers["x-pdx-mode"]) == (200, mode)
    for engine in (made.prefill, made.decode):
        told = [sent.get("X-data-parallel-rank") for _, _, sent in engine.seen]
        assert set(told) <= {"3" if engine is answers else None}
    status, _, raw = await made.post(COMPLETIONS, {**BODY, **more}, headers={"X-data-parallel-rank": "4"})
    assert (status, json.loads(raw)["error"]["message"]) == (400, "rank 4 of 4")


async def test_an_engines_load_is_told_to_who_asks(made):
    for engine in (made.prefill, made.decode):
        engine.headers = {"endpoint-load-metrics": "TEXT named_metrics.kv_cache_usage_perc=0.5"}
    for body in (BODY, {**BODY, "best_of": 2}, {**BODY, "prompt": ENDED}):
        _, headers, _ = await made.post(COMPLETIONS, body, headers={"endpoint-load-metrics-format": "TEXT"})
        assert headers["endpoint-load-metrics"] == "TEXT named_metrics.kv_cache_usage_perc=0.5"
    last = [engine.seen[-1][2] for engine in (made.prefill, made.decode)]
    assert all(each["endpoint-load-metrics-format"] == "TEXT" for each in last)


@pytest.mark.parametrize(("path", "leads"), [(COMPLETIONS, True), ("/health", True), ("/nowhere", False)])
async def test_a_slash_too_many(made, path, leads):
    url = f"{made.url}{path}/?a=b"
    async with made.client.post(url, json=BODY, allow_redirects=False) as response:
        assert response.status == (307 if leads else 404)
        assert response.headers.get("Location") == (f"{path}?a=b" if leads else None)
        if leads:
            assert (await response.read(), response.headers.get("Content-Type")) == (b"", None)
    if path == COMPLETIONS:
        assert (await made.post(f"{path}/", BODY))[0] == 200


async def test_a_wrong_method_is_told_the_right_one(made):
    async with made.client.get(made.url + COMPLETIONS) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["type"] == "Method Not Allowed"
    async with made.client.post(made.url + "/health") as response:
        assert response.headers["Allow"] == "GET,HEAD"
        assert response.headers["Server"] == "pdx"


NUMBERS = ["5", " 5 ", "5.0", "5.", "+5", "-1", "true", "x", "", "0x5", "1e2"]
NUMBERS += [5.0, 5.5, True, False, 1e30, 7, None, [5]]
WORDS = [True, False, 1, 0, 1.0, 2, *"10tfyn", "on", "off", "true", "False", "YES", "no", " on", "x", "", None, [1]]


@pytest.mark.parametrize(("names", "kind", "values"), [(WHOLE, int, NUMBERS), (SWITCHES, bool, WORDS)])
def test_values_are_read_as_pydantic_reads_them_for_vllm(names, kind, values):
    pydantic = pytest.importorskip("pydantic")
    reader = pydantic.TypeAdapter(kind | None)
    for value in values:
        try:
            want = reader.validate_python(value)
        except pydantic.ValidationError:
            want = value
        for name in names:
            got = as_engines_read(name, value)
            assert (got, type(got)) == (want, type(want)), (name, value)


@pytest.mark.parametrize("limit", ["5", 5.0])
async def test_odd_forms_of_numbers_are_no_reason_to_serve_a_request_by_one_engine(made, limit):
    status, headers, raw = await made.post(COMPLETIONS, {**BODY, "max_tokens": limit, "stream": "no"})
    assert (status, headers["x-pdx-mode"]) == (200, "sampled")
    assert json.loads(raw)["usage"]["completion_tokens"] == 5
    _, headers, raw = await made.post(COMPLETIONS, {**BODY, "max_tokens": True, "n": "1"})
    assert made.prefill.bodies[-1]["max_tokens"] == 1
    assert json.loads(raw)["usage"]["completion_tokens"] == 1
