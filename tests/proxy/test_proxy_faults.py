"""Engines that refuse, die, hang, lie or vanish, at every point of a request."""

import asyncio
import json
import socket

import aiohttp
import pytest
from engine_standin import Server, StandIn, transfer_of
from proxy_harness import BODY, CHAT, COMPLETIONS, FORWARDED, HALF, TALK, cluster, events, patience, until, within

from pdx.proxy import health, leg, relay
from pdx.proxy.routes import Route


def text_of(raw, *, stream=False):
    """What an answer says; a stream must be whole."""
    if not stream:
        choice = json.loads(raw)["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    chunks = events(raw)
    assert chunks[-1] == "[DONE]"
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    return "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in choices)


async def expected(made, body=BODY, path=COMPLETIONS):
    engine = StandIn()
    await engine.start()
    try:
        return text_of((await made.post(path, body, base=engine.url))[2])
    finally:
        await engine.stop()


async def broken(engine, fault):
    """From now on the engine has this fault."""
    engine.fault = fault
    if fault == "refuse":
        await engine.stop()


def defective(*_args, **_kwargs):
    raise RuntimeError("a defect")


PROMPTS = {**BODY, "prompt": [FORWARDED, HALF]}  # its decode leg follows the other one


# ---- the prefill leg ----------------------------------------------------------------------------

OF_COMPLETIONS = {"refuse": "refused", "reset": "reset", 500: "status_5xx", "hang": "timeout", 202: "malformed"}
OF_COMPLETIONS |= {400: "status_4xx", 429: "status_429", 503: "status_503", "nonsense": "malformed"}
OF_COMPLETIONS |= {"elsewhere": "redirect", "abort": "malformed"}
OF_CHATS = [(False, 500, "status_5xx"), (True, "reset", "reset"), (True, "defect", "internal")]


@pytest.mark.parametrize(
    ("path", "stream", "fault", "reason"),
    [(COMPLETIONS, False, *each) for each in OF_COMPLETIONS.items()]
    + [(COMPLETIONS, True, 500, "status_5xx"), *((CHAT, *each) for each in OF_CHATS)],
)
async def test_prefill_fails_and_one_engine_serves_alone(path, stream, fault, reason, monkeypatch):
    """The decode leg of a chat, or of one prompt, is under way by then, and goes on."""
    body = {**(TALK if path == CHAT else BODY if stream else PROMPTS), "stream": stream}
    async with cluster(**patience(fault)) as made:
        want = await expected(made, {**body, "stream": False}, path)
        if fault == "defect":
            monkeypatch.setattr(relay.answer, "decode_prefill", defective)
        else:
            await broken(made.prefill, fault)
        status, headers, raw = await made.outlast(made.post(path, body))
        assert (status, headers["x-pdx-mode"], text_of(raw, stream=stream)) == (200, "alone", want)
        assert len(made.decode.seen) == 1
        assert await made.node.cancelled() == headers["x-pdx-transfer-id"]
        if path == COMPLETIONS and not stream:
            assert "kv_transfer_params" not in made.decode.bodies[-1]
        for name in ("fallbacks", "cancels"):
            assert await made.metric(f"pdx_proxy_{name}_total", reason=f"prefill_{reason}") == 1
        assert await made.metric("pdx_proxy_events_total", event="internal_errors") == (fault == "defect")


@pytest.mark.parametrize(
    ("fault", "body"), [("refuse", PROMPTS), ("nonsense", PROMPTS), (503, PROMPTS), (429, BODY), (503, BODY)]
)
async def test_another_prefill_engine_takes_over(fault, body):
    """Beside a decode leg that is under way, only for one that is full: it has not begun."""
    async with cluster(prefills=2) as made:
        want = await expected(made, body)
        await broken(made.prefill, fault)
        status, headers, raw = await made.post(COMPLETIONS, body)
        assert (status, headers["x-pdx-mode"], text_of(raw)) == (200, "sampled", want)
        assert await made.metric("pdx_proxy_failovers_total", leg="prefill") == 1
        assert {transfer_of(made.prefills[1]), transfer_of(made.decode)} == {headers["x-pdx-transfer-id"]}
        assert (await made.timeline(headers["x-pdx-transfer-id"]))["outcome"] == "ok"
        if fault != "refuse" and body is PROMPTS:  # nodes do not take up a transfer again whose writer failed
            assert transfer_of(made.prefill) != headers["x-pdx-transfer-id"]
            assert await made.node.cancelled() == transfer_of(made.prefill)


async def test_connect_timeout():
    """An address that swallows packets: the listener's backlog is full."""
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(trap.getsockname())
        url = f"http://127.0.0.1:{trap.getsockname()[1]}"
        # The node reports once.
        async with cluster(prefills=0, decode=(), named=False, connect_s=0.3, heartbeat_timeout_s=60.0) as made:
            await made.node.report(("trap", "prefill", url), ("d", "decode", made.decode.url))
            await made.metric_reaches(1, "pdx_proxy_engines", role="decode")
            made.proxy.engines.health.of(url).models = {"hash": None}
            status, headers, _ = await made.post(COMPLETIONS, BODY)
            assert (status, headers["x-pdx-mode"]) == (200, "alone")
            assert await made.metric("pdx_proxy_fallbacks_total", reason="prefill_connect_timeout") == 1
        for filler in fillers:
            filler.close()


# ---- defects ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "reason", "code"),
    [
        ((relay.answer.AsItIs, "take", defective), "internal", 500),
        ((relay.router, "decoder", lambda *_args, **_kwargs: None), "no_decoder", 503),
    ],
)
async def test_nodes_are_told_where_no_engine_decodes(made, broken, reason, code, monkeypatch):
    """For a defect, or because none is left."""
    monkeypatch.setattr(*broken)
    assert (await made.post(CHAT, TALK))[0] == code
    assert await made.node.cancelled() == transfer_of(made.prefill)
    assert await made.metric("pdx_proxy_cancels_total", reason=reason) == 1


