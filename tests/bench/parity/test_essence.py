"""What of two answers has to be equal."""

import io
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pdx.bench.parity import report
from pdx.bench.parity.cases import Maker
from pdx.bench.parity.essence import differences, essence, path_text
from pdx.bench.parity.records import Answer, Asked, Call, Case, Recording, Way, posted
from pdx.bench.parity.run import judge
from pdx.errors import ConfigError

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
CASE = posted("a", "/v1/completions", {"prompt": "a"})


def whole(status=200, headers=JSON, **fields):
    return Answer(status=status, headers=headers, content=json.dumps(fields).encode())


def completion(text="a", **fields):
    choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
    return whole(id="cmpl-1", created=5, choices=[choice], usage={"prompt_tokens": 3}, **fields)


def stream(*chunks, end="data: [DONE]\n\n", headers=EVENTS):
    """`chunks`: texts, or whole events."""
    made = [
        each if isinstance(each, dict) else {"id": "cmpl-1", "choices": [{"index": 0, "text": each}]} for each in chunks
    ]
    text = "".join(f"data: {json.dumps(each)}\n\n" for each in made)
    return Answer(status=200, headers=headers, content=(text + end).encode())


def paths(one, other):
    return [path_text(each.path) for each in differences(essence(one), essence(other))]


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (completion(), []),
        (whole(id="cmpl-77", created=9, choices=[], usage={}), ["body.choices", "body.usage.prompt_tokens"]),
        (completion("b"), ["body.choices[0].text"]),
        (completion(kv_transfer_params={"a": 1}, system_fingerprint="x"), []),
        (completion(more=1), ["body.more"]),
        (
            whole(400, error={"code": 400}),
            ["status", "body.id", "body.created", "body.choices", "body.usage", "body.error"],
        ),
        (Answer(fault="no answer: OSError"), ["status", "headers.content-type", "body", "fault"]),
        (Answer(status=200, headers={**JSON, "date": "x", "content-length": "1"}, content=completion().content), []),
        (Answer(status=200, headers={**JSON, "x-odd": "x"}, content=completion().content), ["headers.x-odd"]),
    ],
)
def test_names_times_and_connections_make_no_difference(other, where):
    assert paths(completion(), other) == where


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        ({"id": "cmpl-1"}, {"id": "chatcmpl-1"}, False),
        ({"id": "parity-1"}, {"id": "parity-2"}, False),
        ({"id": "a", "object": "model"}, {"id": "b", "object": "model"}, False),
        ({"usage": {"cached_tokens": 5}}, {"usage": {"cached_tokens": None}}, True),
        ({"logprob": -1.0}, {"logprob": -1.0000001}, True),
        ({"logprob": -1.0}, {"logprob": -1.1}, False),
        ({"count": 1}, {"count": True}, False),
        ({"count": 1000}, {"count": 1001}, False),
        (
            {"input_tokens": 8, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0},
            {"input_tokens": 1, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3},
            True,
        ),
        (
            {"input_tokens": 8, "cache_read_input_tokens": 0},
            {"input_tokens": 8, "cache_read_input_tokens": 4},
            False,
        ),
    ],
)
def test_counts_of_caches_and_last_digits_make_no_difference(one, other, is_equal):
    assert (paths(whole(**one), whole(**other)) == []) == is_equal


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [
        (stream("ab", "c"), True),
        (stream("abc"), True),
        (stream("a", "b", "d"), False),
        (stream("a", "b", "c", end=""), False),
        (stream("a", "b", {"id": "cmpl-2", "choices": [{"index": 0, "text": "c"}]}), False),
        (stream("a", "b", {"id": "cmpl-1", "choices": [{"index": 0, "text": "c", "more": 1}]}), False),
        (stream("abc", end="data: [DONE]\n\nodd\n\n"), False),
        (stream("abc", end=": still here\n\ndata: [DONE]\n\n"), True),
        (stream("abc", end='data: {"error": 5}\n\ndata: [DONE]\n\n'), False),
    ],
)
def test_a_stream_is_what_its_client_makes_of_it(other, is_equal):
    assert (paths(stream("a", "b", "c"), other) == []) == is_equal


def test_answers_side_by_side_in_a_stream_are_joined_each_for_itself():
    def chunks(*order):
        return stream(*({"choices": [{"index": at, "text": text}]} for at, text in order))

    one = chunks((0, "a"), (1, "x"), (0, "b"), (1, "y"))
    assert paths(one, chunks((0, "a"), (0, "b"), (1, "x"), (1, "y"))) == []
    assert paths(one, chunks((0, "a"), (1, "y"), (0, "b"), (1, "x"))) == ["body.events[0].data.choices[1].text"]


def test_the_event_that_says_who_speaks_is_none_of_tokens():
    """The client of OpenAI writes all fields of each event, null where there is none."""

    def chunks(*deltas):
        return stream(*({"choices": [{"index": 0, "delta": each}]} for each in deltas))

    said = {"role": "assistant", "content": ""}
    for more in ({}, {"role": None}):
        one, two, both = ({"content": text, **more} for text in ("a", "b", "ab"))
        assert paths(chunks(said, one, two), chunks(said, both)) == []
    assert paths(chunks(said, {"content": "a"}), chunks({"role": "assistant", "content": "a"})) == ["body.events"]


