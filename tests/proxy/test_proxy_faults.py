"""Engines that refuse, die, hang, lie or vanish, at every point of a request."""

import asyncio
import errno
import json
import time
from unittest.mock import Mock, patch

import aiohttp
import pytest
from engine_standin import StandIn
from proxy_harness import FORWARDED, HALF, cluster, events, run, until, within

from pdx.errors import ClientGone, LegFailed
from pdx.proxy import leg
from pdx.proxy.health import Health, State
from pdx.proxy.leg import Legs
from pdx.proxy.roster import Engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 12}


def text_of(raw):
    return json.loads(raw)["choices"][0]["text"]


def patience(fault):
    """Settings of a proxy: a leg's limit strikes healthy engines, too, so it is short only where nothing else ends."""
    return {"first_byte_timeout_s": 3.0, "idle_timeout_s": 3.0} if fault in ("hang", "stuck", "hang_mid") else {}


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
    + [(400, "status_4xx"), (429, "status_429"), ("nonsense", "malformed"), ("elsewhere", "redirect")],
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [fault for fault, _ in DEAD])
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
            if stream:
                chunks = events(raw)
                assert chunks[-1] == "[DONE]"
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == want
            else:
                assert text_of(raw) == want
            assert await made.metric("pdx_proxy_failovers_total", leg="decode") == 1

    run(main)


@pytest.mark.parametrize(("fault", "code"), DEAD)
@pytest.mark.parametrize("decodes", [1, 2])
def test_no_engine_answers(fault, code, decodes):
    async def main():
        async with cluster(prefills=0, decodes=decodes, **patience(fault)) as made:
            for engine in made.decodes:
                engine.fault = fault
            status, _, raw = await made.post(COMPLETIONS, {**BODY, "n": 2})
            assert status == code
            assert json.loads(raw)["error"]["code"] == code
            assert [len(engine.seen) for engine in made.decodes] == [1] * decodes

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


def test_a_request_that_ends_engines_does_not_get_them_all():
    async def main():
        async with cluster(prefills=0, decodes=5) as made:
            for engine in made.decodes:
                engine.fault = "reset"
            assert (await made.post(COMPLETIONS, {**BODY, "n": 2}))[0] == 502
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


