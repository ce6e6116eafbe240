"""The layout of one engine shard's KV cache, by cache group, and its fingerprint: caches with equal fingerprints can
read each other's bytes.

Pure arithmetic: no torch tensor, no file, no clock. Words as in docs/glossary.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from pdx.errors import LayoutError
from pdx.memory.rules import Rule

PAGE_ALIGNMENT = 16


def slice_span(nbytes: int, total: int, first: int, count: int) -> tuple[int, int]:
    """Start and bytes of slices [first, first + count) in a chunk of `nbytes` with `total` slices.

    Slices of an engine's chunks are equal; chunks of the Python API need not divide evenly.
    """
    start = nbytes * first // total
    return start, nbytes * (first + count) // total - start


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cache group of one shard: `num_layers` layers of pages of `page_bytes`, each page `block_tokens` tokens.

    A page of a state is the layer's state after all tokens up to the end of its block. Everything that decides what the
    bytes of a page mean is a field, and so in the fingerprint: two engines with equal fingerprints can read each
    other's chunks, byte for byte.
    """

    model: str  # identity of the weights, not only their name
    dtype: str  # of the cache: how it is stored and what it means
    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_heads: Annotated[int, Meta(ge=1)]  # KV heads of this shard
    head_dim: Annotated[int, Meta(ge=1)]
    block_tokens: Annotated[int, Meta(ge=1)]
    page_bytes: Annotated[int, Meta(ge=1)]
    chunk_tokens: Annotated[int, Meta(ge=1)]
    order: str  # physical order inside a page, in the engine's terms ("LBHNC")
    backend: str  # attention backend
    isa: str  # CPU instruction set that packs pages; empty on GPUs
    num_shards: Annotated[int, Meta(ge=1, le=1024)]
    hashing: str  # how the engine hashes its blocks
    release: str = ""  # of the engine; another release may pack pages differently
    # What a token attends to in these layers: all tokens before it, the last `window` of them (including itself), those
    # since the last multiple of `window`; or the layers keep a state.
    kind: Literal["full", "window", "local", "state"] = "full"
    window: Annotated[int, Meta(ge=0)] = 0
    layers: tuple[int, ...] = ()  # their numbers in the model; empty: all layers
    drafter: str = ""  # identity of the draft model that has these layers; empty: the model itself
    hash_tokens: Annotated[int, Meta(ge=0)] = 0  # tokens per hash of the engine; 0: `block_tokens`

    def __post_init__(self) -> None:
        if self.chunk_tokens % self.block_tokens:
            raise LayoutError(
                f"chunk_tokens {self.chunk_tokens} is not a multiple of the engine's block size "
                f"{self.block_tokens}; set chunk_tokens to a multiple of it"
            )
        if self.page_bytes % PAGE_ALIGNMENT:
            raise LayoutError(f"pages of {self.page_bytes} bytes are not divisible by {PAGE_ALIGNMENT}")

        if self.chunk_tokens % self.tokens_per_hash:
            raise LayoutError(f"chunk_tokens {self.chunk_tokens} is not a multiple of {self.hash_tokens} hashed tokens")

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks in a full chunk: for a window only those at its end that can be needed, for a state its one page."""
        first, end = self.blocks_of(0, self.chunk_tokens)
        return end - first

    def blocks_of(self, chunk: int, num_tokens: int) -> tuple[int, int]:
        """The blocks [first, end) of chunk number `chunk` in a prompt of `num_tokens` tokens. A window includes one
        token more than its attention, for engines that compute a prompt's last token again."""
        tokens = min((chunk + 1) * self.chunk_tokens, num_tokens)
        first, end = chunk * self.chunk_tokens // self.block_tokens, self.num_blocks(tokens)
        if self.kind == "state":
            first = end - 1
        elif self.kind == "window":
            first = max(first, (tokens - self.window) // self.block_tokens)
        return first, end

    def secret(self, fingerprint: bytes) -> bytes:
        """The secret for the keys of this group's chunks; `fingerprint` is that of all the engine's groups."""
        return hashlib.blake2b(self.fingerprint(), key=fingerprint, digest_size=16, person=b"pdx-group-1").digest()

    def rule(self, tail_tokens: int = 0) -> Rule:
        """The rule that says which chunks a prompt needs whose tail has so many tokens."""
        if self.kind == "full":
            return Rule()
        if self.kind == "state":
            return Rule(reach=1, tail_reach=0)
        if self.kind == "local" and self.window % self.chunk_tokens == 0:
            return Rule(period=self.window // self.chunk_tokens)
        before_tail = max(0, self.window - tail_tokens)
        return Rule(reach=-(-self.window // self.chunk_tokens), tail_reach=-(-before_tail // self.chunk_tokens))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk of one shard, all layers."""
        return self.nbytes_of(self.chunk_tokens)

    def nbytes_of(self, tokens: int) -> int:
        """Bytes of a chunk of so many tokens of one shard, all layers."""
        first, end = self.blocks_of(0, tokens)
        return self.num_blocks_bytes(end - first)

    def num_blocks_bytes(self, num_blocks: int) -> int:
        """Bytes of a chunk of `num_blocks` blocks of one shard, all layers."""
        return self.num_layers * num_blocks * self.page_bytes

    def blocks_in(self, nbytes: int) -> int:
        """Blocks of a chunk of one shard that has so many bytes."""
        return nbytes // (self.num_layers * self.page_bytes)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy, the last one perhaps partly."""
        return -(-num_tokens // self.block_tokens)

    def described(self) -> dict[str, str]:
        """The fields as text, to explain how two engines differ."""
        told = {name: str(value)[:256] for name, value in msgspec.to_builtins(self).items()}
        return told | ({"layers": _runs(self.layers)[:256]} if self.layers else {})

    @property
    def tokens_per_hash(self) -> int:
        return self.hash_tokens or self.block_tokens

    def fingerprint(self) -> bytes:
        """16 bytes that are equal if and only if all fields are; the MAC key of all chunk keys."""
        return hashlib.blake2b(
            msgspec.json.encode(self, order="sorted"), digest_size=16, person=b"pdx-layout-1"
        ).digest()


class Place(NamedTuple):
    """Where an engine has the layers of a cache group."""

    number: int  # the group's number, in both halves of the connector
    table: int  # index of these layers' block table among a request's tables
    stage: int = 0  # of the engine's pipeline


@dataclass(frozen=True)
class CacheGroups(Sequence[KvLayout]):
    """All cache groups of one engine shard, in the engine's order. Most models have one. If the layers are cut into
    stages, each part of a group is a group of its own (ADR 70)."""

    layouts: tuple[KvLayout, ...]
    places: tuple[Place, ...]
    num_tables: int  # block tables of a request, including those of draft models
    stages: str = ""  # how the model's layers are cut, as the setting says it; empty: not cut
    is_part: bool = False  # these are the groups of one of several pipeline stages

    @classmethod
    def of(
        cls,
        layout: KvLayout | Sequence[KvLayout],
        places: Sequence[Place] = (),
        *,
        num_tables: int = 0,
        stages: str = "",
        is_part: bool = False,
    ) -> CacheGroups:
        """`places`: by default each group has its own block table; `num_tables`: by default there are no others. A
        LayoutError if the groups are not of one model and cut into chunks alike."""
        if isinstance(layout, CacheGroups):
            return layout
        layouts = (layout,) if isinstance(layout, KvLayout) else tuple(layout)
        common = {(each.model, each.chunk_tokens, each.num_shards, each.tokens_per_hash) for each in layouts}
        if len(common) != 1:
            raise LayoutError(f"cache groups of several (model, chunk tokens, shards, hashed tokens): {sorted(common)}")
        places = tuple(places) or tuple(Place(at, at) for at in range(len(layouts)))
        num_tables = num_tables or 1 + max(place.table for place in places)
        return cls(layouts, places, num_tables, stages, is_part)

    def with_fields(self, **fields: Any) -> CacheGroups:
        """These groups with other fields in each layout."""
        return replace(self, layouts=tuple(msgspec.structs.replace(each, **fields) for each in self.layouts))

    def beside(self, drafts: CacheGroups | None) -> CacheGroups:
        """These groups, followed by those of a draft model."""
        if drafts is None:
            return self
        return replace(self, layouts=self.layouts + drafts.layouts, places=self.places + drafts.places)

    def __getitem__(self, index: int) -> KvLayout:  # type: ignore[override]
        return self.layouts[index]

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def chunk_tokens(self) -> int:
        return self.layouts[0].chunk_tokens

    @property
    def num_shards(self) -> int:
        return self.layouts[0].num_shards

    @cached_property
    def is_single(self) -> bool:
        """Whether there is one group, of full attention: then any number of leading chunks can be restored, and parts
        of chunks. Not with a draft model's group, because its blocks have the same names as the model's own."""
        first, is_alone = self.layouts[0], len(self.layouts) == 1 and not self.is_part
        return is_alone and first.kind == "full" and not first.hash_tokens and not first.drafter

    @cached_property
    def by_number(self) -> dict[int, int]:
        """A group's number (`Place.number`) -> its index here."""
        return {place.number: at for at, place in enumerate(self.places)}

    @cached_property
    def renumbered(self) -> dict[int, int] | None:
        """`by_number`; None if all the engine's groups are here and each number equals its index."""
        return self.by_number if self.is_part or any(at != number for number, at in self.by_number.items()) else None

    @cached_property
    def has_state(self) -> bool:
        return any(each.kind == "state" for each in self.layouts)

    def whole_chunks(self, num_tokens: int) -> int:
        """The number of whole chunks in a prompt of so many tokens; the rest is its tail. An engine computes a prompt's
        last token again: a state after that token is useless, and local attention before it may look back to other
        tokens. So for such models a chunk that ends with a prompt's last token is its tail."""
        return (num_tokens - any(each.kind in ("state", "local") for each in self.layouts)) // self.chunk_tokens

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk of one shard, all groups together."""
        return sum(each.chunk_bytes for each in self.layouts)

    def fingerprint(self) -> bytes:
        """16 bytes that are equal if and only if those of all groups are; with one group, its own."""
        found = [each.fingerprint() for each in self.layouts]
        if len(found) == 1:
            return found[0]
        return hashlib.blake2b(b"".join(found), digest_size=16, person=b"pdx-groups-1").digest()

    def described(self) -> dict[str, str]:
        """The fields of the only layout as text; with several, the common fields and the number of groups."""
        told = [each.described() for each in self.layouts]
        common = {name: text for name, text in told[0].items() if all(each.get(name) == text for each in told)}
        stages = {"stages": self.stages[:256]} if self.stages else {}
        return common | stages | ({"cache_groups": str(len(told))} if len(told) > 1 else {})

    def described_groups(self) -> list[dict[str, str]]:
        """With several groups, the fields of each that are not in `described`."""
        common = self.described() if len(self.layouts) > 1 else {}
        told = [each.described() for each in self.layouts] if common else []
        return [{name: text for name, text in each.items() if name not in common} for each in told]


def group_title(fields: Mapping[str, str]) -> str:
    """A short description of a cache group, from its fields as text."""
    layers = f"layers {fields['layers']}" if "layers" in fields else f"{fields.get('num_layers', 'all')} layers"
    tokens = f"; {fields['window']} tokens" if "window" in fields else ""
    return f"the {fields.get('kind', 'full')} group ({layers}{tokens})"


def _runs(numbers: Sequence[int]) -> str:
    """The numbers as text, with consecutive ones as ranges."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ",".join(f"{start}-{end}" if end > start else f"{start}" for start, end in zip(starts, ends, strict=True))
