"""Blended KV against the KV of a full forward pass of the same small model."""

import pytest
import torch

from pdx.blend.layers import blended
from pdx.errors import LayoutError

transformers = pytest.importorskip("transformers")
TOKENS, DOCUMENT, LAYERS = 48, 16, 6


@pytest.fixture(scope="module", params=["LlamaConfig", "Qwen3Config"])
def model(request):
    config = getattr(transformers, request.param)(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(100, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def computed(model, tokens, first=0):
    """KV of these tokens alone, at positions from `first` on."""
    positions = torch.arange(first, first + len(tokens))[None]
    with torch.inference_mode():
        cache = model.model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=True).past_key_values
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])


@pytest.fixture(scope="module")
def exact(model, tokens):
    return computed(model, tokens)


@pytest.fixture(scope="module")
def apart(model, tokens):
    firsts = range(0, TOKENS, DOCUMENT)
    return torch.cat([computed(model, tokens[first : first + DOCUMENT], first) for first in firsts], dim=3)


def distance(one, other):
    return float((one - other).pow(2).mean())


def test_all_of_it_is_a_full_forward_pass(model, tokens, exact, apart):
    given = apart.clone()
    torch.testing.assert_close(blended(model, tokens, apart, 1.0), exact, atol=1e-4, rtol=1e-4)
    assert torch.equal(given, apart)
    assert distance(apart, exact) > 0.01


def test_a_share_stays_between_and_what_was_not_chosen_is_as_given(model, tokens, exact, apart):
    made = blended(model, tokens, apart, 0.25)
    assert distance(made, exact) < distance(apart, exact)
    changed = (made != apart).flatten(1, 2).any(dim=-1).any(dim=1).sum(dim=-1).tolist()
    assert changed[1] == TOKENS - DOCUMENT  # all, but the first document's are as they were
    assert changed[2:] == sorted(changed[2:], reverse=True)
    assert sum(changed[2:]) / (LAYERS - 2) == pytest.approx(TOKENS * 0.25, abs=2)


def test_the_first_layers_are_exact_whatever_is_chosen(model, tokens, exact, apart):
    made = blended(model, tokens, apart, 0.01)
    torch.testing.assert_close(made[:2], exact[:2], atol=1e-4, rtol=1e-4)


def test_what_is_known_is_not_chosen(model, tokens, apart):
    chosen = []

    def select(deviations, count):
        chosen.append(deviations.clone())
        return deviations.topk(count).indices

    made = blended(model, tokens, apart, 0.5, known=DOCUMENT, select=select)
    assert torch.equal(made[2:, :, :, :DOCUMENT], apart[2:, :, :, :DOCUMENT])
    assert (chosen[0][:DOCUMENT] == -1).all()
    assert (chosen[0][DOCUMENT:] > 0).all()


def test_a_tokens_deviation_counts_by_the_attention_that_it_gets(model, tokens, exact, apart):
    chosen = []

    def select(deviations, count):
        chosen.append(deviations.clone())
        return deviations.topk(count).indices

    blended(model, tokens, apart, 0.5, select=select)
    model.set_attn_implementation("eager")
    try:
        attention = model.model(input_ids=torch.tensor([tokens]), output_attentions=True).attentions[1]
    finally:
        model.set_attn_implementation("sdpa")
    received = attention[0].sum(dim=(0, 1)) / torch.arange(TOKENS, 0, -1)
    distances = (exact - apart)[1, 0].pow(2).sum(dim=(0, 2))
    torch.testing.assert_close(chosen[0], distances * received, atol=1e-4, rtol=1e-3)


def test_fresh_tokens_are_computed_in_each_layer(model, tokens, exact, apart):
    fresh = torch.zeros(TOKENS, dtype=torch.bool)
    fresh[20:24] = fresh[40:] = True
    without = apart.clone()
    without[:, :, :, fresh] = 0
    made = blended(model, tokens, without, 0.0, fresh=fresh)
    assert (made[:, :, :, fresh] != 0).all()
    # the first document is exact, so a fresh token right behind it is, too
    fresh = torch.zeros(TOKENS, dtype=torch.bool)
    fresh[DOCUMENT] = True
    made = blended(model, tokens, apart, 0.0, fresh=fresh)
    torch.testing.assert_close(made[:, :, :, DOCUMENT], exact[:, :, :, DOCUMENT], atol=1e-4, rtol=1e-4)


def test_windows_are_refused():
    settings = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for config in (
        transformers.MistralConfig(sliding_window=8, num_key_value_heads=1, intermediate_size=8, **settings),
        transformers.Qwen2Config(
            use_sliding_window=True, sliding_window=8, max_window_layers=0, num_key_value_heads=1, **settings
        ),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(LayoutError, match="windows"):
            blended(model, [1, 2], torch.zeros(1, 2, 1, 2, 8), 0.5)


def test_experts_are_layers_like_others(tokens):
    config = transformers.Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    exact = computed(model, tokens)
    torch.testing.assert_close(blended(model, tokens, torch.zeros_like(exact), 1.0), exact, atol=1e-3, rtol=1e-3)


def test_other_layers_are_refused():
    config = transformers.GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1)
    with pytest.raises(LayoutError, match="gpt2"):
        blended(transformers.AutoModelForCausalLM.from_config(config), [1, 2], torch.zeros(1, 2, 1, 2, 8), 0.5)
    config = transformers.Phi3Config(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        pad_token_id=1,
    )
    with pytest.raises(LayoutError, match="q_proj"):
        blended(transformers.AutoModelForCausalLM.from_config(config), [1, 2], torch.zeros(1, 2, 1, 2, 8), 0.5)
