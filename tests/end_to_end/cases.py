"""Requests whose answers through PDX must equal a plain engine's. Deterministic: greedy or seeded."""

from __future__ import annotations

import random
from typing import Any

MODEL = "tiny"


def text(seed: int, length: int) -> str:
    """Printable text of `length` characters; one character is one token of the test model."""
    generator = random.Random(seed)
    return "".join(chr(generator.randint(0x21, 0x7E)) for _ in range(length))


SHARED = text(100, 600)


def completion(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0, **fields}
    return "/v1/completions", body


def chat(*turns: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    return "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 20, "temperature": 0, **fields}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"length-{length}": completion(text(length, length)) for length in (1, 300, 1000, 1024, 3000)},
    "second-turn": completion(text(1000, 1000) + text(24, 200)),  # after "length-1000"
    "one-token": completion(text(1, 400), max_tokens=1),
    "many-tokens": completion(text(2, 200), max_tokens=300),
    "shared-1": completion(SHARED + text(3, 70)),
    "shared-2": completion(SHARED + text(4, 70)),
    "token-ids": completion([ord(character) for character in text(5, 333)]),
    "seeded": completion(text(7, 350), temperature=0.8, seed=7),
    "logprobs": completion(text(8, 320), logprobs=2),
    "echo": completion(text(9, 320), echo=True),
    "two-samples": completion(text(10, 320), n=2, temperature=0.7, seed=3),
    "two-prompts": completion([text(11, 300), text(12, 40)]),
    "stop-string": completion(text(13, 320), stop=["a", "e", "q"]),
    "penalties": completion(text(14, 320), frequency_penalty=1.5, presence_penalty=0.5),
    "chat": chat(text(20, 500)),
    "chat-turns": chat(text(20, 500), text(21, 30), text(22, 40)),
}
