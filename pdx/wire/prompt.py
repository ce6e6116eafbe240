"""The prompt whose chunks a verb is about, as people and programs name it, and the verb with these chunks' keys.

No I/O: the caller has an engine tokenize a text first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from pdx.errors import SelectionError
from pdx.memory.form import LossyName
from pdx.memory.keys import KEY_BYTES
from pdx.wire.base import MAX_KEYS, MAX_NAME, Name, ShardCount
from pdx.wire.tokens import chosen, chunk_keys, form_text, number_of
from pdx.wire.verbs import Model, Recode, Selection, Verb

_V = TypeVar("_V", bound=Verb)
_MAX_TOKENS = 1 << 24
_FIVE = ("tokens", "text", "messages", "keys", "request")
_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_HexKey = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}\Z")]


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which chunks: exactly one of `tokens`, `text`, `messages`, `keys` in hex, and `request`, a part of its id.

    `model`: needed if engines of several models are attached: an engine's name or URL, or a prefix of its layout or its
    model. `salt`: the requests' `cache_salt`; it is never shown. `codec`: the lossy codec that the requests ask for,
    whose chunks have other keys than those of exact requests; empty: none. `shards`: of each of `keys`.
    """

    tokens: Annotated[list[_Token], Meta(max_length=_MAX_TOKENS)] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    keys: Annotated[list[_HexKey], Meta(min_length=1, max_length=MAX_KEYS)] | None = None
    shards: ShardCount = 1
    request: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    model: Name = ""
    salt: str = ""
    codec: Annotated[str, Meta(max_length=40)] = ""

    def __repr__(self) -> str:
        if self.request:
            return f"<Prompt of request {self.request!r}>"
        return f"<Prompt of {f'{len(self.tokens)} tokens' if self.tokens is not None else 'a text, or keys'}>"

    def check(self) -> None:
        """:raises SelectionError: the chunks are not named by exactly one of the five."""
        said = [name for name in _FIVE if getattr(self, name) is not None and (name != "request" or self.request)]
        if len(said) != 1:
            told = " and ".join(said) or "nothing"
            raise SelectionError(f"say which chunks by one of tokens, text, messages, keys and request, not by {told}")

    @property
    def untokenized(self) -> dict[str, Any] | None:
        """The body of a request to an engine's /tokenize if this is a text or a conversation, else None."""
        if self.text is not None:
            return {"prompt": self.text}
        return {"messages": self.messages} if self.messages is not None else None

    def engines(self, models: Sequence[Model]) -> list[Model]:
        """Those of the attached engines that make this prompt's keys; all of them if no keys are to be made.

        :raises SelectionError: see `check`; there are none, or they do not make keys alike.
        """
        self.check()
        return list(models) if self.keys or self.request else chosen(models, self.model)


def about(verb: _V, prompt: Prompt, models: Sequence[Model]) -> _V:
    """The verb for this prompt's chunks; `models`: `prompt.engines`. A text must be tokenized by now.

    :raises SelectionError: it names no chunk, or a codec that the model does not have.
    """
    changes: dict[str, Any] = {"what": _selection(prompt, models)}
    if isinstance(verb, Recode):
        is_named = not (prompt.keys or prompt.request)
        if is_named and (form := form_text(models[0], verb.codec)):
            lossy = msgspec.structs.replace(prompt, codec=verb.codec)
            changes |= {"codec": form, "new_keys": verb.new_keys or _selection(lossy, models).keys}
        elif not is_named and verb.codec in get_args(LossyName):
            raise SelectionError(
                f"chunks that are stored by {verb.codec} get other keys, which no request's id tells: name tokens or a "
                f"text"
            )
    return msgspec.structs.replace(verb, **changes)


def _selection(prompt: Prompt, models: Sequence[Model]) -> Selection:
    if prompt.keys:
        return Selection(list(map(bytes.fromhex, prompt.keys)), prompt.shards)
    if prompt.request:
        sizes = {number_of(model, "chunk_tokens") for model in models if model.shape.get("chunk_tokens")}
        return Selection(request=prompt.request, chunk_tokens=sizes.pop() if len(sizes) == 1 else 0)
    keys = chunk_keys(models[0], prompt.tokens or (), prompt.salt, prompt.codec)
    return Selection(keys, number_of(models[0], "num_shards"), chunk_tokens=number_of(models[0], "chunk_tokens"))
