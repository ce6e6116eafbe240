"""Merging the two legs' answers, and cutting streams into events."""

import asyncio
import contextlib
import json
import tracemalloc
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import LegFailed, ProtocolError
from pdx.proxy import sse
from pdx.proxy.answer import AsItIs, FirstTokenDiffers, Forwarded, decode_prefill
from pdx.proxy.engines import Engine
from pdx.proxy.routes import Route

ENGINE = Engine(url="http://d", name="d", prefills=False, decodes=True, named=True)


def prefill(text="A", finish="length", tokens=(7,), prompt=(1, 2, 3)):
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": list(tokens)}
    choice["prompt_token_ids"] = list(prompt)
    whole = {"id": "cmpl-p", "object": "text_completion", "created": 5, "model": "m", "choices": [choice]}
    return json.dumps({**whole, "usage": usage, "kv_transfer_params": {"host": "10.0.0.1"}}).encode()


@given(
    st.lists(
        st.sampled_from([b"data: x\n\n", b": ping\n\n", b"data: y\r\n\r\n", b"event: e\ndata: 1\n\n", b"\n\n"]),
        max_size=6,
    ),
    st.data(),
)
def test_splitter_is_blind_to_how_bytes_arrive(events, data):
    stream = b"".join(events) + b"data: unfinished\n"
    splitter, found, at = sse.EventSplitter(), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, 40))
        found += splitter.feed(stream[at : at + step])
        at += step
    assert found == events


def test_splitter_is_bounded(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ProtocolError):
        sse.EventSplitter().feed(b"x" * 101)


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b"\xff", b'{"choices":[]}'),
        prefill().replace(b'"prompt_tokens": 3', b'"prompt_tokens": 0'),
        prefill("", "abort", ()).replace(b'"completion_tokens": 1', b'"completion_tokens": 0'),
    ],
)
def test_prefill_answer_must_be_one(raw):
    with pytest.raises(ProtocolError):
        decode_prefill(raw)


@pytest.mark.parametrize("route", [Route.RESPONSES, Route.MESSAGES])
def test_prefill_that_was_aborted_has_no_token(route):
    whole = b'{"usage":{"input_tokens":9,"output_tokens":%d}}'
    assert decode_prefill(whole % 1, route).usage.prompt_tokens == 9
    with pytest.raises(ProtocolError, match="0 tokens"):
        decode_prefill(whole % 0, route)


ROLE = b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
ABORTED = b'data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'
BEGUN = [(Route.CHAT, ROLE, ABORTED), (Route.CHAT, ROLE, b"")]
BEGUN += [
    (Route.MESSAGES, b"event: message_start\n\n", b'event: message_delta\ndata: {"delta":{"stop_reason":null}}\n\n'),
    (Route.CHAT, ROLE, b'data: {"error": {"code": 500}}\n\n'),
    (Route.CHAT, b": a line\n" + ROLE, b': a line\r\n:\r\ndata: {"error": {"code": 500}}\n\n'),
]


@pytest.mark.parametrize(("route", "begun", "end"), BEGUN)
def test_what_only_begins_an_answer_waits_for_the_rest(route, begun, end):
    """vLLM sends both at once; what the client has been sent no other engine can take back."""
    reply = MagicMock(writes=0, write=AsyncMock(), end=AsyncMock())
    leg = MagicMock(engine=ENGINE, read_some=AsyncMock(side_effect=[begun, end, b""]), drain=AsyncMock())
    with pytest.raises(LegFailed):
        asyncio.run(AsItIs(route).take(MagicMock(route=route, reply=reply), leg))
    assert not reply.write.called


def test_a_comment_is_no_part_of_an_answer():
    """With --sse-keep-alive-interval vLLM sends some before the first token, which may be another engine's."""
    comment, token = b": keep-alive\n\n", b"data: {}\n\n"
    said = []

    async def write(events, *, is_ahead):
        said.append((events, is_ahead, exchange.mark.called))

    exchange = MagicMock(route=Route.CHAT, reply=MagicMock(writes=0, write=write))
    leg = MagicMock(read_some=AsyncMock(side_effect=[comment, token + comment, comment, b""]))
    with pytest.raises(LegFailed):
        asyncio.run(AsItIs(Route.CHAT).take(exchange, leg))
    assert said == [(comment, True, False), (token + comment, False, True), (comment, True, True)]
    assert exchange.token.call_count == 1
    assert not exchange.metrics.itl[exchange.mode].observe.called


@pytest.mark.parametrize(
    ("status", "raw"),
    [
        (400, b"{}"),
        (200, b"{}"),
        (200, b'{"choices":[{"finish_reason":"abort"}]}'),
        (200, b'data: {"error": {"code": 400}}\n\n'),
    ],
)
def test_an_engine_that_has_sent_no_token_is_not_remembered_for_a_session(status, raw):
    exchange = MagicMock(route=Route.CHAT, reply=MagicMock(started=False, writes=0, write=AsyncMock()))
    leg = MagicMock(engine=ENGINE, is_stream=raw.startswith(b"data"), status=status)
    leg.read, leg.read_some = AsyncMock(return_value=raw), AsyncMock(side_effect=[raw, b""])
    with contextlib.suppress(LegFailed):
        asyncio.run(AsItIs(Route.CHAT).take(exchange, leg))
    assert not exchange.mark.called


