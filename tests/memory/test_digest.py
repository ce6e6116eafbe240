"""Digests of slices: equal bytes, equal digests; one changed bit, another digest; the same on every machine."""

import xxhash
from hypothesis import given
from hypothesis import strategies as st
from plain_memory import PlainMemory

from pdx.memory.digest import digests
from pdx.wire.base import DIGEST_BYTES


def test_one_digest_after_the_other():
    memory = PlainMemory(b"abcdefgh")
    spans = [(0, 3), (3, 5), (2, 0)]
    found = digests(memory, spans)
    assert len(found) == len(spans) * DIGEST_BYTES
    assert found == b"".join(digests(memory, [span]) for span in spans)
    assert digests(memory, []) == b""


def test_the_value_is_fixed():
    """Nodes of different machines and versions compare them."""
    assert digests(PlainMemory(b""), [(0, 0)]).hex() == "2d06800538d394c2"
    assert digests(PlainMemory(b"pdx"), [(0, 3)]) == xxhash.xxh3_64_intdigest(b"pdx").to_bytes(8, "big")


@given(data=st.binary(min_size=1, max_size=300), place=st.integers(0, 1 << 16), bit=st.integers(0, 7))
def test_one_changed_bit_is_another_digest(data, place, bit):
    other = bytearray(data)
    other[place % len(data)] ^= 1 << bit
    span = [(0, len(data))]
    assert digests(PlainMemory(data), span) != digests(PlainMemory(other), span)
    assert digests(PlainMemory(data), span) == digests(PlainMemory(bytes(data)), span)
