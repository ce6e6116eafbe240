"""What tests of the reference engine share: shapes, settings, prompts."""

from __future__ import annotations

import random
from typing import Any

from pdx.bench.reference.model import Shapes
from pdx.config import ConnectorConfig

SHAPES = Shapes(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=331)
CHUNK = 32
LOOKUP_S = 20.0  # a node that stalls is no miss
SETTINGS: dict[str, Any] = {"seed": 7, "num_blocks": 96, "piece_tokens": CHUNK}


def connector_to(address: str) -> ConnectorConfig:
    """Settings of the connector: with chunks of CHUNK tokens, and without a next node."""
    return ConnectorConfig(node=address, start_node=False, chunk_tokens=CHUNK, lookup_s=LOOKUP_S)


def prompt_of(seed: int, count: int) -> list[int]:
    """Token ids."""
    generator = random.Random(seed)
    return [generator.randrange(SHAPES.vocab) for _ in range(count)]
