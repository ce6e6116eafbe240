"""Which chunks a verb is about: tokens, a text or a conversation, keys, or a request, as a `Selection`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdx.errors import SelectionError
from pdx.memory.keys import KEY_BYTES
from pdx.proxy.cache.instances import Instances
from pdx.wire.base import MAX_KEYS, Name, ShardCount
from pdx.wire.tokens import chunk_keys, chunk_tokens, form_text, num_shards
from pdx.wire.verbs import CodecName, Model, Selection

_MAX_TOKENS = 1 << 24
HexKeys = Annotated[
    list[Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}\Z")]], Meta(min_length=1, max_length=MAX_KEYS)
]
_FIVE = ("tokens", "text", "messages", "keys", "request")
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]


class What(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Of a request's body: exactly one of `tokens`, `text`, `messages`, `keys` and `request`."""

    tokens: Annotated[list[Token], Meta(max_length=_MAX_TOKENS)] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: Name = ""  # of the three above: whose chunks, where engines of several models are there …
    salt: str = ""  # … the requests' `cache_salt` …
    codec: CodecName = ""  # … and the lossy codec that they ask for
    keys: HexKeys | None = None
    shards: ShardCount = 1  # of each of `keys`
    request: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    @property
    def said(self) -> list[str]:
        """By which of the five it says which chunks; only one counts."""
        return [name for name in _FIVE if getattr(self, name) is not None]


class Chosen(msgspec.Struct, frozen=True):
    """The chunks; each stands for `chunk_tokens` tokens, 0: not known."""

    selection: Selection
    chunk_tokens: int


class Prompts:
    """Makes keys of prompts. All calls on one event loop."""

    def __init__(self, instances: Instances, tokenize: Callable[[Model, bytes], Awaitable[list[int]]]) -> None:
        """`tokenize` has that engine make tokens of the body of a request for its /tokenize."""
        self._instances = instances
        self._tokenize = tokenize
        self._turn = asyncio.Semaphore(1)  # to make keys: more threads of Python would only hold up the loop

    async def choose(self, what: What) -> Chosen:
        """:raises SelectionError: it is not said, or said twice, or it names no chunk.

        :raises NoEngine: a text, and no engine makes tokens of it.
        """
        if len(what.said) != 1:
            said = " and ".join(what.said) or "nothing"
            raise SelectionError(f"say which chunks by one of tokens, text, messages, keys and request, not by {said}")
        if what.request is not None:
            return Chosen(Selection(request=what.request), 0)
        if what.keys is not None:
            return Chosen(Selection([bytes.fromhex(key) for key in what.keys], what.shards), 0)
        models = self._instances.model(what.model)
        tokens = what.tokens if what.tokens is not None else await self._tokens(what, models)
        # In a thread: a million tokens take a second, in which clients would wait.
        async with self._turn:
            keys = await asyncio.to_thread(chunk_keys, models[0], tokens, what.salt, what.codec)
        return Chosen(Selection(keys, num_shards(models[0])), chunk_tokens(models[0]))

    def form(self, what: What, codec: str) -> str:
        """The form of the chunks of requests that ask for this codec, where it loses something, and tokens say of which
        model; else nothing.

        :raises SelectionError: the model has no such codec.
        """
        if what.request is not None or what.keys is not None:
            return ""
        return form_text(self._instances.model(what.model)[0], codec)

    async def _tokens(self, what: What, models: list[Model]) -> list[int]:
        body: dict[str, Any] = {"prompt": what.text} if what.text is not None else {"messages": what.messages}
        try:
            written = msgspec.json.encode(body)
        except RecursionError as error:
            raise SelectionError("the messages are nested too deeply") from error
        return await self._tokenize(next((model for model in models if model.url), models[0]), written)
