"""What the node calls an engine's blocks: so that others who read vLLM's events know them."""

from types import SimpleNamespace

from pdx.engine.request import TrackedRequest


def test_a_blocks_name_is_the_end_of_its_hash():
    tracked = TrackedRequest.__new__(TrackedRequest)
    tracked.request = SimpleNamespace(block_hashes=[bytes(range(32)), b"short"])
    names = tracked.block_names(0, 2)
    assert (names[:16], names[16:]) == (bytes(range(16, 32)), b"\0" * 11 + b"short")
    assert int.from_bytes(names[8:16], "big") == int.from_bytes(bytes(range(32)), "big") & (1 << 64) - 1
