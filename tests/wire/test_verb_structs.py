"""Verbs: each says all of itself, its JSON form has its bounds, and the page about them has its fields."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from wire_values import within

from pdx.errors import JobUnknown, ProtocolError, SelectionError
from pdx.wire.messages import RIGHTS
from pdx.wire.objects import Failure, decode_answers, encode_answers, form_of
from pdx.wire.prompt import Prompt, about
from pdx.wire.verbs import VERBS, AnyAnswer, AnyVerb, Clear, Evict, Find, Move, Selection, Verb, node_of

PAGE = Path(__file__).parents[2] / "docs" / "controller.md"
ANSWERS = inspect.type_info(AnyAnswer).types


def test_each_verb_declares_its_name_its_answers_and_who_says_it():
    assert set(VERBS.values()) == set(Verb.__subclasses__()) == set(AnyVerb.__args__)
    assert len(VERBS) == len(Verb.__subclasses__())
    assert {kind for verb in VERBS.values() for kind in verb.answers} == set(AnyAnswer.__args__)
    for kind, may in RIGHTS.items():
        assert {verb for verb in VERBS.values() if verb in may} == {v for v in VERBS.values() if kind in v.said_by}


def test_the_page_about_verbs_has_their_fields_and_answers():
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|[^|]*\|[^|]*\|([^|]*)\|$", PAGE.read_text(), re.M)
    told = [(name, re.findall(r"`(\w+)`", fields), re.findall(r"`(\w+)`", answers)) for name, fields, answers in rows]
    assert told == [
        (name, list(verb.__struct_fields__), [kind.__name__ for kind in verb.answers]) for name, verb in VERBS.items()
    ]


@given(st.one_of(*map(within, ANSWERS)))
def test_an_answer_comes_back_as_it_was(answer):
    failure = Failure("NodeError", "why")
    assert decode_answers(encode_answers({"a": answer}, {"b": failure})) == ({"a": answer}, {"b": failure})


@pytest.mark.parametrize("body", [b"", b"[]", b'{"nodes": {"a": {}}}', b'{"nodes": {"a": {"type": "Find"}}}', b"\xff"])
def test_what_is_no_answer_is_refused(body):
    with pytest.raises(ProtocolError):
        decode_answers(body)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Evict, b'{"below": 0, "nbytes": 1}'),
        (Evict, b'{"below": 1, "nbytes": -1}'),
        (Evict, b'{"below": 1, "nbytes": 1, "tier": 5}'),
        (Evict, b'{"below": 1, "nbytes": 1, "other": 5}'),
        (Move, b'{"source": "a"}'),
        (Move, b'{"source": "a", "target": "' + b"x" * 300 + b'"}'),
        (Clear, b'{"what": {"keys": ["xy"]}}'),
        (Clear, b'{"what": {"request": "' + b"x" * 300 + b'"}}'),
    ],
)
def test_a_form_has_the_bounds_of_its_verb(kind, body):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=form_of(kind))


@pytest.mark.parametrize(
    "name", ["", "alpha", "alpha:yesterday", ":3f-7", "alpha:3f-", "a\n:3f-7", "x" * 400 + ":3f-1"]
)
def test_what_is_no_jobs_name_is_refused(name):
    assert node_of("al:pha:3f-7") == "al:pha"
    with pytest.raises(JobUnknown, match="NODE:EPOCH-NUMBER"):
        node_of(name)


def test_a_prompt_names_its_chunks_in_one_way():
    key = "ab" * 16
    assert about(Find(Selection()), Prompt(keys=[key], shards=2), []).what == Selection([bytes.fromhex(key)], 2)
    assert about(Find(Selection()), Prompt(request="r"), []).what == Selection(request="r")
    for prompt in (Prompt(), Prompt(text="a", request="b"), Prompt(tokens=[1], keys=[key])):
        with pytest.raises(SelectionError, match="say which chunks by one of"):
            prompt.engines([])
    assert "salt" not in repr(Prompt(text="text", salt="salt"))
