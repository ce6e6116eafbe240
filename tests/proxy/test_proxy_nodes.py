"""Engines on several nodes: which legs are told of which node, what nodes hear of each other, whose clock counts."""

import asyncio
import time

import msgspec
import pytest
from proxy_harness import BODY, CHAT, COMPLETIONS, TALK, cluster, until, within

from pdx.telemetry.host import host_id
from pdx.wire import messages
from pdx.wire.messages import Mark
from pdx.wire.proxy import Prefilled

PATIENT = {"heartbeat_timeout_s": 60.0, "known": False}  # nodes report once in these tests, and only where placed
REQUESTS = {"forward": (COMPLETIONS, {**BODY, "stream": True}), "sampled": (COMPLETIONS, BODY), "chat": (CHAT, TALK)}


async def place(made, prefill, *decodes):
    """Have the node `prefill` report the prefill engine, and others one decode engine each: a name, or (name, load)."""
    reports = [(prefill, "prefill", made.prefill.url, 0)]
    for spot, engine in zip(decodes, made.decodes, strict=True):
        name, running = spot if isinstance(spot, tuple) else (spot, 0)
        reports.append((name, "decode", engine.url, running))
    names = {name for name, *_ in reports if name}
    for name in names:
        engines = [(f"{role} on {name}", role, url, running) for node, role, url, running in reports if node == name]
        await made.other_node(name).report(*engines)
    await made.metric_reaches(1 + len(names), "pdx_proxy_reports_total")


def nodes_named(engine):
    """What the engine's last request was told of nodes."""
    params = engine.bodies[-1]["kv_transfer_params"]
    return {name: value for name, value in params.items() if name.endswith("_node")}


@pytest.mark.parametrize(
    ("prefill", "decode", "told_prefill", "told_decode", "unplaced"),
    [
        ("one", "one", {}, {}, 0),
        ("one", "two", {"decode_node": "two"}, {"prefill_node": "one"}, 0),
        ("", "two", {}, {}, 1),
        ("one", "", {}, {"prefill_node": "one"}, 1),
    ],
)
async def test_each_leg_is_told_of_the_other_ones_node(prefill, decode, told_prefill, told_decode, unplaced, caplog):
    """Only if it is known and another one. The engines are named on the command line; nodes report them by URL.

    Nothing is pushed for an engine that no node reports, which must not be silent.
    """
    async with cluster(**PATIENT) as made:
        await place(made, prefill, decode)
        for path, body in REQUESTS.values():
            assert (await made.post(path, body))[0] == 200
            assert (nodes_named(made.prefill), nodes_named(made.decode)) == (told_prefill, told_decode)
        await made.metric_reaches(len(REQUESTS) * unplaced, "pdx_proxy_unplaced_total")
    assert sum("no node has reported" in record.message for record in caplog.records) == unplaced


@pytest.mark.parametrize(
    ("request_kind", "planned", "other", "told"),
    [
        ("forward", "two", ("three", 1), {"prefill_node": "one"}),
        ("sampled", "one", "two", {"prefill_node": "one"}),
        ("chat", "two", ("two", 1), {"prefill_node": "one"}),
        ("forward", "two", ("one", 1), {}),
        ("sampled", "two", "", {"prefill_node": "one"}),
    ],
)
async def test_another_decoder_is_told_where_the_kv_is(request_kind, planned, other, told):
    """The planned decoder is gone when its turn comes: whoever serves can ask the prefill engine's node."""
    path, body = REQUESTS[request_kind]
    async with cluster(decodes=2, **PATIENT) as made:
        await place(made, "one", planned, other)
        if other == "":  # equal load, no known node: its turn comes second
            await made.post(COMPLETIONS, {**BODY, "best_of": 2})
            assert (len(made.decodes[0].seen), len(made.decodes[1].seen)) == (1, 0)
            await made.post(COMPLETIONS, {**BODY, "best_of": 2})
        made.prefill.fault = "hold"
        request = asyncio.create_task(made.post(path, body))
        await within(made.prefill.arrived.wait())
        assert nodes_named(made.prefill) == ({"decode_node": planned} if planned != "one" else {})
        await made.decodes[0].stop()
        made.prefill.released.set()
        status, headers, _ = await within(request)
        assert (status, headers["x-pdx-mode"] != "alone") == (200, True)
        assert nodes_named(made.decodes[1]) == told


