"""Whether an allocator knows each of its slots and holes, and nothing else."""

from pdx.store.allocator import ALIGNMENT


def check(made):
    """They lie one behind the other from the end to the beginning, and holes that touch are one."""
    end, free_bytes, ends, holes = made.total_bytes, 0, set(), set()
    while end:
        start = made.before(end)
        assert start is not None, f"nothing ends at {end}"
        assert 0 <= start < end
        assert start % ALIGNMENT == 0
        ends.add(end)
        if made.hole_bytes(start):
            assert made.hole_bytes(start) == end - start
            assert made.hole_bytes(end) == 0, f"the hole at {end} was not joined with the one before it"
            holes.add(start)
            free_bytes += end - start
        end = start
    assert made.free_bytes == free_bytes
    for offset in range(0, made.total_bytes + ALIGNMENT, ALIGNMENT):
        assert offset in ends or made.before(offset) is None, f"nothing ends at {offset} any more"
        assert offset in holes or not made.hole_bytes(offset), f"no hole is at {offset} any more"