# ---- the decode leg -----------------------------------------------------------------------------

DEAD = {"reset": 502, "hang": 502, 500: 500, 503: 503, 429: 429, "nonsense": 502, "elsewhere": 502, "abort": 502}


@pytest.mark.parametrize(
    ("prompt", "fault", "stream"),
    [(HALF, fault, fault == "hang") for fault in ("refuse", *DEAD)]
    + [(HALF, "abort", True), *((FORWARDED, fault, True) for fault in ("refuse", "hang", "reset", 500))],
)
async def test_decoder_dies_before_it_answers_and_another_takes_over(prompt, fault, stream):
    async with cluster(decodes=2, **patience(fault)) as made:
        body = {**BODY, "prompt": prompt}
        want = await expected(made, body)
        for _ in range(2):  # so that it is the first one's turn
            await made.post(COMPLETIONS, BODY)
        made.decode.seen.clear()
        await broken(made.decode, fault)
        status, _, raw = await made.outlast(made.post(COMPLETIONS, {**body, "stream": stream}))
        assert made.decode.seen or fault == "refuse", "the test is about the engine that was planned"
        assert (status, text_of(raw, stream=stream)) == (200, want)
        assert "kv_transfer_params" in made.decodes[1].bodies[-1]
        assert await made.metric("pdx_proxy_failovers_total", leg="decode") == 1


@pytest.mark.parametrize(("fault", "code"), [*DEAD.items(), (999, 502)])
async def test_no_engine_answers(fault, code):
    async with cluster(prefills=0, decodes=2, **patience(fault)) as made:
        for engine in made.decodes:
            engine.fault = fault
        status, _, raw = await made.outlast(made.post(COMPLETIONS, {**BODY, "best_of": 2, "stream": fault == "hang"}))
        assert (status, json.loads(raw)["error"]["code"]) == (code, code)
        assert [len(engine.seen) for engine in made.decodes] == [1, 1]


async def test_the_transfer_of_a_request_that_nobody_answers_is_cancelled(made):
    made.prefill.fault = "hold"
    request = asyncio.create_task(made.post(COMPLETIONS, PROMPTS))
    await within(made.prefill.arrived.wait())
    made.decode.fault = 429
    transfer = transfer_of(made.prefill)
    made.prefill.released.set()
    made.decode.arrived.clear()
    await within(made.decode.arrived.wait())
    made.prefill.fault = 429  # it has answered; as the last resort it fails, too
    status, headers, raw = await within(request)
    assert (status, json.loads(raw)["error"]["code"]) == (429, 429)
    assert headers["x-pdx-transfer-id"] == await made.node.cancelled() == transfer


@pytest.mark.parametrize(("fault", "code"), [("reset", 502), (429, 429)])
async def test_a_request_that_ends_engines_or_finds_all_full_does_not_get_them_all(fault, code):
    """Where all are full, asking each of them for each request would be what keeps them busy."""
    async with cluster(prefills=0, decodes=5) as made:
        for engine in made.decodes:
            engine.fault = fault
        assert (await made.post(COMPLETIONS, {**BODY, "best_of": 2}))[0] == code
        assert sum(len(engine.seen) for engine in made.decodes) == 3


