"""A blender at a real node: documents whose chunks lie there become chunks of a prompt made of them."""

import random

import numpy as np
import pytest
import torch

from pdx.blend.blender import Blender
from pdx.blend.pages import pack, unpacked
from pdx.client.connection import attached
from pdx.engine.turning import Turning
from pdx.errors import ArenaTooSmall, LayoutError, SelectionError
from pdx.kernels.turned import PageElements
from pdx.memory.form import blended_form
from pdx.memory.rope import rope_of
from pdx.wire.hints import Hints
from pdx.wire.messages import Admit, Admitted, Done, Fill
from pdx.wire.status import Explained
from pdx.wire.tokens import chunk_keys, form_keys
from pdx.wire.verbs import Model, Why

transformers = pytest.importorskip("transformers")
CHUNK, BLOCK, HEADS, DIM, LAYERS = 32, 16, 2, 8, 4
SHAPE = {
    "block_tokens": str(BLOCK), "chunk_tokens": str(CHUNK), "num_shards": "1", "hashing": "sha256_cbor",
    "root": "00" * 32, "salt_tag": "cache_salt", "vocabulary": "100",
}  # fmt: skip


@pytest.fixture(scope="module")
def causal():
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def packed():
    """As vLLM packs pages on CPUs: of 16 tokens each element of a key, and then the values."""
    tokens = np.arange(BLOCK)
    values = BLOCK * DIM + tokens * DIM
    return PageElements(HEADS, 2 * BLOCK * DIM, tokens, np.arange(DIM) * BLOCK, values, np.arange(DIM))


class Bed:
    """A node's client that plays the engine, and the blender beside it."""

    def __init__(self, connection, causal, dtype=torch.float32):
        self.connection, self.causal, self.dtype = connection, causal, dtype
        self.model = Model("engine", "", b"l" * 16, SHAPE)
        rope = rope_of(causal.config.to_dict(), DIM)
        self.blender = Blender(connection, self.model, causal, Turning(rope, packed(), dtype))

    def kv(self, tokens):
        with torch.inference_mode():
            cache = self.causal.model(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
        return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])

    def admit(self, keys, **fields):
        return self.connection.call_for(Admit(keys, **fields), 5.0, Admitted)

    def pages(self, slot):
        view = torch.frombuffer(self.connection.arena.view(slot), dtype=self.dtype)
        return view.view(LAYERS, CHUNK // BLOCK, -1)

    def save(self, document, salt="", priority=0):
        """What an engine leaves of a prompt: its whole chunks."""
        keys, kv = chunk_keys(self.model, document, salt), self.kv(document)
        nbytes = 2 * LAYERS * HEADS * CHUNK * DIM * self.dtype.itemsize
        answer = self.admit(keys, nbytes=nbytes, layers=LAYERS, layout=b"l" * 16, hints=Hints("", priority))
        for number, slot in zip(answer.granted, answer.granted_slots, strict=True):
            pack(kv[:, :, :, number * CHUNK : (number + 1) * CHUNK], self.pages(slot), packed())
        self.connection.call_for(Fill(answer.granted_slots, layers=LAYERS, seal=True), 5.0, Done)

    def found(self, keys):
        """KV of the leading chunks with these keys."""
        answer = self.admit(keys, lease_s=5.0)
        return [unpacked(self.pages(slot), packed()) for slot in answer.slots]


@pytest.fixture
def bed(start_here, causal):
    with attached(start_here(arena_bytes=2 << 20).address, 30.0) as connection:
        yield Bed(connection, causal)


def document(seed, length):
    return torch.randint(100, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_hold_what_was_packed(dtype):
    kv = torch.randn(LAYERS, 2, HEADS, CHUNK, DIM).to(dtype).float()
    pages = torch.full((LAYERS, CHUNK // BLOCK, 2 * HEADS * BLOCK * DIM), torch.nan, dtype=dtype)
    pack(kv, pages, packed())
    assert torch.equal(unpacked(pages, packed()), kv)


def test_documents_in_any_order_become_chunks_of_the_prompt_they_make(bed):
    one, two, three = document(1, 64), document(2, 50), document(3, 40)
    for each in (one, two, three):
        bed.save(each)
    for order, found in (([one, two, three], 64 + 32 + 14), ([three, one, two], 32 + 64 + 24)):
        tokens = sum(order, [])
        made = bed.blender.blend(order, 1.0)
        assert (made.tokens, made.found, made.is_new) == (128, found, True)
        keys = form_keys(bed.model, tokens, "", blended_form(1.0, [len(each) for each in order]))
        exact = bed.kv(tokens)
        chunks = bed.found(keys)
        assert len(chunks) == 4
        for number, chunk in enumerate(chunks):
            torch.testing.assert_close(chunk, exact[:, :, :, number * 32 : number * 32 + 32], atol=1e-3, rtol=1e-3)
        assert not bed.blender.blend(order, 1.0).is_new


def test_no_exact_request_nor_one_of_other_documents_meets_it(bed):
    order = [document(1, 64), document(2, 64)]
    bed.save(order[0])
    bed.blender.blend(order, 0.5)
    tokens = sum(order, [])
    assert len(bed.found(chunk_keys(bed.model, tokens))) == 2  # the first document's own
    for form in (blended_form(0.25, [64, 64]), blended_form(0.5, [32, 96]), "moved"):
        assert not bed.found(form_keys(bed.model, tokens, "", form))
    assert not bed.found(form_keys(bed.model, tokens, "another", blended_form(0.5, [64, 64])))


def test_documents_of_another_tenant_are_computed(bed):
    order = [document(1, 64), document(2, 64)]
    for each in order:
        bed.save(each, "tenant")
    for salt, found, said in (("", 0, "100%"), ("tenant", 128, "15%")):
        made = bed.blender.blend(order, salt=salt)
        assert made.found == found
        bed.admit(form_keys(bed.model, sum(order, []), salt, made.reuse), request="a")
        (told,) = bed.connection.call_for(Why("a"), 5.0, Explained).requests
        assert told.reasons[0].text.startswith(f"blended, {said} recomputed: from client")


def test_room_is_given_back_where_computing_fails(bed, monkeypatch):
    order = [document(1, 64), document(2, 64)]
    with monkeypatch.context() as patched:
        patched.setattr("pdx.blend.blender.blended", None)
        with pytest.raises(TypeError):
            bed.blender.blend(order)
    assert bed.blender.blend(order).is_new


def test_what_cannot_be_is_refused(bed):
    with pytest.raises(SelectionError, match="fill no chunk"):
        bed.blender.blend([[1, 2, 3]])
    with pytest.raises(ArenaTooSmall):
        bed.blender.blend([document(1, 5000)], 0.1)
    model = Model("engine", "", b"l" * 16, {**SHAPE, "num_shards": "2"})
    with pytest.raises(LayoutError, match="2 shards"):
        Blender(bed.connection, model, bed.causal, bed.blender.turning)


def test_documents_stay_while_prompts_of_them_come_and_go(bed, monkeypatch):
    """Prompts that never came before, of 50 documents that take two fifths of the arena."""
    monkeypatch.setattr("pdx.blend.blender.blended", lambda _causal, _tokens, kv, *_, **__: kv)
    documents = [document(seed, CHUNK) for seed in range(50)]
    for each in documents:
        bed.save(each, priority=1)
    draw = random.Random(0)
    found = [bed.blender.blend(draw.sample(documents, 4), 0.0).found for _ in range(100)]
    assert sum(found[-50:]) == 50 * 4 * CHUNK
