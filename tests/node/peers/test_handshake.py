"""How two nodes come to trust each other, without any socket: the table of a connection, and who is refused and why."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import PeerRefused
from pdx.node.peers.connection import CONNECTION, ConnectionState, ConnectionStep, Identity, check_hello, check_welcome
from pdx.transports.channel import RemoteRegion
from pdx.wire.messages import VERSION, Hello, Welcome

OWN = Identity(name="own", epoch=1, host="h", pid=2, schemes=("nixl", "shm", "tcp"), layouts=(b"a", b"b"))
OWN = msgspec.structs.replace(OWN, without={"fog": "too thick", "rain": "too wet"})


def hello(**fields):
    values = {"version": VERSION, "name": "peer", "epoch": 9, "host": "g", "pid": 3, "schemes": ["tcp", "nixl"]}
    return Hello(**{**values, **fields}, kind="peer")


def welcome(schemes=("tcp", "nixl"), **fields):
    regions = [RemoteRegion(scheme, 1, b"t" * 16, b"") for scheme in schemes]
    values = {"version": VERSION, "name": "peer", "epoch": 9, "host": "g", "pid": 3, "regions": regions}
    return Welcome(**{**values, **fields})


def check(message, authenticated=None, is_over=False):
    return check_hello(OWN, message, authenticated=authenticated, is_over=is_over)


# ---- the tables ---------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [ConnectionState.DIALING, ConnectionState.NEW])
def test_every_state_is_reached_and_every_step_is_used(first):
    reached, todo = {first}, [first]
    while todo:
        now = todo.pop()
        after = {target for (state, _), target in CONNECTION.items() if state is now}
        todo += after - reached
        reached |= after
    assert reached == {first, ConnectionState.READY, ConnectionState.CLOSED}
    assert {step for _, step in CONNECTION} == set(ConnectionStep)


def test_a_connection_can_always_be_ended_and_never_opens_again():
    for state in ConnectionState:
        ends = {step for step in ConnectionStep if CONNECTION.get((state, step)) is ConnectionState.CLOSED}
        assert ends == (set() if state is ConnectionState.CLOSED else set(ConnectionStep) - {ConnectionStep.WELCOME})


@given(
    st.sampled_from([ConnectionState.DIALING, ConnectionState.NEW]),
    st.lists(st.sampled_from(ConnectionStep), max_size=30),
)
def test_a_walk_of_a_connection_goes_forward_only_and_is_ready_only_after_a_welcome(first, steps):
    state, taken = first, []
    for step in steps:
        after = CONNECTION.get((state, step))
        if after is None:
            continue
        taken.append(step)
        assert after is not state
        assert after not in (ConnectionState.DIALING, ConnectionState.NEW)
        assert (after is ConnectionState.READY) == (taken == [ConnectionStep.WELCOME])
        state = after


# ---- hello --------------------------------------------------------------------------------------


def test_schemes_are_those_of_both_in_our_order():
    assert check(hello()) == ["nixl", "tcp"]
    assert check(hello(schemes=["tcp", "smoke", "shm"])) == ["shm", "tcp"]
    assert check(hello(), authenticated="peer") == ["nixl", "tcp"]


@pytest.mark.parametrize(
    ("message", "given_name", "is_over", "why"),
    [
        (hello(version=VERSION + 1), None, False, "upgrade the older"),
        (hello(version=0), "peer", False, "upgrade the older"),
        (hello(), "other", False, "the key is that of 'other', not of 'peer'"),
        (hello(name=""), "peer", False, "the key is that of"),
        (hello(name="own"), None, False, "two nodes are named"),
        (hello(name="own"), "own", False, "two nodes are named"),
        (hello(name=""), None, False, "without a name"),
        (hello(name="disk"), None, False, "cannot be named 'disk'"),
        (hello(), None, True, "has ended"),
        (hello(), "peer", True, "has ended"),
        (hello(layouts=[b"c"]), None, False, "no engine of 'peer' has the KV layout"),
        (hello(schemes=[]), None, False, "the other none"),
        (hello(schemes=["smoke"]), None, False, "no channel in common"),
    ],
)
def test_a_hello_is_refused_with_the_reason(message, given_name, is_over, why):
    with pytest.raises(PeerRefused, match=why):
        check(message, authenticated=given_name, is_over=is_over)


@pytest.mark.parametrize(("ours", "theirs"), [((), [b"c"]), ((b"a",), []), ((), []), ((b"a", b"c"), [b"c"])])
def test_layouts_matter_only_where_both_sides_have_engines(ours, theirs):
    own = Identity(name="own", epoch=1, host="h", pid=2, schemes=("tcp",), layouts=ours)
    assert check_hello(own, hello(layouts=theirs), authenticated=None, is_over=False) == ["tcp"]


def test_what_a_node_says_of_itself():
    message = OWN.hello()
    assert (message.version, message.name, message.epoch, message.host, message.pid) == (VERSION, "own", 1, "h", 2)
    assert message.schemes == ["nixl", "shm", "tcp"]
    twice = Identity(name="own", epoch=1, host="h", pid=2, schemes=(), layouts=(b"b", b"a", b"b"))
    assert twice.hello().layouts == [b"a", b"b"]


# ---- welcome ------------------------------------------------------------------------------------


def test_a_welcome_gives_what_was_opened_in_our_order():
    assert check_welcome(OWN, "peer", welcome()) == ["nixl", "tcp"]
    assert check_welcome(OWN, "peer", welcome(["tcp"])) == ["tcp"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (welcome(version=VERSION + 1), "upgrade the older"),
        (welcome(name="third"), "the roster has a wrong address"),
        (welcome(epoch=1), "this node itself"),
        (welcome(layouts=[b"c"]), "no engine of 'peer'"),
        (welcome([]), "no channel in common"),
        (welcome(["smoke"]), "no channel in common"),
        (welcome(["smoke", "fog"]), "; fog: too thick$"),
    ],
)
def test_a_welcome_is_refused_with_the_reason(message, why):
    with pytest.raises(PeerRefused, match=why):
        check_welcome(OWN, "peer", message)


@given(
    st.integers(0, 3),
    st.sampled_from(["own", "peer", "", "x"]),
    st.sampled_from([None, "own", "peer", ""]),
    st.booleans(),
    st.lists(st.sampled_from(["tcp", "nixl", "smoke"])),
)
def test_nobody_gets_in_under_another_name_or_in_an_ended_epoch(version, name, authenticated, is_over, schemes):
    message = hello(version=version, name=name, schemes=schemes)
    try:
        common = check(message, authenticated=authenticated, is_over=is_over)
    except PeerRefused:
        return
    assert authenticated in (None, name)
    assert name not in ("", "own")
    assert version == VERSION
    assert not is_over
    assert common
    assert set(common) <= set(schemes)