@pytest.mark.parametrize("fault", ["reset", 500, "nonsense", "stuck", "elsewhere"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_one_bad_engine_of_four_is_no_black_hole(leg, fault):
    """Its first requests are served by others, and once it is suspect it gets none."""

    async def main():
        async with cluster(prefills=4, decodes=4, **patience(fault)) as made:
            bad = getattr(made, leg)
            bad.fault = fault

            async def burst():
                asked = (made.post(COMPLETIONS, {**BODY, "seed": number}) for number in range(24))
                return {answer[0] for answer in await within(asyncio.gather(*asked))}

            assert await burst() == {200}
            assert bad.seen
            seen = len(bad.seen)
            probed = len(bad.probed)
            await until(lambda: len(bad.probed) > probed)
            for _ in range(2):
                assert await burst() == {200}
            assert len(bad.seen) == seen

    run(main)


def test_an_engine_behind_a_key_gets_one_request_at_a_time_until_one_succeeds():
    """The probe has no key, so it cannot tell whether the engine generates."""

    async def main():
        async with cluster(prefills=0, decodes=2) as made:
            bad, good = made.decodes
            key = {"Authorization": "Bearer k"}
            bad.key = good.key = key["Authorization"]

            def ask(**more):
                return made.post(COMPLETIONS, {**BODY, "n": 2, **more}, headers=key)

            bad.fault = 500
            assert (await ask())[0] == 200
            assert (await ask())[0] == 200
            bad.fault = "hold"
            bad.seen.clear()
            await until(lambda: "token" in bad.probed)
            await made.metric_reaches(1, "pdx_proxy_engine_ready", url=bad.url)
            good.fault = "hold"
            asked = [asyncio.create_task(ask()) for _ in range(8)]
            await until(lambda: len(bad.seen) + len(good.seen) >= 10)
            assert len(bad.seen) == 1
            for each in (bad, good):
                each.released.set()
            assert {answer[0] for answer in await within(asyncio.gather(*asked))} == {200}
            bad.seen.clear()
            assert {(await ask())[0] for _ in range(4)} == {200}
            assert len(bad.seen) == 2

    run(main)


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL])
def test_what_the_proxy_lacks_is_no_engines_fault(lack):
    connect = aiohttp.TCPConnector.connect

    async def main():
        async with cluster() as made:

            async def lacking(connector, request, *rest, **more):
                if str(request.url.origin()) in (made.prefill.url, made.decode.url):
                    raise aiohttp.ClientConnectorError(request.connection_key, OSError(lack, "lacking"))
                return await connect(connector, request, *rest, **more)

            with patch.object(aiohttp.TCPConnector, "connect", lacking):
                for body in (BODY, {**BODY, "n": 2}):
                    status, headers, raw = await made.post(COMPLETIONS, body)
                    assert (status, headers["Retry-After"]) == (503, "1")
                    assert json.loads(raw)["error"]["code"] == 503
                assert (await made.get("/v1/models"))[0] == 503
            assert await made.metric("pdx_proxy_exhausted_total", lack=errno.errorcode[lack]) == 3
            assert json.loads((await made.get("/health"))[1])["decoders"] == 1
            status, headers, _ = await made.post(COMPLETIONS, BODY)
            assert (status, headers["x-pdx-mode"]) == (200, "forward")

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
        async with cluster(named=False, heartbeat_timeout_s=0.6) as made:
            want = await expected(made)
            prefill = ("p", "prefill", made.prefill.url)
            decode = ("d", "decode", made.decode.url)
            beat = asyncio.create_task(keep_reporting(made.node, prefill, decode))
            await made.metric_reaches(1, "pdx_proxy_engines", role="decode")
            held = getattr(made, leg)
            held.fault = "hold"
            held.arrived.clear()
            task = asyncio.create_task(made.post(COMPLETIONS, {**BODY, "stream": stream}))
            await within(held.arrived.wait())
            beat.cancel()
            stays = decode if leg == "prefill" else prefill
            if how == "vanishes":
                beat = asyncio.create_task(keep_reporting(made.node, stays))
            else:
                beat = asyncio.create_task(keep_reporting(made.other_node(), stays))
            await until(lambda: is_detached(held))
            held.released.set()
            status, headers, raw = await within(task)
            assert (status, headers["x-pdx-mode"]) == (200, "forward")
            if stream:
                chunks = events(raw)
                assert chunks[-1] == "[DONE]"
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == want
            else:
                assert text_of(raw) == want
            prefilled = len(made.prefill.seen)
            status, headers, raw = await made.post(COMPLETIONS, BODY)
            assert (status, headers["x-pdx-mode"], text_of(raw)) == (200, "alone", want)
            assert (made.decode.bodies[-1], len(made.prefill.seen)) == (BODY, prefilled)
            assert (await made.get("/health"))[0] == 200
            beat.cancel()

    run(main)


def test_health_is_readiness():
    """It says whether somebody can decode now, by probes of the engines themselves."""

    async def main():
        async with cluster(probe_s=0.2) as made:
            made.decode.health = 503

            async def health():
                status, raw = await made.get("/health")
                return status, json.loads(raw)["decoders"], json.loads(raw)["prefillers"]

            async with asyncio.timeout(10):
                while await health() != (503, 0, 1):
                    await asyncio.sleep(0.01)
            assert (await made.post(COMPLETIONS, BODY))[0] == 200  # the prefill engine serves alone meanwhile
            assert made.decode.seen == []
            made.decode.health = 200
            async with asyncio.timeout(10):
                while await health() != (200, 1, 1):
                    await asyncio.sleep(0.01)
            await made.prefill.stop()
            await made.decode.stop()
            async with asyncio.timeout(10):
                while await health() != (503, 0, 0):
                    await asyncio.sleep(0.01)

    run(main)


