"""What requests and applications say of the future of chunks: the service on a clock of the test, with a fake tier."""

import contextlib
from functools import partial

import pytest
from hints_bed import A, B, Bed, outcomes, told
from service_stage import CHUNKS, keys

from pdx.errors import ProtocolError
from pdx.memory.arena import GRANULE_BYTES
from pdx.store.history import Cause
from pdx.store.tier import Grant
from pdx.wire.base import MAX_SLOTS
from pdx.wire.hints import OWN, Hints
from pdx.wire.messages import Admit, Expect, Fill, Release
from pdx.wire.verbs import Advise


@pytest.fixture
def beds(place):
    with contextlib.ExitStack() as stack:
        yield partial(Bed, stack, place)


@pytest.fixture
def bed(beds):
    return beds()


OF_FIELDS = [
    ({"policy": "age:30"}, {"reuse_s": 60.0}, {"reuse_s": "refused"}, "goes by age alone (--policy)"),
    ({"policy": "age:30"}, {"priority": 3}, {"priority": "accepted"}, ""),
    ({}, {"lease_s": 3600.0}, {"lease_s": "clipped"}, "600 longer is above --lease-max-s"),
    ({"tenant_lease_share": 0.0}, {"lease_s": 60.0}, {"lease_s": "refused"}, "--tenant-lease-share"),
    ({"has_tier": False}, {"demote": [""]}, {"demote": "refused"}, "--disk"),
    ({}, {"lease_s": 10.0, "demote": [""]}, {"lease_s": "accepted", "demote": "refused"}, "keeps the same chunks"),
    ({}, {"codec": "fp8"}, {"codec": "refused"}, "pdx cache compress"),
    ({}, {"codec": "none"}, {"codec": "accepted"}, ""),
    ({}, {"salt": A}, {}, ""),
    ({}, {}, {}, ""),
]


@pytest.mark.parametrize(("config", "hints", "expected", "says"), OF_FIELDS)
def test_each_field_of_a_request_has_its_answer(beds, config, hints, expected, says):
    bed = beds(**config)
    verdicts = bed.request(range(4), Hints("", **hints))
    assert outcomes(verdicts) == expected
    assert says in " ".join(f"{value} {text}" for _, value, text in verdicts.values())
    bed.settle()
    assert bed.there(range(4)) == [0, 1, 2, 3]


# ---- priority and expected reuse ------------------------------------------------------------------


def test_what_is_expected_sooner_stays_longer_and_what_is_expected_at_all_longer_still(bed):
    bed.request(range(8), Hints("", reuse_s=3600.0))
    bed.request(range(10, 18), Hints("", reuse_s=60.0))
    bed.request(range(20, 28))
    room = CHUNKS - 24
    bed.flood(count=room)
    assert bed.there(range(28)) == [*range(8), *range(10, 18), *range(20, 28)]
    kept = []
    for number in range(3):
        bed.ask(Admit(keys(range(5000, 5000 + room)), lease_s=60.0))  # only the three are left to go
        bed.request(range(9000 + 8 * number, 9008 + 8 * number), lease_s=60.0, is_done=False)
        kept.append(bed.there([7, 17, 27]))
    assert kept == [[7, 17], [17], []]


def test_what_was_expected_before_now_has_lost_its_place(bed):
    bed.request(range(8), Hints("", reuse_s=60.0))
    bed.wait(59)
    bed.flood()
    assert bed.there(range(8)) == list(range(8))
    bed.wait(2)
    bed.flood(first=7000, count=2 * CHUNKS)
    assert bed.there(range(8)) == []


def test_of_several_expectations_the_soonest_that_is_to_come_counts(bed):
    bed.request(range(4), Hints("", reuse_s=10.0))
    bed.request(range(4), Hints("", reuse_s=3600.0))
    [chunk] = bed.service.store.index.of(keys([0])[0])
    assert chunk.keep.expected_at == bed.now + 10
    bed.wait(11)
    bed.request(range(4), Hints("", reuse_s=3600.0))
    assert chunk.keep.expected_at == bed.now + 3600


# ---- time to live --------------------------------------------------------------------------------


