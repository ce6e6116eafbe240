"""The requests of a trace: what each asks for, when, and what it leaves. Times in seconds, lengths in tokens."""

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

SCOPE = bytes(KEY_BYTES)  # of all requests: one model, one tenant
MOONCAKE_TOKENS = 512  # per block in Mooncake's traces


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request. `keys`: its prompt's blocks, the last of which may be shorter; equal keys mean equal prefixes.

    `content`: a number for each whole block of the prompt, then for each of `answer_keys`; equal numbers mean equal
    tokens at any position. Blocks are also found by these numbers, as with the hint `reuse: moved`. Empty: unknown.
    """

    at_s: float
    tokens: int  # of the prompt
    output: int  # tokens of the answer
    keys: Sequence[bytes]
    answer_keys: Sequence[bytes] = ()  # the further blocks that are whole once the answer is complete
    session: str = ""
    content: bytes = b""  # encoded like tokens in messages: to the node, a block is one token

    @property
    def num_whole(self) -> int:
        """The number of whole blocks in the prompt whose content is known."""
        return len(self.content) // TOKEN_BYTES - len(self.answer_keys) if self.content else 0

    @property
    def ids(self) -> bytes:
        return self.content[: self.num_whole * TOKEN_BYTES]

    @property
    def prompt_tokens(self) -> PromptTokens | None:
        """What a node is told about the prompt's blocks …"""
        return PromptTokens(SCOPE, self.ids, 1, is_moved=True) if self.content else None

    @property
    def answer_tokens(self) -> PromptTokens | None:
        """… and about the blocks that the answer completes."""
        ids = self.content[len(self.ids) :]
        return PromptTokens(SCOPE, ids, 1, self.num_whole, is_moved=True) if self.content else None

    @property
    def block_names(self) -> Sequence[bytes]:
        """The names by which all its blocks are found: their content if known, else their keys."""
        ids = self.content
        return [ids[at : at + TOKEN_BYTES] for at in range(0, len(ids), TOKEN_BYTES)] or [*self.keys, *self.answer_keys]


def possible_hits(requests: Iterable[Request]) -> Iterator[int]:
    """For each request, the number of leading blocks that a store without evictions would find."""
    seen: set[bytes] = set()
    for request in requests:
        blocks, count = request.block_names, len(request.keys)
        yield next((at for at, name in enumerate(blocks[:count]) if name not in seen), min(len(blocks), count))
        seen.update(blocks)


class Trace(msgspec.Struct, frozen=True):
    """Requests in order of arrival, with blocks of `block_tokens` tokens."""

    name: str
    block_tokens: int
    requests: Sequence[Request]
    sessions: int = 0  # number in the trace; 0: unknown
    window: int = 0  # tokens of the model's context; 0: unknown

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first to the last request."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    def found_by_all(self) -> int:
        """The number of tokens that a store without evictions would find."""
        size, found = self.block_tokens, zip(possible_hits(self.requests), self.requests, strict=True)
        return sum(min(hits * size, request.tokens) for hits, request in found)

    def distinct_blocks(self) -> int:
        """The number of blocks that a store without evictions would have at the end."""
        return len({key for request in self.requests for key in (*request.keys, *request.answer_keys)})


def read(path: Path) -> Trace:
    """Read a trace in Mooncake's format: one JSON object per line, in a file that may be compressed (`.gz`).

    `timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids`: the prompt's blocks of 512 tokens.

    :raises ConfigError: the file cannot be read, or has another format.
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
    if not isinstance(ids, list) or not ids or any(type(each) is not int for each in ids) or len(set(ids)) != len(ids):
        raise ValueError("each request has a list of different numbers as hash_ids")
    return Request(at_ms / 1e3, tokens, output, [number.to_bytes(16, "big") for number in ids])
