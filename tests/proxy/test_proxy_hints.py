"""Hints of clients: no engine sees them but where PDX is, and the answer says what became of each."""

import asyncio
import json

import pytest
from proxy_harness import FORWARDED, cluster, run, within

from pdx.proxy import hints, why
from pdx.proxy.body import parse
from pdx.proxy.hints import digest
from pdx.wire import messages
from pdx.wire.hints import Hints, Verdict, tenant
from pdx.wire.messages import Advise, Advised, Explained, Explanation

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 4}
CHATTED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
SAID = {"version": 1, "session": "mine", "priority": 5, "lease_s": 90, "prefetch": ["next"], "color": "red"}
TOLD = {"version": 1, "session": digest("mine"), "priority": 5, "lease_s": 90.0, "prefetch": [digest("next")]}
NOTHING = 'refused;why="no node has answered to it"'


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(why, "WHY_S", 5.0)


def explained(request, *verdicts):
    return Explanation(request, "engine", 0.0, 0.0, 1, 0, [], verdicts=list(verdicts))


async def answer(node, *verdicts):
    """The node is asked for one request, and tells this of its hints."""
    asked = (await node._next(messages.Why)).request
    await node.socket.send(messages.encode(Explained([explained(f"cmpl-{asked}-0", *verdicts)], 1)))
    return asked


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, BODY), (CHAT, CHATTED)])
@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_of_pdx_are_handed_the_envelope_and_the_client_is_told_what_became_of_it(path, body, stream):
    async def main():
        async with cluster() as made:
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

    run(main)


def test_a_node_hears_of_the_session_within_its_tenant():
    async def main():
        async with cluster() as made:
            for session, salt, told in (
                ({"X-Session-ID": "mine"}, {"cache_salt": "salt"}, ("mine", "salt")),
                ({}, {"pdx_hints": SAID}, ("mine", "")),
                ({"X-Session-ID": "other"}, {"pdx_hints": SAID, "cache_salt": "s"}, ("mine", "s")),
                ({"X-Session-ID": "other"}, {"pdx_hints": {"version": 1}, "cache_salt": 5}, ("other", "")),
            ):
                tell = asyncio.create_task(made.post(COMPLETIONS, {**BODY, **salt}, headers=session))
                arriving = await made.node._next(messages.Arriving)
                assert (arriving.session, arriving.salt) == (digest(told[0]), tenant(told[1]))
                if "pdx_hints" in salt and salt["pdx_hints"] is SAID:
                    await answer(made.node)
                assert (await tell)[0] == 200

    run(main)


def test_an_engine_that_pdx_is_not_in_gets_none_of_it():
    async def main():
        async with cluster(known=False) as made:
            status, headers, _ = await made.post(CHAT, {**CHATTED, "pdx_hints": {"version": 1, "priority": 5}})
            assert status == 200
            assert headers["X-PDX-Hints"] == f"priority={NOTHING}"
            bodies = [*made.prefill.bodies, *made.decode.bodies]
            assert bodies
            assert not any("pdx_hints" in json.dumps(body) for body in bodies)

    run(main)


@pytest.mark.parametrize("body", [{}, {"pdx_hints": None}, {"pdx_hints": {"version": 1}}])
def test_who_says_nothing_waits_for_nothing(body, monkeypatch):
    monkeypatch.setattr(why.Explainer, "verdicts", None)  # would raise

    async def main():
        async with cluster() as made:
            status, headers, _ = await made.post(COMPLETIONS, {**BODY, **body})
            assert status == 200
            assert "X-PDX-Hints" not in headers
            assert "pdx_hints" not in json.dumps(made.prefill.bodies)

    run(main)


