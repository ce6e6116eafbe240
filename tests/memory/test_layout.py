"""The layout: its arithmetic, and a fingerprint in which every field counts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import LayoutError
from pdx.memory.layout import CacheGroups, KvLayout

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


OTHERS = {"window": 512, "layers": (1, 2), "hash_tokens": 8}  # of what is empty there


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_in_the_fingerprint(field):
    value = getattr(LAYOUT, field)
    other = OTHERS.get(field) or (value + "x" if isinstance(value, str) else value * 2)
    assert msgspec.structs.replace(LAYOUT, **{field: other}).fingerprint() != LAYOUT.fingerprint()


@given(st.text(), st.text())
def test_text_does_not_run_from_one_field_into_the_next(model, dtype):
    one = msgspec.structs.replace(LAYOUT, model=model, dtype=dtype).fingerprint()
    moved = msgspec.structs.replace(LAYOUT, model=model + dtype[:1], dtype=dtype[1:]).fingerprint()
    assert (one == moved) == (dtype == "")


@given(st.integers(1, 700), st.sampled_from([16, 32, 64]), st.integers(1, 1500))
def test_the_chunks_of_a_window_have_all_that_is_looked_back_to_and_a_block_more_at_most(window, block, tokens):
    """By tokens: a prompt of so many, of which an engine computes the last one again."""
    layout = msgspec.structs.replace(LAYOUT, kind="window", window=window, block_tokens=block)
    whole, tail = divmod(tokens, layout.chunk_tokens)
    end = whole + (tail > 0)
    first = layout.rule(tail).first(end, has_tail=tail > 0)
    spans = [layout.blocks_of(chunk, tokens) for chunk in range(first, end)]
    covered = {at for start, stop in spans for at in range(start, stop)}
    assert covered >= {at // block for at in range(max(0, tokens - window), tokens)}
    sizes = [layout.chunk_bytes] * whole + [layout.nbytes_of(tail)] * (tail > 0)
    assert [layout.blocks_in(size) for size in sizes[first:]] == [stop - start for start, stop in spans]
    assert all(stop - start <= window // block + 2 for start, stop in spans)


def test_a_state_has_one_page_of_each_chunk_that_of_its_last_token():
    layout = msgspec.structs.replace(LAYOUT, kind="state", block_tokens=64)
    assert (layout.blocks_of(0, 256), layout.blocks_of(2, 700), layout.blocks_of(2, 768)) == (
        (3, 4),
        (10, 11),
        (11, 12),
    )
    assert layout.chunk_bytes == layout.nbytes_of(7) == layout.num_blocks_bytes(1)


def test_a_chunk_of_which_a_state_has_the_last_token_is_a_tail():
    groups = CacheGroups.of([LAYOUT, msgspec.structs.replace(LAYOUT, kind="state")])
    assert [groups.whole_chunks(tokens) for tokens in (256, 257, 512, 513)] == [0, 1, 1, 2]
    assert [CacheGroups.of(LAYOUT).whole_chunks(tokens) for tokens in (255, 256)] == [0, 1]


def test_groups_have_keys_of_their_own_and_one_group_has_those_it_had():
    full, window = LAYOUT, msgspec.structs.replace(LAYOUT, kind="window", window=512)
    both = CacheGroups.of([full, window])
    assert CacheGroups.of(full).fingerprint() == full.fingerprint() != both.fingerprint()
    assert full.secret(both.fingerprint()) != window.secret(both.fingerprint())
    with pytest.raises(LayoutError, match="cache groups of several"):
        CacheGroups.of([full, msgspec.structs.replace(window, chunk_tokens=512)])


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
