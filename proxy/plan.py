"""Decides how one request is served, from its body and from what its engines add to it. Pure.

Only what is known to be safe is done: an unknown field keeps a completion out of `forward`, and a malformed body goes
to one engine unchanged, which then answers it as it would without the proxy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Raw

from pdx.errors import RequestRefused
from pdx.proxy.outline import STEP, Steps, at_once, outline
from pdx.proxy.routes import Route
from pdx.wire.messages import EngineFacts

Body = dict[str, Any]  # values by field; fields that are not inspected stay raw JSON (see `body.parsing`)

FORWARD_BYTES = 1 << 20  # of a prompt: the prefill engine returns all its token ids, which would block the event loop
ONE_TOKEN = "one_token"  # why a request goes to one engine, one that prefills: it needs no more
XARGS = "vllm_xargs"
BYTES_PER_TOKEN = 4  # of text, roughly
_MOST_PROMPTS = 1024  # of a request that may be split
_CONTENT_PARTS = re.compile(rb'"content"\s*:\s*\[')  # content in parts, possibly images: few bytes may be many tokens
_CONTROL_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
_BRACKETS = (ord("["), ord("]"))
_SPACE_BYTES = 4096  # limit for whitespace between values
_IN_IDS = b"0123456789- \t\r\n"
_SEVERAL = re.compile(rb'\[\s*[\["]')
_SOMETHING = re.compile(rb"\[\s*[^\]\s]")
_TEXT = re.compile(rb'\[\s*[^\]\s]|"[^"]')  # or a non-empty list
# Tools that engines call themselves, continuing with a different prompt afterwards.
_BUILT_IN = re.compile(rb'"type"\s*:\s*"(mcp|code_interpreter|container|web_search)')
_TOOLS_BYTES = 1 << 20


class Mode(StrEnum):
    """How the two legs share the work."""

    ALONE = "alone"  # one engine does everything
    FORWARD = "forward"  # the first token comes from whichever leg has it first, all others from the decode leg
    SAMPLED = "sampled"  # all tokens come from the decode leg


def modes(route: Route) -> list[Mode]:
    """The modes in which requests of this route may be served."""
    if route is Route.WHOLE:
        return [Mode.ALONE]
    return [mode for mode in Mode if mode is not Mode.FORWARD or route.forwards]


class Plan(msgspec.Struct, frozen=True):
    """A mode, and why it is not a faster one ("" for forward)."""

    mode: Mode
    why: str = ""
    least_length: int = 0  # the prompt has at least this many tokens: a model with a smaller limit rejects it
    prompts: int = 1  # number of prompts in the request


Prompt = tuple[int, int]  # a completion's single prompt: size in bytes as written, and number of ids; 0 ids: it is text


def strip_control(body: Body) -> tuple[Body, bool]:
    """The body without fields that control transfers, which only the proxy may set, and whether it had any.

    vLLM also reads them from `vllm_xargs`, where a value of the wrong type would even reach the scheduler.
    """
    found = any(name in body for name in _CONTROL_FIELDS)
    clean = {name: value for name, value in body.items() if name not in _CONTROL_FIELDS}
    extra = clean.get(XARGS)
    if isinstance(extra, dict) and any(name in extra for name in _CONTROL_FIELDS):
        clean[XARGS] = {name: value for name, value in extra.items() if name not in _CONTROL_FIELDS}
        found = True
    return clean, found


def model_of(body: Body) -> str | None:
    """The requested model; None if the body names none."""
    name = body.get("model")
    return name if isinstance(name, str) else None


def planning(route: Route, body: Body, *, min_split_tokens: int = 0) -> Steps[Plan]:
    """The fastest mode whose answer is guaranteed to equal a single engine's.

    Two legs gain nothing for one token (`ONE_TOKEN`), or for a prompt below `min_split_tokens`.
    """
    for name, acceptable in _SPLITTABLE.items():
        if not acceptable(body.get(name)):
            return Plan(Mode.ALONE, name)
    if body.get("stream_options") and not body.get("stream"):
        return Plan(Mode.ALONE, "stream_options")
    if (body.get("min_tokens") or 0) > (token_limit(route, body) or 1 << 62):
        return Plan(Mode.ALONE, "min_tokens")
    if not route.forwards:
        return _planned_chat(route, body, min_split_tokens)
    prompt = yield from single_prompt(body.get("prompt"))
    if prompt is None:
        return (yield from _planned_prompts(route, body, min_split_tokens))
    nbytes, ids = prompt
    least_length = ids if body.get("truncate_prompt_tokens") is None else 0
    if token_limit(route, body) == 1:
        return Plan(Mode.ALONE, ONE_TOKEN, least_length)
    if (ids or nbytes // BYTES_PER_TOKEN) < min_split_tokens:
        return Plan(Mode.ALONE, "short_prompt", least_length)
    if nbytes > FORWARD_BYTES:
        return Plan(Mode.SAMPLED, "prompt_size", least_length)
    if not body.get("stream"):  # a body in one piece arrives with its last token anyway
        return Plan(Mode.SAMPLED, "stream", least_length)
    if not _number(0)(body.get("temperature")):
        # Each leg samples a token of its own. A shared seed would slow down sampling of whole batches (ADR 73).
        return Plan(Mode.SAMPLED, "temperature", least_length)
    for name, value in body.items():
        if value is not None and not (name in _FORWARD and _FORWARD[name](value)):
            return Plan(Mode.SAMPLED, name if name in _KNOWN else "unknown_field", least_length)
    return Plan(Mode.FORWARD, "", least_length)


def check_length(plan: Plan, facts: Sequence[EngineFacts | None]) -> None:
    """Reject prompts that no engine accepts: a list of ids is known to be too long before it is parsed. `facts`: of the
    engines that may serve the request.

    :raises RequestRefused: worded as an engine would.
    """
    limits = [each.max_model_len for each in facts if each is not None]
    if not facts or len(limits) < len(facts) or (count := plan.least_length) <= (limit := max(limits)):
        return
    said = f"at least {count}" if count == limit + 1 else str(count)  # engines stop counting there
    raise RequestRefused(
        400,
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {said} input "
        "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
        f"input prompt. (parameter=input_tokens, value={count})",
        param="input_tokens",
    )


def _planned_prompts(route: Route, body: Body, min_split_tokens: int) -> Steps[Plan]:
    prompts = body.get("prompt")
    if not isinstance(prompts, Raw) or (count := (yield from _several(prompts))) < 2:
        return Plan(Mode.ALONE, "prompt")
    if token_limit(route, body) == 1:
        return Plan(Mode.ALONE, ONE_TOKEN)
    if len(memoryview(prompts)) // BYTES_PER_TOKEN < min_split_tokens * count:
        return Plan(Mode.ALONE, "short_prompt")
    return Plan(Mode.SAMPLED, "prompts", prompts=count)


def _planned_chat(route: Route, body: Body, min_split_tokens: int) -> Plan:
    messages = body.get(route.prompt[0])
    pattern = _SOMETHING if route is not Route.RESPONSES else _TEXT
    if not isinstance(messages, Raw) or pattern.match(memoryview(messages)[:_SPACE_BYTES]) is None:
        return Plan(Mode.ALONE, route.prompt[0])
    if route is Route.MESSAGES and token_limit(route, body) is None:  # engines reject it
        return Plan(Mode.ALONE, "max_tokens")
    tools = body.get("tools") if route is Route.RESPONSES else None
    if isinstance(tools, Raw) and _BUILT_IN.search(memoryview(tools)[:_TOOLS_BYTES]) is not None:
        return Plan(Mode.ALONE, "tools")
    if token_limit(route, body) == 1:
        return Plan(Mode.ALONE, ONE_TOKEN)
    is_short = prompt_bytes(route, body) // BYTES_PER_TOKEN < min_split_tokens
    if is_short and _CONTENT_PARTS.search(memoryview(messages)) is None:  # otherwise it is more than text
        return Plan(Mode.ALONE, "short_prompt")
    return Plan(Mode.SAMPLED, "chat")


def prompt_bytes(route: Route, body: Body) -> int:
    """The size of everything the prompt is made of, as written."""
    return sum(len(memoryview(body[name])) for name in route.prompt if isinstance(body.get(name), Raw))


def obstacle(body: Body, *, prefill: EngineFacts | None, decode: EngineFacts | None, prompt_tokens: int = 0) -> str:
    """Why these engines, whose defaults the body does not show, rule out `forward` for this body; "" if they do not."""
    if prefill is None or decode is None:
        return "engine_unknown"
    if prefill.looks_back or decode.looks_back:
        return "engine_looks_back"
    if prefill.stops_short:
        return "engine_stops_short"
    limit = forward_limit(body, decode)
    if (body.get("min_tokens") or 0) > limit:
        return "min_tokens"  # an engine would reject it
    # Otherwise a continuation would have no token to generate, or no room for it.
    return "near_ceiling" if limit == 1 or prompt_tokens + limit > decode.max_model_len else ""


def forward_limit(body: Body, decode: EngineFacts | None) -> int:
    """The maximum number of tokens in the answer to a body of mode `forward`."""
    limit = token_limit(Route.COMPLETIONS, body)
    assert limit is not None
    return min(limit, decode.max_new_tokens) if decode is not None and decode.max_new_tokens else limit


def token_limit(route: Route, body: Body) -> int | None:
    """The maximum number of tokens the client wants; None: as many as fit. Only for a body that may be split."""
    for name in route.limits:
        if (limit := body.get(name)) is not None:
            return limit  # type: ignore[no-any-return]
    return route.default_limit


def single_prompt(prompt: Any) -> Steps[Prompt | None]:
    """The single prompt in a completion's `prompt`; None if there are several, none, or it cannot be told."""
    if not isinstance(prompt, Raw):
        return None
    view = memoryview(prompt)
    size = len(view)
    if _SEVERAL.match(view[:_SPACE_BYTES]) is not None:
        found = yield from _only(view)
        if found is None:
            return None
        view = found
    if view[0] == ord('"'):
        return (size, 0) if len(view) > len('""') else None
    count = yield from _counting(view)
    return (size, count) if count is not None else None