def test_events_of_tokens_have_one_form_and_count_up():
    def chunks(*texts, **first):
        """The last one ends it."""
        made: list = [{"index": 0, "text": text, "finish_reason": None} for text in texts]
        made[0] |= first
        made[-1] |= {"finish_reason": "length", "stop_reason": None}
        return stream(*({"choices": [each]} for each in made))

    def counted(*counts):
        return stream(*({"choices": [{"text": "a" * 9}], "usage": {"completion_tokens": each}} for each in counts))

    whole = chunks("a", "b", "c")
    assert paths(whole, chunks("ab", "c")) == paths(whole, chunks("abc")) == paths(chunks("abc"), whole) == []
    assert paths(whole, chunks("a", "b", "c", stop_reason=None)) == ["body.forms of tokens"]
    assert paths(counted(1, 2, 9), counted(1, 5, 9))[1:] == []
    assert "body.counts up" in paths(counted(1, 2, 9), counted(2, 2, 9))


def test_events_that_are_numbered_count_up():
    def numbered(*numbers):
        return stream(*({"type": "a", "sequence_number": each} for each in numbers), end="")

    assert paths(numbered(0, 1, 2), numbered(0, 1)) == []
    assert paths(numbered(0, 1, 2), numbered(0, 0, 1)) == ["body.counts up"]


def test_where_plain_differs_from_plain_only_the_form_is_compared():
    asked = Asked(case=CASE, first=completion("a", usage2=5), second=completion("b", usage2=5))
    assert judge(asked, completion("c", usage2=5)).differences == []
    assert judge(asked, completion("c", usage2=5)).loose == [("body", "choices", "[]", "text")]
    assert [path_text(each.path) for each in judge(asked, completion(5, usage2=6)).differences] == [
        "body.choices[0].text",
        "body.usage2",
    ]


def test_of_tokens_that_are_drawn_only_the_form_is_compared():
    case = posted("a", "/v1/completions", {}, is_random=True)
    asked = Asked(case=case, first=completion("a"), second=completion("a"))
    assert judge(asked, completion("b")).differences == []
    assert judge(asked, completion("b", more=5)).differences != []
    assert judge(asked, whole(400)).differences != []


@pytest.mark.parametrize("bad", [Answer(fault="no whole answer within 1 s"), whole(500)])
def test_what_plain_does_not_answer_alike_is_not_compared(bad):
    for first, second in ((bad, completion()), (completion(), bad)):
        verdict = judge(Asked(case=CASE, first=first, second=second), completion("z"))
        assert verdict.uncompared
        assert verdict.differences == []


@pytest.mark.parametrize("count", [10, 500, 1500])
def test_a_seed_gives_the_same_cases(count):
    def made(seed):
        return Maker("m", 4096, seed).cases(count, ["openai", "anthropic"])

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert len({case.name for case in made(1)}) == count


def test_every_case_can_be_repeated_from_a_shell():
    for case in Maker("m", 4096, 0).cases(1500, ["openai", "anthropic"]):
        line = case.shell_command("http://a:1")
        assert "http://a:1" in line
        assert len(line) < 12_000


def test_a_recording_is_read_as_it_was_written(tmp_path):
    call = Case(name="b", endpoint="e", call=Call(library="openai", method="models.list"), way=Way.LEAVES)
    asked = [Asked(case=each, first=whole(a=1), second=Answer(content=b"\xff\0")) for each in (CASE, call)]
    made = Recording(url="u", model="m", seed=3, asked=asked, unasked={"a": "b"})
    made.write(tmp_path / "in" / "r.json")
    assert Recording.read(tmp_path / "in" / "r.json") == made
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(ConfigError, match="no recording"):
        Recording.read(tmp_path / "r.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording.read(tmp_path / "none.json")


NAMES = [
    "id",
    "choices",
    "index",
    "delta",
    "role",
    "usage",
    "text",
    "sequence_number",
    "input_tokens",
    "created",
    "data",
]
VALUES = st.recursive(
    st.sampled_from([None, True, 5, 1.5, float("nan"), "x\x1b[2J\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, "\x1b", "\udc00"]), inner),
    max_leaves=12,
)
EVENT = st.builds(
    "{}{}{}".format,
    st.sampled_from(["data: ", "event: a\ndata: ", ": ", "odd"]),
    VALUES.map(json.dumps),
    st.just("\n\n"),
)
ANSWERS = st.builds(
    Answer,
    status=st.sampled_from([200, 400, 404, 405, 500]),
    headers=st.sampled_from([JSON, EVENTS, {}, {"location": "http://[x"}, {"endpoint-load-metrics": ""}]),
    content=st.lists(EVENT, max_size=4).map("".join).map(str.encode)
    | VALUES.map(json.dumps).map(str.encode)
    | st.sampled_from([b"[" * 5000, b"[" * 400 + b"]" * 400, b"\xff\x00"]),
)


@settings(deadline=None)
@given(one=ANSWERS, two=ANSWERS, other=ANSWERS)
def test_no_answer_ends_it_or_steers_the_terminal(one, two, other):
    verdicts = [
        judge(Asked(case=CASE, first=one, second=two), other),
        judge(Asked(case=CASE, first=one, second=one), other),
    ]
    recording = Recording(url="u", model="m", seed=0, asked=[])
    out = io.StringIO()
    report.show(Console(file=out, markup=False, highlight=False), recording, verdicts, "http://a")
    assert "\x1b" not in out.getvalue()
    with tempfile.NamedTemporaryFile() as file:
        report.write(Path(file.name), recording, verdicts, "http://a")
        assert json.load(file)["endpoints"][0]["cases"] == 2
