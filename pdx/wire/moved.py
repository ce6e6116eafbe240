"""What engines tell nodes about the tokens of chunks, and ask by tokens: part of `pdx.wire.messages` (ADR 80)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.memory.keys import KEY_BYTES
from pdx.wire.base import MAX_KEYS, Count, Key, Message, Name

TOKEN_BYTES = 4  # little endian
MAX_TOKENS = 1 << 19  # of one message: half of what a frame may have

Scope = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
TokenIds = Annotated[bytes, Meta(max_length=MAX_TOKENS * TOKEN_BYTES)]
ChunkTokens = Annotated[int, Meta(ge=1, le=1 << 16)]
Shift = Annotated[int, Meta(ge=-(1 << 32), le=1 << 32)]


class PromptTokens(msgspec.Struct, array_like=True, frozen=True):
    """The tokens of the leading whole chunks of an `Admit`, the first of which is the prompt's token `first`.

    `scope`: prompts of one scope have chunks that differ only by their tokens: the same model, layout, cache salt and
    adapter. `is_moved`: not all before them was computed, or is known to have been; others are preferred if both are
    found.
    """

    scope: Scope
    ids: TokenIds
    chunk_tokens: ChunkTokens
    first: Count = 0
    is_moved: bool = False


class Part(msgspec.Struct, array_like=True, frozen=True):
    """What a request takes of a chunk that was computed elsewhere: so many tokens, `shift` positions later."""

    count: Count
    shift: Shift


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """Tokens [first, first + count) of the chunk `key`, which were computed `shift` positions before where they stand
    in the prompt that was asked about."""

    key: Key
    first: Count
    count: Count
    shift: Shift


class FindMoved(Message, frozen=True):
    """Ask where the tokens of this prompt were computed, at any positions, as far as they are known without a gap. What
    is found may be gone: an `Admit` of its keys tells."""

    scope: Scope
    ids: TokenIds
    chunk_tokens: ChunkTokens
    request: Name = ""


class Moved(Message, frozen=True):
    """The pieces cover the prompt's tokens from the first one on. The leading ones are its true beginning, not moved:
    without these nothing is found, since a model that lacks its first tokens' KV generates nonsense."""

    pieces: Annotated[list[Piece], Meta(max_length=MAX_KEYS)] = []