@pytest.mark.parametrize("more", [{"prompt": HALF}, {"best_of": 2}])
async def test_a_whole_answer_that_takes_too_long_is_not_asked_for_again(more):
    """An engine may have computed it all the time, and its first byte comes with its end."""
    async with cluster(decodes=2, answer_timeout_s=600.0) as made:
        for engine in made.decodes:
            engine.fault = "hang"
        asked = asyncio.create_task(made.post(COMPLETIONS, {**BODY, **more}))
        # While its prefill is under way, a decode leg's time does not count.
        prefill = made.proxy.engines.health.of(made.prefill.url)
        await until(lambda: any(engine.hanging for engine in made.decodes) and not prefill.in_flight)
        (slow,) = [engine for engine in made.decodes if engine.seen]
        made.pass_time(601.0)
        status, _, raw = await within(asked)
        assert (status, json.loads(raw)["error"]["message"]) == (502, "the decode engine failed (timeout)")
        assert sum(len(engine.seen) for engine in made.decodes) == 1
        assert sum("kv_transfer_params" not in body for body in made.prefill.bodies) == 0
        assert await made.metric("pdx_proxy_engine_ready", url=slow.url) == 0
        assert await made.metric("pdx_proxy_failovers_total", leg="decode") == 0


async def test_a_proxy_that_stood_still_after_a_refusal_tries_another(monkeypatch):
    """Its clock of failovers counts only the time in which it ran."""
    connect = aiohttp.TCPConnector.connect
    async with cluster(decodes=2) as made:

        async def standing_still(connector, request, *rest, **more):
            if str(request.url.origin()) == made.decodes[0].url:
                made.proxy.env.clock.stood_s += 600
            return await connect(connector, request, *rest, **more)

        monkeypatch.setattr(aiohttp.TCPConnector, "connect", standing_still)
        await made.decodes[0].stop()
        status, _, _ = await made.post(COMPLETIONS, {**BODY, "best_of": 2})
        assert (status, len(made.decodes[1].seen)) == (200, 1)
        assert await made.metric("pdx_proxy_failovers_total", reason="refused") == 1


async def test_prefill_engine_decodes_as_a_last_resort(made):
    want = await expected(made)
    await made.decode.stop()
    status, _, raw = await made.post(COMPLETIONS, BODY)
    assert (status, text_of(raw)) == (200, want)
    assert await made.metric("pdx_proxy_failovers_total", reason="refused") == 1
    status, headers, raw = await made.post(COMPLETIONS, BODY)  # now it is known: no second leg
    assert (status, headers["x-pdx-mode"], text_of(raw)) == (200, "alone", want)


async def test_a_continuation_is_refused():
    """The client has the first token, and is not told what is wrong with a request that it has not made."""
    async with cluster(decode_server=Server(first=ord("q"))) as made:
        made.decode.fault = "no_ids"
        status, headers, raw = await made.post(COMPLETIONS, {**BODY, "stream": True})
        assert (status, headers["x-pdx-mode"], len(made.decode.seen)) == (200, "forward", 2)
        assert [chunk.get("error", {}).get("code") for chunk in events(raw)] == [None, 502]


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code", "reason"), [("error_event", 500, "status_5xx"), ("full_event", 503, "status_503")]
)
async def test_an_error_in_place_of_a_first_event_goes_to_no_client(fault, code, reason):
    """So vLLM answers a streamed request whose engine core is dead, or whose queue became full meanwhile."""
    async with cluster(prefills=0, decodes=2) as made:
        want = await expected(made)
        for engine in made.decodes:
            engine.fault = fault
            status, _, raw = await made.post(COMPLETIONS, {**BODY, "suffix": "", "stream": True})
            assert status in (200, code)
            if status == 200:
                assert text_of(raw, stream=True) == want
        assert (status, json.loads(raw)["error"]["message"]) == (code, "the engine is dead")
        assert await made.metric("pdx_proxy_failovers_total", reason=reason) >= 1
        assert all(engine.seen for engine in made.decodes)


@pytest.mark.parametrize("refuses", [False, True])
async def test_an_engine_that_has_sent_comments_only_is_followed_by_another(refuses):
    """Whose refusal comes too late to be the answer's status."""
    async with cluster(prefills=0, decodes=2) as made:
        want = await expected(made)
        made.decode.fault, made.decodes[1].fault = "comment", 400 if refuses else None
        status, _, raw = await made.post(COMPLETIONS, {**BODY, "suffix": "", "stream": True})
        assert (status, len(made.decode.seen), raw.startswith(b": keep-alive\n\n")) == (200, 1, True)
        assert events(raw)[-1]["error"]["code"] == 502 if refuses else text_of(raw, stream=True) == want


