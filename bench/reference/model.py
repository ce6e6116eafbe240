"""The model of the reference engine: Llama shapes with random weights over a paged KV cache, in plain PyTorch.

Correctness comes before speed: keys and values are gathered from their pages before each attention. On a GPU, no mask
of a prompt's length squared is made: a piece of a prompt is attended with a causal bias that flash kernels support.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

AXES = "LBNHC"  # layers, blocks, tokens of a block, KV heads, content: keys and then values of one head
EPSILON = 1e-5
ATTENTION_GAIN = 2.0  # wider than usual: otherwise attention of random weights is a mean, and hides what it read


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes that decide all weights' shapes; heads, KV heads and `head_dim` as in Llama's configuration."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float = 500_000.0


SHAPES = {
    "tiny": Shapes(3, 64, 4, 2, 16, 128, 512),
    "llama-3.1-8b": Shapes(32, 4096, 32, 8, 128, 14_336, 128_256),
}


class PagedKv:
    """KV of all layers in one buffer. `order` is the physical order of its axes (see AXES): any order that keeps a
    page, one block of one layer, contiguous. Block 0 belongs to no request; block tables are padded with it."""

    def __init__(
        self, shapes: Shapes, num_blocks: int, block_tokens: int, order: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        if sorted(order) != sorted(AXES) or set(order[:2]) != {"L", "B"}:
            raise ValueError(f"order {order!r}: expected L and B, and then N, H and C")
        sizes = (shapes.layers, num_blocks, block_tokens, shapes.kv_heads, 2 * shapes.head_dim)
        buffer = torch.zeros([sizes[AXES.index(axis)] for axis in order], dtype=dtype, device=device)
        self.layers = list(buffer.permute([order.index(axis) for axis in AXES]))  # each [blocks, tokens, heads, 2 dim]
        self.block_tokens = block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return int(self.layers[0][0].numel() * self.layers[0].element_size())

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, content: Tensor) -> None:
        """Write content [tokens, heads, 2 dim] at the block and offset of each token."""
        self.layers[layer][blocks, offsets] = content

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [requests, heads, tokens, dim] of the blocks in `table` [requests, blocks]: a copy."""
        content = self.layers[layer][table].flatten(1, 2).transpose(1, 2)
        keys, values = content.chunk(2, dim=-1)
        return keys, values


