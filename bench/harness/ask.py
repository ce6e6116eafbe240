"""One streamed completion as seen by a client: the text, and when each part of it arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from pdx.errors import ProtocolError
from pdx.proxy.sse import EventSplitter, data

_T = TypeVar("_T")
ANSWER_S = 600.0
CONNECT_S = 20.0
MAX_WORDS = 500  # of a refusal that are kept


class AskFailed(RuntimeError):
    """A server refused, disconnected, or answered with something other than requested; the message has its words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. Times are the client's; `sent_ns` is CLOCK_MONOTONIC, like the proxy's moments."""

    text: str
    ttft_ms: float
    itl_ms: list[float]
    e2e_ms: float
    transfer: str  # empty without PDX
    request_id: str
    prompt_tokens: int
    output_tokens: int
    sent_ns: int
    token_ids: list[int] = field(default_factory=list)  # of the answer; empty unless requested


def completion(
    model: str, prompt: str | Sequence[int], output_tokens: int, *, wants_ids: bool = False
) -> dict[str, Any]:
    """The body of a greedy, streamed completion of exactly `output_tokens`; with `wants_ids`, including token ids."""
    return {
        **({"return_token_ids": True} if wants_ids else {}),
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def session() -> aiohttp.ClientSession:
    """A session for any number of concurrent requests. Create it inside the event loop that uses it.

    Every request has its own connection: a server could close a kept one between two turns, and the request sent on it
    would be lost.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], request_id: str, *, path: str = "/v1/completions"
) -> Answer:
    """Post `body` to `url` as `request_id`, and read its stream to the end.

    :raises AskFailed: no connection, an error instead of or inside the answer, or a truncated stream.
    """
    payload = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    sent_ns = time.monotonic_ns()
    try:
        async with session.post(url + path, data=payload, headers=headers) as response:
            if response.status != 200:
                raise AskFailed(f"{url} answered {response.status}: {(await response.text())[:MAX_WORDS]}")
            transfer = response.headers.get("x-pdx-transfer-id", "")
            stream = _Stream()
            async for event in _events(response):
                stream.take(event, time.monotonic_ns())
    except (aiohttp.ClientError, TimeoutError, ProtocolError) as error:
        raise AskFailed(f"{url} broke off: {type(error).__name__} {error}") from error
    return stream.answer(sent_ns, transfer, request_id)


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """All results; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Stream:
    """Assembles an answer."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._came_ns: list[int] = []  # arrival of each event that has text or tokens
        self._end_ns = 0
        self._usage: dict[str, Any] | None = None
        self._is_done = False

    def take(self, event: bytes, now_ns: int) -> None:
        self._end_ns = now_ns
        if event == b"[DONE]":
            self._is_done = True
            return
        try:
            fields = json.loads(event)
            text = "".join(map(_text, fields["choices"]))
            token_ids = [token for choice in fields["choices"] for token in choice.get("token_ids") or ()]
        except (ValueError, KeyError, TypeError) as error:
            raise AskFailed(f"not a completion: {event[:MAX_WORDS].decode(errors='replace')}") from error
        self._usage = fields.get("usage") or self._usage
        self._token_ids += token_ids
        if text or token_ids:
            self._text.append(text)
            self._came_ns.append(now_ns)

    def answer(self, sent_ns: int, transfer: str, request_id: str) -> Answer:
        if not self._is_done or self._usage is None or not self._came_ns:
            raise AskFailed(f"the stream ended early, after {''.join(self._text)[:MAX_WORDS]!r}")
        gaps = zip(self._came_ns, self._came_ns[1:], strict=False)
        return Answer(
            text="".join(self._text),
            ttft_ms=(self._came_ns[0] - sent_ns) / 1e6,
            itl_ms=[round((later - earlier) / 1e6, 3) for earlier, later in gaps],
            e2e_ms=(self._end_ns - sent_ns) / 1e6,
            transfer=transfer,
            request_id=request_id,
            prompt_tokens=int(self._usage["prompt_tokens"]),
            output_tokens=int(self._usage["completion_tokens"]),
            sent_ns=sent_ns,
            token_ids=self._token_ids,
        )


def _text(choice: dict[str, Any]) -> str:
    text: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text or ""


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event, however the bytes were split in transit."""
    splitter = EventSplitter()
    async for part in response.content.iter_any():
        for event in splitter.feed(part):
            found = data(event)
            if found is not None:
                yield found
