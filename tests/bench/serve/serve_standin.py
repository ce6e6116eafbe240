"""A stand-in for an OpenAI server: fixed answers, a cache of beginnings, and a memory of who asked when."""

import json
import time
from dataclasses import dataclass

from standin_server import StandInServer, asked_text

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass
class Seen:
    """One request."""

    body: dict
    arrived: float
    answer: str = ""


@dataclass
class Conduct:
    """What to do with a request."""

    status: int = 200
    message: str = ""
    tokens: int | None = None  # end the answer after so many
    hangs: bool = False


class StandIn(StandInServer):
    """`conduct(number, body)` decides about the number-th request; all are answered well otherwise.

    `metrics`: whose; vLLM's, "" for none, else the page itself. `resets`: whether its prefix cache can be emptied.
    `events`: "reset" and "asked", in their order.
    """

    def __init__(self, root, conduct=None, *, max_model_len=100_000, metrics="vllm", resets=True):
        self.conduct, self.metrics, self.resets = conduct, metrics, resets
        self.card = {"id": "toy", "root": root, "max_model_len": max_model_len}
        self.seen, self.events = [], []
        self._own, self._kept = set(), set()  # beginnings of prompts
        super().__init__()

    def models(self):
        return [self.card]

    def page(self):
        return super().page() if self.metrics == "vllm" else self.metrics or None

    def reset(self):
        if not self.resets:
            return 404, b"Not Found"
        self.events.append("reset")
        self._own.clear()
        return super().reset()

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

    def complete(self, body, request_id):
        with self.lock:
            self.events.append("asked")
            self._look_up(asked_text(body))
            seen = Seen(body, time.monotonic())
            self.seen.append(seen)
            conduct = self.conduct(len(self.seen) - 1, body) if self.conduct else Conduct()
        if conduct.status != 200:
            return conduct.status, json.dumps({"error": {"message": conduct.message}}).encode()
        if conduct.hangs:
            return None
        is_chat = "messages" in body
        asked = body["max_completion_tokens"] if is_chat else body["max_tokens"]
        texts = [f" {token}" for token in range(asked if conduct.tokens is None else conduct.tokens)]
        seen.answer = "".join(texts)
        choices = [{"delta": {"content": text}} if is_chat else {"text": text} for text in texts]
        return choices, len(texts), {"Content-Type": "text/event-stream"}
