"""How one request is served, decided from its body and from what its engines add to it. Pure.

What is not known to be safe is not done: a field nobody has thought about keeps a completion out of `forward`,
and a body that looks wrong goes to one engine as it is, which then gives its own answer to it.
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

Body = dict[str, Any]  # by field: its value, or the JSON of what is not looked at (see `body.parsing`)

FORWARD_BYTES = 1 << 20  # of a prompt: the prefill engine sends all its token ids back, which takes everybody's time
ONE_TOKEN = "one_token"  # why a request goes to one engine, and to one that prefills: that is all it has to do
XARGS = "vllm_xargs"
BYTES_PER_TOKEN = 4  # of text, roughly
_MOST_PROMPTS = 1024  # of a request that is shared
_CONTENT_PARTS = re.compile(rb'"content"\s*:\s*\[')  # text in parts, or pictures: few bytes may be many tokens
_CONTROL_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
_BRACKETS = (ord("["), ord("]"))
_SPACE_BYTES = 4096  # no longer is what separates values
_IN_IDS = b"0123456789- \t\r\n"
_SEVERAL = re.compile(rb'\[\s*[\["]')
_SOMETHING = re.compile(rb"\[\s*[^\]\s]")
_TEXT = re.compile(rb'\[\s*[^\]\s]|"[^"]')  # or a list with something in it
# Tools that engines call themselves, and then go on with a prompt that is another one.
_BUILT_IN = re.compile(rb'"type"\s*:\s*"(mcp|code_interpreter|container|web_search)')
_TOOLS_BYTES = 1 << 20


class Mode(StrEnum):
    """How the two legs share the work."""

    ALONE = "alone"  # one engine does everything
    FORWARD = "forward"  # the first token is of whichever leg has it first, all others are the decode leg's
    SAMPLED = "sampled"  # all tokens are the decode leg's


def modes(route: Route) -> list[Mode]:
    """Those in which requests of a route may be served."""
    if route is Route.WHOLE:
        return [Mode.ALONE]
    return [mode for mode in Mode if mode is not Mode.FORWARD or route.forwards]


class Plan(msgspec.Struct, frozen=True):
    """The mode, and why it is not a faster one ("" for forward)."""

    mode: Mode
    why: str = ""
    least_length: int = 0  # a model that takes less than so many tokens refuses the prompt
    prompts: int = 1  # that one request has


Prompt = tuple[int, int]  # a completion's only one: its bytes, as it was written, and how many ids it is; 0: it is text


def strip_control(body: Body) -> tuple[Body, bool]:
    """`body` without fields that steer transfers, and whether there were any. Only this proxy may set those.

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
    """The name of the model that it asks for; None: it names none."""
    name = body.get("model")
    return name if isinstance(name, str) else None


def planning(route: Route, body: Body, *, min_split_tokens: int = 0) -> Steps[Plan]:
    """The fastest mode in which the answer is certain to be the one a single engine would give.

    Nothing is gained by two legs for one token (`ONE_TOKEN`), nor for a prompt of less than `min_split_tokens`.
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
    if not body.get("stream"):  # what comes in one piece comes with its last token
        return Plan(Mode.SAMPLED, "stream", least_length)
    if not _number(0)(body.get("temperature")):
        # Each leg draws a token of its own. One seed for both would have whole batches sampled slower (ADR 73).
        return Plan(Mode.SAMPLED, "temperature", least_length)
    for name, value in body.items():
        if value is not None and not (name in _FORWARD and _FORWARD[name](value)):
            return Plan(Mode.SAMPLED, name if name in _KNOWN else "unknown_field", least_length)
    return Plan(Mode.FORWARD, "", least_length)


def check_length(plan: Plan, facts: Sequence[EngineFacts | None]) -> None:
    """What no engine takes goes to none: a list of ids is long before it is read. `facts`: of each that may serve it.

    :raises RequestRefused: in an engine's words.
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
    if route is Route.MESSAGES and token_limit(route, body) is None:  # which an engine refuses
        return Plan(Mode.ALONE, "max_tokens")
    tools = body.get("tools") if route is Route.RESPONSES else None
    if isinstance(tools, Raw) and _BUILT_IN.search(memoryview(tools)[:_TOOLS_BYTES]) is not None:
        return Plan(Mode.ALONE, "tools")
    if token_limit(route, body) == 1:
        return Plan(Mode.ALONE, ONE_TOKEN)
    is_short = prompt_bytes(route, body) // BYTES_PER_TOKEN < min_split_tokens
    if is_short and _CONTENT_PARTS.search(memoryview(messages)) is None:  # else it is more than text
        return Plan(Mode.ALONE, "short_prompt")
    return Plan(Mode.SAMPLED, "chat")


def prompt_bytes(route: Route, body: Body) -> int:
    """All that the prompt is made of, as it was written."""
    return sum(len(memoryview(body[name])) for name in route.prompt if isinstance(body.get(name), Raw))


