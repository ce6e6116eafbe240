"""Chunk keys: whatever differs in meaning has another key."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from pdx.memory.keys import KEY_BYTES, chunk_key, named_key, tail_key

fingerprints = st.binary(min_size=16, max_size=16)
hashes = st.binary(max_size=64)
names = st.text(st.characters(codec="utf-8"), max_size=64)


@given(fingerprints, hashes, fingerprints, hashes)
def test_any_part_changed_is_another_key(one, block, other, other_block):
    assert (chunk_key(one, block) == chunk_key(other, other_block)) == ((one, block) == (other, other_block))


@given(fingerprints, hashes, names, hashes, names)
def test_a_tail_is_for_one_transfer(fingerprint, block, transfer, other_block, other_transfer):
    same = (block, transfer) == (other_block, other_transfer)
    assert (tail_key(fingerprint, block, transfer) == tail_key(fingerprint, other_block, other_transfer)) == same


@given(fingerprints, st.binary(min_size=1, max_size=40), st.integers(0, 40))
def test_moving_a_byte_from_one_part_to_the_next_is_another_key(fingerprint, text, cut):
    """Without length prefixes both sides would hash the same bytes."""
    text = bytes(byte & 0x7F for byte in text)
    cut = min(cut, len(text) - 1)
    moved = tail_key(fingerprint, text[: cut + 1], text[cut + 1 :].decode())
    assert tail_key(fingerprint, text[:cut], text[cut:].decode()) != moved


@given(fingerprints, hashes)
def test_the_three_kinds_of_keys_never_meet(fingerprint, block):
    kinds = {chunk_key(fingerprint, block), tail_key(fingerprint, block, ""), named_key(block.hex())}
    assert len(kinds) == 3


def test_keys_are_128_bits_of_a_cryptographic_hash():
    """CVE-2026-10813 was a 16-bit hash; the exact value pins the format that other hosts compute, too."""
    assert KEY_BYTES * 8 >= 128
    mac = hashlib.blake2b(digest_size=16, key=b"f" * 16, person=b"pdx-chunk-1")
    mac.update((4).to_bytes(8, "little") + b"hash")
    assert chunk_key(b"f" * 16, b"hash") == mac.digest()
