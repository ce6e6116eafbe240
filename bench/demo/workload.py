"""The demo's requests: cold prompts of four lengths, a conversation's second turn, and eight at once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from pdx.bench.harness import ask

MODEL = "tiny"
ANSWER_TOKENS = 48
CHANGED_AT = 5  # of prompts that differ in one early token
TEXT = """the cache moves while layers are still being computed and every token of a prompt is needed for the next one
so nothing may be lost on its way from the engine that reads to the one that writes"""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready to be posted to any OpenAI server of `MODEL`."""

    name: str
    path: str
    body: dict[str, Any]


def completion(name: str, prompt: str) -> Request:
    """Continue `prompt` greedily: one character is one token."""
    return Request(name, "/v1/completions", ask.completion(MODEL, prompt, ANSWER_TOKENS))


def chat(name: str, *turns: str) -> Request:
    """Answer the last of `turns`, which alternate between user and assistant."""
    roles = ("user", "assistant")
    body = ask.completion(MODEL, "", ANSWER_TOKENS)
    del body["prompt"]
    body["messages"] = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    return Request(name, "/v1/chat/completions", body)


def cold() -> list[Request]:
    """Prompts that nothing is known of."""
    return [completion(f"{length:,} tokens", text(length, seed=length)) for length in (40, 300, 1000, 4000)]


def changed(request: Request) -> Request:
    """The same prompt but for one early token."""
    prompt = request.body["prompt"]
    return completion(f"{request.name}, one changed", prompt[:CHANGED_AT] + "#" + prompt[CHANGED_AT + 1 :])


def first_turn() -> Request:
    return chat("first turn (chat)", text(1000, seed=1))


def second_turn(answer: str) -> Request:
    """The conversation goes on after the first turn's `answer`."""
    return chat("second turn (chat)", text(1000, seed=1), answer, text(300, seed=2))


def at_once() -> list[Request]:
    """Eight prompts; the first four begin with the same 600 tokens."""
    shared = text(600, seed=3)
    prompts = [shared + text(150 * n, seed=10 + n) for n in range(1, 5)]
    prompts += [text(200 * n, seed=20 + n) for n in range(1, 5)]
    return [completion(f"at once, {n} of 8", prompt) for n, prompt in enumerate(prompts, 1)]


def text(length: int, seed: int) -> str:
    """`length` characters of random words."""
    draw = random.Random(seed)
    known = TEXT.split()
    words = " ".join(draw.choice(known) for _ in range(length))
    return words[:length]
