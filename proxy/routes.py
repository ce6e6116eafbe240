"""The clients' API: generating routes, which two engines may share, and routes that go to one engine unchanged.

Other routes do not exist for clients. Administration of an engine (`/sleep`, `/collective_rpc`, `/reset_prefix_cache`,
loading adapters, updating weights …) is for its operator, at the engine.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

_CHOICES = re.compile(rb'"choices"\s*:'), re.compile(rb'"finish_reason": ?"abort"')  # which JSON escapes in texts


class Route(StrEnum):
    """A generating endpoint with all its properties: to add one, add a row."""

    limits: tuple[str, ...]  # fields that limit the answer's tokens: the first one present counts
    default_limit: int | None  # vLLM's default if none is present; None: as many as fit
    prompt: tuple[str, ...]  # fields the prompt is made of; the first one is required
    answer_only: tuple[str, ...]  # fields that shape only the answer, besides those in `body`
    forwards: bool  # whether the first token can be sent alone: the prompt is text or ids, not a conversation
    member: re.Pattern[bytes]  # present in every whole answer
    aborted: re.Pattern[bytes]  # in an answer or event if the engine gave the request up, as vLLM's pause makes it
    last_event: re.Pattern[bytes] | None  # ends a stream; None: [DONE] does

    COMPLETIONS = "/v1/completions", ("max_tokens",), 16, ("prompt",), ("response_format",), True, *_CHOICES, None
    CHAT = (
        "/v1/chat/completions",
        ("max_completion_tokens", "max_tokens"),
        None,
        ("messages", "tools", "documents"),
        (),
        False,
        *_CHOICES,
        None,
    )
    RESPONSES = (
        "/v1/responses",
        ("max_output_tokens",),
        None,
        ("input", "instructions", "tools"),
        ("include", "enable_response_messages"),
        False,
        re.compile(rb'"output"\s*:'),
        re.compile(rb"\0"),  # never: vLLM calls it completed
        re.compile(rb"event: (response\.(completed|incomplete|failed)|error)\b"),
    )
    MESSAGES = (
        "/v1/messages",
        ("max_tokens",),
        None,
        ("messages", "system", "tools"),
        ("stop_sequences",),
        False,
        re.compile(rb'"stop_reason"\s*:\s*"'),  # missing if aborted
        re.compile(rb'event: message_delta\ndata: .*"delta": ?\{"stop_reason": ?null'),
        re.compile(rb"event: (message_stop|error)\b"),
    )
    WHOLE = "whole", (), None, (), (), False, *_CHOICES, None  # all of `PASSED`

    def __new__(cls, path: str, *facts: Any) -> Route:
        made = str.__new__(cls, path)
        made._value_ = path
        made.limits, made.default_limit, made.prompt, made.answer_only, *rest = facts
        made.forwards, made.member, made.aborted, made.last_event = rest
        return made


GENERATING = frozenset(Route) - {Route.WHOLE}
FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})  # their bodies are forms with a file
RESPONSE = "/v1/responses/{id:[A-Za-z0-9_:-][A-Za-z0-9_.:-]*}"  # stored by one engine, if it stores responses at all

# Routes that go to one engine unchanged, by method. Which of them an engine has depends on its model and options.
PASSED = {
    "POST": (
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
        *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/generative_scoring", "/v1/systemone"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        *sorted(FORMS),
        *("/v1/chat/completions/batch", "/cohere/v2/chat", "/invocations"),
        *("/v1/completions/render", "/v1/chat/completions/render", "/v1/messages/render", "/v1/responses/render"),
        *("/cohere/v2/chat/render", "/v1/completions/derender", "/v1/chat/completions/derender"),
        f"{RESPONSE}/cancel",
    ),
    "GET": ("/version", "/tokenizer_info", RESPONSE),
}
