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


SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass
class StandIn:
    """`conduct(number, body)` decides about the number-th request; all are answered well otherwise."""

    root: str = "model"
    conduct: object = None
    max_model_len: int = 100_000
    metrics: str = "vllm"  # whose: vLLM's, "" for none, else the page itself
    resets: str = "yes"  # an engine's prefix cache; "no": there is no such request
    seen: list[Seen] = field(default_factory=list)
    events: list[str] = field(default_factory=list)  # "reset" and "asked", in their order
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))

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
        self._own, self._kept = set(), set()  # beginnings of prompts
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._tell)
        app.router.add_post("/reset_prefix_cache", self._reset)
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

    async def _tell(self, _request):
        if not self.metrics:
            return web.Response(status=404)
        name = "vllm:prompt_tokens_by_source_total"
        lines = [f'{name}{{engine="0",source="{source}"}} {count}.0' for source, count in self.found.items()]
        return web.Response(text="\n".join(lines) if self.metrics == "vllm" else self.metrics)

    async def _reset(self, _request):
        if self.resets == "no":
            return web.Response(status=404)
        self.events.append("reset")
        self._own.clear()
        return web.json_response({"success": True})

    def _look_up(self, text):
        """Ten letters are a block: what begins a prompt is in its own cache, or was before that was emptied."""
        block, rest = text[:10], len(text) - 10
        source = next(
            (s for s, known in zip(SOURCES[1:], (self._own, self._kept), strict=True) if block in known), None
        )
        self.found[source or "local_compute"] += 10
        self.found["local_compute"] += rest
        self._own.add(block)
        self._kept.add(block)

    async def _answer(self, request):
        body = await request.json()
        self.events.append("asked")
        self._look_up(body["prompt"] if "prompt" in body else "".join(each["content"] for each in body["messages"]))
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
