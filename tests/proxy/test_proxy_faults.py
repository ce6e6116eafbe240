"""Engines that refuse, die, hang, lie or vanish, at every point of a request."""

import asyncio
import json
import time

import pytest
from engine_standin import Server, StandIn
from proxy_harness import FORWARDED, HALF, cluster, events, patience, run, until, within

from pdx.proxy import leg, relay
from pdx.proxy.health import Health

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 12}


def text_of(raw, *, stream=False):
    """What an answer says; a stream must be whole."""
    if not stream:
        return json.loads(raw)["choices"][0]["text"]
    chunks = events(raw)
    assert chunks[-1] == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])


def test_an_error_in_place_of_a_first_event_goes_to_no_client():
    """So vLLM answers a streamed request whose engine core is dead."""

    async def main():
        async with cluster(prefills=0, decodes=2) as made:
            want = await expected(made)
            for engine in made.decodes:
                engine.fault = "error_event"
                status, _, raw = await made.post(COMPLETIONS, {**BODY, "suffix": "", "stream": True})
                assert status in (200, 500)
                if status == 200:
                    assert "".join(each["choices"][0]["text"] for each in events(raw)[:-1]) == want
            assert (status, json.loads(raw)["error"]["message"]) == (500, "the engine is dead")
            assert all(engine.seen for engine in made.decodes)

    run(main)


async def expected(made, body=BODY):
    engine = StandIn()
    await engine.start()
    try:
        return text_of((await made.post(COMPLETIONS, body, base=engine.url))[2])
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("refuse", "refused"), ("reset", "reset"), ("hang", "timeout"), (500, "status_5xx"), (503, "status_5xx")]
    + [
        (202, "malformed"),
        (400, "status_4xx"),
        (429, "status_429"),
        ("nonsense", "malformed"),
        ("elsewhere", "redirect"),
    ],
)
def test_prefill_fails(fault, reason):
    async def main():
        async with cluster(**patience(fault)) as made:
            if fault == "refuse":
                await made.prefill.stop()
            made.prefill.fault = fault
            status, headers, raw = await made.post(COMPLETIONS, BODY)
            assert (status, headers["x-pdx-mode"], text_of(raw)) == (200, "alone", await expected(made))
            assert await made.node.cancelled() == headers["x-pdx-transfer-id"]
            assert "kv_transfer_params" not in made.decode.bodies[-1]
            assert await made.metric("pdx_proxy_fallbacks_total", reason=f"prefill_{reason}") == 1
            assert await made.metric("pdx_proxy_cancels_total", reason=f"prefill_{reason}") == 1

    run(main)


TALK = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}


def test_both_legs_of_a_chat_are_sent_at_once():
    async def main():
        async with cluster() as made:
            made.prefill.fault = "hold"
            request = asyncio.create_task(made.post(CHAT, TALK))
            await within(made.decode.arrived.wait())
            assert made.prefill.seen
            params = made.decode.bodies[0]["kv_transfer_params"]
            assert (params["is_early"], "prefill_tokens" in params) == (True, False)
            assert params["transfer_id"] == made.prefill.bodies[0]["kv_transfer_params"]["transfer_id"]
            assert not request.done(), "its engine waits for the transfer"
            made.prefill.released.set()
            status, headers, _ = await within(request)
            assert (status, headers["x-pdx-mode"], len(made.decode.seen)) == (200, "sampled", 1)
            assert (await made.node.prefilled(), len(made.prefill.seen)) == (params["transfer_id"], 1)

    run(main)


def test_where_no_node_could_be_told_the_legs_of_a_chat_follow_each_other():
    async def main():
        async with cluster(known=False) as made:
            status, headers, _ = await made.post(CHAT, TALK)
            assert (status, headers["x-pdx-mode"]) == (200, "sampled")
            params = made.decode.bodies[0]["kv_transfer_params"]
            assert ("is_early" in params, params["prefill_tokens"] > 1) == (False, True)

    run(main)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "reason"), [("refuse", "refused"), ("reset", "reset"), (500, "status_5xx")])
