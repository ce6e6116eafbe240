"""Stand-ins for engines: they answer in vLLM's protocol at a fixed pace, and compute nothing.

    python -m pdx.bench.proxy.stand_in_engine --port PORT --port PORT [--first-ms MS] [--pace-ms MS] [--intake-ms MS]

Every request gets its first token after `first_ms` and each further one `pace_ms` later, however many requests there
are. A decode leg waits for its prompt's KV, which is there when the prefill leg ends, and it needs `intake_ms` to read
a prompt that is text; then it starts as an engine does that goes on with a request. `POST /pace` changes these times.
`GET /ended` tells when prefill legs ended, by request id, and forgets them. All ports are of one process.

Two bytes of a prompt are one token. A token's text follows from the number of tokens before it alone, so that what
comes through a proxy can be compared with what comes straight from here. Each event of a stream says when it was sent,
on the monotonic clock: how long it took to a client on this machine does not depend on the pace of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pdx.bench.harness.web import serve_until_stopped

MODEL = "stand-in"
MODEL_LEN = 1 << 20
WORDS = (" alpha", " beta", " gamma", " delta", " eps", " zeta", " eta", " theta")
FIRST_TOKEN = 1000  # ids of generated tokens, of as many digits as an engine's
MAX_BODY = 64 << 20
DEFAULT_TOKENS = 16
SHUTDOWN_S = 2.0  # for requests under way
KV_WAIT_S = 5.0  # a decode leg whose KV does not come by then computes its prompt itself, as engines do


@dataclass(slots=True)
class Pace:
    """When tokens come."""

    first_ms: float
    pace_ms: float
    intake_ms: float = 0.0  # of a decode leg whose prompt is text: template, tokens, scheduling


class StandInEngine:
    """The routes of all engines, of which each is an `app`. All of it runs on one event loop."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._arrivals: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # of KV, by transfer
        self._ended: dict[str, float] = {}  # by request id, when a prefill leg had its token

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/pace", self._set_pace)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ended", self._tell_ended)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "max_model_len": MODEL_LEN}
        return web.json_response({"object": "list", "data": [card]})

    async def _set_pace(self, request: web.Request) -> web.Response:
        self._pace = Pace(**await request.json())
        return web.Response()

    async def _tell_ended(self, _request: web.Request) -> web.Response:
        ended, self._ended = self._ended, {}
        return web.json_response(ended)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        came_at = time.monotonic()
        body = json.loads(await request.read())
        is_chat = request.path.endswith("chat/completions")
        given = "".join(each["content"] for each in body["messages"]) if is_chat else body.get("prompt")
        prompt = _tokens(given)
        if not prompt:
            fault = {"message": "a stand-in takes one prompt, as text or token ids", "type": "BadRequestError"}
            return web.json_response({"error": fault}, status=400)
        head = {
            "id": f"cmpl-{request.headers.get('X-Request-Id', '')}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,
            "model": MODEL,
        }
        limit = body.get("max_tokens") or DEFAULT_TOKENS
        params = body.get("kv_transfer_params") or {}
        returned = None
        if params.get("do_remote_decode") and "transfer_id" not in params:  # of a router that was made for NIXL
            params["transfer_id"] = uuid.uuid4().hex
            returned = {"do_remote_prefill": True, "transfer_id": params["transfer_id"], "prefill_tokens": len(prompt)}
        tokens = self._each_token(came_at, params, len(prompt), is_text=isinstance(given, str))
        if body.get("stream"):
            return await _stream(request, head, body, prompt, limit, tokens)
        for _ in range(limit):
            await anext(tokens)
        response = web.json_response({**_whole(head, body, prompt, limit), "kv_transfer_params": returned})
        if params.get("do_remote_decode"):
            self._ended[request.headers.get("X-Request-Id", "")] = time.monotonic()
            # A decode engine's first step takes longer than this answer, a stand-in's no time: its KV comes last.
            await response.prepare(request)
            await response.write_eof()
            self._arrivals[params["transfer_id"]].set()
        return response

    async def _each_token(
        self, came_at: float, params: dict[str, Any], prompt_tokens: int, *, is_text: bool
    ) -> AsyncIterator[None]:
        """Goes on when the next token is there."""
        if params.get("do_remote_prefill"):
            try:
                async with asyncio.timeout(KV_WAIT_S):
                    await self._arrivals[params["transfer_id"]].wait()
            except TimeoutError:
                params, came_at = {}, time.monotonic()
        for due in self._moments(came_at, params, prompt_tokens, is_text=is_text, arrived_at=time.monotonic()):
            await _sleep_until(due)
            yield

    def _moments(
        self, came_at: float, params: dict[str, Any], prompt_tokens: int, *, is_text: bool, arrived_at: float
    ) -> Iterator[float]:
        """When each token is due, on the monotonic clock. `arrived_at`: the prompt's KV, of a decode leg."""
        pace = self._pace
        due = came_at + pace.first_ms / 1e3
        if params.get("do_remote_prefill"):
            due = max(arrived_at, came_at + (pace.intake_ms / 1e3 if is_text else 0.0))
            # What is behind the prefilled tokens was sampled before: it is decoding. An early leg is the prompt alone.
            if prompt_tokens > params.get("prefill_tokens", prompt_tokens):
                due += pace.pace_ms / 1e3
        while True:
            yield due
            due += pace.pace_ms / 1e3