def test_what_has_a_time_to_live_is_forgotten_after_it_everywhere(bed):
    assert outcomes(bed.request(range(8), Hints("", ttl_s=60.0))) == {"ttl_s": "accepted"}
    bed.settle()
    assert bed.below.keys == set(keys(range(8)))
    bed.flood()  # memory has them no more
    bed.wait(59)
    assert bed.below.keys >= set(keys(range(8)))
    bed.wait(2)
    assert not bed.below.keys & set(keys(range(8)))
    assert bed.there(range(8)) == []
    assert len(bed.service.hinting.ends) == 0


def test_what_requests_share_lives_as_long_as_the_longest(bed):
    bed.request(range(8), Hints("", ttl_s=60.0))
    bed.request(range(4), Hints("", ttl_s=600.0))
    bed.request(range(4), Hints("", ttl_s=5.0))
    bed.request(range(2))
    bed.wait(61)
    assert bed.there(range(8)) == [0, 1, 2, 3]
    bed.wait(600)
    assert bed.there(range(8)) == [0, 1]


def test_what_others_use_without_an_end_gets_none(bed):
    bed.request(range(4))
    outcome, _, text = bed.request(range(8), Hints("", ttl_s=60.0))["ttl_s"]
    assert (outcome, "4 of 8 chunks stay" in text) == ("clipped", True)
    assert outcomes(bed.request(range(4), Hints("", ttl_s=60.0))) == {"ttl_s": "refused"}
    bed.wait(61)
    assert bed.there(range(8)) == [0, 1, 2, 3]


def test_what_a_tier_below_has_of_others_gets_no_end(bed):
    bed.below.keys = set(keys(range(4)))
    scheduler, worker = bed.attach("e", kind="scheduler"), bed.attach("e0", kind="worker")
    writes = Admit(keys(range(8)), GRANULE_BYTES, 1, hints=Hints("", ttl_s=60.0))  # and reads nothing
    answer = bed.ask(writes, scheduler)
    assert answer.granted == list(range(8))
    assert told(answer)["ttl_s"][2].startswith("4 of 8 chunks stay")
    bed.ask(Fill(answer.granted_slots, 0, 1, True), worker)
    bed.wait(61)
    assert bed.there(range(8)) == [0, 1, 2, 3]
    assert bed.below.keys >= set(keys(range(4)))


def test_what_is_being_filled_when_its_time_comes_is_forgotten_when_it_is_whole(bed):
    answer = bed.ask(Admit(keys(range(4)), GRANULE_BYTES, 1, hints=Hints("", ttl_s=1.0)))
    bed.wait(30)
    bed.end(answer)
    assert bed.there(range(4)) == [0, 1, 2, 3]
    bed.wait(30)
    assert bed.there(range(4)) == []


def test_a_look_is_no_use(bed):
    bed.request(range(4), Hints("", ttl_s=60.0))
    bed.ask(Admit(keys(range(4))))
    bed.wait(61)
    assert bed.there(range(4)) == []


def test_so_many_chunks_may_have_an_end(bed, monkeypatch):
    monkeypatch.setattr("pdx.store.hints.MAX_ENDS", 6)
    verdicts = bed.request(range(8), Hints("", ttl_s=60.0))
    assert outcomes(verdicts) == {"ttl_s": "clipped"}
    assert verdicts["ttl_s"][2] == "2 of 8 chunks stay: too many chunks have an end"
    bed.wait(61)
    assert len(bed.there(range(8))) == 2


# ---- leases --------------------------------------------------------------------------------------


def test_what_is_leased_is_not_evicted_until_its_time_is_over(bed):
    assert bed.request(range(8), Hints("", lease_s=60.0)) == {"lease_s": ("accepted", "", "")}
    bed.flood(count=2 * CHUNKS)
    assert bed.there(range(8)) == list(range(8))
    bed.wait(61)
    assert bed.service.store.counters["tenant_leases_expired"] == 8
    bed.flood(first=8000, count=2 * CHUNKS)
    assert bed.there(range(8)) == []
    assert (bed.service.store.index.kept_bytes, bed.service.store.tenant_leases.total_bytes()) == (0, 0)


def test_a_lease_does_not_outlast_a_time_to_live(bed):
    assert bed.request(range(8), Hints("", lease_s=60.0, ttl_s=10.0))["lease_s"][:2] == ("clipped", "10")
    bed.wait(11)
    assert bed.there(range(8)) == []


