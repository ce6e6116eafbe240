"""A tier notes which keys came and went, for whoever tells of it."""

import pytest
from disk_bed import Bed, key
from events_bed import Below, EventsBed

from pdx.store.copies import Copies
from pdx.store.copy import Priority
from pdx.store.tier import Grant


@pytest.fixture
def bed(tmp_path):
    bed = Bed(tmp_path)
    bed.tier.changed = {}
    yield bed
    bed.close()


def test_what_makes_room_for_another_is_noted(bed):
    number = 0
    while not any(not bed.tier.holds(each) for each in bed.tier.changed):
        number += 1
        bed.store(number)
    assert not bed.tier.holds(key(1))


def test_files_from_before_are_noted_as_they_are_counted(bed):
    bed.store(1)
    bed.close_tier()
    bed.open(wait=False)
    bed.tier.changed = {}
    while not bed.is_counted:
        bed.turn()
    assert set(bed.tier.changed) == {key(1)}


def test_a_look_is_no_use(bed):
    bed.store(1)
    bed.store(2)
    bed.tier.holds(key(1))
    assert bed.tier.find([key(1)], 1)
    assert next(iter(bed.tier._index.last_used())).key == key(2)
    bed.tier.use([key(1)])
    assert next(iter(bed.tier._index.last_used())).key == key(1)


class Storing(Below):
    """A fake whose jobs end when the test says so."""

    is_whole = True

    def __init__(self):
        super().__init__()
        self.jobs = []

    def admit(self, copy):
        return Grant(range(len(copy.keys)))

    def store(self, job):
        self.jobs.append(job)

    def over(self, copy):
        pass


def test_a_copy_says_of_how_many_shards_a_key_is(tmp_path):
    bed, tier = EventsBed(tmp_path), Storing()
    try:
        copies = Copies(bed.store, bed.env, group_bytes=1)
        bed.put(key(1), shards=2)
        tier.changed = {}
        copies.store(tier, [key(1)], 2, arenas=(), priority=Priority.STORE, deadline=1e9)
        copies.pump()
        assert tier.changed == {}
        for job in tier.jobs:
            copies.done(tier, job, None)
        assert tier.changed == {key(1): 2}
    finally:
        bed.close()
