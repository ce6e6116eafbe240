"""A stand-in for an OpenAI server, on a thread of its own: streams fixed answers, and remembers who asked when."""

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Seen:
    """One request."""

    body: dict
    request_id: str
    arrived: float
    left: float = 0.0  # the last byte of the answer was handed to the network
    answer: str = ""


@dataclass
class Conduct:
    """What to do with a request."""

    status: int = 200
    message: str = ""
    tokens: int | None = None  # end the answer after so many
    hangs: bool = False  # after the first token
    pause_s: float = 0.0  # before each token


@dataclass
class StandIn:
    """`conduct(number, body)` decides about the number-th request; all are answered well otherwise."""

    root: str = "model"
    conduct: object = None
    max_model_len: int = 100_000
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="stand-in")
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def _run(self, ready):
        self._loop.run_until_complete(self._serve(ready))
        self._loop.close()

    async def _serve(self, ready):
        self._end = asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _models(self, _request):
        return web.json_response({"data": [{"id": "toy", "root": self.root, "max_model_len": self.max_model_len}]})

    async def _answer(self, request):
        body = await request.json()
        seen = Seen(body, request.headers.get("x-request-id", ""), time.monotonic())
        self.seen.append(seen)
        conduct = self.conduct(len(self.seen) - 1, body) if self.conduct else Conduct()
        if conduct.status != 200:
            return web.json_response({"error": {"message": conduct.message}}, status=conduct.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        asked = body["max_completion_tokens"] if is_chat else body["max_tokens"]
        count = asked if conduct.tokens is None else conduct.tokens
        for token in range(count):
            text = f" {token}"
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            await asyncio.sleep(conduct.pause_s)
            await self._event(response, {"choices": [choice]})
            seen.answer += text
            if conduct.hangs:
                await asyncio.Event().wait()
        usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": count}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        seen.left = time.monotonic()
        return response

    async def _event(self, response, event):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def prompt_tokens(body):
    """One character is one token."""
    if "messages" in body:
        return sum(len(message["content"]) for message in body["messages"])
    return len(body["prompt"])
