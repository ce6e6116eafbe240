"""Hints of clients: no engine sees them but where PDX is, and the answer says what became of each."""

import asyncio
import json
from unittest.mock import Mock

import pytest
from proxy_harness import CHAT, COMPLETIONS, FORWARDED, Node, cluster
from read_at_once import parse

from pdx.proxy import hints
from pdx.proxy.cache import orders
from pdx.proxy.hints import digest
from pdx.telemetry.env import Env
from pdx.wire import messages
from pdx.wire.hints import Hints, Verdict, tenant
from pdx.wire.proxy import Arriving, Order, Reply
from pdx.wire.status import Explained, Explanation
from pdx.wire.verbs import Found, Why

BODY = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 4}
CHATTED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
SAID = {"version": 1, "session": "mine", "priority": 5, "lease_s": 90, "prefetch": ["next"], "color": "red"}
TOLD = {"version": 1, "session": digest("mine"), "priority": 5, "lease_s": 90.0, "prefetch": [digest("next")]}
NOTHING = 'refused;why="no node has answered to it"'


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(orders, "WHY_S", 5.0)


def explained(request, *verdicts):
    return Explanation(request, "engine", 0.0, 0.0, 1, 0, [], verdicts=list(verdicts))


async def asked_why(node):
    order = await node.heard(Order)
    assert (order.number, type(order.verb)) == (0, Why)
    return order.verb


async def answer(node, *verdicts):
    """The node is asked for one request, and tells this of its hints."""
    asked = (await asked_why(node)).request
    await node.socket.send(messages.encode(Reply(0, Explained([explained(f"cmpl-{asked}-0", *verdicts)], 1))))
    return asked


@pytest.mark.parametrize(("path", "body", "stream"), [(COMPLETIONS, BODY, True), (CHAT, CHATTED, False)])
async def test_engines_are_handed_the_envelope_and_clients_told_of_it(made, path, body, stream):
    verdicts = [Verdict("lease_s", "clipped", "longer is above", "60"), Verdict("priority", "accepted")]
    node = asyncio.create_task(answer(made.node, *verdicts))
    asks = {**body, "stream": stream, "pdx_hints": SAID, "cache_salt": "salt"}
    status, headers, _ = await made.post(path, asks, headers={"X-Request-Id": "abc"})
    assert status == 200
    assert await node == "abc"
    assert headers["X-PDX-Hints"].split(", ") == [
        f"session={NOTHING}",
        "priority=accepted",
        'lease_s=clipped:60;why="longer is above"',
        f"prefetch={NOTHING}",
        'color=refused;why="version 1 has no such field"',
    ]
    for engine in (made.prefill, made.decode):
        assert "pdx_hints" not in engine.bodies[-1], "it is no field of an engine's"
        assert engine.bodies[-1]["kv_transfer_params"]["pdx_hints"] == TOLD
        assert engine.bodies[-1]["cache_salt"] == "salt"


async def test_a_node_hears_of_the_session_within_its_tenant(made):
    for session, salt, told in (
        ({"X-Session-ID": "mine"}, {"cache_salt": "salt"}, ("mine", "salt")),
        ({}, {"pdx_hints": SAID}, ("mine", "")),
        ({"X-Session-ID": "other"}, {"pdx_hints": SAID, "cache_salt": "s"}, ("mine", "s")),
        ({"X-Session-ID": "other"}, {"pdx_hints": {"version": 1}, "cache_salt": 5}, ("other", "")),
    ):
        tell = asyncio.create_task(made.post(COMPLETIONS, {**BODY, **salt}, headers=session))
        arriving = await made.node.heard(Arriving)
        assert (arriving.session, arriving.salt) == (digest(told[0]), tenant(told[1]))
        if "pdx_hints" in salt and salt["pdx_hints"] is SAID:
            await answer(made.node)
        assert (await tell)[0] == 200


async def test_an_engine_that_pdx_is_not_in_gets_none_of_it(monkeypatch):
    monkeypatch.setattr(orders, "WHY_S", 0.05)
    async with cluster(known=False) as made:
        status, headers, _ = await made.post(CHAT, {**CHATTED, "pdx_hints": {"version": 1, "priority": 5}})
        assert status == 200
        assert headers["X-PDX-Hints"] == f"priority={NOTHING}"
        bodies = [*made.prefill.bodies, *made.decode.bodies]
        assert bodies
        assert not any("pdx_hints" in json.dumps(body) for body in bodies)


async def test_who_says_nothing_waits_for_nothing(made):
    for body in ({}, {"pdx_hints": None}, {"pdx_hints": {"version": 1}}):
        status, headers, _ = await made.post(COMPLETIONS, {**BODY, **body})
        assert status == 200
        assert "X-PDX-Hints" not in headers
    assert "pdx_hints" not in json.dumps(made.prefill.bodies)
    says = {**BODY, "pdx_hints": {"version": 1, "priority": 5}}
    asked = asyncio.create_task(made.post(COMPLETIONS, says, headers={"X-Request-Id": "says"}))
    assert await answer(made.node) == "says", "of the others no node was asked"
    assert (await asked)[0] == 200