def test_a_comment_is_known_without_memory_for_each_of_its_lines():
    comment = b":\n" * (1 << 16)
    tracemalloc.start()
    try:
        assert sse.is_comment(comment)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def behind(text="", *, continues=True):
    """The client has that much of the prefill engine; whether the decode engine has been told."""

    async def sent():
        there = asyncio.Event()
        whole = asyncio.get_running_loop().create_future()
        whole.set_result(decode_prefill(prefill(text)))
        reply = SimpleNamespace(write=AsyncMock(side_effect=lambda *_, **how: there.set()))
        shape = Forwarded(Route.COMPLETIONS, None, whole, lambda _: whole.result())
        decode = SimpleNamespace(engine=ENGINE, read_some=there.wait)
        await shape.first(SimpleNamespace(reply=reply, stream_options={}), decode)
        return shape

    shape = asyncio.run(sent())
    shape.continues = continues
    return shape


def chunk_of(text, finish=None):
    choice = {"index": 0, "text": text, "finish_reason": finish}
    chunk = {"id": "d", "object": "text_completion", "created": 9, "model": "m", "choices": [choice]}
    return sse.event(json.dumps(chunk, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ([("abc", None), ("abc", None)], ["", "abc"]),
        ([("abcd", None), ("e", None)], ["d", "e"]),
        ([("", None), ("a", None), ("bcde", "stop")], ["", "", "de"]),
        ([("abc", "length")], [""]),
    ],
)
def test_what_the_client_has_is_taken_out_of_the_decode_engines_answer(said, left):
    shape = behind("abc", continues=False)
    events = [shape.event(chunk_of(*each)) for each in said]
    found = [json.loads(sse.data(event))["choices"][0] if event else {"text": ""} for event in events]
    assert [each["text"] for each in found] == left
    assert [bool(event) for event in events] == [
        bool(text) or finish is not None for text, (_, finish) in zip(left, said, strict=True)
    ]


@pytest.mark.parametrize("said", [[("x", None)], [("ab", None), ("x", None)], [("", "stop")], [("ab", "stop")]])
def test_an_answer_that_begins_otherwise_is_another_one(said):
    shape = behind("abc", continues=False)
    *before, last = [chunk_of(*each) for each in said]
    assert [shape.event(event) for event in before] == [b""] * len(before)
    with pytest.raises(FirstTokenDiffers):
        shape.event(last)


def test_events_of_the_decode_leg():
    for event in (
        sse.DONE,
        b": ping\n\n",
        b'data: {"error": {"code": 1}}\n\n',
        b"data: not json\n\n",
        b"data: [1]\n\n",
    ):
        assert behind().event(event) == event
    chunk = {"id": "d", "created": 9, "model": "m", "choices": [{"text": "\ud800é"}]}
    chunk["usage"] = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    got = json.loads(sse.data(behind().event(b"data: " + json.dumps(chunk).encode() + b"\n\n")))
    assert (got["id"], got["created"], got["choices"]) == ("cmpl-p", 5, [{"text": "\ud800é"}])
    assert got["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


TAILS = [
    '{"index":0,"text":"a","finish_reason":null}]}',
    '{"index":0,"text":"\\"usage\\" é"}],"system_fingerprint":"x"}',
    '{"index":0,"text":"usage"}]}',
    '{"index":0,"text":"a"}],"usage":{"prompt_tokens":4,"completion_tokens":1,"total_tokens":5}}',
    '{"index":0,"text":"a"}],"metrics":{"x":1}}',
    "]}",
    '{"index":0,"text":"}],\\"choices\\":["}]}',
]
HEADS = [
    '"id":"d","object":"text_completion","created":9,"model":"m"',
    '"id":"d", "object":"text_completion","created":9,"model":"m"',
    '"model":"m","id":"d","object":"text_completion","created":9',
    '"id":"d","choices":[],"object":"text_completion","created":9,"model":"m"',
    '"id":"d","object":"text_completion","created":9',
]


@given(
    events=st.lists(st.tuples(st.sampled_from(HEADS), st.sampled_from(TAILS)), max_size=6),
    end=st.sampled_from(["\n\n", "\r\n\r\n", "\ndata: \n\n"]),
)
def test_events_that_begin_alike_come_out_as_if_each_had_been_read(events, end):
    stream = behind()
    for head, tail in events:
        event = f'data: {{{head},"choices":[{tail}{end}'.encode()
        one, other = stream.event(event), behind().event(event)
        if one != other:
            assert json.loads(sse.data(one)) == json.loads(sse.data(other))
