"""What a node says of misses that a tier below has to do with: it never got the chunk, lost it, or is too slow."""

import pytest
from explanations_bed import keep, told, why, worker
from explanations_bed import service as service
from explanations_bed import session as session
from service_stage import CHUNKS, Below, keys

from pdx.errors import TierError
from pdx.memory.arena import GRANULE_BYTES
from pdx.store.history import Cause
from pdx.wire.messages import Admit, Pin, Ping


@pytest.fixture
def below(service):
    tier = Below(service.copies)
    service.tiers.below.append([tier])
    return tier


def evict(service, session, clock):
    """Everything that is here."""
    keep(service, session, range(1000, 1000 + CHUNKS), "greedy")
    clock.now += 3.0


GONE = "evicted for request greedy, 3.0 s ago"


def go(service, session, below, clock):
    """It was here, and is no more."""
    keep(service, session, [1], "a")
    evict(service, session, clock)


def be_stored(service, session, below, clock, *, requests=1):
    """The tier got it, has lost it, and it is no more here."""
    for number in range(requests):
        keep(service, session, [1], f"a {number}")
    service.turn()
    below.end()
    below.keys.clear()
    evict(service, session, clock)


def be_found_twice(*stage):
    be_stored(*stage, requests=2)


def be_too_many(service, session, below, clock):
    """The tier takes nothing while it is here."""
    below.takes_stores = False
    keep(service, session, [1], "a")
    service.turn()
    evict(service, session, clock)


def be_left_out(service, session, below, clock):
    be_too_many(service, session, below, clock)
    below.takes_stores = True
    service.turn()


def be_hidden(*stage):
    be_stored(*stage)
    be_nowhere_known(*stage)


def be_nowhere_known(service, session, below, clock):
    below.says = "does not answer: unreachable"


def be_removed(service, session, below, clock):
    below.history.note(keys([1]), Cause.REMOVED, clock.now)
    clock.now += 2.0


def be_slow(service, session, below, clock):
    below.late_at = clock.now
    below.keys.update(keys([1]))


def be_slow_and_shared(service, session, below, clock):
    below.late_at = clock.now
    below.is_shared = True  # what it has is not known here


def be_without_room(service, session, below, clock):
    keep(service, session, range(1000, 1000 + CHUNKS), "all")
    service.handle(session, Pin(keys(range(1000, 1000 + CHUNKS))))
    below.keys.update(keys([1]))


def be_broken(service, session, below, clock):
    below.keys.update(keys([1]))
    assert service.handle(session, Admit(keys([1]), lease_s=1.0, wait_s=5.0)) is None
    service.turn()
    below.keys.clear()
    below.end(TierError("its digest is another", "corrupt"))
    clock.now += 1.0


TWICE_SEEN = "not stored below, because no second request had found it (--store twice-seen)"
OVERRUN = "below: not stored: it did not keep up, and the chunk was evicted before its turn, 0.0 s ago"
NOT_ASKED = "never in memory here; below was not asked, because it was too slow a moment ago"


@pytest.mark.parametrize(
    ("service", "happens", "kind", "text"),
    [
        ({"store": "twice-seen"}, go, "policy", f"{GONE}; {TWICE_SEEN}"),
        ({"store": "twice-seen"}, be_found_twice, "evicted", GONE),
        (
            {"store": "write-back"},
            go,
            "policy",
            f"{GONE}; not stored below, because its turn had not come (--store write-back)",
        ),
        ({}, be_too_many, "policy", f"{GONE}; below was to get it, and takes nothing now"),
        ({}, be_left_out, "policy", f"{GONE}; {OVERRUN}"),
        ({}, be_hidden, "tier", f"{GONE}; below does not answer: unreachable"),
        ({}, be_nowhere_known, "tier", "never in memory here; below does not answer: unreachable"),
        ({}, be_removed, "evicted", "never in memory here; below: removed to make room, 2.0 s ago"),
        ({}, be_slow, "tier", "on below, which was too slow a moment ago"),
        ({}, be_slow_and_shared, "tier", NOT_ASKED),
        ({"pin_share": 1.0}, be_without_room, "tier", "on below, but the arena had no room for it"),
        ({}, be_broken, "failed", "not loaded from below: its digest is another, 1.0 s ago"),
    ],
    indirect=["service"],
)
def test_what_a_tier_has_to_do_with_it_is_told(service, session, below, clock, happens, kind, text):
    happens(service, session, below, clock)
    keep(service, session, [1], "b")
    reason = why(service, session, "b").reasons[0]
    assert (reason.is_hit, reason.kind, reason.text) == (False, kind, text)


def test_what_is_computed_sooner_than_a_tier_loads_it_says_so_with_both_rates(service, session, below):
    below.load_rate.moved(GRANULE_BYTES, 0, GRANULE_BYTES)
    below.keys.update(keys([1, 2]))
    service.handle(worker(service, session), Ping(chunk_s=1e-9))
    keep(service, session, [1, 2], "a")
    text = "on below, but computing it is faster: it loads 1 GB/s, and a chunk is computed in 1e-09 s"
    probe = (1, 1, False, "being filled by below at that time")
    assert told(service, session, "a") == [(0, 1, False, text), probe], "a look how fast it is, which nobody waits for"
    assert service.counters["loads_not_worth"] == 2
