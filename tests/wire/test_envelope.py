"""The envelope of hints as it comes from outside: what is taken of it, and what is refused by name."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.wire import hints
from pdx.wire.hints import MAX_FIELDS, MAX_NAMED, Hints, Verdict, parse, tenant, worst
from pdx.wire.messages import Admit, ToNode, decode_to_node, encode

FULL = {
    "version": 1,
    "session": "chat 7",
    "priority": 5,
    "reuse_s": 60,
    "ttl_s": 3600.0,
    "lease_s": 0,
    "prefetch": ["chat 6"],
    "demote": True,
    "codec": "fp8",
    "prefetch_to": "gpu",
    "reuse": "moved",
}


def refused(envelope):
    return {verdict.field: verdict.text for verdict in parse(envelope).decided}


def test_an_envelope_is_what_nodes_are_told():
    found = parse(FULL, "tenant")
    assert found.hints == Hints(
        "chat 7", 5, 60.0, tenant("tenant"), 3600.0, 0.0, ["chat 6"], [""], "fp8", prefetch_to="gpu", reuse="moved"
    )
    assert found.said == tuple(FULL)[1:]
    assert found.hints.as_object() == FULL
    assert decode_to_node(encode(ToNode(1, True, Admit([], hints=found.hints)))).body.hints == found.hints


def test_nothing_said_is_nothing_asked():
    for envelope in (None, {"version": 1}, {"version": 1, "prefetch": False, "priority": 0, "demote": []}):
        found = parse(envelope)
        assert (found.hints, found.decided, found.hints.asks) == (Hints(""), (), [])
        assert {verdict.outcome for verdict in found.answer([])} <= {"accepted"}


def test_every_field_of_the_envelope_is_one_of_the_type_and_the_other_way_round():
    fields = {field.name for field in msgspec.structs.fields(Hints)} - {"salt", "form"}
    assert fields == set(hints._TYPES) == set(FULL) - {"version"}
    assert parse(FULL).hints.asks == [name for name in Hints.__struct_fields__ if name in fields]


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None, [], -1, 1 << 70])
def test_another_version_is_refused_as_a_whole(version):
    assert refused({**FULL, "version": version}) == {"version": "this is version 1"}
    assert parse({**FULL, "version": version}).hints == Hints("")


@pytest.mark.parametrize("envelope", [[], "x", 1, True, [["version", 1]], {}, {"session": "s"}])
def test_what_is_no_envelope_is_refused_as_a_whole(envelope):
    assert list(refused(envelope)) == ["version"]
    assert parse(envelope).hints == Hints("")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("session", bad) for bad in ("", "x" * 65, "\ud800", 1, None, ["s"])),
        *(("priority", bad) for bad in (-1, 10, 1.5, "5", True, None, 1 << 80)),
        *(
            (field, bad)
            for field in ("reuse_s", "ttl_s", "lease_s")
            for bad in (-1, -1e-9, 86_401, math.nan, math.inf, -math.inf, 1e308, "60", True, None, [1])
        ),
        *(
            (field, bad)
            for field in ("prefetch", "demote")
            for bad in (
                1,
                "s",
                None,
                [""],
                [1],
                [None],
                [["s"]],
                ["x" * 65],
                ["\ud800"],
                ["s"] * (MAX_NAMED + 1),
                {"s": True},
            )
        ),
        *(("codec", bad) for bad in ("", "zstd", 8, None, ["fp8"])),
        *(("prefetch_to", bad) for bad in ("", "disk", 0, None, ["gpu"])),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_and_the_others_are_taken(field, bad):
    found = parse({**FULL, field: bad})
    assert [verdict.field for verdict in found.decided] == [field]
    assert found.hints == msgspec.structs.replace(parse(FULL).hints, **{field: getattr(Hints(""), field)})


def test_a_tier_that_is_no_memory_is_refused_in_a_sentence():
    text = refused({**FULL, "prefetch_to": "disk"})["prefetch_to"]
    assert "it is host or gpu: another tier is no memory" in text


def test_fields_that_this_version_does_not_have_are_refused_by_name():
    found = parse({**FULL, "color": 1, "salt": "x", "a\nb\x1b": 1, "n" * 1000: {}})
    assert [verdict.field for verdict in found.decided] == ["color", "salt", "a?b?", "n" * 32]
    assert found.hints == parse(FULL).hints


def test_sizes_are_bounded():
    nested = current = []
    for _ in range(100_000):
        current.append([])
        current = current[0]
    assert list(refused({**FULL, "demote": nested, "deep": nested})) == ["demote", "deep"]
    assert "1001" in refused({"version": 1, **dict.fromkeys(map(str, range(1000)), 1)})["version"]
    most = {"version": 1, **dict.fromkeys(map(str, range(MAX_FIELDS - 1)), "x" * 10_000)}
    found = parse(most)
    assert len(found.answer([])) == MAX_FIELDS - 1
    assert len(msgspec.msgpack.encode(found.answer([]))) < 8192


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from([*FULL, "other"]), json_values | st.sampled_from(list(FULL.values())), max_size=9)
)
def test_whatever_is_said_each_field_has_one_answer_and_what_is_told_decodes(said):
    found = parse({"version": 1, **said}) if "version" not in said else parse(said)
    answer = found.answer([])
    assert len({verdict.field for verdict in answer}) == len(answer)
    assert decode_to_node(encode(ToNode(1, True, Admit([], hints=found.hints)))).body.hints == found.hints
    again = parse(json.loads(json.dumps(found.hints.as_object())))
    assert (again.hints, again.decided) == (found.hints, ())
    for verdict in answer:
        assert verdict.as_member.isascii()
        assert verdict.as_member.isprintable()


def test_the_answer_takes_the_worst_of_several_nodes():
    told = [Verdict("lease_s", "accepted"), Verdict("lease_s", "refused", "no"), Verdict("lease_s", "clipped", "", "5")]
    assert worst(told) == [Verdict("lease_s", "refused", "no")]
    found = parse({"version": 1, "lease_s": 9, "priority": 1, "ttl_s": 0}).answer(told)
    assert [(one.field, one.outcome) for one in found] == [
        ("lease_s", "refused"),
        ("priority", "refused"),
        ("ttl_s", "accepted"),
    ]


@pytest.mark.parametrize(
    ("verdict", "member", "told"),
    [
        (Verdict("priority", "accepted"), "priority=accepted", "accepted"),
        (Verdict("lease_s", "clipped", "a", "60"), 'lease_s=clipped:60;why="a"', "clipped to 60: a"),
        (Verdict("x y", "refused", 'say "a\\b" é\n'), "unknown=refused;why=\"say 'ab' \"", 'refused: say "a\\b" é\n'),
        (Verdict("x", "clipped", "", "6, y=1"), "x=clipped", "clipped to 6, y=1"),
    ],
)
def test_an_answer_is_told_in_a_header_and_in_a_sentence(verdict, member, told):
    assert (verdict.as_member, verdict.told) == (member, told)


def test_a_tenant_is_a_digest_of_its_salt():
    assert tenant(None) == tenant("") == b""
    assert len({tenant("a"), tenant("b"), tenant("a" * 10_000), tenant("\udcff")}) == 4
