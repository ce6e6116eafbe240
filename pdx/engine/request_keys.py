"""The keys of a request's chunks, and what an `Admit` says about their sizes. Keys of several cache groups are in one
list, group by group, each with equally many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdx.engine.step import BlockHasher, EngineRequest
from pdx.memory.keys import KEY_BYTES, chunk_key, root_key, short_key, tail_key
from pdx.memory.layout import CacheGroups, KvLayout, Place
from pdx.wire.base import MAX_BLOCKS
from pdx.wire.messages import Group


class RequestKeys:
    """The keys of one request's chunks."""

    def __init__(self, request: EngineRequest, groups: CacheGroups, fingerprint: bytes) -> None:
        """`fingerprint`: what the keys are made with; that of the model's groups, until the engine's cache is reset."""
        self._request = request
        self._groups = groups
        self._fingerprint = fingerprint
        is_alone = len(groups) == 1 and not groups[0].drafter
        self._secrets = [fingerprint] if is_alone else [each.secret(fingerprint) for each in groups]
        self._hashes_per_chunk = groups.chunk_tokens // groups[0].tokens_per_hash
        self._keys: list[list[bytes]] = [[] for _ in groups]
        self._hashes: list[bytes] = []  # the block hash that each chunk's keys were made of
        self._tail: list[bytes] | None = None
        self._tail_tokens = -1  # for a transfer of so many tokens

    def leading(self, num_chunks: int, first: int = 0) -> list[bytes]:
        """The keys of full chunks [first, num_chunks), whose blocks must be full of known tokens.

        They are cached. A session that goes on with new input loses its last token, and the engine drops that block's
        hash: chunks that had it get other keys.
        """
        hashes = self._request.block_hashes
        while self._hashes and not self._is_last_hash_valid(hashes):
            self._hashes.pop()
            for of_group in self._keys:
                of_group.pop()
        for index in range(len(self._hashes), num_chunks):
            self._hashes.append(bytes(hashes[(index + 1) * self._hashes_per_chunk - 1]))
            for of_group, secret in zip(self._keys, self._secrets, strict=True):
                of_group.append(chunk_key(secret, self._hashes[-1]))
        return [key for of_group in self._keys for key in of_group[first:num_chunks]]

    def _is_last_hash_valid(self, hashes: Sequence[bytes]) -> bool:
        """Hashes are chained: if the last one is what it was, so are all before it."""
        last = len(self._hashes) * self._hashes_per_chunk - 1
        return last < len(hashes) and bytes(hashes[last]) == self._hashes[-1]

    def block_names(self, first: int, end: int) -> bytes:
        """The node's names for blocks [first, end), as far as they are full of known tokens: the end of the engine's
        hashes, by which subscribers of events know blocks (`pdx.wire.kv_events`)."""
        hashes = self._request.block_hashes[first:end]
        return b"".join([bytes(one)[-KEY_BYTES:].rjust(KEY_BYTES, b"\0") for one in hashes])

    def parent(self, chunk: int) -> bytes:
        """The key of what precedes the chunk with this number."""
        return self.leading(chunk)[-1] if chunk else root_key(self._fingerprint)

    def block_fields(self, first_chunk: int, end_block: int) -> dict[str, Any]:
        """What an `Admit` says about the blocks from this chunk on, so that a chunk can be found in part."""
        blocks_per_chunk = self._groups[0].blocks_per_chunk
        first_block = first_chunk * blocks_per_chunk
        if end_block - first_block > MAX_BLOCKS or not self._groups.is_single:
            return {}
        names = self.block_names(first_block, end_block)
        return {"blocks": names, "chunk_blocks": blocks_per_chunk, "parent": self.parent(first_chunk)}

    def end(self, num_tokens: int) -> tuple[bytes, int] | None:
        """Key and number of the full blocks behind the last whole chunk, up to `num_tokens`; None: there are none."""
        end = num_tokens // self._groups[0].block_tokens
        count = end % self._groups[0].blocks_per_chunk
        return (short_key(self._fingerprint, bytes(self._request.block_hashes[end - 1])), count) if count else None

    def tail(self, hasher: BlockHasher, tokens: int, transfer: str) -> list[bytes] | None:
        """The keys of the tail of a transfer of so many tokens; None: it ends with a full chunk."""
        if tokens != self._tail_tokens:
            self._tail, self._tail_tokens = self._make_tail(hasher, tokens, transfer), tokens
        return self._tail

    def _make_tail(self, hasher: BlockHasher, tokens: int, transfer: str) -> list[bytes] | None:
        first = self._groups.whole_chunks(tokens) * self._groups.chunk_tokens
        if tokens == first:
            return None
        parent = self._request.block_hashes[first // self._groups[0].tokens_per_hash - 1] if first else None
        hashed = hasher(self._request, parent, first, tokens)
        return [tail_key(secret, hashed, transfer) for secret in self._secrets]


def with_tail(keys: Sequence[bytes], tail: Sequence[bytes]) -> list[bytes]:
    """Insert each group's tail key behind its other keys."""
    width = len(keys) // len(tail)
    return [key for at, last in enumerate(tail) for key in (*keys[at * width : (at + 1) * width], last)]


def without_tail(keys: Sequence[bytes], num_groups: int) -> list[bytes]:
    """Remove the last key of each group."""
    width = len(keys) // num_groups
    return [key for at, key in enumerate(keys, 1) if at % width]


def sizes(groups: CacheGroups, tail_tokens: int, *, has_room: bool) -> dict[str, Any]:
    """What an `Admit` says about its chunks, the last of which may be a tail; `has_room`: it asks for room."""
    if not groups.is_single:
        pairs = zip(groups, groups.places, strict=True)
        return {"groups": [_group(each, place, tail_tokens, has_room=has_room) for each, place in pairs]}
    [layout] = groups
    nbytes = layout.chunk_bytes if has_room else 0
    return {"nbytes": nbytes, "layers": layout.num_layers, "tail_nbytes": layout.nbytes_of(tail_tokens)}


def _group(layout: KvLayout, place: Place, tail_tokens: int, *, has_room: bool) -> Group:
    rule = layout.rule(tail_tokens)
    return Group(
        *(rule.reach, rule.tail_reach, rule.period),
        nbytes=layout.chunk_bytes if has_room else 0,
        layers=layout.num_layers,
        tail_nbytes=layout.nbytes_of(tail_tokens) if tail_tokens else 0,
        shard=place.stage * layout.num_shards,
    )