def obstacle(body: Body, *, prefill: EngineFacts | None, decode: EngineFacts | None, prompt_tokens: int = 0) -> str:
    """Why a body that may be forwarded is not by these engines, whose own defaults no body shows; "" if it is."""
    if prefill is None or decode is None:
        return "engine_unknown"
    if prefill.looks_back or decode.looks_back:
        return "engine_looks_back"
    if prefill.stops_short:
        return "engine_stops_short"
    limit = forward_limit(body, decode)
    if (body.get("min_tokens") or 0) > limit:
        return "min_tokens"  # which an engine refuses
    # Else a continuation would have no token to make, or no place for it.
    return "near_ceiling" if limit == 1 or prompt_tokens + limit > decode.max_model_len else ""


def forward_limit(body: Body, decode: EngineFacts | None) -> int:
    """The most tokens in the answer to a body of mode `forward`."""
    limit = token_limit(Route.COMPLETIONS, body)
    assert limit is not None
    return min(limit, decode.max_new_tokens) if decode is not None and decode.max_new_tokens else limit


def token_limit(route: Route, body: Body) -> int | None:
    """The most tokens the client wants; None: as many as fit. Only for a body that may be split."""
    for name in route.limits:
        if (limit := body.get(name)) is not None:
            return limit  # type: ignore[no-any-return]
    return route.default_limit


def single_prompt(prompt: Any) -> Steps[Prompt | None]:
    """The one prompt in a completion's `prompt`; None: several, none, or nothing one could tell."""
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
    """How many prompts a list has; 0: it is none of texts or of lists of ids, or has too many."""
    view = memoryview(prompts)
    if _SEVERAL.match(view[:_SPACE_BYTES]) is None:
        return 0
    try:
        spans = yield from outline(view, _MOST_PROMPTS)
    except RequestRefused:
        return 0
    return len(spans)


def token_count(ids: Raw | memoryview) -> int | None:
    """How many numbers a JSON list of whole numbers has; None: it is something else, or empty. Without reading them."""
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


# Whoever fails one of these goes to one engine as it is.
_SPLITTABLE: dict[str, Callable[[Any], bool]] = {
    "n": _at_least(1),
    "best_of": _one,
    "use_beam_search": _false,
    "echo": _false,
    "prompt_logprobs": _absent,  # an engine asked for them saves and finds nothing of the prompt
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
    # Of responses: what another engine does not have, what is answered before it is made, and -1 as above.
    "previous_response_id": _absent,
    "background": _false,
    "truncation": lambda value: value in (None, "disabled"),
}

# The values (other than null) with which the decode engine, given prompt + first token, continues exactly as it
# would have after sampling that token itself. So it is asked to where it samples another one than the client has.
_FORWARD: dict[str, Callable[[Any], bool]] = {
    # The same at every step, or only a name. A bad value is refused by the prefill leg, which has it too.
    **dict.fromkeys(
        ("model", "prompt", "temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "user")
        + ("seed", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "priority")
        + ("request_id", "session_id", "cache_salt", "stream", "stream_interval"),
        _anything,
    ),
    # The prefill leg does not have these, and the first event is sent before the decode leg's engine has read them.
    "stream_options": lambda value: all(
        each is None or (name in _STREAM_OPTIONS and isinstance(each, bool)) for name, each in value.items()
    ),
    "add_special_tokens": _anything,  # the decode leg gets token ids
    "max_tokens": _anything,  # one less on the decode leg
    "min_tokens": _anything,  # likewise
    "length_penalty": _anything,  # of beam search only
    "n": _one,
    "best_of": _one,
    "use_beam_search": _false,
    "echo": _false,
    "prompt_embeds": _empty,
    # These look at the tokens generated so far; to the decode leg the first one would be prompt.
    "presence_penalty": _number(0),
    "frequency_penalty": _number(0),
    "repetition_penalty": _number(1),
    "bad_words": _empty,
    "repetition_detection": _absent,
    "structured_outputs": _absent,
    "response_format": lambda value: value == {"type": "text"},
    "thinking_token_budget": _absent,
    "watermarking": _false,
    "stop": _empty,  # may lie across the first token's end
    "spaces_between_special_tokens": lambda value: value is True,
    # These describe every token, the first one included.
    "logprobs": _absent,
    "logprob_token_ids": _empty,
    "return_token_ids": _false,
    "return_tokens_as_token_ids": _false,
    "return_token_offsets": _false,
    "truncate_prompt_tokens": _absent,
    "truncation_side": _absent,
    "vllm_xargs": _empty,
}

_KNOWN = frozenset(_FORWARD)  # names from outside never become labels
# Numbers, and what is true or false, in any form that engines take.
WHOLE = (
    *("n", "best_of", "min_tokens", "truncate_prompt_tokens"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens"),
)
SWITCHES = ("stream", "echo", "use_beam_search", "background")
# The values of these decide; of all others it matters at most whether they are null.
LOOKED_AT = frozenset(
    [*_SPLITTABLE, *(name for name, check in _FORWARD.items() if check is not _anything)]
    + ["model", "temperature", "request_id", XARGS]
)