@pytest.mark.parametrize(
    ("prompt", "fault"), [(FORWARDED, "reset_mid"), (FORWARDED, "hang_mid"), (HALF, "reset_mid"), (HALF, "end_mid")]
)
async def test_decoder_dies_in_the_middle_of_a_stream(prompt, fault):
    async with cluster(**patience(fault)) as made:
        made.decode.fault = fault
        status, headers, raw = await made.outlast(made.post(COMPLETIONS, {**BODY, "prompt": prompt, "stream": True}))
        assert status == 200
        found = events(raw)
        assert all("choices" in chunk for chunk in found[:-1])
        assert (len(found), headers["x-pdx-mode"]) == (3, "forward" if prompt == FORWARDED else "sampled")
        assert found[-1]["error"]["code"] == 502
        assert await made.node.cancelled() == headers["x-pdx-transfer-id"]
        assert await made.metric("pdx_proxy_requests_total", outcome="broken") == 1


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "it ended", "type": "E", "code": %d}}\n\n'
TOLD = json.dumps('data: {"error": 1}\n\nevent: error\n\n"finish_reason":"abort"').encode()
STOP = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":%s}}\n\nevent: message_stop\n\n'
LATE = [
    (COMPLETIONS, ERROR % 500 + DONE, "broken", 1),
    (COMPLETIONS, b'data: {"error": {"code": 1e999}}\n\n' + DONE, "broken", 0),
    (CHAT, ERROR % 400 + DONE, "client_error", 0),
    (CHAT, b'data: {"choices": [{"delta": {}, "finish_reason":"abort"}]}\n\n' + DONE, "broken", 1),
    (CHAT, b'data: {"choices": [{"delta": {"content": ' + TOLD + b"}}]}\n\n" + DONE, "ok", 0),
    (Route.MESSAGES, b'event: error\ndata: {"type": "error", "error": {"type": "internal_error"}}\n\n', "broken", 0),
    (Route.MESSAGES, STOP % b"null", "broken", 1),
    (Route.MESSAGES, STOP % b'"end_turn"', "ok", 0),
    (Route.MESSAGES, (STOP % b'"end_turn"').replace(b"\n\nevent", b"\n\n: a line\nevent"), "ok", 0),
    (Route.RESPONSES, b"event: response.failed\ndata: {}\n\n", "broken", 0),
    (Route.RESPONSES, b'event: response.completed\ndata: {"metadata":{"finish_reason":"abort"}}\n\n', "ok", 0),
]


@pytest.mark.parametrize(("path", "end", "outcome", "faults"), LATE)
async def test_a_stream_that_ends_in_an_error_is_no_success(path, end, outcome, faults, caplog):
    """The client gets what the engine sent; an error without a code may be the request's own, and blames no engine."""
    body = {COMPLETIONS: {**BODY, "prompt": HALF}, Route.RESPONSES: {"input": HALF}}.get(path, TALK)
    async with cluster() as made:
        made.decode.end, made.decode.fault = end, "hold_end"
        async with made.client.post(made.url + path, json={**body, "stream": True}) as response:
            await within(response.content.readuntil(b"\n\n"))
            made.decode.released.set()
            assert (await within(response.read())).endswith(end)
        assert await made.metric("pdx_proxy_requests_total", outcome=outcome) == 1
        assert await made.metric("pdx_proxy_engine_failures_total") == faults
        assert await made.metric("pdx_proxy_cancels_total") == (outcome != "ok")
        assert (made.proxy.engines.health.of(made.decode.url).served_at > 0) == (outcome == "ok")
        assert any("failed: engine" in each.getMessage() for each in caplog.records) == (outcome == "broken")


ENDS = {
    "a comment": DONE + b": bye\n\n",
    "a blank event": DONE + b"\n\n",
    "an event": DONE + ERROR % 500,
    "half an event": DONE + b'data: {"half": ',
    "one newline": b"data: [DONE]\n",
    "no newline": b": ping\n\ndata: [DONE]",
}