def test_above_the_budget_the_beginning_of_the_prompt_is_leased_and_then_nothing(bed):
    outcome, value, text = bed.request(range(40), Hints("", lease_s=60.0))["lease_s"]
    assert (outcome, value) == ("clipped", "60")
    assert text == "the first 32 of 40 chunks: more is above --tenant-lease-share"
    assert outcomes(bed.request(range(100, 108), Hints("", lease_s=60.0))) == {"lease_s": "refused"}
    assert outcomes(bed.request(range(200, 208), Hints("", salt=A, lease_s=60.0))) == {"lease_s": "accepted"}
    bed.flood(count=2 * CHUNKS)
    assert bed.there(range(300)) == [*range(32), *range(200, 208)]


# ---- demoting ------------------------------------------------------------------------------------


def test_what_is_demoted_is_stored_below_first_and_then_leaves_memory(beds):
    bed = beds(store="twice-seen")  # by which nothing of it would be stored
    bed.is_slow = True
    answer = bed.ask(Admit(keys(range(8)), GRANULE_BYTES, 1, lease_s=5.0, hints=Hints("", demote=[""])))
    assert told(answer) == {"demote": ("accepted", "", "")}
    bed.service.tick()
    bed.service.turn()
    assert not bed.below.jobs, "it is not whole yet"
    bed.end(answer)
    bed.service.tick()
    bed.service.turn()
    assert bed.there(range(8)) == list(range(8)), "it is being stored"
    bed.settle()
    assert bed.there(range(8)) == []
    assert bed.below.keys == set(keys(range(8)))
    assert bed.service.counters["demoted_chunks"] == 8
    assert len(bed.service.hinting.demotions) == 0
    assert bed.service.store.history.why(keys([0])[0]).why is Cause.DEMOTED


def test_what_somebody_reads_is_demoted_when_nobody_does(bed):
    bed.request(range(4))
    lease = bed.ask(Admit(keys(range(4)), lease_s=100.0)).lease
    assert outcomes(bed.advise(Hints("", demote=[""]), range(4))) == {"demote": "accepted"}
    bed.settle()
    bed.wait(90)
    bed.settle()
    assert bed.there(range(4)) == [0, 1, 2, 3]
    bed.ask(Release(lease))
    bed.settle()
    assert bed.there(range(4)) == []


def test_what_a_request_in_a_queue_waits_for_stays_until_it_waits_no_more(bed):
    bed.request(range(4), Hints("s"))
    bed.ask(Expect("q", keys(range(4))))
    assert outcomes(bed.advise(Hints("s", demote=[OWN])))["demote"] == "accepted"
    bed.settle()
    bed.wait(100)
    assert bed.there(range(4)) == [0, 1, 2, 3]
    bed.ask(Expect("q", []))
    bed.settle()
    assert bed.there(range(4)) == []
    assert bed.below.keys == set(keys(range(4)))


def test_what_another_request_uses_meanwhile_stays(bed):
    bed.request(range(4))
    bed.advise(Hints("", demote=[""]), range(4))
    bed.request(range(2))
    bed.settle()
    assert bed.there(range(4)) == [0, 1]


def test_what_the_tier_below_does_not_take_stays(bed):
    bed.below.admit = lambda copy: Grant([])
    bed.request(range(4), Hints("", demote=[""]))
    bed.settle()
    bed.wait(61)
    bed.settle()
    assert bed.there(range(4)) == [0, 1, 2, 3]
    assert bed.service.counters["demotions_given_up"] == 4


def test_what_other_sessions_use_too_stays(bed):
    bed.request(range(4), Hints("one"))
    bed.request([0, 1, 10, 11], Hints("two"))
    outcome, _, text = bed.request(range(4), Hints("one", demote=[""]))["demote"]
    assert (outcome, text) == ("clipped", "the first 2 of 4 chunks stay: other sessions use them, too")
    bed.settle()
    assert bed.there(range(4)) == [0, 1]


# ---- sessions ------------------------------------------------------------------------------------


