"""The bodies of the two legs, built from the client's. Pure; the client's body is never changed."""

from __future__ import annotations

import json

from pdx.proxy.plan import Body, Mode, Route

# What shapes the answer only. In chat, `response_format`, `tools` and the like also shape the prompt and stay.
_ANSWER_ONLY = (
    "stream_options",
    "stream_interval",
    "stop",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "return_prompt_text",
    "structured_outputs",
    "bad_words",
    "repetition_detection",
    "thinking_token_budget",
)


def encode(body: Body) -> bytes:
    """As JSON, in ASCII: also what a lenient reader let pass (NaN, lone surrogates) comes out as it came in."""
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def prefill_body(route: Route, body: Body, *, mode: Mode, transfer: str, decode_node: str = "") -> Body:
    """The prefill leg: the client's prompt, one token, and where its KV is to go (empty: it stays on its node)."""
    leg = dict(body)
    leg["stream"] = False
    leg["max_tokens"] = 1
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    if leg.get("min_tokens"):
        leg["min_tokens"] = 1  # the first token may still not end the text
    if mode is Mode.FORWARD:
        leg.pop("stream_options", None)
        leg.pop("stream_interval", None)
        leg["return_token_ids"] = True
    else:
        for name in _ANSWER_ONLY:
            leg.pop(name, None)
        if route is Route.COMPLETIONS:
            leg.pop("response_format", None)
    leg["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": transfer}
    if decode_node:
        leg["kv_transfer_params"]["decode_node"] = decode_node
    return leg


def continuation_body(body: Body, *, prompt: list[int], first: int, limit: int, transfer: str) -> Body:
    """The decode leg of `forward`: go on after `prompt` + `first`, to `limit` tokens with that one."""
    leg = dict(body)
    leg["prompt"] = [*prompt, first]
    leg["max_tokens"] = limit - 1
    if leg.get("min_tokens"):
        leg["min_tokens"] -= 1
    leg["kv_transfer_params"] = _arriving(transfer, len(prompt))
    return leg


def sampled_body(body: Body, *, prompt_tokens: int, cached_tokens: int | None, transfer: str) -> Body:
    """The decode leg of `sampled`: the client's own request, with its prompt's KV on the way.

    `cached_tokens`: what the prefill engine had of the prompt, if it says so. To the decode engine all that arrives
    is cached; told of the other count it reports that one.
    """
    params = _arriving(transfer, prompt_tokens)
    if cached_tokens is not None:
        params["remote_prefill_cached_tokens"] = cached_tokens
    return {**body, "kv_transfer_params": params}


def located(leg: Body, prefill_node: str) -> Body:
    """A decode leg for an engine of another node than `prefill_node`, where what does not arrive can be asked for."""
    return {**leg, "kv_transfer_params": {**leg["kv_transfer_params"], "prefill_node": prefill_node}}


def _arriving(transfer: str, prompt_tokens: int) -> Body:
    return {"do_remote_prefill": True, "transfer_id": transfer, "prefill_tokens": prompt_tokens}