async def test_an_envelope_that_makes_no_sense_costs_its_request_nothing(made, monkeypatch):
    monkeypatch.setattr(orders, "WHY_S", 0.01)
    many = {"version": 1, **{f"f{one}": 1 for one in range(1000)}}
    for bad in ("x", 5, [], {}, {"version": 2, "priority": 5}, many):
        status, headers, plain = await made.post(COMPLETIONS, {**BODY, "pdx_hints": bad})
        assert status == 200
        assert headers["X-PDX-Hints"].startswith("version=refused")
        assert json.loads(plain)["choices"]
    assert "pdx_hints" not in json.dumps([*made.prefill.bodies, *made.decode.bodies])


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 300 + b"]" * 300,
        b'{"version": 1, "demote": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"version":1,"session":"' + b"x" * hints.MAX_BYTES + b'"}',
        b'{"version": 1, "ttl_s": NaN, "lease_s": 1e999, "priority": -1, "reuse_s": 1e300}',
    ],
)
def test_what_is_deep_large_or_no_number_is_refused(raw):
    body, envelope = hints.take(parse(b'{"prompt": "x", "pdx_hints": ' + raw + b"}"), "")
    assert "pdx_hints" not in body
    assert envelope.hints == Hints("")
    assert {verdict.outcome for verdict in envelope.answer([])} == {"refused"}


@pytest.mark.parametrize(
    ("field", "stream"),
    [("session", True), ("prefetch", False), ("codec", True), ("request_id", False)],  # a stream cannot say the last
)
async def test_half_a_character_costs_its_request_nothing(made, field, stream):
    """Python's reader of JSON makes texts of it that have no bytes."""
    said = {"version": 1, "color": "red"}
    asks = {**BODY, "stream": stream, "pdx_hints": said}
    (asks if field == "request_id" else said)[field] = ["\ud800"] if field == "prefetch" else "\ud800"
    node = asyncio.create_task(answer(made.node)) if field != "request_id" else None
    status, headers, told = await made.post(COMPLETIONS, asks)
    assert status == 200
    assert 'color=refused;why="version 1 has no such field"' in headers["X-PDX-Hints"]
    assert b"choices" in told
    assert not made.proxy.env.counters["internal_errors"]
    if node is not None:
        await node


async def test_of_a_request_without_a_name_that_nodes_know_none_is_asked(made):
    asks = {**BODY, "pdx_hints": {"version": 1, "priority": 4}}
    for name in ("", "r" * 257):
        _, headers, _ = await made.post(COMPLETIONS, {**asks, "request_id": name})
        assert headers["X-PDX-Hints"] == f"priority={NOTHING}"
    tell = asyncio.create_task(made.post(COMPLETIONS, {**asks, "request_id": "named"}))
    assert await answer(made.node, Verdict("priority", "accepted")) == "named"
    assert (await tell)[1]["X-PDX-Hints"] == "priority=accepted"


async def test_what_clients_may_ask_for_is_clipped():
    async with cluster(client_priority=3) as made:
        node = asyncio.create_task(answer(made.node, Verdict("priority", "accepted")))
        _, headers, _ = await made.post(COMPLETIONS, {**BODY, "pdx_hints": {"version": 1, "priority": 4}})
        assert headers["X-PDX-Hints"] == 'priority=clipped:3;why="more is above --client-priority"'
        assert made.prefill.bodies[-1]["kv_transfer_params"]["pdx_hints"]["priority"] == 3
        await node
        node = asyncio.create_task(answer(made.node, Verdict("priority", "accepted")))
        _, headers, _ = await made.post(COMPLETIONS, {**BODY, "pdx_hints": {"version": 1, "priority": 3}})
        assert headers["X-PDX-Hints"] == "priority=accepted"
        await node


def one(request, outcome="accepted"):
    """A node tells of one request."""
    return Explained([explained(request, Verdict("priority", outcome))], 1)


async def test_what_others_say_or_of_other_requests_is_no_answer():
    async with cluster() as made:

        async def answer():
            assert (await asked_why(made.node)).request == "abc"
            for told in (one("cmpl-xyz-0", "refused"), one("cmpl-abcd-0", "clipped"), Found(1, 1, {}), one("x-abc-0")):
                await made.node.socket.send(messages.encode(Reply(0, told)))

        stranger = Node(made.node.address, "stranger")  # it has not reported
        await stranger.socket.send(messages.encode(Reply(0, one("cmpl-abc-0", "refused"))))
        node = asyncio.create_task(answer())
        asks = {**BODY, "pdx_hints": {"version": 1, "priority": 5}}
        _, told, _ = await made.post(COMPLETIONS, asks, headers={"X-Request-Id": "abc"})
        assert told["X-PDX-Hints"] == "priority=accepted"
        await node
        stranger.close()


async def test_only_so_many_may_wait_for_it(monkeypatch):
    monkeypatch.setattr(orders, "MAX_WHY", 1)
    asked = []
    made = orders.Orders(Mock(tell=lambda order, nodes: asked.append((order, nodes))), Env())
    first = asyncio.create_task(made.verdicts("a"))
    await asyncio.sleep(0)
    assert await made.verdicts("b") == []
    made.replied("n", Reply(0, one("cmpl-a-0")))
    assert (await first, asked) == ([Verdict("priority", "accepted")], [(Order(0, Why("a")), {""})])
