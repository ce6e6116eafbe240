"""An OpenAI server as the demo sees it: started, waited for, asked."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pdx.bench.demo.workload import Request
from pdx.cli.processes import Process, State, last_lines

ANSWER_S = 300.0
START_S = 600.0
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said to one request; `transfer` is empty without PDX."""

    text: str
    prompt_tokens: int
    transfer: str


class Failed(Exception):
    """A server ended, never became ready, or answered with an error; the text holds its words."""


def wait(process: Process, say: Callable[[str], None]) -> None:
    """Until `process` is ready; says every ten seconds what was last logged beside its log.

    :raises Failed: it ended, or took longer than `START_S`.
    """
    started_at = said_at = time.monotonic()
    while process.look() is not State.READY:
        now = time.monotonic()
        if process.state is State.DIED or now - started_at > START_S:
            raise Failed(f"{process.name} is {process.state}:\n" + "\n".join(process.tail(30)))
        if now - said_at >= 10:
            said_at = now
            newest = max(process.log.parent.glob("*.log"), key=lambda log: log.stat().st_mtime)
            say(f"  {newest.stem}: {' '.join(last_lines(newest, 1))[:110]}")
        time.sleep(0.2)


def get(url: str) -> bytes:
    """The body at `url`."""
    with direct.open(url, timeout=ANSWER_S) as response:
        body: bytes = response.read()
        return body


def ask(url: str, request: Request) -> Answer:
    """Post one request and read its stream to the end.

    :raises Failed: the server says that it could not answer.
    """
    post = urllib.request.Request(
        url + request.path, json.dumps(request.body).encode(), {"Content-Type": "application/json"}
    )
    text, prompt_tokens = "", 0
    with direct.open(post, timeout=ANSWER_S) as response:
        transfer = response.headers.get("x-pdx-transfer-id", "")
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            event: dict[str, Any] = json.loads(data)
            if "choices" not in event:
                raise Failed(f"{request.name}: {data.decode()}")
            text += "".join(_text(choice) for choice in event["choices"])
            if event.get("usage"):
                prompt_tokens = event["usage"]["prompt_tokens"]
    return Answer(text, prompt_tokens, transfer)


def _text(choice: dict[str, Any]) -> str:
    text: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text or ""


def ask_at_once(url: str, requests: Sequence[Request]) -> list[Answer]:
    """Post all requests together."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: ask(url, request), requests))
