"""Which mode a body gets, and what the legs are asked."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_at_once import classify, parse

from pdx.proxy.body import arriving, as_engines_read, continuation_body, encode, prefill_body
from pdx.proxy.plan import ONE_TOKEN, Mode, Plan, strip_control, token_limit
from pdx.proxy.routes import GENERATING, Route

TRANSFER = "t" * 32
SIMPLE = {"model": "m", "prompt": "hello"}
STREAM = {**SIMPLE, "stream": True, "temperature": 0}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def mode(route=Route.COMPLETIONS, **fields):
    return classify(route, taken({**(STREAM if route is Route.COMPLETIONS else CHAT), **fields})).mode


def taken(body):
    """A client's body as the proxy has it."""
    return parse(json.dumps(body).encode())


def given_back(body):
    """What an engine reads of such a body."""
    return json.loads(bytes(encode(body)))


# Fields, and values with each of which a completion gets this mode.
ONE_BY_ONE = {
    Mode.FORWARD: {
        "prompt": ([1, 2, 3], [[1, 2, 3]], ["one"]), "logprobs": (None,), "response_format": ({"type": "text"},),
        "vllm_xargs": ({},), "n": (1,), "best_of": (1,), "echo": (False,), "use_beam_search": (False,),
        "bad_words": ([],), "stop": ([],), "user": ("u",), "cache_salt": ("s",), "frequency_penalty": (0.0,),
        "temperature": (0.0,), "seed": (1,), "stream": (1, "yes"), "stream_options": ({"include_usage": True},),
    },
    Mode.SAMPLED: {
        "stop": ("x", "", ["x"]), "logprobs": (0, 5), "presence_penalty": (0.1, False), "frequency_penalty": (-1,),
        "repetition_penalty": (1.1,), "temperature": (0.7, None, False, "0"),
        "stream": (None, False), "bad_words": (["x"],), "structured_outputs": ({"regex": "x"},),
        "guided_json": ({},), "response_format": ({"type": "json_object"},), "return_token_ids": (True,),
        "truncate_prompt_tokens": (5,), "spaces_between_special_tokens": (False,), "vllm_xargs": ({"x": 1},),
        "repetition_detection": ({},), "watermarking": (True,), "never_heard_of": (0,), "n": (2, "2"),
        "prompt": (["a", "b"], [[1], [2]], [[1], ["a"]], [[1, 2], [3]]),
    },
    Mode.ALONE: {
        "n": (0, "x"), "best_of": (2,), "use_beam_search": (True,), "echo": (True, 1), "prompt_logprobs": (0, -1),
        "prompt_embeds": ("x",), "suffix": ("",), "truncate_prompt_tokens": (-1,), "stream": ("si",),
        "prompt": ([["a"]], ["a"] * 1100, [], "", [""], [[]], [True], [1, "a"], None, {"a": 1}, [["a"]]),
        "max_tokens": (0, "5 tokens", 5.5), "min_tokens": (17, -1),
    },
}  # fmt: skip
TOGETHER = [
    (Mode.FORWARD, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}),
    (Mode.FORWARD, {"stop_token_ids": [3], "ignore_eos": True, "min_tokens": 4}),
    (Mode.FORWARD, {"presence_penalty": 0, "repetition_penalty": 1.0}),
    (Mode.SAMPLED, {"seed": 1, "temperature": 0.5}),
    (Mode.SAMPLED, {"seed": 1, "temperature": False}),
    (Mode.ALONE, {"stream_options": []}),
    (Mode.ALONE, {"stream": False, "stream_options": {"include_usage": True}}),
    (Mode.ALONE, {"max_tokens": 3, "min_tokens": 4}),
    (Mode.ALONE, {"prompt": ["a", "b"], "max_tokens": 1}),
]


@pytest.mark.parametrize(
    ("wanted", "fields"),
    TOGETHER
    + [(how, {name: each}) for how, row in ONE_BY_ONE.items() for name, values in row.items() for each in values],
)
def test_the_mode_of_a_completion(wanted, fields):
    assert mode(**fields) is wanted


def test_one_token_is_no_work_for_two_engines():
    for fields in ({"max_tokens": 1}, {"max_tokens": 1, "stream": True}, {"max_tokens": 1, "logprobs": 5}):
        assert classify(Route.COMPLETIONS, taken({**SIMPLE, **fields})) == Plan(Mode.ALONE, ONE_TOKEN)
    for fields in ({"max_tokens": 1}, {"max_completion_tokens": 1, "max_tokens": 9}):
        assert classify(Route.CHAT, taken({**CHAT, **fields})) == Plan(Mode.ALONE, ONE_TOKEN)
    assert mode(Route.CHAT, max_completion_tokens=9, max_tokens=1) is Mode.SAMPLED
    assert classify(Route.COMPLETIONS, taken({**SIMPLE, "max_tokens": 1, "n": 2})).why == ONE_TOKEN
    assert classify(Route.CHAT, taken({"messages": [], "max_tokens": 1})).why == "messages"


