"""The digest of weight files: what it sees of them, and how much of them it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdx.engine.weights import PIECE_BYTES, WHOLE_BYTES, pieces, weight_files, weights_digest

MIB = 1 << 20
Weights = dict[str, torch.Tensor]


def of_model() -> Weights:
    """Large tensors with small ones between them, as in a model's file; 40 MB."""
    return {
        "embed": torch.zeros(3 * MIB),
        "layers.0.attn.k_scale": torch.ones(1),
        "layers.0.mlp": torch.zeros(5 * MIB),
        "layers.0.norm": torch.ones(4096),
        "layers.1.mlp": torch.zeros(MIB),
        "norm": torch.ones((WHOLE_BYTES - 4) // 4),
    }


def as_safetensors(tensors: Weights, folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors")


def as_torch(tensors: Weights, folder: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


@pytest.fixture
def digest_of(tmp_path: Path) -> Callable[..., bytes]:
    def digest(save: Callable[[Weights, Path], None], tensors: Weights, name: str = "a") -> bytes:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        save(tensors, folder)
        return weights_digest(weight_files(folder))

    return digest


@pytest.mark.parametrize("save", [as_safetensors, as_torch])
def test_the_digest_is_that_of_every_tensor_wherever_it_lies(digest_of: Callable[..., bytes], save: object) -> None:
    """Of a small one each value counts: two calibrations of one checkpoint differ in the scales of the cache and in
    nothing else. A large one changes everywhere when it is trained."""
    digests = {digest_of(save, of_model(), "a")}
    assert digests == {digest_of(save, of_model(), "b")}
    small = [(name, at) for name in ("layers.0.attn.k_scale", "layers.0.norm", "norm") for at in (0, -1)]
    large = [(name, slice(None)) for name in ("embed", "layers.0.mlp", "layers.1.mlp")]
    for name, which in small + large:
        edited = of_model()
        edited[name][which] += 0.5
        digests.add(digest_of(save, edited, "b"))
    assert len(digests) == 1 + len(small) - 1 + len(large), "of one value the first is the last"


def damaged(head: bytes) -> bytes:
    return len(head).to_bytes(8, "little") + head + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1",
        (1 << 62).to_bytes(8, "little") + bytes(64),
        damaged(b"[]"),
        damaged(b"{"),
        damaged(json.dumps({"a": {"data_offsets": [8, 0]}}).encode()),
        damaged(json.dumps({"a": {"data_offsets": [0, 1 << 60]}}).encode()),
        damaged(json.dumps({"a": {"data_offsets": "ab"}}).encode()),
    ],
)
def test_a_file_without_a_sound_table_is_sampled_all_the_same(tmp_path: Path, content: bytes) -> None:
    """The engine itself says what is wrong with it."""
    for suffix in (".safetensors", ".bin", ".pt", ".gguf"):
        (tmp_path / f"model{suffix}").write_bytes(content)
    assert len(weight_files(tmp_path)) == 4
    before = weights_digest(weight_files(tmp_path))
    (tmp_path / "model.gguf").write_bytes(content + b"!")
    assert weights_digest(weight_files(tmp_path)) != before


def test_what_is_read_of_large_tensors_is_bounded() -> None:
    """0.4 % of them, and two pieces of each: a checkpoint of 140 GB in 700 tensors costs 0.6 GB of reading."""
    size = 200 * MIB
    spans = [(index * size, size) for index in range(700)]
    read = sum(nbytes for _, nbytes in pieces(spans))
    assert read <= 700 * (size // 256 + 2 * PIECE_BYTES)
    assert all(offset // size == (offset + nbytes - 1) // size for offset, nbytes in pieces(spans))