def test_models_are_those_of_all_engines_that_are_well():
    async def main():
        async with cluster(prefills=2, decodes=2) as made:
            await made.decodes[0].stop()
            await made.prefills[0].stop()
            made.decodes[1].models_served = ["hash", "adapter"]
            made.prefills[1].models_served = ["hash", "other"]
            for _ in range(5):
                status, raw = await made.get("/v1/models")
                assert status == 200
                cards = json.loads(raw)["data"]
                assert [card["id"] for card in cards] == ["hash", "adapter", "other"]
                assert cards[0]["owner"] == "d1"
            assert (made.decodes[1].listed, made.prefills[1].listed) == (1, 1)  # the answer is kept

    run(main)


def test_models_are_told_to_each_client_by_its_own_key_and_are_no_load():
    async def main():
        async with cluster(prefills=0, decodes=2) as made:
            first = made.decode
            first.key = "Bearer a"
            first.fault = "hang"

            async def ask(key):
                async with made.client.get(made.url + "/v1/models", headers={"Authorization": key}) as response:
                    return response.status

            asked = asyncio.create_task(ask("Bearer a"))
            await until(lambda: first.listed)
            assert await made.metric("pdx_proxy_engine_in_flight", url=first.url) == 0
            asked.cancel()
            first.fault = None
            assert await ask("Bearer b") == 401
            assert await ask("Bearer a") == 200

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


ENGINE = Engine(url="http://e", name="e", prefills=True, decodes=True, named=True)


def legs_of(session, clock):
    health = Health(clock=clock, chance=lambda: 0.0, silence_s=120.0)
    limits = {"connect_timeout_s": 2.0, "first_byte_timeout_s": 600.0, "idle_timeout_s": 120.0}
    return Legs(session, health=health, **limits)


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
    legs = legs_of(session, lambda: now)

    async def main():
        async with legs.post(ENGINE, "/v1/completions", payload=b"", headers={}) as answer:
            return answer.status

    if times * ran_s < 2.0:
        assert asyncio.run(main()) == 200
    else:
        with pytest.raises(LegFailed, match="connect_timeout"):
            asyncio.run(main())
    assert session.asked == asked


class Silence:
    """A client session with one answer, a stream, whose bytes come when the test says so."""

    def __init__(self):
        self.bytes = asyncio.Queue()

    async def request(self, *asked, **how):
        content = Mock(readany=self.bytes.get)
        return Mock(status=200, content_type="text/event-stream", content=content)


class Alone:
    """A leg of its own task, and a clock that only the test moves."""

    def __init__(self):
        self.now = 0.0
        self.session = Silence()
        self.legs = legs_of(self.session, lambda: self.now)
        self.read = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.task = asyncio.create_task(self._take())

    async def _take(self):
        async with self.legs.post(ENGINE, COMPLETIONS, payload=b"", headers={}) as answer:
            while await answer.read_some():
                self.read += 1
                await self.may_read.wait()

    async def after(self, seconds, data=None):
        if data is not None:
            self.session.bytes.put_nowait(data)
            read = self.read
            await until(lambda: self.read > read)
        self.now += seconds
        self.legs.end_silent()
        for _ in range(5):
            await asyncio.sleep(0)


def test_a_stream_may_last_as_long_as_bytes_come():
    async def main():
        alone = Alone()
        await alone.after(599)
        for _ in range(50):
            await alone.after(119, b"x")
        assert not alone.task.done()
        alone.session.bytes.put_nowait(b"")
        await alone.task
        assert alone.legs._health.of(ENGINE.url).failures == 0

    run(main)


@pytest.mark.parametrize(("data", "limit"), [(None, 600), (b"x", 120)])
def test_an_engine_that_is_silent_for_too_long_is_suspect(data, limit):
    async def main():
        alone = Alone()
        await alone.after(0)
        await alone.after(limit - 1, data)
        assert not alone.task.done()
        await alone.after(1)
        with pytest.raises(LegFailed, match=f"timeout: nothing for {limit} s"):
            await within(alone.task)
        assert alone.legs._health.of(ENGINE.url).state is State.SUSPECT

    run(main)


def test_a_client_that_takes_nothing_is_not_the_engines_fault():
    async def main():
        alone = Alone()
        alone.may_read.clear()
        await alone.after(121, b"x")
        with pytest.raises(ClientGone, match="120 s"):
            await within(alone.task)
        assert not alone.legs._health.of(ENGINE.url).avoided

    run(main)