def test_prefill_of_a_chat_fails_and_its_decode_leg_goes_on(fault, reason, stream):
    async def main():
        async with cluster() as made:
            want = await made.post(CHAT, TALK, base=made.decode.url)
            made.decode.seen.clear()
            if fault == "refuse":
                await made.prefill.stop()
            made.prefill.fault = fault
            status, headers, raw = await made.post(CHAT, {**TALK, "stream": stream})
            assert (status, headers["x-pdx-mode"], len(made.decode.seen)) == (200, "alone", 1)
            if not stream:
                assert json.loads(raw)["choices"] == json.loads(want[2])["choices"]
            assert await made.node.cancelled() == headers["x-pdx-transfer-id"]
            assert await made.metric("pdx_proxy_fallbacks_total", reason=f"prefill_{reason}") == 1

    run(main)


def test_another_decoder_is_asked_while_the_prefill_of_a_chat_goes_on():
    async def main():
        async with cluster(decodes=2) as made:
            made.prefill.fault = "hold"
            for each in made.decodes:
                each.fault = 503
            made.decodes[1].fault = None
            requests = [asyncio.create_task(made.post(CHAT, TALK)) for _ in range(2)]
            await until(lambda: len(made.decodes[1].seen) == 2)
            made.prefill.released.set()
            for request in requests:
                status, headers, _ = await within(request)
                assert (status, headers["x-pdx-mode"]) == (200, "sampled")

    run(main)


def test_a_chat_that_leaves_ends_both_of_its_legs():
    async def main():
        async with cluster() as made:
            made.prefill.fault = "hold"
            request = asyncio.create_task(made.post(CHAT, TALK))
            await within(asyncio.gather(made.prefill.arrived.wait(), made.decode.arrived.wait()))
            request.cancel()
            await within(asyncio.gather(made.prefill.closed.wait(), made.decode.closed.wait()))
            assert await made.node.cancelled() == made.decode.bodies[0]["kv_transfer_params"]["transfer_id"]

    run(main)


def test_a_chat_that_is_answered_before_its_prefill_ends_that():
    async def main():
        async with cluster() as made:
            made.prefill.fault = "hold"
            request = asyncio.create_task(made.post(CHAT, TALK))
            await within(made.decode.arrived.wait())
            transfer = made.decode.bodies[0]["kv_transfer_params"]["transfer_id"]
            made.decode.settled[transfer].set()  # by its own deadline
            assert (await within(request))[0] == 200
            await within(made.prefill.closed.wait())
            assert await made.node.cancelled() == transfer

    run(main)


