"""The header `X-PDX-Why`: what the nodes say of a request's chunks."""

import asyncio
from unittest.mock import Mock

import pytest
from proxy_harness import FORWARDED, Node, cluster

from pdx.proxy import why
from pdx.wire import messages
from pdx.wire.messages import Explained, Explanation, Reason

COMPLETIONS = "/v1/completions"
BODY = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 4}
ASKS = {"X-PDX-Why": "1", "X-Request-Id": "abc"}


def explained(engine, request):
    reasons = [
        Reason(0, 3, True, "memory", "from engine x, 1.0 s ago"),
        Reason(3, 2, True, "disk", "from disk at 1.00 GB/s, 0.0 s ago"),
        Reason(5, 1, False, "evicted", "evicted for request secret, 1.0 s ago"),
        Reason(6, 1, False, "new", "never stored here under this key"),
        Reason(7, 1, False, "evicted", "evicted for request another, 1.0 s ago"),
    ]
    return Explanation(request, engine, 0.0, 0.0, 8, 5, reasons)


async def answer(node, *found):
    """The node is asked, and tells this."""
    asked = (await node._next(messages.Why)).request
    await node.socket.send(messages.encode(Explained(list(found), len(found))))
    return asked


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_asks_is_told_in_a_header(made, stream):
    node = asyncio.create_task(
        answer(made.node, explained("decoder-1", "cmpl-abc-0"), explained("prefiller", "cmpl-abc-0"))
    )
    status, headers, _ = await made.post(COMPLETIONS, {**BODY, "stream": stream}, headers=ASKS)
    assert status == 200
    assert await node == "abc"
    parts = headers["X-PDX-Why"].split("; ")
    assert sorted(parts) == [
        f"{name} 5/8 chunks, from memory:3 disk:2, missing evicted:2 new:1" for name in ("decoder-", "prefille")
    ]


async def test_a_node_that_tells_without_end_makes_no_header_that_clients_refuse(made):
    """aiohttp's own client takes 8,190 bytes."""
    reasons = [Reason(0, 1, True, chr(0x4E00 + kind) * 16, "") for kind in range(64)]
    told = [Explanation("cmpl-abc-0", f"e{at}", 0.0, 0.0, 8, 5, reasons) for at in range(32)]
    node = asyncio.create_task(answer(made.node, *told))
    status, headers, _ = await made.post(COMPLETIONS, BODY, headers=ASKS)
    await node
    assert status == 200
    assert len(headers["X-PDX-Why"].encode()) < 8190


def test_names_of_others_are_not_told():
    told = why.summary(explained("decoder", "cmpl-abc-0"))
    assert "secret" not in told
    assert "another" not in told


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "abc"}])
async def test_who_does_not_ask_is_told_nothing_and_no_node_is_asked(headers, monkeypatch):
    monkeypatch.setattr(why.Explainer, "why", None)  # would raise
    async with cluster() as made:
        status, told, _ = await made.post(COMPLETIONS, BODY, headers=headers)
        assert status == 200
        assert "X-PDX-Why" not in told


async def test_without_debug_headers_nobody_is_told():
    async with cluster(debug_headers=False) as made:
        status, told, _ = await made.post(COMPLETIONS, BODY, headers=ASKS)
        assert status == 200
        assert "X-PDX-Why" not in told


async def test_nodes_that_do_not_answer_or_do_not_know_cost_a_moment(made):
    node = asyncio.create_task(answer(made.node))
    status, told, _ = await made.post(COMPLETIONS, BODY, headers=ASKS)
    assert status == 200
    assert told["X-PDX-Why"] == "no node knows this request"
    await node


async def test_what_a_node_says_of_another_request_is_no_answer(made):
    node = asyncio.create_task(answer(made.node, explained("e", "cmpl-xyz-0")))
    _, told, _ = await made.post(COMPLETIONS, BODY, headers=ASKS)
    assert told["X-PDX-Why"] == "no node knows this request"
    await node


async def test_who_has_not_reported_is_not_believed(made):
    stranger = Node(made.node.address, "stranger")
    await stranger.socket.send(messages.encode(Explained([explained("e", "cmpl-abc-0")], 1)))
    node = asyncio.create_task(answer(made.node, explained("decoder", "cmpl-abc-0")))
    _, told, _ = await made.post(COMPLETIONS, BODY, headers=ASKS)
    assert told["X-PDX-Why"].startswith("decoder 5/8")
    await node
    stranger.close()


async def test_only_so_many_may_wait_for_it(monkeypatch):
    monkeypatch.setattr(why, "MAX_ASKED", 1)
    asked = []
    explainer = why.Explainer(Mock(ask_why=asked.append))
    first = asyncio.create_task(explainer.why("a"))
    await asyncio.sleep(0)
    assert await explainer.why("b") == "too many ask"
    explainer.told(Explained([explained("e", "cmpl-a-0")], 1))
    assert (await first).startswith("e 5/8")
    assert asked == ["a"]