@dataclass(slots=True)
class Batch:
    """Tokens that go through the model together. The first `num_single` requests have one token each and are attended
    together; the others are attended one by one."""

    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    rows: Tensor  # [tokens]: the row of each token's request in `table`
    table: Tensor  # [requests, blocks]
    last: Tensor  # [requests]: index of each request's last token
    num_single: int
    spans: list[tuple[int, int, int]]  # of the others: first token, end, tokens of the context

    @classmethod
    def of(cls, work: Sequence[tuple[Sequence[int], int, Sequence[int]]], device: torch.device) -> Batch:
        """A batch of (token ids, position of the first, block ids of the whole context), single tokens first."""
        width = max(len(blocks) for _, _, blocks in work)
        table = [[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in work]
        columns: tuple[list[int], ...] = ([], [], [], [])
        (tokens, positions, rows, last), spans = columns, []
        for row, (ids, start, _) in enumerate(work):
            if len(ids) > 1:
                spans.append((len(tokens), len(tokens) + len(ids), start + len(ids)))
            tokens += ids
            positions += range(start, start + len(ids))
            rows += [row] * len(ids)
            last.append(len(tokens) - 1)
        parts = (tokens, positions, rows, table, last)
        a, b, c, d, e = (torch.tensor(part, dtype=torch.int64).to(device) for part in parts)
        return cls(a, b, c, d, e, num_single=len(work) - len(spans), spans=spans)


class Model:
    """A model with weights drawn from `seed`; processes with devices of the same type have the same weights."""

    def __init__(self, shapes: Shapes, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = shapes
        generator = torch.Generator(device).manual_seed(seed)

        def draw(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            drawn = torch.randn(rows, columns, generator=generator, dtype=dtype, device=device)
            return drawn.mul_(gain / math.sqrt(columns))

        inner, hidden, ffn = shapes.heads * shapes.head_dim, shapes.hidden, shapes.ffn
        content = 2 * shapes.kv_heads * shapes.head_dim
        self.embedding = draw(shapes.vocab, shapes.hidden, math.sqrt(shapes.hidden))
        sizes = ((inner + content, hidden, ATTENTION_GAIN), (hidden, inner), (2 * ffn, hidden), (hidden, ffn))
        self.layers = [[draw(*size) for size in sizes] for _ in range(shapes.layers)]
        self.head = draw(shapes.vocab, shapes.hidden)
        self._ones = torch.ones(shapes.hidden, dtype=dtype, device=device)
        exponents = torch.arange(0, shapes.head_dim, 2, device=device) / shapes.head_dim
        self._frequencies = shapes.rope_theta**-exponents

    def forward(
        self,
        parts: Sequence[Batch],
        kv: PagedKv,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute the parts' KV into `kv`, layer by layer; returns the logits of each request's last token.

        A part's result does not depend on the other parts. `on_layer` is called with each layer whose KV is written.
        """
        with torch.inference_mode():
            hidden = [self.embedding[part.tokens] for part in parts]
            turns = [self._turns(part.positions) for part in parts]
            for layer in range(self.shapes.layers):
                for index, part in enumerate(parts):
                    hidden[index] = self._layer(layer, hidden[index], part, turns[index], kv)
                if on_layer is not None:
                    on_layer(layer)
            ends = [self._norm(states[part.last]) for states, part in zip(hidden, parts, strict=True)]
            return torch.cat([functional.linear(end, self.head) for end in ends])

    def _layer(self, layer: int, hidden: Tensor, part: Batch, turns: tuple[Tensor, Tensor], kv: PagedKv) -> Tensor:
        shapes = self.shapes
        qkv, out, gate_up, down = self.layers[layer]
        projected = functional.linear(self._norm(hidden), qkv).unflatten(-1, (-1, shapes.head_dim))
        turned, values = projected.split([shapes.heads + shapes.kv_heads, shapes.kv_heads], dim=1)
        queries, keys = _rotate(turned, *turns).split([shapes.heads, shapes.kv_heads], dim=1)
        offsets = part.positions % kv.block_tokens
        blocks = part.table[part.rows, part.positions // kv.block_tokens]
        kv.write(layer, blocks, offsets, torch.cat((keys, values), dim=-1))
        hidden = hidden + functional.linear(self._attend(layer, queries, part, kv).flatten(1), out)
        gate, up = functional.linear(self._norm(hidden), gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, down)

    def _attend(self, layer: int, queries: Tensor, part: Batch, kv: PagedKv) -> Tensor:
        """Attention of queries [tokens, heads, dim] over the pages of their requests."""
        results = []
        if count := part.num_single:
            keys, values = kv.read(layer, part.table[:count])
            is_past = torch.arange(keys.shape[2], device=keys.device) <= part.positions[:count, None]
            grouped = queries[:count].unflatten(1, (self.shapes.kv_heads, -1))  # a KV head's queries are a sequence
            result = functional.scaled_dot_product_attention(grouped, keys, values, is_past[:, None, None])
            results.append(result.flatten(1, 2))
        for row, (first, end, length) in enumerate(part.spans, count):
            keys, values = kv.read(layer, part.table[row : row + 1, : -(-length // kv.block_tokens)])
            piece = queries[first:end].transpose(0, 1)[None]  # [1, heads, tokens, dim]
            bias = _causal(end - first, length, queries.device)
            result = functional.scaled_dot_product_attention(
                piece, keys[:, :, :length], values[:, :, :length], bias, enable_gqa=True
            )
            results.append(result[0].transpose(0, 1))
        return torch.cat(results)

    def _norm(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (self.shapes.hidden,), self._ones, EPSILON)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None] * self._frequencies
        return angles.cos(), angles.sin()


def _causal(count: int, length: int, device: torch.device) -> Tensor:
    """The attention bias for queries that are the last `count` tokens of `length`."""
    if device.type == "cpu":
        return torch.ones(count, length, dtype=torch.bool).tril(length - count)
    from torch.nn.attention.bias import causal_lower_right  # more than a second: it imports torch's compiler

    return causal_lower_right(count, length)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, dim], computed in float32."""
    left, right = heads.float().chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1).to(heads.dtype)
