"""The baselines' proxy between two stand-in engines: what the legs say, what the client gets."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from pdx.bench.systems.baseline_proxy import Proxy

DEADLINE_S = 20.0
# Odd on purpose: no event per chunk, no valid JSON, half a character at a chunk's end.
CHUNKS = [b'data: {"a": 1}\n\ndata: {"b"', b": 2}\n\n\xc3", b"\xa4 data: [DONE]\n\n"]
RETURNED = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "p"}
BODY = {"model": "m", "prompt": "hello", "max_tokens": 7, "min_tokens": 3, "stream": True, "stream_options": {"x": 1}}


class Engine:
    """Notes what it is asked; answers a prefill leg with parameters, a stream with CHUNKS, both when allowed."""

    def __init__(self):
        self.seen = []
        self.arrived = asyncio.Event()
        self.allowed = asyncio.Event()
        self.allowed.set()

    async def start(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.serve)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def serve(self, request):
        self.seen.append((json.loads(await request.read()), request.headers))
        self.arrived.set()
        if not self.seen[-1][0]["stream"]:
            await self.allowed.wait()
            return web.json_response({"kv_transfer_params": RETURNED})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in CHUNKS:
            await response.write(chunk)
            await self.allowed.wait()
        return response


class Stage:
    def __init__(self, prefill, decode, url, client):
        self.prefill, self.decode, self.url, self.client = prefill, decode, url, client

    async def post(self, body=BODY, **headers):
        headers = {"X-Request-Id": "r1"} | headers
        async with self.client.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    async def moments(self, request_id="r1"):
        async with self.client.get(f"{self.url}/moments/{request_id}") as answer:
            return answer.status, await answer.json() if answer.status == 200 else {}


@asynccontextmanager
async def stage():
    prefill, decode = Engine(), Engine()
    await prefill.start()
    await decode.start()
    proxy = Proxy(prefill.url, decode.url)
    runner = web.AppRunner(proxy.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as client:
            yield Stage(prefill, decode, f"http://127.0.0.1:{runner.addresses[0][1]}", client)
    finally:
        for engine in (prefill, decode):
            engine.allowed.set()
        await runner.cleanup()
        for engine in (prefill, decode):
            await engine.runner.cleanup()


def play(scene):
    async def main():
        async with asyncio.timeout(2 * DEADLINE_S), stage() as it:
            await scene(it)

    asyncio.run(main())


def test_what_the_legs_say_and_the_client_gets():
    async def scene(it):
        it.prefill.allowed.clear()
        asking = asyncio.create_task(it.post())
        await it.prefill.arrived.wait()
        assert "decode_sent" not in (await it.moments())[1]
        it.prefill.allowed.set()
        status, headers, raw = await asking
        order = ["received", "prefill_sent", "prefill_answered", "decode_sent", "decode_first", "done"]
        _, moments = await it.moments()
        assert sorted(moments, key=moments.__getitem__) == order
        assert (await it.moments("unknown"))[0] == 404
        assert (status, raw) == (200, b"".join(CHUNKS))
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert headers["X-Request-Id"] == "r1"
        ((prefill, prefill_headers),) = it.prefill.seen
        ((decode, decode_headers),) = it.decode.seen
        to_prefill, to_decode = prefill.pop("kv_transfer_params"), decode.pop("kv_transfer_params")
        assert prefill == {"model": "m", "prompt": "hello", "max_tokens": 1, "stream": False}
        assert decode == BODY
        assert prefill_headers["X-Request-Id"] == decode_headers["X-Request-Id"] == "r1"
        assert (to_prefill["do_remote_decode"], to_prefill["do_remote_prefill"]) == (True, False)
        assert to_decode == RETURNED

    play(scene)
