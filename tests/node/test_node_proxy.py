"""What a node tells the proxy and does for it; a plain ROUTER stands where the proxy will."""

import msgpack
import pytest
from proxy_router import Proxy

from pdx.config import NodeConfig, node_name
from pdx.memory.arena import GRANULE_BYTES
from pdx.node.daemon import Daemon
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.wire.hints import Hints
from pdx.wire.messages import (
    VERSION,
    Abort,
    Admit,
    Admitted,
    Bye,
    Cancel,
    Delete,
    EngineFacts,
    Fill,
    Mark,
    Ping,
    encode,
)
from pdx.wire.proxy import Arriving, NodeReport, Order, Prefilled, Reply, decode_to_proxy
from pdx.wire.verbs import Clear, Drain, Drained, Find, Selection, Status

TRANSFER = "transfer-0123456789"
OTHER_TRANSFER, THIRD_TRANSFER = "other-" + TRANSFER, "third-" + TRANSFER
KEY = b"k" * 16


@pytest.fixture
def proxy(place):
    made = Proxy(f"ipc://{place}/proxy.sock")
    yield made
    made.context.destroy(linger=0)
    (place / "proxy.sock").unlink(missing_ok=True)


@pytest.fixture
def node(start_here, proxy):
    return start_here(proxy=proxy.address, report_s=60.0)


def test_the_first_report_registers_the_node(node, proxy):
    report = proxy.report()
    assert (report.version, report.node, report.engines, report.marks) == (VERSION, node_name(node.config), [], [])
    assert report.epoch == node.status().epoch
    assert report.free_bytes == report.arena_bytes == 8 << 20


def test_reports_are_the_heartbeat(place, proxy, clock):
    config = NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=2 << 20, proxy=proxy.address, report_s=1.0)
    with Daemon(config, Env(clock)) as daemon:
        for _ in range(6):
            wait_until(lambda: daemon.turn(0.01) or proxy.router.poll(0), what="it is due")
            assert isinstance(proxy.report(), NodeReport)
            clock.now += 0.9
            daemon.turn(0.01)
            assert not proxy.router.poll(20), "a tenth of a second is left"
            clock.now += 0.1


def test_engines_that_come_and_go_are_told_at_once(node, proxy, attach):
    facts = EngineFacts(2048, max_new_tokens=7, looks_back=False)
    scheduler = attach(node, kind="scheduler", engine="e", role="prefill", url="http://127.0.0.1:8000", facts=facts)
    attach(node, kind="worker", engine="e")
    attach(node, kind="client", engine="e")
    report = proxy.report_where(lambda report: report.engines)
    assert [(e.engine, e.role, e.url, e.running, e.facts) for e in report.engines] == [
        ("e", "prefill", "http://127.0.0.1:8000", 0, facts)
    ]
    told = {one.kind: one.facts for one in node.status().attached if one.engine == "e"}
    of_scheduler = {"max_model_len": 2048, "max_new_tokens": 7, "looks_back": False, "stops_short": False}
    assert told == {"scheduler": of_scheduler, "worker": {}, "client": {}}
    scheduler.ask(Bye())
    assert proxy.report_where(lambda report: not report.engines)


def test_load_and_room_are_in_the_report(node, proxy, attach):
    scheduler = attach(node, kind="scheduler", engine="e")
    worker = attach(node, kind="worker", engine="e")
    scheduler.ask(Ping(running=7))
    slots = scheduler.ask(Admit([KEY], GRANULE_BYTES)).granted_slots
    scheduler.ask(Mark(TRANSFER, "admitted", 1))
    report = proxy.report_where(lambda report: report.marks)
    assert report.engines[0].running == 7
    assert report.free_bytes == report.arena_bytes - GRANULE_BYTES
    worker.ask(Abort(slots))


@pytest.mark.parametrize(("chunks", "events"), [(2, ["admitted", "near"]), (3, ["admitted"])])
def test_a_transfer_of_which_little_is_to_be_computed_is_said_to_be_near(node, proxy, attach, chunks, events):
    scheduler, worker = attach(node, kind="scheduler", engine="e"), attach(node, kind="worker", engine="e")
    keys = [bytes([number]) * 16 for number in range(chunks)]
    slots = scheduler.ask(Admit(keys, GRANULE_BYTES, transfer=TRANSFER, part="writes")).granted_slots
    for event in ("admitted", "prefill_end"):
        scheduler.ask(Mark(TRANSFER, event, 1))
    marks = []
    while not marks or marks[-1] != "prefill_end":
        marks += [mark.event for mark in proxy.report().marks]
    assert marks == [*events, "prefill_end"]
    worker.ask(Abort(slots))


