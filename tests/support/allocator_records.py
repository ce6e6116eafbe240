"""Whether what an allocator has written down agrees."""

from collections import Counter

from pdx.store.allocator import ALIGNMENT


def check(made):
    """What its records say of each other."""
    holes = list(made._hole_at.items())
    sizes = Counter(made._hole_at.values())
    assert made._sizes == sorted(sizes)
    assert made._count_of == sizes
    assert made._of_size.keys() == sizes.keys()
    for offset, nbytes in holes:
        assert offset in made._of_size[nbytes]
    assert {offset + nbytes: offset for offset, nbytes in [*holes, *made._slots.items()]} == made._ends
    assert made._free_bytes == sum(made._hole_at.values())
    end, after_hole = 0, False
    for offset, nbytes in sorted([*holes, *made._slots.items()]):
        is_hole = offset in made._hole_at
        assert offset == end, f"{offset} does not start where its neighbour ends, {end}"
        assert nbytes > 0
        assert nbytes % ALIGNMENT == 0
        assert not (is_hole and after_hole), f"the hole at {offset} was not joined with the one before it"
        end, after_hole = offset + nbytes, is_hole
    assert end == made.total_bytes
