"""Requests of a trace: what each asks for, when, and what it leaves behind. Times in seconds, lengths in tokens."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from pdx.errors import ConfigError
from pdx.memory.keys import KEY_BYTES
from pdx.wire.moved import TOKEN_BYTES, PromptTokens

SCOPE = bytes(KEY_BYTES)  # of all of them: one model, one tenant
MOONCAKE_TOKENS = 512  # of a block in Mooncake's traces


class Request(msgspec.Struct, frozen=True, gc=False):
    """One of them. `keys`: its prompt's blocks, the last one may be shorter; equal keys mean equal prefixes.

    `content`: a number for each whole block of the prompt, and for those of `more`; equal numbers mean equal tokens,
    wherever they stand. It is found by these, too, as with the hint `reuse: moved`. Empty: they are not known.
    """

    at_s: float
    tokens: int  # of the prompt
    output: int  # tokens of the answer
    keys: Sequence[bytes]
    more: Sequence[bytes] = ()  # blocks that are whole when the answer is there, behind the whole ones of the prompt
    session: str = ""
    content: bytes = b""  # as tokens in messages: to the node a block is one

    @property
    def whole(self) -> int:
        """How many whole blocks the prompt has whose content is known."""
        return len(self.content) // TOKEN_BYTES - len(self.more) if self.content else 0

    @property
    def ids(self) -> bytes:
        return self.content[: self.whole * TOKEN_BYTES]

    @property
    def prompt_tokens(self) -> PromptTokens | None:
        """What a node is told of the prompt's blocks …"""
        return PromptTokens(SCOPE, self.ids, 1, is_moved=True) if self.content else None

    @property
    def answer_tokens(self) -> PromptTokens | None:
        """… and of those of the answer."""
        return (
            PromptTokens(SCOPE, self.content[len(self.ids) :], 1, self.whole, is_moved=True) if self.content else None
        )

    @property
    def named(self) -> Sequence[bytes]:
        """All its blocks by what they are found by."""
        ids = self.content
        return [ids[at : at + TOKEN_BYTES] for at in range(0, len(ids), TOKEN_BYTES)] or [*self.keys, *self.more]


def leading(requests: Iterable[Request]) -> Iterator[int]:
    """Of each how many leading blocks a store would find that never forgets anything."""
    seen: set[bytes] = set()
    for request in requests:
        blocks, count = request.named, len(request.keys)
        yield next((at for at, name in enumerate(blocks[:count]) if name not in seen), min(len(blocks), count))
        seen.update(blocks)


class Trace(msgspec.Struct, frozen=True):
    """Requests in the order in which they come; all blocks have so many tokens."""

    name: str
    block_tokens: int
    requests: Sequence[Request]
    sessions: int = 0  # that are in it; 0: it does not say
    window: int = 0  # tokens that the model's context has; 0: it does not say

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first to the last request."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    def found_by_all(self) -> int:
        """Tokens that a store which never forgets anything would find."""
        size, found = self.block_tokens, zip(leading(self.requests), self.requests, strict=True)
        return sum(min(hits * size, request.tokens) for hits, request in found)

    def distinct_blocks(self) -> int:
        """How many blocks a store would have that never forgets anything."""
        return len({key for request in self.requests for key in (*request.keys, *request.more)})


def read(path: Path) -> Trace:
    """A trace in Mooncake's form: a JSON object a line, in a file that may be compressed (`.gz`).

    `timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids`: the prompt's blocks of 512 tokens.

    :raises ConfigError: it cannot be read, or is something else.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            requests = [_request(json.loads(line)) for line in lines if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path} is no trace in Mooncake's form: {type(error).__name__}: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return Trace(path.name.split("_")[0], MOONCAKE_TOKENS, sorted(requests, key=lambda request: request.at_s))


def _request(record: dict[str, object]) -> Request:
    at_ms = float(str(record["timestamp"]))
    tokens, output = int(str(record["input_length"])), int(str(record["output_length"]))
    ids = record["hash_ids"]
    if not math.isfinite(at_ms):
        raise ValueError(f"each request has a time, and {at_ms} is none")
    if tokens < 1 or output < 0:
        raise ValueError("each request has at least a token, and no answer has fewer than none")
    if not isinstance(ids, list) or any(type(each) is not int for each in ids) or len(set(ids)) != len(ids):
        raise ValueError("each request has a list of different numbers as hash_ids")
    return Request(at_ms / 1e3, tokens, output, [number.to_bytes(16, "big") for number in ids])
