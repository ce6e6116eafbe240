"""A text's tokens, by the engine that would be asked with it: vLLM's /tokenize."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from pdx.client.http_call import HttpAnswer, call
from pdx.errors import SelectionError
from pdx.wire.verbs import Model

_T = TypeVar("_T")

TIMEOUT_S = 30.0


class _Served(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Served]


class _Tokens(msgspec.Struct):
    tokens: list[int]


def tokens_of(text: str, models: Sequence[Model]) -> list[int]:
    """The tokens that the first of these engines with a URL makes of a text, special ones as it adds them to prompts.

    :raises SelectionError: none of them has told its URL, or it does not answer as vLLM does.
    """
    model = next((model for model in models if model.url), None)
    if model is None:
        raise SelectionError(
            f"engine {models[0].engine!r} has not told where it serves HTTP, so nobody makes tokens of a text: give ids"
        )
    served = _asked(model, "/v1/models", None, _Models)
    if not served.data:
        raise SelectionError(f"the engine at {model.url} serves no model")
    return _asked(model, "/tokenize", {"model": served.data[0].id, "prompt": text}, _Tokens).tokens


def _asked(model: Model, path: str, body: Any, kind: type[_T]) -> _T:
    try:
        answer: HttpAnswer = call(model.url, path, body, timeout_s=TIMEOUT_S)
        if answer.status != 200:
            raise SelectionError(f"the engine at {model.url} answers {answer.status} to {path}: {answer.text[:200]!r}")
        return msgspec.json.decode(answer.body, type=kind)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError) as error:
        raise SelectionError(f"the engine at {model.url} makes no tokens of a text: {error}") from error
