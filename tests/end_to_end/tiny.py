"""The model of these tests: small enough to start in seconds."""

from __future__ import annotations

from pathlib import Path

from pdx.bench.harness.tiny_llama import make_model


def make_tiny(folder: Path, seed: int) -> Path:
    """Four layers of four heads of 64."""
    make_model(folder, layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, seed=seed)
    return folder