def test_how_engines_name_their_chunks_is_in_the_report_as_soon_as_it_changes(node, proxy, attach):
    scheduler = attach(node, kind="scheduler", engine="e", layout=b"l" * 16, shape={"root": "00ff"})
    (engine,) = proxy.report_where(lambda report: report.engines).engines
    assert (engine.layout, engine.shape) == (b"l" * 16, {"root": "00ff"})
    scheduler.tell(Ping(keyed=b"k" * 16))
    assert proxy.report_where(lambda report: report.engines).engines[0].layout == b"k" * 16
    scheduler.tell(Ping())
    assert proxy.report_where(lambda report: report.engines).engines[0].layout == b"l" * 16


def test_marks_arrive_once_and_in_order(node, proxy, attach):
    scheduler = attach(node, kind="scheduler", engine="e")
    for number in range(100):
        scheduler.tell(Mark(TRANSFER, f"event {number}", number, number, 1, "another"))  # says who it is, in vain
    marks = []

    def all_are_there():
        marks.extend(proxy.report().marks)
        return len(marks) >= 100

    wait_until(all_are_there)
    assert [(mark.event, mark.at_ns, mark.nbytes, mark.engine) for mark in marks] == [
        (f"event {number}", number, number, "e") for number in range(100)
    ]


def test_cancel_from_the_proxy_is_carried_out(node, proxy, attach):
    client = attach(node)
    proxy.report()
    slots = client.ask(Admit([KEY], GRANULE_BYTES, transfer=TRANSFER, part="writes")).granted_slots
    assert client.ask(Admit([KEY], transfer=TRANSFER)).waiting
    proxy.send(encode(Cancel(TRANSFER)))
    wait_until(lambda: not client.ask(Admit([KEY], transfer=TRANSFER)).waiting)
    assert client.status().chunks == {"quarantined": 1}
    assert client.ask(Abort(slots)).count == 1


def test_who_expects_a_transfer_waits_no_more_when_its_prefill_is_over(node, proxy, attach):
    """Its node has not heard of it: the engine that prefilled runs without PDX, say."""
    client = attach(node)
    proxy.report()
    expect = Admit([KEY], lease_s=1.0, transfer=OTHER_TRANSFER, part="expects", wait_s=60.0)
    seq = client.tell(expect, reply=True)
    client.ask(Ping())
    proxy.send(encode(Prefilled(OTHER_TRANSFER)))
    assert client.answer() == (seq, Admitted())
    assert client.ask(expect) == Admitted(), "nor does who asks later"


def test_a_transfer_under_way_is_waited_for_although_its_prefill_is_over(node, proxy, attach):
    client = attach(node)
    proxy.report()
    slots = client.ask(Admit([KEY], GRANULE_BYTES, transfer=THIRD_TRANSFER, part="writes")).granted_slots
    before = client.status().counters.get("transfers_given_up", 0)
    proxy.send(encode(Prefilled(THIRD_TRANSFER)))
    proxy.send(encode(Cancel(OTHER_TRANSFER[:-1])))  # behind it
    wait_until(lambda: client.status().counters.get("transfers_given_up", 0) > before)
    assert client.ask(Admit([KEY], transfer=THIRD_TRANSFER)).waiting
    client.ask(Fill(slots, seal=True))
    assert client.ask(Admit([KEY], transfer=THIRD_TRANSFER)).hits == 1
    client.ask(Delete([KEY]))


def test_cancel_matches_the_whole_name(node, proxy, attach):
    """CVE-2026-112266: a prefix of a request id aborted everybody's requests."""
    client = attach(node)
    proxy.report()
    slots = client.ask(Admit([KEY], GRANULE_BYTES, transfer=TRANSFER, part="writes")).granted_slots
    proxy.send(encode(Cancel(TRANSFER[:16])))
    wait_until(lambda: client.status().counters.get("transfers_given_up"))
    assert client.ask(Admit([KEY], transfer=TRANSFER)).waiting
    assert client.ask(Abort(slots)).count == 1


def test_a_malformed_message_of_the_proxy_is_dropped_and_counted(node, proxy, attach):
    client = attach(node)
    proxy.report()
    malformed = [
        [b""],
        [b"\xc1"],
        [encode(Cancel(TRANSFER))[:-1]],
        [encode(Cancel(TRANSFER)), b""],
        [msgpack.packb(["Cancel", "short"])],
        [msgpack.packb(["Cancel", "x" * 65])],
        [msgpack.packb(["Shutdown"])],
        [msgpack.packb([1, True, ["Status"]])],
    ]
    for frames in malformed:
        proxy.send(*frames)
    wait_until(lambda: client.status().counters.get("messages_dropped") == len(malformed))
    assert "transfers_given_up" not in client.status().counters