def cached_tokens(raw, *, stream):
    usage = events(raw)[-2]["usage"] if stream else json.loads(raw)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_of_a_chat_waits_for_what_the_prefill_engine_had(stream):
    async def main():
        async with cluster(server=Server(details=True)) as made:
            body = {**TALK, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
            had = cached_tokens((await made.post(CHAT, body, base=made.prefill.url))[2], stream=stream)
            made.prefill.seen.clear()
            made.prefill.arrived.clear()
            made.prefill.fault = "hold"
            request = asyncio.create_task(made.post(CHAT, body))
            await within(asyncio.gather(made.prefill.arrived.wait(), made.decode.arrived.wait()))
            params = made.decode.bodies[0]["kv_transfer_params"]
            made.decode.settled[params["transfer_id"]].set()  # all KV has arrived, and the answer is whole
            await within(made.decode.answered.wait())
            for _ in range(20):  # all in one event loop: the proxy has its answer by then
                await made.get("/health")
            made.prefill.released.set()
            status, headers, raw = await within(request)
            assert (status, headers["x-pdx-mode"]) == (200, "sampled")
            assert cached_tokens(raw, stream=stream) == had
            assert await made.node.prefilled() == params["transfer_id"]
            assert await made.metric("pdx_proxy_cancels_total", reason="prefill_late") == 0

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_of_a_chat_does_not_wait_for_a_prefill_engine_that_hangs(stream, monkeypatch):
    async def main():
        monkeypatch.setattr(relay, "USAGE_S", 0.05)
        async with cluster(server=Server(details=True)) as made:
            made.prefill.fault = "hold"
            body = {**TALK, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
            request = asyncio.create_task(made.post(CHAT, body))
            await within(made.decode.arrived.wait())
            transfer = made.decode.bodies[0]["kv_transfer_params"]["transfer_id"]
            made.decode.settled[transfer].set()  # by its own deadline
            status, _, raw = await within(request)
            assert (status, cached_tokens(raw, stream=stream) > 0) == (200, True)  # the decode engine's own
            await within(made.prefill.closed.wait())
            assert await made.node.cancelled() == transfer
            assert await made.metric("pdx_proxy_cancels_total", reason="prefill_late") == 1

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_leg_may_end_a_little_later_than_its_decode_leg(stream, monkeypatch):
    async def main():
        monkeypatch.setattr(relay, "UNREAD_S", 30.0)
        async with cluster() as made:
            made.prefill.fault = "hold"
            request = asyncio.create_task(made.post(CHAT, {**TALK, "stream": stream}))
            await within(asyncio.gather(made.prefill.arrived.wait(), made.decode.arrived.wait()))
            transfer = made.decode.bodies[0]["kv_transfer_params"]["transfer_id"]
            made.decode.settled[transfer].set()  # all KV has arrived
            await within(made.decode.answered.wait())
            if stream:
                await within(asyncio.wait([request]))
            made.prefill.released.set()
            status, headers, _ = await within(request)
            assert (status, headers["x-pdx-mode"]) == (200, "sampled")
            assert await made.node.prefilled() == transfer
            assert not made.prefill.closed.is_set()
            assert await made.metric("pdx_proxy_cancels_total", reason="prefill_late") == 0

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_in_the_prefill_of_a_chat_costs_it_nothing_but_that(stream, monkeypatch):
    async def main():
        async with cluster() as made:
            want = await made.post(CHAT, TALK, base=made.decode.url)
            made.decode.seen.clear()
            monkeypatch.setattr(relay.answer, "decode_prefill", defective)
            status, headers, raw = await made.post(CHAT, {**TALK, "stream": stream})
            assert (status, headers["x-pdx-mode"], len(made.decode.seen)) == (200, "alone", 1)
            if not stream:
                assert json.loads(raw)["choices"] == json.loads(want[2])["choices"]
            assert await made.node.cancelled() == headers["x-pdx-transfer-id"]
            assert await made.metric("pdx_proxy_fallbacks_total", reason="prefill_internal") == 1
            assert await made.metric("pdx_proxy_events_total", event="internal_errors") == 1

    run(main)


def defective(*_args, **_kwargs):
    raise RuntimeError("a defect")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_nodes_are_told_where_a_defect_ends_a_request(path, monkeypatch):
    async def main():
        async with cluster() as made:
            monkeypatch.setattr(relay.answer.AsItIs, "take", defective)
            status, _, _ = await made.post(path, {**BODY, "logprobs": 1} if path == COMPLETIONS else TALK)
            assert status == 500
            assert await made.node.cancelled() == made.prefill.bodies[0]["kv_transfer_params"]["transfer_id"]
            assert await made.metric("pdx_proxy_cancels_total", reason="internal") == 1
            assert await made.metric("pdx_proxy_requests_total", outcome="internal") == 1

    run(main)


def test_nodes_are_told_where_no_engine_is_left_to_decode(monkeypatch):
    async def main():
        async with cluster() as made:
            monkeypatch.setattr(relay.router, "decoder", lambda *_args, **_kwargs: None)
            assert (await made.post(CHAT, TALK))[0] == 503
            assert await made.node.cancelled() == made.prefill.bodies[0]["kv_transfer_params"]["transfer_id"]
            assert await made.metric("pdx_proxy_cancels_total", reason="no_decoder") == 1

    run(main)


def test_a_chat_that_its_decode_engine_refuses_is_not_late():
    async def main():
        async with cluster() as made:
            made.prefill.fault = "hold"
            made.decode.fault = 404
            assert (await made.post(CHAT, TALK))[0] == 404
            await within(made.prefill.closed.wait())
            assert await made.node.cancelled() == made.prefill.bodies[0]["kv_transfer_params"]["transfer_id"]
            assert await made.metric("pdx_proxy_cancels_total", reason="decode_refused") == 1

    run(main)


def test_a_request_the_engine_refuses_is_refused_by_the_engine():
    async def main():
        async with cluster() as made:
            body = {**BODY, "max_tokens": 5000}
            direct = await made.post(COMPLETIONS, body, base=made.decode.url)
            status, _, raw = await made.post(COMPLETIONS, body)
            assert (status, raw) == (direct[0], direct[2])
            assert status == 400
            assert await made.metric("pdx_proxy_requests_total", outcome="client_error") == 1

    run(main)


def test_prefill_that_refused_is_left_in_peace_for_a_moment():
    async def main():
        async with cluster() as made:
            await made.prefill.stop()
            for _ in range(3):
                assert (await made.post(COMPLETIONS, BODY))[1]["x-pdx-mode"] == "alone"
            assert await made.metric("pdx_proxy_fallbacks_total", reason="prefill_refused") == 1
            assert await made.metric("pdx_proxy_fallbacks_total", reason="no_prefiller") == 2

    run(main)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [FORWARDED, HALF])
def test_decoder_refuses_and_another_takes_over(prompt, stream):
    async def main():
        async with cluster(decodes=2) as made:
            body = {**BODY, "prompt": prompt}
            want = await expected(made, body)
            await made.decodes[0].stop()
            for _ in range(2):
                status, _, raw = await made.post(COMPLETIONS, {**body, "stream": stream})
                assert status == 200
                assert text_of(raw, stream=stream) == want
            assert all("kv_transfer_params" in body for body in made.decodes[1].bodies)

    run(main)


def test_a_proxy_that_stood_still_after_a_refusal_tries_another(monkeypatch):
    """A standstill of the proxy itself costs no engine its turn."""
    failed = Health.failed

    def stand_still(health, use, reason):
        time.sleep(2.6)
        failed(health, use, reason)

    monkeypatch.setattr(Health, "failed", stand_still)

    async def main():
        async with cluster(decodes=2) as made:
            await made.decodes[0].stop()
            status, _, _ = await made.post(COMPLETIONS, {**BODY, "n": 2})
            assert (status, len(made.decodes[1].seen)) == (200, 1)
            assert await made.metric("pdx_proxy_failovers_total", reason="refused") == 1

    run(main)


def test_prefill_engine_decodes_as_a_last_resort():
    async def main():
        async with cluster() as made:
            want = await expected(made)
            await made.decode.stop()
            status, _, raw = await made.post(COMPLETIONS, BODY)
            assert (status, text_of(raw)) == (200, want)
            assert await made.metric("pdx_proxy_failovers_total", reason="refused") == 1
            status, headers, raw = await made.post(COMPLETIONS, BODY)  # now it is known: no second leg
            assert (status, headers["x-pdx-mode"], text_of(raw)) == (200, "alone", want)

    run(main)


def test_nobody_left():
    async def main():
        async with cluster() as made:
            await made.prefill.stop()
            await made.decode.stop()
            for _ in range(2):
                status, _, raw = await made.post(COMPLETIONS, BODY)
                assert status == 503
                assert json.loads(raw)["error"]["code"] == 503
                assert "127.0.0.1" not in raw.decode()
            assert (await made.get("/health"))[0] == 503
            assert (await made.get("/v1/models"))[0] == 503
        async with cluster(prefills=0, decodes=0) as made:
            assert (await made.post(COMPLETIONS, BODY))[0] == 503
            assert await made.metric("pdx_proxy_requests_total", outcome="unavailable") == 1

    run(main)


@pytest.mark.parametrize("fault", ["reset_mid", "end_mid", "hang_mid"])
@pytest.mark.parametrize("prompt", [FORWARDED, HALF])
def test_decoder_dies_in_the_middle_of_a_stream(prompt, fault):
    async def main():
        async with cluster(**patience(fault)) as made:
            made.decode.fault = fault
            status, headers, raw = await made.post(COMPLETIONS, {**BODY, "prompt": prompt, "stream": True})
            assert status == 200
            found = events(raw)
            assert all("choices" in chunk for chunk in found[:-1])
            assert len(found) == (4 if headers["x-pdx-mode"] == "forward" else 3)
            assert found[-1]["error"]["code"] == 502
            assert await made.node.cancelled() == headers["x-pdx-transfer-id"]
            assert await made.metric("pdx_proxy_requests_total", outcome="broken") == 1

    run(main)


DONE = b"data: [DONE]\n\n"
ENDS = {
    "a comment": DONE + b": bye\n\n",
    "a blank event": DONE + b"\n\n",
    "an event": DONE + b'data: {"error": {"message": "too late"}}\n\n',
    "half an event": DONE + b'data: {"half": ',
    "one newline": b"data: [DONE]\n",
    "no newline": b": ping\n\ndata: [DONE]",
}


@pytest.mark.parametrize(
    ("end", "fault"),
    [(end, None) for end in ENDS]
    + [(end, fault) for end in ENDS if ENDS[end].startswith(DONE) for fault in ("reset_after", "hang_after")],
)
@pytest.mark.parametrize("prompt", [FORWARDED, HALF])
def test_what_comes_after_the_end_of_a_stream_is_no_error(prompt, end, fault, monkeypatch):
    monkeypatch.setattr(leg, "_DRAIN_S", 0.01)

    async def main():
        async with cluster() as made:
            body = {**BODY, "prompt": prompt}
            want = await expected(made, body)
            made.decode.end, made.decode.fault = ENDS[end], fault
            status, _, raw = await made.post(COMPLETIONS, {**body, "stream": True})
            chunks = events(raw)
            assert (status, chunks[-1], raw.count(b"[DONE]")) == (200, "[DONE]", 1)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == want
            await made.metric_reaches(1, "pdx_proxy_requests_total", outcome="ok")
            assert await made.metric("pdx_proxy_requests_total") == 1
            assert await made.metric("pdx_proxy_cancels_total") == 0

    run(main)


def test_a_client_that_leaves_after_the_end_of_a_stream_is_not_gone():
    async def main():
        async with cluster() as made:
            made.decode.fault = "hang_after"
            async with made.client.post(made.url + COMPLETIONS, json={**BODY, "stream": True}) as response:
                await within(response.content.readuntil(DONE))
                response.close()
            await within(made.decode.closed.wait())
            await made.metric_reaches(1, "pdx_proxy_requests_total", outcome="ok")
            assert await made.metric("pdx_proxy_cancels_total") == 0

    run(main)


DEAD = [
    ("reset", 502),
    ("hang", 502),
    (500, 500),
    (503, 503),
    (429, 429),
    ("nonsense", 502),
    ("elsewhere", 502),
    (999, 502),
]


@pytest.mark.parametrize(
    ("fault", "stream"),
    [(fault, stream) for fault, _ in DEAD for stream in (False, True) if stream or fault != "hang"],
)
@pytest.mark.parametrize("prompt", [FORWARDED, HALF])
def test_decoder_dies_before_it_answers_and_another_takes_over(prompt, fault, stream):
    """Also behind a first token that the client has: the continuation can go to any engine."""

    async def main():
        async with cluster(decodes=2, **patience(fault)) as made:
            body = {**BODY, "prompt": prompt}
            want = await expected(made, body)
            await made.post(COMPLETIONS, BODY)
            await made.post(COMPLETIONS, BODY)
            made.decode.fault = fault
            made.decode.seen.clear()
            status, headers, raw = await made.post(COMPLETIONS, {**body, "stream": stream})
            assert made.decode.seen, "the test is about the engine that was planned"
            assert status == 200
            assert text_of(raw, stream=stream) == want
            assert await made.metric("pdx_proxy_failovers_total", leg="decode") == 1

    run(main)


@pytest.mark.parametrize(("fault", "code"), DEAD)
@pytest.mark.parametrize("decodes", [1, 2])
def test_no_engine_answers(fault, code, decodes):
    async def main():
        async with cluster(prefills=0, decodes=decodes, **patience(fault)) as made:
            for engine in made.decodes:
                engine.fault = fault
            status, _, raw = await made.post(COMPLETIONS, {**BODY, "n": 2, "stream": fault == "hang"})
            assert status == code
            assert json.loads(raw)["error"]["code"] == code
            assert [len(engine.seen) for engine in made.decodes] == [1] * decodes

    run(main)


@pytest.mark.parametrize("more", [{"prompt": FORWARDED}, {"prompt": HALF}, {"n": 2}])
def test_a_whole_answer_that_takes_too_long_is_not_asked_for_again(more):
    """An engine may have computed it all the time, and its first byte comes with its end."""

    async def main():
        async with cluster(decodes=2, answer_timeout_s=1.0) as made:
            for engine in made.decodes:
                engine.fault = "hold"
            asked = asyncio.create_task(made.post(COMPLETIONS, {**BODY, **more}))
            await until(lambda: any(engine.seen for engine in made.decodes))
            (slow,) = [engine for engine in made.decodes if engine.seen]
            status, _, raw = await within(asked)
            assert (status, json.loads(raw)["error"]["message"]) == (502, "the decode engine failed (timeout)")
            assert sum(len(engine.seen) for engine in made.decodes) == 1
            assert sum("kv_transfer_params" not in body for body in made.prefill.bodies) == 0
            assert await made.metric("pdx_proxy_engine_ready", url=slow.url) == 0
            assert await made.metric("pdx_proxy_failovers_total", leg="decode") == 0

    run(main)


@pytest.mark.parametrize(("fault", "code"), DEAD)
def test_the_transfer_of_a_request_that_nobody_answers_is_cancelled(fault, code):
    async def main():
        async with cluster(**patience(fault)) as made:
            made.prefill.fault = "hold"
            request = asyncio.create_task(made.post(COMPLETIONS, BODY))
            await within(made.prefill.arrived.wait())
            made.decode.fault = fault
            transfer = made.prefill.bodies[-1]["kv_transfer_params"]["transfer_id"]
            made.prefill.released.set()
            made.decode.arrived.clear()
            await within(made.decode.arrived.wait())
            made.prefill.fault = fault  # it has answered; as the last resort it fails, too
            status, headers, raw = await within(request)
            assert (status, json.loads(raw)["error"]["code"]) == (code, code)
            assert headers["x-pdx-transfer-id"] == transfer
            assert await made.node.cancelled() == transfer

    run(main)


@pytest.mark.parametrize(("fault", "code"), [("reset", 502), (429, 429)])
def test_a_request_that_ends_engines_or_finds_all_full_does_not_get_them_all(fault, code):
    """Where all are full, asking each of them for each request would be what keeps them busy."""

    async def main():
        async with cluster(prefills=0, decodes=5) as made:
            for engine in made.decodes:
                engine.fault = fault
            assert (await made.post(COMPLETIONS, {**BODY, "n": 2}))[0] == code
            assert sum(len(engine.seen) for engine in made.decodes) == 3

    run(main)


@pytest.mark.parametrize("fault", ["refuse", "reset", 500, "nonsense", "hang"])
def test_another_prefill_engine_takes_over(fault):
    async def main():
        async with cluster(prefills=2, **patience(fault)) as made:
            want = await expected(made)
            made.prefill.fault = fault
            if fault == "refuse":
                await made.prefill.stop()
            status, headers, raw = await made.post(COMPLETIONS, BODY)
            assert (status, headers["x-pdx-mode"], text_of(raw)) == (200, "forward", want)
            assert await made.metric("pdx_proxy_failovers_total", leg="prefill") == 1
            told = {
                engine.bodies[-1]["kv_transfer_params"]["transfer_id"] for engine in (made.prefills[1], made.decode)
            }
            assert told == {headers["x-pdx-transfer-id"]}
            assert (await made.timeline(headers["x-pdx-transfer-id"]))["outcome"] == "ok"
            if fault != "refuse":  # nodes do not take up a transfer again whose writer failed
                old = made.prefill.bodies[-1]["kv_transfer_params"]["transfer_id"]
                assert old not in told
                assert await made.node.cancelled() == old

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_continuation_is_refused(stream):
    async def main():
        async with cluster() as made:
            await made.post(COMPLETIONS, BODY)
            made.decode.fault = 400
            status, headers, raw = await made.post(COMPLETIONS, {**BODY, "stream": stream})
            if stream:  # the first token was gone already
                assert status == 200
                assert events(raw)[-1]["error"]["code"] == 502
            else:  # the second opinion, on the client's own request
                assert (status, headers["x-pdx-mode"]) == (400, "alone")
                assert made.decode.bodies[-1] == {**BODY, "stream": False}

    run(main)


async def keep_reporting(node, *engines):
    while True:
        await node.report(*engines)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("how", ["vanishes", "falls silent"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_nodes_report_cuts_no_answer(leg, how, stream, caplog):
    """The engine goes on with what it has, and serves alone afterwards: no KV goes through its node."""

    def is_detached(engine):
        return any(f"engine {engine.url} is attached to no node" in record.message for record in caplog.records)

    async def main():
        async with cluster(named=False, heartbeat_timeout_s=2.0) as made:
            want = await expected(made)
            engines = {each: (each[0], each, getattr(made, each).url) for each in ("prefill", "decode")}
            goes, stays = engines.pop(leg), *engines.values()
            beats = [(made.node, goes, stays)] if how == "vanishes" else [(made.node, goes), (made.other_node(), stays)]
            beats = [asyncio.create_task(keep_reporting(*each)) for each in beats]
            await made.metric_reaches(1, "pdx_proxy_engines", role="prefill")
            await made.metric_reaches(1, "pdx_proxy_engines", role="decode")
            held = getattr(made, leg)
            held.fault = "hold"
            held.arrived.clear()
            task = asyncio.create_task(made.post(COMPLETIONS, {**BODY, "stream": stream}))
            await within(held.arrived.wait())
            beats[0].cancel()
            if how == "vanishes":
                beats[0] = asyncio.create_task(keep_reporting(made.node, stays))
            await until(lambda: is_detached(held))
            held.released.set()
            status, headers, raw = await within(task)
            assert (status, headers["x-pdx-mode"]) == (200, "forward")
            assert text_of(raw, stream=stream) == want
            prefilled = len(made.prefill.seen)
            status, headers, raw = await made.post(COMPLETIONS, BODY)
            assert (status, headers["x-pdx-mode"], text_of(raw)) == (200, "alone", want)
            assert (made.decode.bodies[-1], len(made.prefill.seen)) == (BODY, prefilled)
            assert (await made.get("/health"))[0] == 200
            for beat in beats:
                beat.cancel()

    run(main)


def test_connect_timeout():
    """An address that swallows packets: the listener's backlog is full."""
    import socket

    async def main():
        trap = socket.socket()
        trap.bind(("127.0.0.1", 0))
        trap.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(trap.getsockname())
            fillers.append(filler)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}"
        limits = {"connect_timeout_s": 1.0, "heartbeat_timeout_s": 60.0}  # the node reports once
        async with cluster(prefills=0, decode=(), named=False, **limits) as made:
            await made.node.report(("trap", "prefill", url), ("d", "decode", made.decode.url))
            await made.metric_reaches(1, "pdx_proxy_engines", role="decode")
            made.proxy._health.of(url).models = {"hash": None}
            status, headers, _ = await made.post(COMPLETIONS, BODY)
            assert (status, headers["x-pdx-mode"]) == (200, "alone")
            assert await made.metric("pdx_proxy_fallbacks_total", reason="prefill_connect_timeout") == 1
        for each in (trap, *fillers):
            each.close()

    run(main)