def _only(items: memoryview) -> Steps[memoryview | None]:
    try:
        spans = yield from outline(items, 1)
    except RequestRefused:
        return None
    if len(spans) != 1:
        return None
    begin, end = spans[0]
    if max(begin, len(items) - end) > _SPACE_BYTES:
        return None
    around = bytes(items[:begin]).split() + bytes(items[end:]).split()
    return items[begin:end] if around == [b"[", b"]"] else None


def _several(prompts: Raw) -> Steps[int]:
    """The number of prompts in a list; 0 if it is not a list of texts or of lists of ids, or has too many."""
    view = memoryview(prompts)
    if _SEVERAL.match(view[:_SPACE_BYTES]) is None:
        return 0
    try:
        spans = yield from outline(view, _MOST_PROMPTS)
    except RequestRefused:
        return 0
    return len(spans)


def token_count(ids: Raw | memoryview) -> int | None:
    """The number of elements in a JSON list of integers, without parsing it; None if it is something else, or empty."""
    return at_once(_counting(memoryview(ids)))


def _counting(ids: memoryview) -> Steps[int | None]:
    if len(ids) < len("[0]") or (ids[0], ids[-1]) != _BRACKETS:
        return None
    commas, is_empty = 0, True
    inner = ids[1:-1]
    for at in range(0, len(inner), STEP):
        if at:
            yield
        piece = bytes(inner[at : at + STEP])
        marks = piece.translate(None, _IN_IDS)
        commas += len(marks)
        if marks.strip(b","):
            return None
        is_empty = is_empty and piece.isspace()
    return None if is_empty else commas + 1


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _absent(value: Any) -> bool:
    return value is None