@pytest.mark.parametrize(
    ("gone", "detached", "told"),
    [(False, False, {"one", "two"}), (True, False, {"one", "two", "three"}), (True, True, {"one", "two"})],
)
async def test_a_transfer_is_cancelled_where_it_is_known(gone, detached, told):
    """A Cancel costs each node time, and whoever can send requests can give them up."""
    async with cluster(decodes=2, **PATIENT) as made:
        nodes = [made.other_node(name) for name in ("one", "two", "three", "four")]
        engines = [("prefill", made.prefill), ("decode", made.decodes[0]), ("decode", made.decodes[1])]
        for node, (role, engine), running in zip(nodes, engines, (0, 0, 1), strict=False):
            await node.report((node.name, role, engine.url, running))
        await nodes[3].report()
        await made.metric_reaches(5, "pdx_proxy_reports_total")
        for node in nodes:
            assert await node.peers() == {}
        if detached:
            await nodes[2].report()
            await made.metric_reaches(6, "pdx_proxy_reports_total")
        if gone:  # so the other one is asked in its place
            await made.decodes[0].stop()
        serving = made.decodes[1 if gone else 0]
        serving.fault = "hang"
        request = asyncio.create_task(made.post(CHAT, TALK))
        await until(lambda: serving.seen)
        request.cancel()
        await made.metric_reaches(1, "pdx_proxy_cancels_total")
        await made.node.report(listen="ipc:///new")  # all hear of it, after what they heard before
        for node in nodes:
            heard = await node.heard(object)
            if isinstance(heard, Prefilled):  # the same nodes hear of that, too
                assert node.name in told
                heard = await node.heard(object)
            assert isinstance(heard, messages.Cancel) == (node.name in told), node.name


def content(body):
    """What a chat's user says."""
    return body["messages"][0]["content"]


async def test_a_plan_is_load():
    """Requests that are all still in prefill are spread over the decoders; whoever leaves takes the plan along."""
    async with cluster(decodes=3, **PATIENT) as made:
        await place(made, "one", "two", "three", "four")
        made.prefill.fault = "hold"
        requests = {}

        async def burst(*names):
            for name in names:
                body = {**TALK, "messages": [{"role": "user", "content": name}]}
                requests[name] = asyncio.create_task(made.post(CHAT, body))
            await until(lambda: len(made.prefill.seen) == len(requests))
            bodies = {content(body): body for body in made.prefill.bodies}
            return {name: bodies[name]["kv_transfer_params"]["decode_node"] for name in names}

        planned = await burst(*"abcdefghi")
        assert sorted(planned.values()) == ["four"] * 3 + ["three"] * 3 + ["two"] * 3
        left = {name for name, node in planned.items() if node == "four"}
        for name in left:
            requests[name].cancel()
        await made.metric_reaches(3, "pdx_proxy_requests_total", outcome="client_gone")
        assert set((await burst(*"xyz")).values()) == {"four"}
        made.prefill.released.set()
        await within(asyncio.gather(*(requests[name] for name in requests.keys() - left)))
        wanted = [[body for body in engine.bodies if content(body) not in left] for engine in made.decodes]
        assert [len(bodies) for bodies in wanted] == [3, 3, 3]


