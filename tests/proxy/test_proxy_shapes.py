"""Responses and messages: shared by two engines as chats are, and to the client as one engine would have answered."""

import json

import pytest
from engine_standin import Server
from proxy_harness import FORWARDED, cluster, until, within
from read_at_once import classify, parse

from pdx.errors import ProtocolError
from pdx.proxy import probe
from pdx.proxy.plan import Mode
from pdx.proxy.routes import Route
from pdx.proxy.usage import usage_of, with_cached

RESPONSE = {"model": "hash", "input": "hello" * 9, "temperature": 0, "max_output_tokens": 12}
MESSAGE = {"model": "hash", "messages": [{"role": "user", "content": FORWARDED * 9}], "temperature": 0}
MESSAGE |= {"max_tokens": 12, "system": "be short"}
BOTH = [(Route.RESPONSES, RESPONSE), (Route.MESSAGES, MESSAGE)]


def events(raw):
    """Names and data of a stream's events; it must be whole."""
    parts = [event.split("\n") for event in raw.decode().removesuffix("\n\n").split("\n\n")]
    assert all(len(lines) == 2 and lines[0].startswith("event: ") for lines in parts), raw
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def normal(route, answer):
    """Without what names the one answer."""
    text = json.dumps(answer, sort_keys=True)
    return text.replace(str(answer.get("id")), "id") if route is Route.RESPONSES else text


@pytest.mark.parametrize(
    ("stream", "details", "nodes"), [(False, True, True), (True, True, True), (True, False, True), (False, True, False)]
)
@pytest.mark.parametrize(("route", "body"), BOTH)
async def test_two_engines_answer_as_one_does(route, body, stream, details, nodes):
    async with cluster(server=Server(details=details), known=nodes) as made:
        body = {**body, "stream": stream, "request_id": "resp_1"}
        _, _, alone = await made.post(route, body, base=made.decode.url)
        made.decode.seen.clear()
        status, headers, raw = await made.post(route, body)
        assert (status, headers["x-pdx-mode"]) == (200, "sampled")
        read = events if stream else json.loads
        assert read(raw) == read(alone)
        first, last = made.prefill.bodies[0], made.decode.bodies[0]
        limit = route.limits[0]
        assert (first["stream"], first[limit], last[limit]) == (False, 1, 12)
        assert first["kv_transfer_params"]["do_remote_decode"]
        assert last["kv_transfer_params"]["do_remote_prefill"]
        assert first["kv_transfer_params"]["transfer_id"] == last["kv_transfer_params"]["transfer_id"]
        assert {**last, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}
        assert first.get("store") is (False if route is Route.RESPONSES else None)


async def test_a_stream_that_breaks_off_ends_with_an_error():
    for fault in ("reset_mid", "end_mid"):
        async with cluster() as made:
            made.prefill.fault = made.decode.fault = fault  # the other one serves alone, once the first is suspect
            for route, body in BOTH:
                status, _, raw = await made.post(route, {**body, "stream": True})
                name, data = events(raw)[-1]
                assert (status, name) == (200, "error")
                assert data["error"]["code"] == 502
                assert data.get("type") == ("error" if route is Route.MESSAGES else None)


async def test_a_message_that_its_engine_aborted_comes_from_another():
    async with cluster(prefills=0, decodes=2) as made:
        made.decode.fault = "abort"
        for _ in range(2):
            status, _, raw = await made.post(Route.MESSAGES, MESSAGE)
            assert (status, json.loads(raw)["stop_reason"]) == (200, "end_turn")
        assert await made.metric("pdx_proxy_failovers_total") == 1


async def test_where_the_prefill_engine_fails_the_other_one_does_all(made):
    made.prefill.fault = 500
    for route, body in BOTH:
        status, headers, _ = await made.post(route, body)
        assert (status, headers["x-pdx-mode"]) == (200, "alone")


