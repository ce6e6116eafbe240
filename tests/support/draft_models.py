"""A tiny model with random weights, and a head of EAGLE's that proposes what it generates, as long as its own KV is
right.

    target(folder), eagle(folder)               # folders in this one; the same bytes each time

The model has one layer, embeddings of length 1 and norms that do nothing. So the head, which is given the last token's
embedding beside the model's hidden state, is that same layer over the embeddings alone: it sees all that the model sees
but the first token.
"""

from __future__ import annotations

import json
from pathlib import Path

from families import FAMILIES, Family, Group

_ONE_LAYER = Family("Llama", (Group("FullAttentionSpec", 1, 32),), {"num_hidden_layers": 1, "rms_norm_eps": 1e-12})
_WEIGHTS = "model.safetensors"
assert _ONE_LAYER.groups[0].spec == FAMILIES["llama"].groups[0].spec


def target(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    model = _ONE_LAYER.write(folder / "target")
    weights = load_file(model / _WEIGHTS)
    embeddings = weights["model.embed_tokens.weight"]
    embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
    save_file(weights, model / _WEIGHTS, metadata={"format": "pt"})
    return model


def eagle(folder: Path) -> Path:
    """That of `target`, which must be there."""
    import torch
    from safetensors.torch import load_file, save_file

    model, head = folder / "target", folder / "eagle"
    weights = load_file(model / _WEIGHTS)
    head.mkdir()
    (head / "config.json").write_text((model / "config.json").read_text())
    layer = {name.removeprefix("model."): tensor for name, tensor in weights.items() if ".layers.0." in name}
    del layer["layers.0.input_layernorm.weight"]
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    save_file(
        {**layer, "fc.weight": torch.cat((torch.eye(width), torch.zeros(width, width)), 1)},
        head / _WEIGHTS,
        metadata={"format": "pt"},
    )
    return head
