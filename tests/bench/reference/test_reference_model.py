"""The reference engine's model is Llama: the logits of transformers' implementation with the same weights."""

from __future__ import annotations

import pytest
import torch
from reference_prompts import SHAPES, prompt_of

from pdx.bench.reference.model import AXES, Batch, Model, PagedKv

BLOCK = 16


@pytest.mark.long  # for transformers are imported
def test_the_logits_are_those_of_another_implementation() -> None:
    """Of a prompt in two pieces and then single tokens, in float32."""
    transformers = pytest.importorskip("transformers")
    device, prompt = torch.device("cpu"), prompt_of(1, 70)
    model = Model(SHAPES, 7, torch.float32, device)
    kv = PagedKv(SHAPES, 8, BLOCK, AXES, torch.float32, device)
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=SHAPES.vocab,
            hidden_size=SHAPES.hidden,
            intermediate_size=SHAPES.ffn,
            num_hidden_layers=SHAPES.layers,
            num_attention_heads=SHAPES.heads,
            num_key_value_heads=SHAPES.kv_heads,
            head_dim=SHAPES.head_dim,
            rms_norm_eps=1e-5,
            rope_theta=SHAPES.rope_theta,  # of transformers 4
            rope_parameters={"rope_type": "default", "rope_theta": SHAPES.rope_theta},
            tie_word_embeddings=False,
        )
    )
    other.load_state_dict(named_as_llama(model))
    with torch.inference_mode():
        expected = other(torch.tensor([prompt])).logits[0]
    ends = [40, 66, 67, 68, 69, 70]
    for start, end in zip([0, *ends], ends, strict=False):
        part = Batch.of([(prompt[start:end], start, range(1, 2 + (end - 1) // BLOCK))], device)
        torch.testing.assert_close(model.forward([part], kv)[0], expected[end - 1], rtol=1e-4, atol=1e-4)


def named_as_llama(model: Model) -> dict[str, torch.Tensor]:
    """The weights under the names that transformers gives them."""
    heads, kv = SHAPES.heads * SHAPES.head_dim, SHAPES.kv_heads * SHAPES.head_dim
    ones = torch.ones(SHAPES.hidden)
    found = {"model.embed_tokens.weight": model.embedding, "lm_head.weight": model.head, "model.norm.weight": ones}
    for layer, (qkv, out, gate_up, down) in enumerate(model.layers):
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), qkv.split([heads, kv, kv]), strict=True)) | {"o_proj": out}
        mlp = dict(zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True)) | {"down_proj": down}
        found |= {f"model.layers.{layer}.self_attn.{name}.weight": part for name, part in parts.items()}
        found |= {f"model.layers.{layer}.mlp.{name}.weight": part for name, part in mlp.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = ones
    return found