def test_an_engine_on_all_interfaces_is_told_where_its_node_is(node, proxy, attach):
    """`pdx serve --host 0.0.0.0`: only the node knows at which address others reach this host."""
    attach(node, kind="scheduler", engine="any", url="http://0.0.0.0:8100")
    attach(node, kind="scheduler", engine="one", url="http://10.0.0.7:8100")
    found = proxy.report_where(lambda report: len(report.engines) == 2)
    assert {engine.engine: engine.url for engine in found.engines} == {
        "any": "http://127.0.0.1:8100",
        "one": "http://10.0.0.7:8100",
    }


def test_the_node_heeds_a_session_that_the_proxy_tells_of(node, proxy, attach):
    client = attach(node)
    proxy.report()
    ask = Admit([KEY], lease_s=1.0, request="first", hints=Hints("a session"))
    client.ask(ask)
    before = client.status().counters.get("arrivals", 0)
    proxy.send(encode(Arriving("another session")))
    proxy.send(encode(Arriving("a session")))
    wait_until(lambda: client.status().counters.get("arrivals", 0) == before + 1, what="the node has heard")
    client.ask(ask)


def test_a_verb_that_the_proxy_relays_is_carried_out_and_answered_with_its_number(node, proxy, attach):
    assert proxy.report()
    worker = attach(node, kind="client")
    granted = worker.ask(Admit([KEY], 4096, 1))
    worker.ask(Fill(granted.granted_slots, seal=True))
    what = Selection([KEY])
    assert proxy.order(Find(what)).tiers == {"host": 1}
    refused = proxy.order(Clear(what, "tape"), number=6)
    assert (refused.error, "'tape'" in refused.text) == ("TierUnknown", True)
    assert proxy.order(Clear(what, "host"), number=7).chunks == 1
    assert proxy.order(Find(what), number=8).hits == 0
    assert proxy.order(Status(), number=9).counters["refused"] == 1


def test_a_verb_in_which_the_node_fails_is_refused_and_the_node_lives_on(place, proxy, monkeypatch):
    config = NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=2 << 20, proxy=proxy.address)
    with Daemon(config) as daemon:

        def outcome_of(verb):
            proxy.send(encode(Order(1, verb)))
            while True:
                daemon.turn(0.1)
                while proxy.router.poll(0):
                    said = decode_to_proxy(proxy.router.recv_multipart()[1])
                    if isinstance(said, Reply):
                        return said.outcome

        wait_until(lambda: daemon.turn(0.1) or proxy.router.poll(0), what="a report")
        proxy.report()
        carry_out = daemon.service.control
        monkeypatch.setattr(daemon.service, "control", lambda verb: {}[verb])
        refused = outcome_of(Find(Selection([KEY])))
        assert (refused.error, "internal error" in refused.text) == ("NodeError", True)
        assert daemon.service.counters["internal_errors"] == 1
        monkeypatch.setattr(daemon.service, "control", carry_out)
        assert outcome_of(Find(Selection([KEY]))).hits == 0
        monkeypatch.setattr("pdx.node.proxies.MAX_FRAME_BYTES", 10)
        assert "more than 10 bytes" in outcome_of(Find(Selection([KEY]))).text


def test_an_engine_that_is_drained_is_told_of_at_once(node, proxy, attach):
    url = "http://127.0.0.1:8000"
    scheduler = attach(node, kind="scheduler", engine="e", url=f"{url}/")
    scheduler.ask(Ping(running=7))
    proxy.report_where(lambda report: report.engines)
    assert proxy.order(Drain(url)) == Drained("e", 7)

    def says(draining):
        return lambda said: isinstance(said, NodeReport) and [each.draining for each in said.engines] == [draining]

    assert proxy.report_where(says(draining=True))
    assert proxy.order(Drain("e", draining=False)) == Drained("e", 7, draining=False)
    assert proxy.report_where(says(draining=False))
    rank = attach(node, kind="scheduler", engine="e_dp1", url=url)  # of the same server
    rank.ask(Ping(running=2))
    assert proxy.order(Drain("e_dp1")) == Drained("e", 9)
    assert proxy.order(Drain("/")).error == "NodeError"
    refused = proxy.order(Drain("http://127.0.0.1:8001"))
    assert refused.error == "NodeError"
    assert f"is attached to node {node_name(node.config)}; there are: {url}" in refused.text
