"""The handshake of nodes without any socket: the tables of both sides, and who is refused and why."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import PeerRefused
from pdx.node.peers.handshake import (
    LINK,
    SESSION,
    Identity,
    LinkState,
    LinkStep,
    SessionState,
    SessionStep,
    check_hello,
    check_welcome,
)
from pdx.transports.channel import RemoteRegion
from pdx.wire.messages import VERSION
from pdx.wire.peer_messages import PeerHello, PeerWelcome

TABLES = [(LINK, LinkState, LinkStep, LinkState.CLOSED), (SESSION, SessionState, SessionStep, SessionState.NEW)]
OWN = Identity(name="own", epoch=1, host="h", pid=2, schemes=("nixl", "shm", "tcp"), layouts=(b"a", b"b"))
OWN = msgspec.structs.replace(OWN, without={"fog": "too thick", "rain": "too wet"})


def hello(**fields):
    values = {"version": VERSION, "name": "peer", "epoch": 9, "host": "g", "pid": 3, "schemes": ["tcp", "nixl"]}
    return PeerHello(**{**values, **fields})


def welcome(schemes=("tcp", "nixl"), **fields):
    regions = [RemoteRegion(scheme, 1, b"t" * 16, b"") for scheme in schemes]
    values = {"version": VERSION, "name": "peer", "epoch": 9, "host": "g", "pid": 3, "regions": regions}
    return PeerWelcome(**{**values, **fields})


def check(message, authenticated=None, buried=False):
    return check_hello(OWN, message, authenticated=authenticated, buried=buried)


# ---- the tables ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "states", "steps", "first"), TABLES, ids=["link", "session"])
def test_every_state_is_reached_and_every_step_is_used(table, states, steps, first):
    reached, todo = {first}, [first]
    while todo:
        now = todo.pop()
        after = {target for (state, _), target in table.items() if state is now}
        todo += after - reached
        reached |= after
    assert reached == set(states)
    assert {step for _, step in table} == set(steps)
    assert {state for state, _ in table} <= set(states)


def test_a_link_can_always_be_ended_and_dialled_again():
    for state in LinkState:
        if state is not LinkState.CLOSED:
            assert LINK[state, LinkStep.LOST] is LINK[state, LinkStep.LEAVE] is LinkState.CLOSED
    assert [state for state, step in LINK if step is LinkStep.DIAL] == [LinkState.CLOSED]
    assert [state for (state, step), after in LINK.items() if after is LinkState.READY] == [LinkState.DIALING]


def test_only_over_is_final_and_a_session_that_is_over_never_opens_again():
    outgoing = {state: {after for (before, _), after in SESSION.items() if before is state} for state in SessionState}
    assert [state for state, after in outgoing.items() if not after] == [SessionState.OVER]
    assert [state for (state, _), after in SESSION.items() if after is SessionState.OPEN] == [SessionState.NEW]
    assert SessionState.NEW not in SESSION.values()


@given(st.lists(st.sampled_from(LinkStep), max_size=30))
def test_a_walk_of_a_link_is_ready_only_after_a_welcome_to_its_own_dialling(steps):
    state, since_dial = LinkState.CLOSED, []
    for step in steps:
        after = LINK.get((state, step))
        if after is None:
            continue
        since_dial = [step] if step is LinkStep.DIAL else [*since_dial, step]
        assert (after is LinkState.READY) == (since_dial == [LinkStep.DIAL, LinkStep.WELCOMED])
        state = after


@given(st.lists(st.sampled_from(SessionStep), max_size=30))
def test_a_walk_of_a_session_goes_forward_only(steps):
    order = [SessionState.NEW, SessionState.OPEN, SessionState.OVER]
    state = SessionState.NEW
    for step in steps:
        after = SESSION.get((state, step), state)
        assert order.index(after) >= order.index(state)
        assert (state, step) not in SESSION or after is not state
        state = after


# ---- hello --------------------------------------------------------------------------------------


def test_schemes_are_those_of_both_in_our_order():
    assert check(hello()) == ["nixl", "tcp"]
    assert check(hello(schemes=["tcp", "smoke", "shm"])) == ["shm", "tcp"]
    assert check(hello(), authenticated="peer") == ["nixl", "tcp"]


@pytest.mark.parametrize(
    ("message", "given_name", "buried", "why"),
    [
        (hello(version=VERSION + 1), None, False, "upgrade the older"),
        (hello(version=0), "peer", False, "upgrade the older"),
        (hello(), "other", False, "the key is that of 'other', not of 'peer'"),
        (hello(name=""), "peer", False, "the key is that of"),
        (hello(name="own"), None, False, "two nodes are named"),
        (hello(name="own"), "own", False, "two nodes are named"),
        (hello(name=""), None, False, "without a name"),
        (hello(), None, True, "has ended"),
        (hello(), "peer", True, "has ended"),
        (hello(layouts=[b"c"]), None, False, "no engine of 'peer' has the KV layout"),
        (hello(schemes=[]), None, False, "the other none"),
        (hello(schemes=["smoke"]), None, False, "no channel in common"),
    ],
)
def test_a_hello_is_refused_with_the_reason(message, given_name, buried, why):
    with pytest.raises(PeerRefused, match=why):
        check(message, authenticated=given_name, buried=buried)


@pytest.mark.parametrize(("ours", "theirs"), [((), [b"c"]), ((b"a",), []), ((), []), ((b"a", b"c"), [b"c"])])
def test_layouts_matter_only_where_both_sides_have_engines(ours, theirs):
    own = Identity(name="own", epoch=1, host="h", pid=2, schemes=("tcp",), layouts=ours)
    assert check_hello(own, hello(layouts=theirs), authenticated=None, buried=False) == ["tcp"]


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
def test_nobody_gets_in_under_another_name_or_in_an_ended_life(version, name, authenticated, buried, schemes):
    message = hello(version=version, name=name, schemes=schemes)
    try:
        common = check(message, authenticated=authenticated, buried=buried)
    except PeerRefused:
        return
    assert authenticated in (None, name)
    assert name not in ("", "own")
    assert version == VERSION
    assert not buried
    assert common
    assert set(common) <= set(schemes)