def _false(value: Any) -> bool:
    return value is None or value is False


def _empty(value: Any) -> bool:
    return value is None or value in ([], {})


def _one(value: Any) -> bool:
    return value is None or (_is_int(value) and value == 1)


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: value is None or (_is_int(value) and value >= least)


def _number(default: float) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and value == default


def _anything(value: Any) -> bool:
    return True


# A body that fails one of these checks goes to one engine unchanged.
_SPLITTABLE: dict[str, Callable[[Any], bool]] = {
    "n": _at_least(1),
    "best_of": _one,
    "use_beam_search": _false,
    "echo": _false,
    "prompt_logprobs": _absent,  # an engine asked for them neither saves nor loads KV of the prompt
    "prompt_embeds": _empty,
    "suffix": _absent,
    # -1 means "as many as fit beside the answer", which the prefill leg's shorter answer would change.
    "truncate_prompt_tokens": _at_least(1),
    "stream": lambda value: value is None or isinstance(value, bool),
    "stream_options": lambda value: value is None or isinstance(value, dict),
    "max_tokens": _at_least(1),
    "max_completion_tokens": _at_least(1),
    "max_output_tokens": _at_least(1),
    "min_tokens": _at_least(0),
    # In responses: state that other engines lack, answers given before they are generated, and -1 as above.
    "previous_response_id": _absent,
    "background": _false,
    "truncation": lambda value: value in (None, "disabled"),
}

