"""Keys that are turned while they are copied, against the same keys computed at their new positions."""

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pdx.errors import LayoutError
from pdx.kernels.turned import PageElements, Turn, scatter_turned, spans
from pdx.memory.rope import Rope, rope_of

BLOCK, HEADS, DIM = 32, 2, 8
UNTOUCHED = 7.0
some = settings(max_examples=examples(150), deadline=None)


def by_token(block=BLOCK):
    """Tokens one behind the other, key and value of a head side by side (HNC)."""
    tokens, elements = np.arange(block) * 2 * DIM, np.arange(DIM)
    return PageElements(HEADS, block * 2 * DIM, tokens, elements, tokens, elements + DIM)


def packed(group=16, block=BLOCK):
    """As vLLM packs pages for vector units: of `group` tokens element 0, of the same element 1, …; then the values."""
    tokens = np.arange(block)
    keys = tokens // group * group * DIM + tokens % group
    room = -(-block // group) * group  # the last group may not be full
    values = room * DIM + tokens * DIM
    return PageElements(HEADS, (room + block) * DIM, keys, np.arange(DIM) * group, values, np.arange(DIM))


def in_twos(block=BLOCK):
    """As for AMX: of 16 tokens elements 0 and 1, and so on."""
    tokens, elements = np.arange(block), np.arange(DIM)
    keys = tokens // 16 * 16 * DIM + tokens % 16 * 2
    return PageElements(
        HEADS, 2 * block * DIM, keys, elements // 2 * 32 + elements % 2, block * DIM + tokens * DIM, elements
    )


PAGES = {
    "by token": by_token(),
    "packed": packed(),
    "packed by 32": packed(32),
    "packed by 12": packed(12),  # the last tile was shorter, and keys of the others were not written
    "in twos": in_twos(),
}
ROPES = {
    "halves": Rope((1.0, 0.3, 0.01, 0.002)),
    "interleaved": Rope((1.0, 0.3, 0.01, 0.002), interleaved=True),
    "in part": Rope((1.0, 0.1)),
}


def put(pages, elements, token, page, keys, values):
    for head in range(elements.num_heads):
        at = head * elements.head
        pages[page, at + elements.key_tokens[token] + elements.key_elements] = keys[head]
        pages[page, at + elements.value_tokens[token] + elements.value_elements] = values[head]


def turned(keys, rope, position):
    """Keys [..., DIM] without position, at that one."""
    out = np.array(keys, dtype=np.float64)
    for (first, second), frequency in zip(rope.pairs(), rope.frequencies, strict=True):
        cosine, sine = np.cos(position * frequency), np.sin(position * frequency)
        out[..., first] = keys[..., first] * cosine - keys[..., second] * sine
        out[..., second] = keys[..., second] * cosine + keys[..., first] * sine
    return out


def aligned(pages, offset):
    """The same, `offset` bytes behind the beginning of a line of memory: whole tiles are streamed to lines alone."""
    room = np.zeros(pages.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    found = room[start : start + pages.nbytes].view(pages.dtype).reshape(pages.shape)
    found[:] = pages
    return found


@pytest.mark.parametrize("elements", PAGES.values(), ids=PAGES)
@some
@given(data=st.data())
def test_a_moved_key_is_the_one_computed_there_and_nothing_else_is_touched(elements, data):
    rope, offset = data.draw(st.sampled_from(list(ROPES.values()))), data.draw(st.sampled_from([0, 4]))
    source_pages, target_pages = 3, 5
    first = data.draw(st.integers(0, source_pages * BLOCK - 1))
    count = data.draw(st.integers(1, source_pages * BLOCK - first))
    target = data.draw(st.integers(0, target_pages * BLOCK - count))
    blocks = data.draw(st.permutations(range(target_pages)))
    was, now = data.draw(st.integers(0, 100_000)), data.draw(st.integers(0, 100_000))
    random = np.random.default_rng(first * 1000 + count)
    keys, values = random.normal(size=(2, source_pages * BLOCK, HEADS, DIM))
    size = elements.num_heads * elements.head
    source = np.zeros((source_pages, size), np.float32)
    expected = np.full((target_pages, size), UNTOUCHED, np.float32)
    for token in range(source_pages * BLOCK):
        put(source, elements, token % BLOCK, token // BLOCK, turned(keys[token], rope, was + token), values[token])
    for token in range(count):
        there, each = target + token, first + token
        told = turned(keys[each], rope, now + each)
        put(expected, elements, there % BLOCK, blocks[there // BLOCK], told, values[each])
    layers = [aligned(np.full_like(expected, UNTOUCHED), offset) for _ in range(2)]
    lines = spans(elements, first, target, count, blocks)
    scatter_turned(
        np.stack([np.zeros_like(source), source]), layers, lines, Turn.of(elements, rope, now - was, is_half=False)
    )
    np.testing.assert_allclose(layers[1], expected, atol=2e-4)
    assert ((layers[1] == UNTOUCHED) == (expected == UNTOUCHED)).all()
    np.testing.assert_array_equal(layers[0], np.where(expected == UNTOUCHED, UNTOUCHED, 0))


@pytest.mark.parametrize(
    "elements",
    [PAGES["by token"], *(pytest.param(PAGES[name], marks=pytest.mark.long) for name in PAGES if name != "by token")],
    ids=PAGES,
)
def test_halves_are_rounded_to_the_nearest_as_torch_does(elements):
    pages = torch.randn(2, elements.num_heads * elements.head).bfloat16()
    pages[0, :4] = torch.tensor([float("inf"), float("nan"), 3.4e38, -0.0]).bfloat16()
    as_bits = pages.view(torch.uint16).numpy()
    found, floats = aligned(np.zeros_like(as_bits), 0), np.zeros(as_bits.shape, np.float32)
    lines = spans(elements, 3, 0, 60, [1, 0])
    turn, half = (Turn.of(elements, ROPES["halves"], -1234, is_half=h) for h in (False, True))
    scatter_turned(as_bits[None], [found], lines, half)
    scatter_turned(pages.float().numpy()[None], [floats], lines, turn)
    expected = torch.from_numpy(floats).bfloat16()
    assert torch.equal(torch.from_numpy(found).view(torch.bfloat16).nan_to_num(5.0), expected.nan_to_num(5.0))


def test_what_lies_outside_is_refused_before_anything_is_copied():
    elements = by_token()
    pages, found = np.ones((2, elements.num_heads * elements.head), np.float32), np.zeros((2, 512), np.float32)
    turn = Turn.of(elements, ROPES["halves"], 1, is_half=False)
    found = np.zeros_like(pages)
    for line in ([2, 0, 0, 0, 1], [0, 0, 2, 0, 1], [0, 30, 0, 0, 3], [0, 0, 0, 31, 2], [-1, 0, 0, 0, 1]):
        with pytest.raises(IndexError):
            scatter_turned(pages[None], [found], np.array([line]), turn)
    with pytest.raises(ValueError, match="expected 1 layers"):
        scatter_turned(pages[None], [found, found], np.array([[0, 0, 0, 0, 1]]), turn)
    with pytest.raises(ValueError, match="uint16"):
        scatter_turned(pages.view(np.uint16)[None], [found.view(np.uint16)], np.array([[0, 0, 0, 0, 1]]), turn)
    with pytest.raises(ValueError, match="float64"):
        scatter_turned(pages.astype(np.float64)[None], [found], np.array([[0, 0, 0, 0, 1]]), turn)
    assert not found.any()


LLAMA = {"model_type": "llama", "rope_theta": 100_000.0}
SCALED = {
    "default": {},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("scaling", SCALED.values(), ids=SCALED)
def test_it_is_what_transformers_computes(scaling):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=512, **(LLAMA | scaling)
    )
    embedding = llama.LlamaRotaryEmbedding(config)
    keys = torch.randn(1, 1, 1, 16)
    at = {}
    for position in (3, 460):
        cosine, sine = embedding(keys, torch.tensor([[position]]))
        at[position] = llama.apply_rotary_pos_emb(keys, keys, cosine, sine)[1].numpy().reshape(1, -1)
    rope = rope_of(config.to_dict() | {"model_type": "llama"}, 16)
    elements = PageElements(1, 32, np.zeros(1, np.int64), np.arange(16), np.zeros(1, np.int64), np.arange(16) + 16)
    source, found = np.zeros((1, 32), np.float32), np.zeros((1, 32), np.float32)
    source[0, :16] = at[3]
    scatter_turned(source[None], [found], spans(elements, 0, 0, 1, [0]), Turn.of(elements, rope, 457, is_half=False))
    np.testing.assert_allclose(found[:, :16], at[460], atol=1e-4)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"model_type": "bloom"}, "bloom"),
        ({"model_type": "smollm3"}, "smollm3"),  # not in all layers
        (LLAMA | {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        (LLAMA | {"dual_chunk_attention_config": {"chunk_size": 8192}}, "dual_chunk"),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "rope_dim": 4}}, "rope_dim"),
        (LLAMA | {"rope_theta": None}, "rope_theta None"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (LLAMA | {"partial_rotary_factor": 0.03}, "0 of 16"),
    ],
)
def test_what_cannot_be_turned_is_refused_by_name(config, named):
    with pytest.raises(LayoutError, match=named):
        rope_of(config, 16)
