"""Chats, whose two legs are under way at once: when the second one is sent, and which waits for the other."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest
from engine_standin import Server, transfer_of
from proxy_harness import CHAT, TALK, cluster, events, until, within

from pdx.proxy import relay
from pdx.wire.messages import Mark


@asynccontextmanager
async def held_chat(*, stream=False, details=False):
    """A chat whose two legs are under way, and whose prefill engine holds its own: the request, and its transfer."""
    async with cluster(server=Server(details=details)) as made:
        made.prefill.fault = "hold"
        body = {**TALK, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        request = asyncio.create_task(made.post(CHAT, body))
        await within(asyncio.gather(made.prefill.arrived.wait(), made.decode.arrived.wait()))
        yield made, request, transfer_of(made.decode)


async def test_both_legs_of_a_chat_are_sent_at_once():
    async with held_chat() as (made, request, transfer):
        params = made.decode.bodies[0]["kv_transfer_params"]
        assert (params["is_early"], "prefill_tokens" in params) == (True, False)
        assert transfer_of(made.prefill) == transfer
        assert not request.done(), "its engine waits for the transfer"
        made.prefill.released.set()
        status, headers, _ = await within(request)
        assert (status, headers["x-pdx-mode"]) == (200, "sampled")
        assert (len(made.prefill.seen), len(made.decode.seen)) == (1, 1)
        assert await made.node.prefilled() == transfer


LONG = {"messages": [{"role": "user", "content": "word " * 200 * 3}], "temperature": 0, "max_tokens": 12}


@asynccontextmanager
async def held_long_chat():
    """A chat of a long prompt, whose prefill engine holds its leg: the request, and its transfer."""
    async with cluster(server=Server(model_len=8192)) as made:
        made.prefill.fault = "hold"
        request = asyncio.create_task(made.post(CHAT, LONG))
        await within(made.prefill.arrived.wait())
        for _ in range(5):  # all in one event loop: the decode leg would be there by then
            await made.get("/health")
        assert not made.decode.seen
        yield made, request, transfer_of(made.prefill)


async def test_the_decode_leg_of_a_long_prompt_is_sent_when_prefill_comes_to_its_end():
    """A node says so: an engine with a request that waits is busy, although it computes nothing."""
    async with held_long_chat() as (made, request, transfer):
        near = Mark(transfer=transfer, event="near", at_ns=time.monotonic_ns())
        engines = [("p0", "prefill", made.prefill.url), ("d0", "decode", made.decode.url)]
        await made.node.report(*engines, marks=[near], facts=made.decode.server.facts)
        await within(made.decode.arrived.wait())
        assert made.decode.bodies[0]["kv_transfer_params"]["is_early"]
        assert not request.done()
        made.prefill.released.set()
        status, headers, _ = await within(request)
        assert (status, headers["x-pdx-mode"]) == (200, "sampled")


async def test_a_long_prompt_of_which_no_node_says_anything_has_its_decode_leg_behind_prefill():
    async with held_long_chat() as (made, request, transfer):
        made.prefill.released.set()
        assert (await within(request))[0] == 200
        params = made.decode.bodies[0]["kv_transfer_params"]
        assert (params["transfer_id"], "is_early" in params) == (transfer, False)


async def test_a_client_that_leaves_before_the_decode_leg_of_a_long_prompt():
    async with held_long_chat() as (made, request, transfer):
        request.cancel()
        await within(made.prefill.closed.wait())
        assert await made.node.cancelled() == transfer
        assert not made.decode.seen


async def test_where_no_node_could_be_told_the_legs_of_a_chat_follow_each_other():
    async with cluster(known=False) as made:
        status, headers, _ = await made.post(CHAT, TALK)
        assert (status, headers["x-pdx-mode"]) == (200, "sampled")
        params = made.decode.bodies[0]["kv_transfer_params"]
        assert ("is_early" in params, params["prefill_tokens"] > 1) == (False, True)


async def test_another_decoder_is_asked_while_the_prefill_of_a_chat_goes_on():
    async with cluster(decodes=2) as made:
        made.prefill.fault = "hold"
        made.decodes[0].fault = 503
        requests = [asyncio.create_task(made.post(CHAT, TALK)) for _ in range(2)]
        await until(lambda: len(made.decodes[1].seen) == 2)
        made.prefill.released.set()
        for request in requests:
            status, headers, _ = await within(request)
            assert (status, headers["x-pdx-mode"]) == (200, "sampled")


def cached_tokens(raw, *, stream):
    usage = events(raw)[-2]["usage"] if stream else json.loads(raw)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_usage_of_a_chat_waits_for_what_the_prefill_engine_had(stream):
    async with held_chat(stream=stream, details=True) as (made, request, transfer):
        made.decode.settled[transfer].set()  # all KV has arrived, and the answer is whole
        await within(made.decode.answered.wait())
        for _ in range(20):  # all in one event loop: the proxy has its answer by then
            await made.get("/health")
        made.prefill.released.set()
        status, headers, raw = await within(request)
        assert (status, headers["x-pdx-mode"]) == (200, "sampled")
        body = {**TALK, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        had = cached_tokens((await made.post(CHAT, body, base=made.prefill.url))[2], stream=stream)
        assert cached_tokens(raw, stream=stream) == had
        assert await made.node.prefilled() == transfer
        assert await made.metric("pdx_proxy_cancels_total", reason="prefill_late") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_does_not_wait_for_a_prefill_engine_that_hangs(stream, monkeypatch):
    """Neither its end nor its usage, which is the decode engine's own then."""
    monkeypatch.setattr(relay, "USAGE_S", 0.05)
    async with held_chat(stream=stream, details=True) as (made, request, transfer):
        made.decode.settled[transfer].set()  # by its own deadline
        status, _, raw = await within(request)
        assert (status, cached_tokens(raw, stream=stream) > 0) == (200, True)
        await within(made.prefill.closed.wait())
        assert await made.node.cancelled() == transfer
        assert await made.metric("pdx_proxy_cancels_total", reason="prefill_late") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_leg_may_end_a_little_later_than_its_decode_leg(stream, monkeypatch):
    monkeypatch.setattr(relay, "UNREAD_S", 30.0)
    async with held_chat(stream=stream) as (made, request, transfer):
        made.decode.settled[transfer].set()  # all KV has arrived
        await within(made.decode.answered.wait())
        if stream:
            await within(asyncio.wait([request]))
        made.prefill.released.set()
        status, headers, _ = await within(request)
        assert (status, headers["x-pdx-mode"]) == (200, "sampled")
        assert await made.node.prefilled() == transfer
        assert not made.prefill.closed.is_set()


async def test_a_chat_that_its_decode_engine_refuses_is_not_late(made):
    made.prefill.fault = "hold"
    made.decode.fault = 404
    assert (await made.post(CHAT, TALK))[0] == 404
    await within(made.prefill.closed.wait())
    assert await made.node.cancelled() == transfer_of(made.prefill)
    assert await made.metric("pdx_proxy_cancels_total", reason="decode_refused") == 1