@pytest.mark.parametrize(
    ("route", "fields", "tokens"),
    [
        (Route.COMPLETIONS, {"prompt": "x" * 38}, 10),  # the quotes count, too
        (Route.COMPLETIONS, {"prompt": ["x" * 38]}, 10),
        (Route.COMPLETIONS, {"prompt": [1] * 10}, 10),
        (Route.COMPLETIONS, {"prompt": [[123456] * 10]}, 10),
        (Route.COMPLETIONS, {"prompt": ["x" * 36, "x" * 35]}, 9),  # on average
        (Route.CHAT, {"messages": [{"role": "user", "content": "x" * 9}]}, 10),
        (Route.CHAT, {"messages": [{"role": "user", "content": "x" * 9}], "tools": ["y" * 36]}, 20),
    ],
)
def test_prompts_of_fewer_tokens_than_the_least_are_not_split(route, fields, tokens):
    body = taken(fields)
    assert classify(route, body, min_split_tokens=tokens).mode is not Mode.ALONE
    assert classify(route, body, min_split_tokens=tokens + 1) == Plan(
        Mode.ALONE, "short_prompt", classify(route, body).least_length
    )


def test_a_picture_is_no_short_prompt():
    content = [{"type": "image_url", "image_url": {"url": "http://a/b"}}]
    body = taken({"messages": [{"role": "user", "content": content}]})
    assert classify(Route.CHAT, body, min_split_tokens=1000).mode is Mode.SAMPLED
    words = taken({"messages": [{"role": "user", "content": 'what does "content": [ mean?'}]})
    assert classify(Route.CHAT, words, min_split_tokens=1000).why == "short_prompt"


def test_chat():
    assert mode(Route.CHAT) is Mode.SAMPLED
    assert mode(Route.CHAT, tools=[{}], temperature=0, logprobs=True) is Mode.SAMPLED
    assert mode(Route.CHAT, n=2) is Mode.SAMPLED
    assert mode(Route.CHAT, echo=True) is Mode.ALONE
    assert mode(Route.CHAT, messages=[]) is Mode.ALONE
    assert mode(Route.CHAT, messages="hi") is Mode.ALONE
    assert mode(Route.CHAT, max_completion_tokens=0) is Mode.ALONE
    assert token_limit(Route.CHAT, {"max_tokens": 5, "max_completion_tokens": 7}) == 7
    assert token_limit(Route.CHAT, {"max_tokens": 5}) == 5
    assert token_limit(Route.CHAT, {}) is None
    assert token_limit(Route.COMPLETIONS, {}) == 16


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(
    ["prompt", "n", "stop", "stream", "stream_options", "max_tokens", "min_tokens", "seed", "temperature"]
    + ["logprobs", "echo", "messages", "vllm_xargs", "kv_transfer_params", "response_format", "best_of"]
)


@given(body=st.dictionaries(NAMES, JSON), route=st.sampled_from(sorted(GENERATING)))
def test_any_body_has_a_mode_and_its_legs_leave_it_as_it_was(body, route):
    before = {name: as_engines_read(name, value) for name, value in body.items()}
    body = taken(body)
    clean, stripped = strip_control(body)
    assert stripped == ("kv_transfer_params" in body)
    fields = given_back(clean)
    assert fields == {name: value for name, value in before.items() if name != "kv_transfer_params"}
    plan = classify(route, clean)
    if plan.mode is not Mode.ALONE:
        leg = given_back(prefill_body(route, clean, mode=plan.mode, transfer=TRANSFER))
        assert leg["max_tokens"] == 1
        assert leg["stream"] is False
        assert "stream_options" not in leg
        assert leg["kv_transfer_params"] == {"do_remote_decode": True, "transfer_id": TRANSFER}
        sampled = given_back(arriving(clean, prompt_tokens=3, cached_tokens=None, transfer=TRANSFER))
        assert {name: sampled[name] for name in fields} == fields
    assert given_back(body) == before


@pytest.mark.parametrize(("fields", "rest"), [({}, {}), ({"min_tokens": 3}, {"min_tokens": 2})])
def test_a_continuation_goes_on_behind_the_first_token(fields, rest):
    body = taken({**STREAM, "max_tokens": 9, **fields})
    leg = given_back(continuation_body(body, msgspec.Raw(b"[1, 2]"), 3, limit=7))
    assert leg == {**STREAM, "prompt": [1, 2, 3], "max_tokens": 6, **rest}
    assert given_back(body) == {**STREAM, "max_tokens": 9, **fields}


@given(name=st.text(min_size=1, max_size=12), value=JSON)
def test_a_field_nobody_has_thought_about_is_not_forwarded(name, value):
    unknown = f"x_{name}"
    assert (mode(**{unknown: value}) is Mode.FORWARD) == (value is None)
    assert classify(Route.COMPLETIONS, taken({**STREAM, unknown: 1})).why == "unknown_field"


def test_prefill_leg():
    client = {**SIMPLE, "max_tokens": 9, "min_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    leg = given_back(prefill_body(Route.COMPLETIONS, taken(client), mode=Mode.FORWARD, transfer=TRANSFER))
    assert leg == {
        **SIMPLE,
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": TRANSFER},
    }
    chat = {**CHAT, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2, "stop": "x", "tools": [{}]}
    chat |= {"response_format": {"type": "json_object"}, "continue_final_message": True}
    leg = given_back(prefill_body(Route.CHAT, taken(chat), mode=Mode.SAMPLED, transfer=TRANSFER))
    assert leg == {
        **CHAT,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "tools": [{}],
        "response_format": {"type": "json_object"},
        "continue_final_message": True,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": TRANSFER},
    }