@pytest.mark.parametrize(
    "bad",
    ["x", 5, [], {}, {"version": 2, "priority": 5}, {"version": 1, **{f"f{one}": 1 for one in range(1000)}}],
)
def test_an_envelope_that_makes_no_sense_costs_its_request_nothing(bad, monkeypatch):
    monkeypatch.setattr(why, "WHY_S", 0.01)

    async def main():
        async with cluster() as made:
            status, headers, plain = await made.post(COMPLETIONS, {**BODY, "pdx_hints": bad})
            assert status == 200
            assert headers["X-PDX-Hints"].startswith("version=refused")
            assert "pdx_hints" not in json.dumps([*made.prefill.bodies, *made.decode.bodies])
            assert json.loads(plain)["choices"]

    run(main)


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


def test_what_clients_may_ask_for_is_clipped():
    async def main():
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

    run(main)


def test_other_names_for_it_are_still_removed():
    async def main():
        async with cluster() as made:
            own = {"kv_transfer_params": {"pdx_hints": SAID}, "vllm_xargs": {"kv_transfer_params": {"pdx_hints": SAID}}}
            status, headers, _ = await made.post(COMPLETIONS, {**BODY, **own})
            assert status == 200
            assert "X-PDX-Hints" not in headers
            assert "pdx_hints" not in json.dumps(made.prefill.bodies)

    run(main)


# ---- advice about sessions -----------------------------------------------------------------------


async def advise(made, body, **kwargs):
    status, _, raw = await made.post("/pdx/hints", body, base=made.admin, **kwargs)
    return status, json.loads(raw)


async def heed(node, *verdicts, number=None):
    advice = await node._next(Advise)
    await node.socket.send(messages.encode(Advised(list(verdicts), advice.number if number is None else number)))
    return advice


def test_advice_goes_to_all_nodes_and_each_answers():
    async def main():
        async with cluster() as made:
            other = made.other_node("other")
            await other.report()
            await made.metric_reaches(2, "pdx_proxy_reports_total")
            asked = asyncio.create_task(
                advise(made, {"version": 1, "session": "mine", "cache_salt": "s", "prefetch": True, "lease_s": 5})
            )
            accepted, no = Verdict("prefetch", "accepted"), Verdict("lease_s", "refused", "no room")
            first = await heed(made.node, accepted, Verdict("lease_s", "accepted"))
            second = await heed(other, accepted, no)
            assert first == second
            assert first.hints == Hints(digest("mine"), salt=tenant("s"), lease_s=5.0, prefetch=[""])
            session = "refused: no node has answered to it"
            assert await within(asked) == (
                200,
                {
                    "nodes": {
                        "node": {"session": session, "prefetch": "accepted", "lease_s": "accepted"},
                        "other": {"session": session, "prefetch": "accepted", "lease_s": "refused: no room"},
                    }
                },
            )

    run(main)


def test_a_node_that_is_silent_is_not_waited_for_for_long(monkeypatch):
    monkeypatch.setattr(hints, "ADVISE_S", 0.05)

    async def main():
        async with cluster() as made:
            stale = asyncio.create_task(heed(made.node, Verdict("session", "accepted"), number=77))
            assert await advise(made, {"version": 1, "session": "mine"}) == (200, {"nodes": {}})
            await stale
            assert made.proxy._advice._asked == {}

    run(main)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"version": 1}, "names no session"),
        ({"session": "s"}, "say which version"),
        ({"version": 1, "session": "s", "cache_salt": 5}, "is not a text"),
        ([1], "not a JSON object"),
        ({"version": 1, "session": ["s"]}, "names no session"),
    ],
)
def test_advice_that_makes_no_sense_is_refused(body, said):
    async def main():
        async with cluster() as made:
            status, told = await advise(made, body)
            assert status == 400
            assert said in told["error"]["message"]

    run(main)


def test_advice_is_for_who_runs_the_proxy_and_no_page_of_others_can_send_it():
    async def main():
        async with cluster() as made:
            assert (await made.post("/pdx/hints", {"version": 1, "session": "s"}))[0] == 404
            async with made.client.post(made.admin + "/pdx/hints", data=b'{"version":1,"session":"s"}') as response:
                assert response.status == 400
            large = {"version": 1, "session": "s", "x": "y" * hints.MAX_BYTES}
            assert (await made.post("/pdx/hints", large, base=made.admin))[0] == 413

    run(main)
