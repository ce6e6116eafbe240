"""Which engines and nodes are known, and how engines are."""

from unittest.mock import Mock

import msgspec
import pytest
from steps import lines_run

from pdx.proxy.engines import FORGET_S, MAX_ENGINES, MAX_ENGINES_OF_NODE, MAX_NODES, Engines
from pdx.proxy.health import FIRST_S, LONGEST_S, PROBE_S, EngineState, Health, Reason
from pdx.telemetry.env import Env
from pdx.wire.messages import VERSION, EngineFacts
from pdx.wire.proxy import EngineReport, NodeReport, PeerEntry


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def health_of(clock, chance=1.0):
    return Health(Env(clock), silence_s=60.0, chance=Mock(random=lambda: chance))


def engines(clock, prefill=(), decode=(), health=None):
    health = health or health_of(clock)
    return Engines(Env(clock), health, prefill=prefill, decode=decode, heartbeat_timeout_s=3.0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    return health_of(clock)


@pytest.fixture
def found(clock):
    return engines(clock)


def report(*engines, node="n", epoch=1):
    listed = [EngineReport(engine=name, role=role, url=url, running=2) for name, role, url in engines]
    return NodeReport(version=VERSION, node=node, epoch=epoch, arena_bytes=0, free_bytes=0, engines=listed, marks=[])


A, B = ("a", "prefill", "http://a:1"), ("b", "both", "http://b:1/")


def urls(found):
    return sorted(engine.url for engine in found.all())


def nodes_of(found):
    return {engine.url: engine.node for engine in found.all()}


def test_an_engine_that_is_not_reported_any_more_serves_alone(clock, found):
    assert found.report(report(A, B)) == frozenset()
    assert nodes_of(found) == {"http://a:1": "n", "http://b:1": "n"}
    assert [(each.prefills, each.decodes, each.detached) for each in found.all()] == [
        (True, False, False),
        (True, True, False),
    ]
    assert found.report(report(B)) == {"http://a:1"}
    assert nodes_of(found) == {"http://a:1": "", "http://b:1": "n"}
    assert [each.detached for each in found.all()] == [True, False]
    assert [each.name for each in found.all()] == ["a", "b"]
    clock.now += 2.9
    assert found.expire() == frozenset()
    assert found.nodes() == 1
    clock.now += 0.2
    assert nodes_of(found) == {"http://a:1": "", "http://b:1": ""}  # also before anybody called expire
    assert found.nodes() == 0
    assert found.expire() == {"http://b:1"}
    assert [each.detached for each in found.all()] == [True, True]
    found.report(report(A, B))
    assert [each.detached for each in found.all()] == [False, False]


def test_data_parallel_ranks_of_one_server_are_one_engine_with_the_load_of_all(clock, health):
    found = engines(clock, health=health)
    believed, dropped = found.screen(report(("e_dp0", "both", "http://a:1"), ("e_dp1", "both", "http://a:1/")))
    found.report(believed)
    assert (urls(found), dropped, health.of("http://a:1").others) == (["http://a:1"], [], 4)


@pytest.mark.parametrize("drained", [0, 1])
def test_a_server_is_drained_if_a_rank_of_it_is_and_is_the_same_in_any_order_of_its_ranks(found, drained):
    ranks = report(("e_dp0", "both", "http://a:1"), ("e_dp1", "both", "http://a:1")).engines
    ranks[drained] = msgspec.structs.replace(ranks[drained], draining=True)
    told = [found.screen(msgspec.structs.replace(report(), engines=each))[0] for each in (ranks, ranks[::-1])]
    assert [[(one.engine, one.draining) for one in each.engines] for each in told] == [[("e_dp0", True)]] * 2


def test_of_engines_that_share_no_kv_each_is_compared_with_few(found):
    """After weights were changed everywhere each engine has a layout of its own."""

    def apart(count, alike, *roles):
        """Of so many engines, of which so many each have one layout: what is told, and in how many steps."""
        told = report(*((f"e{n}", roles[n % len(roles)], f"http://e{n}:1") for n in range(count)))
        listed = [
            msgspec.structs.replace(one, layout=bytes([n // alike]) * 16, shape={"model": "m"})
            for n, one in enumerate(told.engines)
        ]
        found.report(msgspec.structs.replace(told, engines=listed))
        with lines_run() as lines:
            sentences = found.apart()
        return sentences, len(lines)

    for roles in (("decode", "prefill"), ("decode",)):
        (few, before), (many, after) = (apart(count, 1, *roles) for count in (20, 40))
        assert bool(few) == bool(many) == (len(roles) == 2)
        assert after <= 3 * before
    assert not apart(40, 2, "decode", "prefill")[0], "each has one that it can share with"


def test_a_report_that_says_nothing_new_costs_the_same_with_more_nodes(clock, found):
    """No engine is looked at again but its own."""
    for number in range(20):
        found.report(report(("x", "both", f"http://x{number}:1"), node=f"n{number}"))
    before = found.all()
    for number in range(20):
        clock.now += 0.01
        again = report(("x", "both", f"http://x{number}:1"), node=f"n{number}")
        assert found.screen(again) == (again, [])
        assert found.report(again) == frozenset()
    assert all(one is other for one, other in zip(before, found.all(), strict=True))


@pytest.mark.parametrize("change", ["name", "role", "facts", "url", "node"])
def test_news_of_an_engine_is_known_at_once(clock, found, change):
    found.report(report(A))
    assert [each.name for each in found.all()] == ["a"]
    facts = EngineFacts(512, 0, False)
    told = {
        "name": report(("c", *A[1:])),
        "role": report((A[0], "both", A[2])),
        "facts": msgspec.structs.replace(report(A), engines=[EngineReport(*A, running=2, facts=facts)]),
        "url": report(B),
        "node": report(A, node="other"),
    }[change]
    found.report(told)
    seen = {each.url: (each.name, each.decodes, each.facts, each.node) for each in found.all()}
    assert (
        seen
        == {
            "name": {"http://a:1": ("c", False, None, "n")},
            "role": {"http://a:1": ("a", True, None, "n")},
            "facts": {"http://a:1": ("a", False, facts, "n")},
            "url": {"http://a:1": ("a", False, None, ""), "http://b:1": ("b", True, None, "n")},
            "node": {"http://a:1": ("a", False, None, "other")},
        }[change]
    )
    clock.now += 3.1
    assert {each.node for each in found.all()} == {""}
    found.report(told)
    assert {each.node for each in found.all()} >= {"other" if change == "node" else "n"}


def test_an_engine_that_nobody_reports_and_that_does_not_answer_is_forgotten(clock, health):
    found = engines(clock, decode=["http://c:1"], health=health)
    found.report(report(A, B))
    clock.now += FORGET_S
    found.expire()
    health.probed(health.of("http://b:1"), "")
    health.probed(health.of("http://a:1"), "refused")
    assert urls(found) == ["http://a:1", "http://b:1", "http://c:1"]
    clock.now += 1
    found.expire()
    assert urls(found) == ["http://b:1", "http://c:1"]
    found.report(report(A))
    assert urls(found) == ["http://a:1", "http://b:1", "http://c:1"]


def test_engines_are_bounded(found):
    several = [("x", "decode", f"http://x{number}:1") for number in range(MAX_ENGINES + 10)]
    for first in range(0, len(several), 50):
        believed, dropped = found.screen(report(*several[first : first + 50], node=f"n{first}"))
        found.report(believed)
    assert len(found.all()) == MAX_ENGINES
    assert [reason for reason, _ in dropped] == ["engines"] * 10
    assert found.screen(report(several[0], node="n0"))[1] == []


def test_one_node_does_not_take_all_places(found):
    """Nor does it by naming others each time: those it named before are still asked whether they are well."""
    refused = []
    for turn in range(3):
        own = [("x", "decode", f"http://x:{port}") for port in range(1000 * turn + 1, 1000 * turn + 41)]
        believed, dropped = found.screen(report(*own))
        found.report(believed)
        refused += [reason for reason, _ in dropped]
    assert len(found.all()) == MAX_ENGINES_OF_NODE == 64
    assert refused == ["engines"] * (3 * 40 - 64)
    assert found.screen(report(A, node="other"))[1] == []


def test_who_leaves_the_roster_file_gets_nothing_more():
    """Not even as engines that serve alone: the key may have been taken away because somebody else has it."""
    found = engines(Clock(), decode=["http://c:1"])
    found.report(report(A, ("c", "decode", "http://c:1")))
    found.report(report(B, node="stays"))
    found.report(report(node="gone"))
    assert found.expire({"n", "stays"}) == frozenset()
    assert nodes_of(found) == {"http://a:1": "n", "http://b:1": "stays", "http://c:1": "n"}
    assert found.expire({"stays"}) == {"http://a:1", "http://c:1"}
    assert nodes_of(found) == {"http://b:1": "stays", "http://c:1": ""}
    assert found.nodes() == 1


def test_a_restarted_node_does_not_lose_its_engines_while_they_attach_again(clock, found):
    found.report(report(A, epoch=1))
    assert found.report(report(epoch=2)) == frozenset()
    clock.now += 2
    assert found.report(report(A, epoch=2)) == frozenset()
    clock.now += 2
    assert found.expire() == frozenset()
    assert urls(found) == ["http://a:1"]


def test_named_engines_stay_but_a_node_may_say_they_are_detached():
    clock = Clock()
    found = engines(clock, prefill=["http://a:1/"], decode=["http://a:1", "http://c:1"])
    assert urls(found) == ["http://a:1", "http://c:1"]
    assert not any(each.detached for each in found.all())  # no node has ever reported them: that is no news
    found.report(report(A))
    first = found.all()[0]
    assert (first.name, first.prefills, first.decodes, first.named) == ("a", True, True, True)
    assert found.report(report()) == {"http://a:1"}
    assert urls(found) == ["http://a:1", "http://c:1"]
    assert [each.detached for each in found.all()] == [True, False]
    found.report(report(A))
    clock.now += FORGET_S + 1
    found.expire()
    assert urls(found) == ["http://a:1", "http://c:1"]


URL = "http://a:1"


def refused_once(health, url=URL):
    with health.begin(url) as use:
        health.failed(use, Reason.REFUSED)
    return health.of(url)


def test_a_failure_makes_an_engine_suspect_until_a_probe_finds_it_well(clock, health):
    assert health.due(URL)
    health.probed(health.of(URL), "")
    record = refused_once(health)
    assert (record.avoided, record.is_ready) == (True, False)
    clock.now += FIRST_S * 0.9
    assert not health.due(URL)
    clock.now += FIRST_S * 0.1
    assert record.avoided, "time alone does not make it well"
    assert health.due(URL)
    assert not health.due(URL), "one probe at a time"
    health.probed(record, "")
    assert (record.avoided, record.is_ready) == (False, True)


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_the_time_until_the_next_probe_doubles_up_to_a_limit(chance):
    clock = Clock()
    health = health_of(clock, chance)
    record = refused_once(health)
    waits = []
    for _ in range(8):
        waits.append(record.probe_at - clock.now)
        clock.now = record.probe_at
        health.probed(record, "refused")
    share = 0.75 + chance / 4
    assert waits == [pytest.approx(share * each) for each in (1, 2, 4, 8, 16, 30, 30, 30)]
    assert LONGEST_S == 30
    health.probed(record, "")
    refused_once(health)
    assert record.probe_at - clock.now > 20, "no request has succeeded in between"
    health.probed(record, "")
    health.succeeded(health.begin(URL))
    refused_once(health)
    assert record.probe_at - clock.now <= FIRST_S


def test_an_engine_that_does_not_answer_is_asked_every_few_seconds_however_long_it_is_away(clock, health):
    """One that was started again is to serve within 5 s; one that answers, and fails requests, may have longer."""
    record = refused_once(health)
    for _ in range(50):
        assert record.probe_at - clock.now <= PROBE_S
        clock.now = record.probe_at
        health.probed(record, "GET /health: refused", answers=False)
    health.probed(record, "one token: status 500")
    assert record.probe_at - clock.now <= 2 * FIRST_S, "it was away: that is one failure"


def test_another_life_of_an_engine_is_looked_at_anew(clock, found):
    health = found.health
    found.report(report(A))
    health.probed(health.of("http://a:1"), "")
    record = health.of("http://a:1")
    record.models = {"m": None}
    found.report(report(A))
    found.report(report(("a", "both", "http://a:1")))
    assert (record.models, record.is_ready) == ({"m": None}, True), "another role is no other life"
    found.report(report(("a-anew", "both", "http://a:1")))
    assert (record.models, record.is_ready, record.probe_at) == (None, False, clock.now)


def test_many_legs_that_fail_together_are_one_failure(health):
    uses = [health.begin(URL) for _ in range(8)]
    for use in uses:
        health.failed(use, Reason.RESET)
    assert health.of(URL).failures == 1
    assert health.failures == {"reset": 8}


def test_every_failure_of_an_engine_makes_it_suspect(clock):
    for reason in Reason:
        health = health_of(clock)
        health.failed(health.begin(URL), reason)
        assert health.of(URL).avoided == (reason not in (Reason.STATUS_4XX, Reason.STATUS_429))


def test_an_engine_that_may_not_generate_gets_one_request_at_a_time(health):
    with health.begin(URL) as use:
        health.failed(use, Reason.STATUS_5XX)
    record = health.of(URL)
    before = health.begin(URL)  # as the last resort
    health.probed(record, "")
    assert (record.state, record.is_ready) == (EngineState.TRIAL, True)
    before.end()
    assert not record.avoided
    with health.plan(URL) as plan:
        assert record.avoided, "a plan is one"
        plan.end()
        with health.begin(URL) as use:
            assert record.avoided
            health.failed(use, Reason.STATUS_5XX)
    assert (record.state, record.failures) == (EngineState.SUSPECT, 2)
    health.probed(record, "")
    with health.begin(URL) as use:
        health.succeeded(use)
    with health.begin(URL):
        assert (record.avoided, record.failures) == (False, 0)


def test_what_began_before_the_engine_failed_does_not_make_it_well(health):
    before = health.begin(URL)
    refused_once(health)
    health.succeeded(before)
    assert health.of(URL).avoided


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.STATUS_503])
def test_an_engine_that_speaks_to_others_does_not_hang_and_may_be_full(clock, health, reason):
    use = health.begin(URL)
    health.of(URL).heard_at = clock.now - 59
    health.failed(use, reason)
    assert not health.of(URL).avoided
    clock.now += 2
    health.failed(use, reason)
    assert health.of(URL).avoided


def test_a_request_that_fails_everywhere_is_to_blame_itself(health):
    names = {"http://a:1", "http://b:1", "http://c:1"}
    for url in names - {"http://c:1"}:
        health.succeeded(health.begin(url))
    for url in names:
        health.failed(health.begin(url), Reason.STATUS_5XX)
    health.pardon({"http://a:1"})
    assert all(health.of(url).avoided for url in names), "one engine's word is no proof"
    health.pardon(names)
    assert [health.of(url).avoided for url in sorted(names)] == [False, False, True], "c has served nobody"


def test_a_client_whose_requests_fail_does_not_fill_the_log(clock, health, caplog):
    names = {"http://a:1", "http://b:1"}
    for _ in range(100):
        for url in names:
            health.succeeded(health.begin(url))
            health.failed(health.begin(url), Reason.STATUS_5XX)
        health.pardon(names)
        for _ in range(2):  # and as many that no engine serves in between
            for url in names:
                health.failed(health.begin(url), Reason.STATUS_5XX)
            health.pardon(names)
    assert all(health.of(url).state is EngineState.WELL for url in names)
    assert health.failures == {"status_5xx": 600}
    clock.now += PROBE_S
    assert all(map(health.due, names)), "nor does it keep the proxy from asking them for their health"
    assert len(caplog.records) == 4  # of each engine, that it is suspect, and that it is well


def test_an_engine_that_cannot_be_asked_is_not_believed(found):
    odd = report(("x", "decode", "http://user:secret@a:1"), ("y", "decode", ""), ("z", "decode", "http://0.0.0.0:1"))
    believed, dropped = found.screen(odd)
    assert believed.engines == []
    assert [reason for reason, _ in dropped] == ["unroutable"] * 3
    assert "secret" not in str(dropped)


def test_a_name_has_two_lives_at_most(clock, found):
    """A node that was started again has a new one; more at a time would be somebody who fills the memory."""
    for epoch in (1, 2):
        assert found.screen(report(A, epoch=epoch))[1] == []
        found.report(report(A, epoch=epoch))
    believed, dropped = found.screen(report(A, epoch=3))
    assert believed is None
    assert [reason for reason, _ in dropped] == ["epochs"]
    assert found.screen(report(A, epoch=1))[0] is not None
    clock.now += 3.1
    assert found.screen(report(A, epoch=3)) == (report(A, epoch=3), [])
    found.report(report(A, epoch=3))
    assert found.nodes() == 1


def test_a_url_has_one_owner_whose_next_life_has_it_too(found):
    """A node that names another one's engine would get the KV that is meant for that one's node."""
    found.report(report(A, epoch=1))
    assert found.screen(report(A, epoch=2)) == (report(A, epoch=2), [])
    assert [reason for reason, _ in found.screen(report(A, B, node="other"))[1]] == ["owned"]
    assert found.screen(report(A, B, node="other"))[0] == report(B, node="other")


def test_an_owner_that_is_silent_owns_nothing(clock, found):
    found.report(report(A))
    spelled = ("a", "prefill", "HTTP://A:1")
    assert [reason for reason, _ in found.screen(report(spelled, node="other"))[1]] == ["owned"]
    clock.now += 3.1
    assert found.screen(report(A, node="other")) == (report(A, node="other"), [])


def test_nodes_are_bounded_and_one_too_many_is_said_to_be_so(found):
    for number in range(MAX_NODES):
        found.report(report(node=str(number)))
    believed, dropped = found.screen(report(node="one more"))
    assert (believed, [reason for reason, _ in dropped]) == (None, ["nodes"])
    assert found.screen(report(node="7", epoch=2))[0] is not None


def test_peers_are_the_nodes_that_listen_each_with_its_latest_life(clock, found):
    found.report(report(A))
    assert found.peers() == {}
    listening = msgspec.structs.replace(report(A, node="a", epoch=1), listen="tcp://10.0.0.1:1", public_key="k" * 40)
    found.report(listening)
    assert found.peers() == {("a", 1): PeerEntry("a", "tcp://10.0.0.1:1", "k" * 40)}
    clock.now += 1
    found.report(msgspec.structs.replace(listening, epoch=2, listen="tcp://10.0.0.1:2"))
    found.report(listening)  # the last word of a life that is over changes nothing
    assert found.peers() == {("a", 2): PeerEntry("a", "tcp://10.0.0.1:2", "k" * 40)}
    clock.now += 3.1
    found.expire()
    assert found.peers() == {}