@pytest.mark.parametrize("prompt", [FORWARDED, HALF])
async def test_what_comes_after_the_end_of_a_stream_is_no_error(prompt, monkeypatch):
    monkeypatch.setattr(leg, "_DRAIN_S", 0.01)
    whole = [end for end in ENDS.values() if end.startswith(DONE)]
    cases = [(end, None) for end in ENDS.values()] + [
        (end, f"{how}_after") for end in whole for how in ("reset", "hang")
    ]
    async with cluster() as made:
        body = {**BODY, "prompt": prompt}
        want = await expected(made, body)
        for count, (end, fault) in enumerate(cases, start=1):
            made.decode.end, made.decode.fault = end, fault
            status, _, raw = await made.post(COMPLETIONS, {**body, "stream": True})
            assert (status, raw.count(b"[DONE]"), text_of(raw, stream=True)) == (200, 1, want), (end, fault)
            await made.metric_reaches(count, "pdx_proxy_requests_total", outcome="ok")
        assert await made.metric("pdx_proxy_requests_total") == count
        assert await made.metric("pdx_proxy_cancels_total") == 0


async def test_a_client_that_leaves_after_the_end_of_a_stream_is_not_gone(made, monkeypatch):
    monkeypatch.setattr(leg, "_DRAIN_S", 0.2)
    made.decode.fault = "hang_after"
    async with made.client.post(made.url + COMPLETIONS, json={**BODY, "stream": True}) as response:
        await within(response.content.readuntil(DONE))
        response.close()
    await within(made.decode.closed.wait())
    await made.metric_reaches(1, "pdx_proxy_requests_total", outcome="ok")
    assert await made.metric("pdx_proxy_cancels_total") == 0


# ---- nodes --------------------------------------------------------------------------------------


async def test_an_engine_that_has_ended_and_is_not_reported_is_forgotten_before_its_address_is_anothers(monkeypatch):
    monkeypatch.setattr(health, "FIRST_S", 0.05)
    async with cluster(decodes=2, named=False, heartbeat_timeout_s=600.0, probe_s=0.05) as made:
        ended, *left = (("d0", "decode", made.decode.url), ("d1", "decode", made.decodes[1].url))
        await made.node.report(ended, *left)
        await made.metric_reaches(1, "pdx_proxy_engine_ready", url=made.decode.url)
        await made.decode.stop()
        await made.node.report(*left)
        await until(lambda: [each.name for each in made.proxy.engines.all()] == ["d1"])


@pytest.mark.parametrize(("leg", "how", "stream"), [("prefill", "vanishes", True), ("decode", "falls silent", False)])
async def test_what_nodes_report_cuts_no_answer(leg, how, stream, caplog):
    """The engine goes on with what it has, and serves alone afterwards: no KV goes through its node."""

    def is_detached(engine):
        return any(
            "is attached to no node" in record.message and engine.url in record.message for record in caplog.records
        )

    async with cluster(named=False, heartbeat_timeout_s=60.0) as made:
        want = await expected(made)
        engines = {each: (each[0], each, getattr(made, each).url) for each in ("prefill", "decode")}
        goes, stays = engines.pop(leg), *engines.values()
        beats = [(made.node, goes, stays)] if how == "vanishes" else [(made.node, goes), (made.other_node(), stays)]
        beats = [asyncio.create_task(each[0].keep_reporting(*each[1:])) for each in beats]
        for engine in (made.prefill, made.decode):  # whose models are known then
            await made.metric_reaches(1, "pdx_proxy_engine_ready", url=engine.url)
        held = getattr(made, leg)
        held.fault = "hold"
        held.arrived.clear()
        task = asyncio.create_task(made.post(COMPLETIONS, {**BODY, "stream": stream}))
        await within(held.arrived.wait())
        beats[0].cancel()
        if how == "vanishes":
            beats[0] = asyncio.create_task(made.node.keep_reporting(stays))
        else:
            heard = await made.metric("pdx_proxy_reports_total")
            await made.metric_reaches(heard + 3, "pdx_proxy_reports_total")  # what this node said last has come, too
            made.pass_time(59.0)
            heard = await made.metric("pdx_proxy_reports_total")
            await made.metric_reaches(heard + 2, "pdx_proxy_reports_total")  # of the other node, since then
            made.pass_time(2.0)
        await until(lambda: is_detached(held))
        held.released.set()
        status, headers, raw = await within(task)
        assert (status, headers["x-pdx-mode"]) == (200, "forward" if stream else "sampled")
        assert text_of(raw, stream=stream) == want
        prefilled = len(made.prefill.seen)
        status, headers, raw = await made.post(COMPLETIONS, BODY)
        assert (status, headers["x-pdx-mode"], text_of(raw)) == (200, "alone", want)
        assert (made.decode.bodies[-1], len(made.prefill.seen)) == (BODY, prefilled)
        assert (await made.get("/health"))[0] == 200
        for beat in beats:
            beat.cancel()