# The values (other than null) with which the decode engine, given prompt + first token, continues exactly as if it
# had sampled that token itself. It is asked to do so when it samples another token than the client was sent.
_FORWARD: dict[str, Callable[[Any], bool]] = {
    # The same at every step, or only a name. The prefill leg has the field too, and rejects a bad value.
    **dict.fromkeys(
        ("model", "prompt", "temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "user")
        + ("seed", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "priority")
        + ("request_id", "session_id", "cache_salt", "stream", "stream_interval"),
        _anything,
    ),
    # The prefill leg lacks these, and the first event is sent before the decode leg's engine has validated them.
    "stream_options": lambda value: all(
        each is None or (name in _STREAM_OPTIONS and isinstance(each, bool)) for name, each in value.items()
    ),
    "add_special_tokens": _anything,  # the decode leg gets token ids
    "max_tokens": _anything,  # one less on the decode leg
    "min_tokens": _anything,  # likewise
    "length_penalty": _anything,  # only for beam search
    "n": _one,
    "best_of": _one,
    "use_beam_search": _false,
    "echo": _false,
    "prompt_embeds": _empty,
    # These depend on the tokens generated so far; for the decode leg, the first one would be prompt.
    "presence_penalty": _number(0),
    "frequency_penalty": _number(0),
    "repetition_penalty": _number(1),
    "bad_words": _empty,
    "repetition_detection": _absent,
    "structured_outputs": _absent,
    "response_format": lambda value: value == {"type": "text"},
    "thinking_token_budget": _absent,
    "watermarking": _false,
    "stop": _empty,  # may span the end of the first token
    "spaces_between_special_tokens": lambda value: value is True,
    # These describe every token, including the first.
    "logprobs": _absent,
    "logprob_token_ids": _empty,
    "return_token_ids": _false,
    "return_tokens_as_token_ids": _false,
    "return_token_offsets": _false,
    "truncate_prompt_tokens": _absent,
    "truncation_side": _absent,
    "vllm_xargs": _empty,
}

_KNOWN = frozenset(_FORWARD)  # client-supplied names never become labels
# Numbers and booleans, in any form that engines accept.
WHOLE = (
    *("n", "best_of", "min_tokens", "truncate_prompt_tokens"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens"),
)
SWITCHES = ("stream", "echo", "use_beam_search", "background")
# The values of these matter; of all others at most whether they are null.
LOOKED_AT = frozenset(
    [*_SPLITTABLE, *(name for name, check in _FORWARD.items() if check is not _anything)]
    + ["model", "temperature", "request_id", XARGS]
)
