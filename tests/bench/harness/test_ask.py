"""The streaming client: what it reads from a stream, however the bytes arrive, and what it refuses to take for one."""

import asyncio
import json
import time

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import Script, serving

from pdx.bench.harness.ask import AskFailed, ask, completion, session


def event(fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text):
    return event({"choices": [{"index": 0, "text": text}]})


def usage(prompt=7, output=3):
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


DONE = b"data: [DONE]\n\n"
STREAM = token("a") + token("é") + token("") + token("c") + usage() + DONE


def asked(script, request_id="r1"):
    async def run():
        async with serving(script) as url, session() as client:
            return await ask(client, url, completion("tiny", "prompt", 3), request_id)

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_what_an_answer_says():
    script = Script([STREAM], headers={"x-pdx-transfer-id": "t1"})
    before_ns = time.monotonic_ns()
    answer = asked(script)
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("aéc", 7, 3)
    assert (answer.transfer, answer.request_id) == ("t1", "r1")
    assert script.request_ids == ["r1"]
    assert before_ns <= answer.sent_ns <= time.monotonic_ns()
    assert len(answer.itl_ms) == 2  # an event without text is no token
    assert 0 < answer.ttft_ms <= answer.e2e_ms
    assert answer.ttft_ms + sum(answer.itl_ms) <= answer.e2e_ms + 0.01  # gaps are rounded to a microsecond


def test_what_is_asked():
    script = Script([STREAM])
    asked(script)
    body = script.bodies[0]
    assert body["prompt"] == "prompt"
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (3, 0, True)
    assert body["stream"]
    assert body["stream_options"] == {"include_usage": True}


@settings(max_examples=examples(25))
@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12, unique=True).map(sorted))
def test_bytes_may_be_cut_anywhere(cuts):
    ends = [*cuts, len(STREAM)]
    chunks = [STREAM[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
    assert asked(Script(chunks)).text == "aéc"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (Script([b'{"error": "no such model"}'], status=404), "404.*no such model"),
        (Script([token("a"), event({"error": {"message": "engine died"}})]), "engine died"),
        (Script([token("a"), b"data: {not json\n\n"]), "not json"),
        (Script([token("a"), usage()]), "ended early, after 'a'"),  # no [DONE]
        (Script([token("a"), DONE]), "ended early"),  # no usage
        (Script([usage(), DONE]), "ended early"),  # no token
        (Script([token("a")], breaks=True), "broke off"),
    ],
)
def test_what_is_no_answer(script, says):
    with pytest.raises(AskFailed, match=says):
        asked(script)


def test_token_ids_of_an_answer_are_kept_where_they_are_asked_for():
    """A token whose text is not whole yet comes as an event without text."""
    ids = [event({"choices": [{"index": 0, "text": text, "token_ids": [each]}]}) for text, each in (("a", 5), ("", 6))]
    answer = asked(Script([b"".join(ids) + token("c") + usage() + DONE]))
    assert answer.token_ids == [5, 6]
    assert len(answer.itl_ms) == 2
    assert completion("tiny", [1], 3, wants_ids=True)["return_token_ids"] is True
    assert "return_token_ids" not in completion("tiny", [1], 3)
    assert asked(Script([STREAM])).token_ids == []
