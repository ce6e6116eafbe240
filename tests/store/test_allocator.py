"""The allocator against a model that keeps one entry per 4 KB granule."""

import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdx.store.allocator import ALIGNMENT, Allocator

GRANULES = 64


def one(allocator, nbytes):
    """The offset of one more slot, None where no hole is large enough."""
    return next(iter(allocator.allocate_many(nbytes, 1)), None)


class Model:
    """A granule map: which slot each granule belongs to, None where free. Slow and obvious."""

    def __init__(self) -> None:
        self.owners = [None] * GRANULES

    def holes(self):
        """(granules, first granule) of every maximal free run."""
        found, start = [], None
        for index, owner in enumerate([*self.owners, "end"]):
            if owner is None and start is None:
                start = index
            elif owner is not None and start is not None:
                found.append((index - start, start))
                start = None
        return found

    def allocate(self, size):
        """Best fit, lowest offset among equals."""
        fitting = [hole for hole in self.holes() if hole[0] >= size]
        if not fitting:
            return None
        _, start = min(fitting)
        self.owners[start : start + size] = [start] * size
        return start

    def allocate_many(self, size, count):
        together = [hole for hole in self.holes() if hole[0] >= size * count]
        if together and count:
            _, start = min(together)
            starts = list(range(start, start + size * count, size))
            for slot in starts:
                self.owners[slot : slot + size] = [slot] * size
            return starts
        found = []
        while len(found) < count and (start := self.allocate(size)) is not None:
            found.append(start)
        return found

    def free(self, start):
        self.owners = [None if owner == start else owner for owner in self.owners]


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(GRANULES * ALIGNMENT)
        self.model = Model()

    def slots(self):
        return sorted({owner for owner in self.model.owners if owner is not None})

    @rule(nbytes=st.integers(1, 20 * ALIGNMENT))
    def allocate(self, nbytes):
        expected = self.model.allocate(-(-nbytes // ALIGNMENT))
        offset = one(self.allocator, nbytes)
        assert offset == (None if expected is None else expected * ALIGNMENT)

    @rule(nbytes=st.integers(1, 6 * ALIGNMENT), count=st.integers(0, 12))
    def allocate_many(self, nbytes, count):
        expected = self.model.allocate_many(-(-nbytes // ALIGNMENT), count)
        assert self.allocator.allocate_many(nbytes, count) == [start * ALIGNMENT for start in expected]

    @precondition(slots)
    @rule(data=st.data())
    def free(self, data):
        start = data.draw(st.sampled_from(self.slots()))
        self.model.free(start)
        self.allocator.free_many([start * ALIGNMENT])

    @precondition(slots)
    @rule(data=st.data())
    def free_many(self, data):
        starts = data.draw(st.lists(st.sampled_from(self.slots()), unique=True))
        for start in starts:
            self.model.free(start)
        self.allocator.free_many([start * ALIGNMENT for start in starts])

    @precondition(slots)
    @rule(data=st.data(), twice=st.booleans())
    def free_many_what_is_not_all_slots(self, data, twice):
        start = data.draw(st.sampled_from(self.slots())) * ALIGNMENT
        with pytest.raises(ValueError, match="named twice" if twice else "no slot at offset"):
            self.allocator.free_many([start, start if twice else start + 1])

    @invariant()
    def agrees_with_the_model(self):
        slots = [(self.model.owners.count(start), start) for start in self.slots()]
        holes = {start: size for size, start in self.model.holes()}
        free = sum(holes.values())
        said = (
            f"{(GRANULES - free) * ALIGNMENT} of {GRANULES * ALIGNMENT} bytes, {len(slots)} slots, {len(holes)} holes"
        )
        assert repr(self.allocator) == f"<Allocator {said}>"
        assert self.allocator.free_bytes == free * ALIGNMENT
        ends = {start + size: start for size, start in [*slots, *self.model.holes()]}
        for at in range(GRANULES + 1):
            assert self.allocator.hole_bytes(at * ALIGNMENT) == holes.get(at, 0) * ALIGNMENT
            before = ends.get(at)
            assert self.allocator.before(at * ALIGNMENT) == (None if before is None else before * ALIGNMENT)

    def teardown(self):
        for start in self.slots():
            self.allocator.free_many([start * ALIGNMENT])
        assert self.allocator.hole_bytes(0) == self.allocator.free_bytes == self.allocator.total_bytes


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=examples(60), stateful_step_count=40)


@pytest.mark.parametrize("total", [0, -ALIGNMENT, ALIGNMENT + 1])
def test_a_total_that_is_not_granules_is_refused(total):
    with pytest.raises(ValueError, match=str(total)):
        Allocator(total)


@pytest.mark.parametrize(("nbytes", "count"), [(0, 1), (-1, 1), (1, -1)])
def test_nothing_or_less_cannot_be_allocated(nbytes, count):
    with pytest.raises(ValueError, match="cannot allocate"):
        Allocator(ALIGNMENT).allocate_many(nbytes, count)


def test_holes_that_come_and_go_hide_none():
    allocator = Allocator(GRANULES * ALIGNMENT)
    slots = allocator.allocate_many(ALIGNMENT, GRANULES)
    allocator.free_many(slots[::2])
    for _ in range(100):
        allocator.free_many(slots[61:62])  # joins two holes …
        assert allocator.allocate_many(ALIGNMENT, 3) == slots[60:63]
        allocator.free_many([slots[60], slots[62]])  # … that are there again
    assert allocator.allocate_many(ALIGNMENT, GRANULES) == slots[::2]