async def test_a_response_has_an_id_by_which_it_is_found_in_logs(made):
    _, headers, raw = await made.post(Route.RESPONSES, RESPONSE)
    assert json.loads(raw)["id"] == f"resp_{headers['x-pdx-transfer-id']}"


async def test_a_response_that_goes_on_goes_to_the_engine_that_keeps_the_one_before():
    async with cluster(prefills=2, decodes=3) as made:
        made.decodes[1].has = {"resp_7"}
        for _ in range(4):
            body = {**RESPONSE, "previous_response_id": "resp_7"}
            status, headers, _ = await made.post(Route.RESPONSES, body)
            assert (status, headers["x-pdx-mode"]) == (200, "alone")
        assert len(made.decodes[1].seen) == 4


async def test_who_keeps_a_response_is_known_though_another_engine_hangs(monkeypatch):
    """Each such request waited 2 s for an engine whose host was gone."""
    monkeypatch.setattr(probe, "_LIST_S", 1e9)
    async with cluster(prefills=0, decodes=2) as made:
        made.decodes[0].fault = "hang"
        made.decodes[1].has = {"resp_7"}
        assert (await within(made.post(Route.RESPONSES, {**RESPONSE, "previous_response_id": "resp_7"})))[0] == 200
        await until(lambda: not made.decodes[0].hanging)


async def test_what_can_be_no_name_of_a_response_is_for_an_engine_to_refuse():
    async with cluster(prefills=1, decodes=2) as made:
        body = {**RESPONSE, "previous_response_id": "\ud800"}
        assert (await made.post(Route.RESPONSES, body))[0] == 200
        assert [body["previous_response_id"] for each in made.decodes for body in each.bodies] == ["\ud800"]


ALONE = {
    Route.RESPONSES: {
        "previous_response_id": "resp_1", "background": True, "truncation": "auto", "input": "", "max_output_tokens": 0,
        "tools": [{"type": "mcp", "server_label": "x"}], "stream": "perhaps",
    },
    Route.MESSAGES: {"messages": [], "max_tokens": None, "stream": "perhaps"},
}  # fmt: skip
SHARED = {
    Route.RESPONSES: {
        "input": [{"role": "user", "content": "hi"}], "background": False, "truncation": "disabled", "store": True,
        "tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "json_object"}}, "seed": 3,
    },
    Route.MESSAGES: {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": [{"name": "mcp"}], "top_k": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("route", "name", "value", "mode"),
    [(route, name, value, mode) for mode, table in ((Mode.ALONE, ALONE), (Mode.SAMPLED, SHARED))
     for route, row in table.items() for name, value in row.items()],
)  # fmt: skip
def test_the_mode(route, name, value, mode):
    plan = classify(route, parse(json.dumps({**dict(BOTH)[route], name: value}).encode()))
    assert plan.mode is mode
    assert mode is Mode.SAMPLED or plan.why == name


def test_short_prompts_and_one_token():
    for route, body in BOTH:
        fields = parse(json.dumps(body).encode())
        assert classify(route, fields, min_split_tokens=1000).why == "short_prompt"
        assert classify(route, {**fields, route.limits[0]: 1}).why == "one_token"


def test_what_was_cached_is_told_in_each_routes_names():
    message = b'{"usage":{"input_tokens":1,"cache_read_input_tokens":90,"cache_creation_input_tokens":9}}'
    usage = usage_of(Route.MESSAGES, message)
    assert (usage.prompt_tokens, usage.cache_counts) == (100, {"cached_tokens": 90, "created_cache_tokens": 9})
    told = json.loads(with_cached(Route.MESSAGES, message, {"cached_tokens": 16, "created_cache_tokens": 80}))
    assert told["usage"] == {"input_tokens": 4, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 80}
    with pytest.raises(ProtocolError, match="has no usage"):
        usage_of(Route.MESSAGES, b'{"usage":{"input_tokens":"abc"}}')
    odd = b'{"response":{"usage":null}}'
    assert with_cached(Route.RESPONSES, odd, {"cached_tokens": 16}) is odd