def test_a_session_is_loaded_leased_and_demoted_by_its_name(bed):
    bed.request(range(8), Hints("s"))
    bed.settle()
    bed.flood(count=2 * CHUNKS)
    assert bed.there(range(8)) == []
    verdicts = bed.advise(Hints("s", lease_s=60.0, prefetch=[""], priority=3, reuse_s=5.0))
    assert set(outcomes(verdicts).values()) == {"accepted"}
    bed.settle()
    bed.flood(first=8000, count=2 * CHUNKS)
    assert bed.there(range(8)) == list(range(8))
    assert outcomes(bed.advise(Hints("s", lease_s=0.0, demote=[""]))) == {
        "lease_s": "accepted",
        "demote": "accepted",
        "session": "accepted",
    }
    bed.wait(31)  # it was expected so long
    bed.settle()
    assert bed.there(range(8)) == []


def test_a_request_may_name_other_sessions(bed):
    bed.request(range(8), Hints("next"))
    bed.request(range(20, 24), Hints("last"))
    bed.settle()
    bed.service.store.delete(keys(range(8)))
    verdicts = bed.request(range(40, 44), Hints("now", prefetch=["next"], demote=["last", "nobody"]))
    assert outcomes(verdicts) == {"session": "accepted", "prefetch": "accepted", "demote": "clipped"}
    assert verdicts["demote"][2] == "no request of session 'nobody' is known here"
    bed.settle()
    assert bed.there(range(24)) == list(range(8))


def test_the_name_of_a_session_finds_nothing_of_another_tenant(bed):
    bed.request(range(8), Hints("s", salt=A, ttl_s=60.0))
    bed.settle()
    for salt in (b"", B):
        for hints in (
            Hints("s", salt=salt, demote=[""]),
            Hints("x", salt=salt, demote=["s"]),
            Hints("x", salt=salt, prefetch=["s"]),
            Hints("s", salt=salt, ttl_s=600.0, lease_s=60.0, priority=9, reuse_s=1.0, prefetch=[""], demote=["s"]),
        ):
            assert set(outcomes(bed.advise(hints)).values()) == {"refused"}
        bed.service.look_ahead.arriving((salt, "s"))
        assert len(bed.service.look_ahead) == 0
    bed.settle()
    assert bed.there(range(8)) == list(range(8))
    assert bed.service.store.index.kept_bytes == 0
    bed.request(range(100, 104), Hints("s", salt=B))  # of the same name, and nobody's loss
    assert outcomes(bed.advise(Hints("s", salt=A, demote=[""]))) == {"demote": "accepted", "session": "accepted"}
    bed.settle()
    assert bed.there([*range(8), *range(100, 104)]) == [100, 101, 102, 103]
    bed.wait(61)
    assert not bed.below.keys & set(keys(range(8)))


def test_another_tenants_keys_are_as_if_they_were_not_there(bed):
    bed.request(range(8), Hints("s", salt=A))
    verdicts = bed.advise(Hints("", salt=B, lease_s=60.0, demote=[""], ttl_s=5.0, priority=9, reuse_s=9.0), range(8))
    assert set(outcomes(verdicts).values()) == {"refused"}
    bed.settle()
    bed.wait(6)
    assert bed.there(range(8)) == list(range(8))


def test_a_prefetch_without_a_tier_below_says_so(beds):
    bed = beds(has_tier=False)
    bed.request(range(8), Hints("s"))
    assert outcomes(bed.advise(Hints("s", prefetch=[""])))["prefetch"] == "accepted", "all of it is here"
    bed.wait(31)  # it was expected so long
    bed.flood(count=2 * CHUNKS)
    outcome, _, text = bed.advise(Hints("s", prefetch=[""]))["prefetch"]
    assert (outcome, "no tier below" in text) == ("refused", True)


# ---- what there is not ---------------------------------------------------------------------------


def test_advice_about_nothing_is_refused(bed):
    assert outcomes(bed.advise(Hints("", lease_s=1.0, prefetch=[""]))) == {"lease_s": "refused", "prefetch": "refused"}
    assert bed.advise(Hints("")) == {}
    with pytest.raises(ProtocolError, match="are more than"):
        bed.ask(Advise(Hints(""), keys(range(100)), MAX_SLOTS // 100 + 1))


def test_hints_that_fail_cost_the_request_nothing(bed, monkeypatch):
    monkeypatch.setattr(bed.service.hinting, "request", lambda *_, **__: 1 / 0)
    answer = bed.ask(Admit(keys(range(4)), GRANULE_BYTES, 1, hints=Hints("", lease_s=5.0)))
    assert (answer.granted, answer.verdicts) == ([0, 1, 2, 3], [])
    assert bed.service.counters["internal_errors"] == 1
