"""Which answers of nodes count, of those that are asked what became of a request's hints."""

import asyncio
from unittest.mock import Mock

from proxy_harness import FORWARDED, Node, cluster

from pdx.proxy import why
from pdx.wire import messages
from pdx.wire.explained import Explained, Explanation
from pdx.wire.hints import Verdict
from pdx.wire.verbs import Why

ASKS = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 4, "pdx_hints": {"version": 1, "priority": 5}}
ACCEPTED = Verdict("priority", "accepted")


def explained(request, verdict=ACCEPTED):
    return Explained([Explanation(request, "engine", 0.0, 0.0, 8, 5, [], verdicts=[verdict])], 1)


async def test_what_others_say_or_of_other_requests_is_no_answer():
    async with cluster() as made:

        async def answer():
            assert (await made.node._next(Why)).request == "abc"
            for told in (explained("cmpl-xyz-0", Verdict("priority", "refused")), explained("cmpl-abc-0")):
                await made.node.socket.send(messages.encode(told))

        stranger = Node(made.node.address, "stranger")  # it has not reported
        await stranger.socket.send(messages.encode(explained("cmpl-abc-0", Verdict("priority", "refused"))))
        node = asyncio.create_task(answer())
        _, told, _ = await made.post("/v1/completions", ASKS, headers={"X-Request-Id": "abc"})
        assert told["X-PDX-Hints"] == "priority=accepted"
        await node
        stranger.close()


async def test_only_so_many_may_wait_for_it(monkeypatch):
    monkeypatch.setattr(why, "MAX_ASKED", 1)
    asked = []
    explainer = why.Explainer(Mock(ask_why=asked.append))
    first = asyncio.create_task(explainer.verdicts("a"))
    await asyncio.sleep(0)
    assert await explainer.verdicts("b") == []
    explainer.told(explained("cmpl-a-0"))
    assert (await first, asked) == ([ACCEPTED], ["a"])
