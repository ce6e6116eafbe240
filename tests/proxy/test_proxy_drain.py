"""A proxy that is told to end: no new requests, time for those under way, then an error that a client understands."""

import asyncio
import json
import signal

import pytest
from proxy_harness import BODY, COMPLETIONS, begin, stream, until, within
from proxy_process import proxy_process


async def test_new_requests_are_refused_and_those_under_way_go_on(made):
    made.prefill.fault = made.decode.fault = "hold"
    before = asyncio.create_task(made.post(COMPLETIONS, BODY))
    await within(made.prefill.arrived.wait())
    made.proxy.drain.begin()
    for path in ("/health", "/v1/models"):
        async with made.client.get(made.url + path) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert (await made.get("/healthz"))[0] == 200, "or whoever looks after it would end what goes on"
    status, headers, raw = await made.post(COMPLETIONS, BODY)
    assert (status, headers["Retry-After"], headers["Connection"]) == (503, "1", "close")
    assert json.loads(raw)["error"]["code"] == 503
    assert await made.metric("pdx_proxy_events_total", event="refused_while_stopping") == 3
    waiting = asyncio.create_task(made.proxy.drain.wait(60))
    await asyncio.sleep(0)
    assert not waiting.done()
    made.release()
    assert (await within(before))[0] == 200
    await within(waiting)
    assert await made.metric("pdx_proxy_requests_total", outcome="ok") == 1


async def test_at_the_end_streams_get_an_error_event_and_others_an_error(made):
    """Once streams were cut in the middle of the chunked body, and counted as clients that had left."""
    begun = asyncio.Event()
    made.decode.fault = "hang_mid"
    streaming = asyncio.create_task(stream(made, begun))
    await within(begun.wait())
    await within(made.decode.progress.wait())
    made.prefill.arrived.clear()
    made.prefill.fault = "hang"
    whole = asyncio.create_task(made.post(COMPLETIONS, BODY))
    await within(made.prefill.arrived.wait())
    assert len(made.proxy.drain) == 2
    made.proxy.drain.end()
    error = json.loads((await within(streaming))[-1])["error"]
    assert (error["code"], error["message"]) == (503, "the proxy is being stopped")
    status, _, raw = await within(whole)
    assert (status, json.loads(raw)["error"]["message"]) == (503, "the proxy is being stopped")
    await made.metric_reaches(2, "pdx_proxy_requests_total", outcome="stopped")
    assert await made.metric("pdx_proxy_requests_total", outcome="client_gone") == 0
    assert await made.metric("pdx_proxy_cancels_total", reason="stopped") == 2
    await within(made.prefill.closed.wait())
    assert len(made.proxy.drain) == 0


async def test_a_body_that_is_still_coming_is_ended_too(made):
    reader, writer = await begin(made.url, 1000)
    writer.write(b"{")
    await until(lambda: len(made.proxy.drain))
    made.proxy.drain.end()
    assert b" 503 " in await within(reader.readline())
    writer.close()
    assert await made.metric("pdx_proxy_requests_total", outcome="stopped") == 1


@pytest.mark.parametrize(("drain", "signals"), [("600", 2), ("0.1", 1)], ids=["a second signal", "their time is over"])
async def test_a_signal_lets_requests_finish_and_then_streams_end_with_an_error(drain, signals, tmp_path):
    """At once by a second signal, else when their time is over."""
    async with proxy_process(tmp_path, "--drain", drain) as made:
        begun = asyncio.Event()
        made.engine.fault = "hang_mid"
        streaming = asyncio.create_task(stream(made, begun))
        await within(begun.wait())
        await until(lambda: made.engine.hanging)
        made.engine.arrived.clear()
        made.engine.fault = "hold"
        before = asyncio.create_task(made.ask())
        await within(made.engine.arrived.wait())
        made.process.send_signal(signal.SIGTERM)
        if signals == 2:
            await until(lambda: "stopping" in made.log, 60)
            assert made.process.returncode is None
            made.engine.released.set()
            assert await within(before) == 200
            made.process.send_signal(signal.SIGINT)
        assert json.loads((await within(streaming))[-1])["error"]["code"] == 503
        assert await within(made.process.wait(), 60) == 0
        await asyncio.gather(before, return_exceptions=True)
