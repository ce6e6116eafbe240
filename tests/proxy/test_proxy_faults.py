"""Engines that refuse, die, hang, lie or vanish, at every point of a request."""

import asyncio
import json
import time
from unittest.mock import Mock

import aiohttp
import pytest
from engine_standin import StandIn
from proxy_harness import FORWARDED, HALF, cluster, events, run, within

from pdx.errors import LegFailed
from pdx.proxy.leg import Legs
from pdx.proxy.roster import Engine, Roster

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 12}


def text_of(raw):
    return json.loads(raw)["choices"][0]["text"]


def patience(fault):
    """Settings of a proxy: a leg's limit strikes healthy engines, too, so it is short only where nothing else ends."""
    return {"read_timeout_s": 3.0} if fault in ("hang", "hang_mid") else {}


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
    + [(400, "status_4xx"), ("nonsense", "malformed")],
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
        async with cluster(suspect_s=60.0) as made:
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
                if stream:
                    chunks = events(raw)
                    assert chunks[-1] == "[DONE]"
                    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == want
                else:
                    assert text_of(raw) == want
            assert all("kv_transfer_params" in body for body in made.decodes[1].bodies)

    run(main)


def test_a_proxy_that_stood_still_after_a_refusal_tries_another(monkeypatch):
    """A standstill of the proxy itself costs no engine its turn."""
    suspect = Roster.suspect

    def stand_still(roster, url):
        time.sleep(2.6)
        suspect(roster, url)

    monkeypatch.setattr(Roster, "suspect", stand_still)

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


@pytest.mark.parametrize(("fault", "code"), [("reset", 502), ("hang", 502), (500, 500), (503, 503), ("nonsense", 502)])
@pytest.mark.parametrize("prompt", [FORWARDED, HALF])
def test_decoder_dies_before_it_answers(prompt, fault, code):
    async def main():
        async with cluster(**patience(fault)) as made:
            await made.post(COMPLETIONS, BODY)
            made.decode.fault = fault
            status, headers, raw = await made.post(COMPLETIONS, {**BODY, "prompt": prompt})
            if fault == "nonsense" and prompt == HALF:
                assert status == 200  # as it is
                return
            assert status == code
            assert json.loads(raw)["error"]["code"] == code
            assert await made.node.cancelled() == headers["x-pdx-transfer-id"]

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
def test_engine_is_lost_while_it_works(leg, how, stream):
    async def main():
        async with cluster(named=False, heartbeat_timeout_s=0.6) as made:
            prefill = ("p", "prefill", made.prefill.url)
            decode = ("d", "decode", made.decode.url)
            beat = asyncio.create_task(keep_reporting(made.node, prefill, decode))
            await made.metric_reaches(1, "pdx_proxy_engines", role="decode")
            broken = getattr(made, leg)
            broken.fault = "hang"
            broken.arrived.clear()
            task = asyncio.create_task(made.post(COMPLETIONS, {**BODY, "stream": stream}))
            await within(broken.arrived.wait())
            beat.cancel()
            stays = decode if leg == "prefill" else prefill
            if how == "vanishes":
                beat = asyncio.create_task(keep_reporting(made.node, stays))
            else:
                beat = asyncio.create_task(keep_reporting(made.other_node(), stays))
            status, headers, raw = await within(task)
            await within(broken.closed.wait())
            if leg == "prefill":
                assert (status, headers["x-pdx-mode"]) == (200, "alone")
                assert await made.metric("pdx_proxy_fallbacks_total", reason="prefill_lost") == 1
            elif headers["x-pdx-mode"] == "forward" and stream:
                assert events(raw)[-1]["error"]["code"] == 502
            else:
                assert status == 502
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
            status, headers, _ = await made.post(COMPLETIONS, BODY)
            assert (status, headers["x-pdx-mode"]) == (200, "alone")
            assert await made.metric("pdx_proxy_fallbacks_total", reason="prefill_connect_timeout") == 1
        for each in (trap, *fillers):
            each.close()

    run(main)


class StoppedWhileConnecting:
    """A client session whose process stands still for longer than a connection may take, `times` in a row."""

    def __init__(self, times, passes):
        self.times = times
        self.passes = passes
        self.asked = 0

    async def request(self, *asked, **how):
        self.asked += 1
        self.passes()
        if self.asked <= self.times:
            raise aiohttp.ConnectionTimeoutError
        return Mock(status=200, content_type="application/json")


@pytest.mark.parametrize(("ran_s", "times", "asked"), [(0.5, 1, 2), (0.5, 3, 4), (0.5, 4, 4), (2.0, 1, 1)])
def test_a_connection_may_take_its_time_of_this_process(ran_s, times, asked):
    """Here each attempt ends by a timer, of whose time the process ran for `ran_s`; 2 s of that are too long."""
    now = 0.0

    def passes():
        nonlocal now
        now += ran_s

    session = StoppedWhileConnecting(times, passes)
    legs = Legs(session, connect_timeout_s=2.0, read_timeout_s=600.0, clock=lambda: now)
    engine = Engine(url="http://e", name="e", prefills=True, decodes=True, named=True)

    async def main():
        async with legs.post(engine, "/v1/completions", payload=b"", headers={}) as answer:
            return answer.status

    if times * ran_s < 2.0:
        assert asyncio.run(main()) == 200
    else:
        with pytest.raises(LegFailed, match="connect_timeout"):
            asyncio.run(main())
    assert session.asked == asked
