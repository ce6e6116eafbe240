"""The shape of one engine shard's KV cache, and the fingerprint that tells whether two caches mean the same bytes.

Pure arithmetic: no torch tensor, no file, no clock. Words as in docs/glossary.md.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.errors import LayoutError

PAGE_ALIGNMENT = 16


def slice_span(nbytes: int, total: int, first: int, count: int) -> tuple[int, int]:
    """Where slices [first, first + count) of a chunk of `nbytes` in `total` slices lie: (start, bytes).

    Slices of an engine's chunks are equal; a user's chunk of the Python API need not divide evenly.
    """
    start = nbytes * first // total
    return start, nbytes * (first + count) // total - start


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One shard's KV: `num_layers` layers of pages of `page_bytes`, each page `block_tokens` tokens.

    Everything that decides what the bytes of a page mean is a field, so it is in the fingerprint: two engines
    with equal fingerprints can read each other's chunks, byte for byte.
    """

    model: str  # identity of the weights, not their name alone
    dtype: str  # of the cache: how it is stored and what it means
    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_heads: Annotated[int, Meta(ge=1)]  # KV heads of this shard
    head_dim: Annotated[int, Meta(ge=1)]
    block_tokens: Annotated[int, Meta(ge=1)]
    page_bytes: Annotated[int, Meta(ge=1)]
    chunk_tokens: Annotated[int, Meta(ge=1)]
    order: str  # physical order inside a page, as the engine calls it ("LBHNC")
    backend: str  # attention backend
    isa: str  # CPU instruction set that packs pages; empty on GPUs
    num_shards: Annotated[int, Meta(ge=1, le=1024)]
    hashing: str  # how the engine hashes its blocks
    release: str = ""  # of the engine, which may pack pages otherwise in the next one

    def __post_init__(self) -> None:
        if self.chunk_tokens % self.block_tokens:
            raise LayoutError(
                f"chunk_tokens {self.chunk_tokens} is not a multiple of the engine's block size "
                f"{self.block_tokens}; set chunk_tokens to a multiple of it"
            )
        if self.page_bytes % PAGE_ALIGNMENT:
            raise LayoutError(f"pages of {self.page_bytes} bytes are not divisible by {PAGE_ALIGNMENT}")

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks in a full chunk."""
        return self.chunk_tokens // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk of one shard, all layers."""
        return self.num_blocks_bytes(self.blocks_per_chunk)

    def num_blocks_bytes(self, num_blocks: int) -> int:
        """Bytes of a chunk of `num_blocks` blocks of one shard, all layers."""
        return self.num_layers * num_blocks * self.page_bytes

    def blocks_in(self, nbytes: int) -> int:
        """Blocks of a chunk of one shard that has so many bytes."""
        return nbytes // (self.num_layers * self.page_bytes)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy, the last one perhaps in part."""
        return -(-num_tokens // self.block_tokens)

    def described(self) -> dict[str, str]:
        """Its fields as text, for who tells two engines what keeps them apart."""
        return {name: str(getattr(self, name))[:256] for name in self.__struct_fields__}

    def fingerprint(self) -> bytes:
        """16 bytes that are equal exactly where every field is; the key of every chunk key."""
        return hashlib.blake2b(
            msgspec.json.encode(self, order="sorted"), digest_size=16, person=b"pdx-layout-1"
        ).digest()
