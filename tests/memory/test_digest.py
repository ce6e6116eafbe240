"""Digests of slices: equal bytes, equal digests; one changed bit, another digest; the same on every machine."""

import xxhash
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
