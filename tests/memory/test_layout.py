"""The layout: its arithmetic, and a fingerprint in which every field counts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import LayoutError
from pdx.memory.layout import KvLayout

LAYOUT = KvLayout(
    model="llama@1",
    dtype="bfloat16",
    num_layers=32,
    num_heads=8,
    head_dim=128,
    block_tokens=16,
    page_bytes=65_536,
    chunk_tokens=256,
    order="LBHNC",
    backend="FLASH_ATTN",
    isa="",
    num_shards=1,
    hashing="sha256 seed=0",
)
FIELDS = [field.name for field in msgspec.structs.fields(KvLayout)]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_in_the_fingerprint(field):
    value = getattr(LAYOUT, field)
    other = value + "x" if isinstance(value, str) else value * 2
    assert msgspec.structs.replace(LAYOUT, **{field: other}).fingerprint() != LAYOUT.fingerprint()


def test_equal_layouts_have_equal_fingerprints():
    copy = msgspec.json.decode(msgspec.json.encode(LAYOUT), type=KvLayout)
    assert copy.fingerprint() == LAYOUT.fingerprint()
    assert len(LAYOUT.fingerprint()) == 16


@given(st.text(), st.text())
def test_text_does_not_run_from_one_field_into_the_next(model, dtype):
    one = msgspec.structs.replace(LAYOUT, model=model, dtype=dtype).fingerprint()
    moved = msgspec.structs.replace(LAYOUT, model=model + dtype[:1], dtype=dtype[1:]).fingerprint()
    assert (one == moved) == (dtype == "")


def test_sizes_of_llama_8b():
    assert LAYOUT.blocks_per_chunk == 16
    assert LAYOUT.chunk_bytes == 32 << 20
    assert LAYOUT.num_blocks_bytes(1) == 32 * 65_536
    assert [LAYOUT.num_blocks(tokens) for tokens in (0, 1, 16, 17, 256)] == [0, 1, 1, 2, 16]


def test_a_chunk_that_is_no_whole_number_of_blocks_names_the_setting():
    with pytest.raises(LayoutError, match="chunk_tokens 250 is not a multiple .* 16; set chunk_tokens"):
        msgspec.structs.replace(LAYOUT, chunk_tokens=250)


def test_pages_that_cannot_be_copied_in_16_byte_elements_are_refused():
    with pytest.raises(LayoutError, match="40 bytes are not divisible by 16"):
        msgspec.structs.replace(LAYOUT, page_bytes=40)
