"""The tiny model with eyes: an Idefics 3, whose text model is a Llama, and whose answers depend on each picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny import make_tiny

SIDE, PATCH, SHUFFLE = 56, 14, 2  # pixels; a picture has (SIDE / PATCH / SHUFFLE)² tokens
WORDS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def make_tiny_vision(folder: Path) -> Path:
    """The tiny Llama behind a tower of two layers and a projector."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    make_tiny(folder, seed=0)
    text = json.loads((folder / "config.json").read_text())
    numbers = _add_words(folder)
    eyes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        text_config=text,
        vision_config={**eyes, "image_size": SIDE, "patch_size": PATCH},
        scale_factor=SHUFFLE,
        image_token_id=numbers["<image>"],
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(3)
    model = Idefics3ForConditionalGeneration(config).float()
    seen = model.model.connector.modality_projection.proj
    torch.nn.init.normal_(seen.weight, std=3 / seen.weight.shape[1] ** 0.5)
    known = load_file(folder / "model.safetensors")
    own = {name.replace("model.", "model.text_model.", 1) if name != "lm_head.weight" else name: each
           for name, each in known.items()}  # fmt: skip
    missing = model.load_state_dict(own, strict=False)
    assert not missing.unexpected_keys
    (folder / "model.safetensors").unlink()
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, folder / "model.safetensors")
    config.architectures = ["Idefics3ForConditionalGeneration"]
    config.save_pretrained(folder)
    pixels = {
        "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False, "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE},
    }  # fmt: skip
    words = {"processor_class": "Idefics3Processor", "image_seq_len": (SIDE // PATCH // SHUFFLE) ** 2}
    for name, content in (("processor_config", words), ("preprocessor_config", pixels)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def _add_words(folder: Path) -> dict[str, int]:
    """Tokens for a picture and what stands around it."""
    path = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    known = tokenizer["added_tokens"]
    first = 1 + max(each["id"] for each in known)
    numbers = {word: first + at for at, word in enumerate(WORDS)}
    known += [{**known[-1], "id": number, "content": word} for word, number in numbers.items()]
    path.write_text(json.dumps(tokenizer))
    return numbers
