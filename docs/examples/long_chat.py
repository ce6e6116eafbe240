"""A chat about pages of Python's documentation that outgrows its window: docs/tutorials/chat-and-documents.md.

python docs/examples/long_chat.py http://127.0.0.1:8100 [moved]
"""

import json
import sys
import time
from http.client import HTTPResponse
from pydoc_data.topics import topics
from typing import Any
from urllib.request import Request, urlopen

URL, *REUSE = sys.argv[1:]
WINDOW, ANSWER = 2048, 48  # tokens
PAGES = ("pass", "del", "return", "break", "continue", "global", "nonlocal", "while", "for")


def post(path: str, body: dict[str, Any]) -> HTTPResponse:
    answer: HTTPResponse = urlopen(Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"}))
    return answer


def ask(messages: list[dict[str, str]]) -> str:
    """Print which tokens were computed, how long the first one took, and the answer."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "stop": ["\n\n"]}
    if REUSE:
        body["kv_transfer_params"] = {"pdx_hints": {"version": 1, "reuse": "moved"}}
    began, first_s, text, request = time.monotonic(), 0.0, "", ""
    for line in post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}):
        if line.startswith(b"data: {"):
            told = json.loads(line.removeprefix(b"data: "))
            request = told["id"]
            for choice in told["choices"]:
                text += choice["delta"].get("content") or ""
                first_s = first_s or (text and time.monotonic() - began)
            usage = told.get("usage") or {}
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{computed} of {usage['prompt_tokens']} tokens computed, {first_s:.1f} s, {request}")  # noqa: T201
    print(f"    {' '.join(text.split())}")  # noqa: T201
    return text


messages = [{"role": "system", "content": "You answer questions about pages of documentation in one short sentence."}]
for page in PAGES:
    messages.append({"role": "user", "content": f"{topics[page].strip()}\n\nWhat does the {page} statement do?"})
    print(f"{page}: ", end="")  # noqa: T201
    if json.load(post("/tokenize", {"messages": messages}))["count"] + ANSWER > WINDOW:
        half = len(messages) // 4 * 2  # questions with their answers; the system message stays
        del messages[1 : 1 + half]
        print(f"the oldest {half} messages are cut, ", end="")  # noqa: T201
    messages.append({"role": "assistant", "content": ask(messages)})