def _tokens(prompt: Any) -> list[int]:
    """The ids of a prompt's tokens; empty: it is not one."""
    if isinstance(prompt, list):
        return prompt if all(isinstance(token, int) for token in prompt) else []
    if not isinstance(prompt, str):
        return []
    data = prompt.encode()
    return array("H", data + b" " * (len(data) % 2)).tolist()


def _word(position: int) -> str:
    return WORDS[position % len(WORDS)]


def _usage(prompt: list[int], generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": generated,
        "total_tokens": len(prompt) + generated,
    }


def _whole(head: dict[str, Any], body: dict[str, Any], prompt: list[int], limit: int) -> dict[str, Any]:
    wants_ids = body.get("return_token_ids")
    positions = range(len(prompt), len(prompt) + limit)
    text = "".join(map(_word, positions))
    choice = {
        "index": 0,
        **({"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [FIRST_TOKEN + at for at in positions] if wants_ids else None,
        "prompt_token_ids": prompt if wants_ids else None,
    }
    return {**head, "choices": [choice], "usage": _usage(prompt, limit)}


async def _stream(
    request: web.Request,
    head: dict[str, Any],
    body: dict[str, Any],
    prompt: list[int],
    limit: int,
    tokens: AsyncIterator[None],
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for number in range(limit):
        await anext(tokens)
        text = _word(len(prompt) + number)
        choice = {
            "index": 0,
            **({"delta": {"content": text}} if "messages" in body else {"text": text}),
            "logprobs": None,
            "finish_reason": "length" if number == limit - 1 else None,
            "stop_reason": None,
        }
        await response.write(_event({**head, "choices": [choice], "sent_at": time.monotonic()}))
    if (body.get("stream_options") or {}).get("include_usage"):
        await response.write(_event({**head, "choices": [], "usage": _usage(prompt, limit)}))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def _sleep_until(due: float) -> None:
    """Returns at once where that moment has passed, but lets others run."""
    await asyncio.sleep(max(0.0, due - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pdx.bench.proxy.stand_in_engine", description="Answers in vLLM's protocol at a fixed pace."
    )
    parser.add_argument("--port", type=int, action="append", required=True, help="on 127.0.0.1; repeatable")
    parser.add_argument("--first-ms", type=float, default=20.0, help="from a request to its first token")
    parser.add_argument("--pace-ms", type=float, default=5.0, help="from each token to the next")
    parser.add_argument("--intake-ms", type=float, default=0.0, help="a decode leg's time to read a prompt of text")
    arguments = parser.parse_args()
    engine = StandInEngine(Pace(arguments.first_ms, arguments.pace_ms, arguments.intake_ms))
    apps = {port: engine.app() for port in arguments.port}
    asyncio.run(serve_until_stopped(apps, shutdown_s=SHUTDOWN_S))


if __name__ == "__main__":
    main()