async def test_a_leg_that_has_started_is_no_plan_any_more():
    """It would count twice: with one leg each, the decoder whose turn came first is next."""
    async with cluster(decodes=2, **PATIENT) as made:
        first, second = made.decodes
        first.fault = second.fault = "hang"
        alone = {**BODY, "best_of": 2}
        requests = []
        for engine, body in ((first, TALK), (second, alone), (first, alone)):
            seen = len(engine.seen)
            path = CHAT if body is TALK else COMPLETIONS
            requests.append(asyncio.create_task(made.post(path, body)))
            await until(lambda engine=engine, seen=seen: len(engine.seen) > seen)
        for request in requests:
            request.cancel()


async def test_nodes_hear_of_each_other():
    async def hears_of(node, **nodes):
        while await node.peers() != nodes:  # it may first be told what was so before its own report
            pass

    async with cluster() as made:
        one, two, three = (made.other_node(name) for name in ("one", "two", "three"))
        second = {"listen": "ipc:///2", "public_key": "k" * 40}
        await two.report(**second)
        await hears_of(two, two="ipc:///2")
        await one.report(listen="ipc:///1")
        await hears_of(one, one="ipc:///1", two="ipc:///2")
        await hears_of(two, one="ipc:///1", two="ipc:///2")
        await three.report()  # it does not listen, but may want to reach the others
        await hears_of(three, one="ipc:///1", two="ipc:///2")
        one.epoch += 1  # restarted, at another address
        await one.report(listen="ipc:///3")
        await hears_of(two, one="ipc:///3", two="ipc:///2")
        made.pass_time(601.0)
        await two.report(**second)
        await hears_of(two, two="ipc:///2")  # one has fallen silent


async def test_a_node_that_says_something_else_each_time_is_not_echoed():
    """All nodes hear of a change, so one that makes many must not have them all told of each."""
    async with cluster(**PATIENT) as made:
        one, two = made.other_node("one"), made.other_node("two")
        await two.report()
        for number in range(100):
            await one.report(listen=f"ipc:///{number}")
        heard = 0
        while (await two.peers()).get("one") != "ipc:///99":
            heard += 1
        assert heard < 50


async def test_moments_of_another_host_are_told_by_this_hosts_clock(made):
    _, headers, _ = await made.post(COMPLETIONS, BODY)
    transfer = headers["x-pdx-transfer-id"]
    mark = Mark(transfer=transfer, event="pushed", at_ns=10**6, nbytes=5, tokens=0, engine="far")
    near = msgspec.structs.replace(mark, event="landed", engine="near")
    far_ns = 10**9  # what the other host's clock shows when it reports
    before_ns = time.monotonic_ns()
    await made.other_node("far").report(marks=[mark], host="another host", sent_ns=far_ns)
    await made.other_node("near").report(marks=[near], host=host_id(), sent_ns=far_ns)
    await made.metric_reaches(3, "pdx_proxy_reports_total")
    after_ns = time.monotonic_ns()
    at_ns = {each["event"]: each["at_ns"] for each in (await made.timeline(transfer))["moments"]}
    assert before_ns <= at_ns["pushed"] + far_ns - 10**6 <= after_ns
    assert at_ns["landed"] == 10**6


# ---- sessions ---------------------------------------------------------------------------------


async def test_nodes_hear_of_a_session_before_its_legs_which_name_it():
    async with cluster(**PATIENT) as made:
        await place(made, "one", "two")
        one, two = made.others
        long = "of a client, 🙂 " * 50
        told = set()
        for name, (path, body) in zip(("a", "a", long), REQUESTS.values(), strict=True):
            status, *_ = await made.post(path, body, headers={"X-Session-ID": name})
            assert status == 200
            session = await one.arriving()
            assert await two.arriving() == session
            assert len(session) == 32
            for engine in (made.prefill, made.decode):
                hints = {"version": 1, "session": session}
                assert engine.bodies[-1]["kv_transfer_params"]["pdx_hints"] == hints
            told.add(session)
        assert len(told) == 2, "one for each name"
        assert (await made.post(COMPLETIONS, BODY))[0] == 200
        assert "pdx_hints" not in made.prefill.bodies[-1]["kv_transfer_params"]
