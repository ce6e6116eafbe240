"""What is compared of an engine's answers."""

from __future__ import annotations

from typing import Any

from engine_process import Server


def essence(answer: dict[str, Any]) -> Any:
    """What must be equal: texts, reasons, log probabilities' tokens, usage."""
    assert answer["http_status"] == 200, answer
    choices = []
    for choice in answer["choices"]:
        content = choice["message"]["content"] if "message" in choice else choice["text"]
        logprobs = choice.get("logprobs") or {}
        tokens = logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or []]
        choices.append((content, choice["finish_reason"], tokens))
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return choices, usage


def computed_prompt_tokens(server: Server) -> float:
    """Prompt tokens that this engine computed itself, by its own account."""
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
