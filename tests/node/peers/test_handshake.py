"""How two nodes come to trust each other, without any socket: who is refused and why."""

from __future__ import annotations

import msgspec
import pytest

from pdx.errors import PeerRefused
from pdx.node.peers.connection import check_hello, check_welcome
from pdx.transports.channel import RemoteRegion
from pdx.wire.messages import VERSION, Hello, Welcome

OWN = Hello(VERSION, 2, "peer", "own", epoch=1, host="h", schemes=["nixl", "shm", "tcp"], layouts=[b"a", b"b"])
WITHOUT = {"fog": "too thick", "rain": "too wet"}


def hello(**fields):
    values = {"version": VERSION, "name": "peer", "epoch": 9, "host": "g", "pid": 3, "schemes": ["tcp", "nixl"]}
    return Hello(**{**values, **fields}, kind="peer")


def welcome(schemes=("tcp", "nixl"), **fields):
    regions = [RemoteRegion(scheme, 1, b"t" * 16, b"") for scheme in schemes]
    values = {"version": VERSION, "name": "peer", "epoch": 9, "host": "g", "pid": 3, "regions": regions}
    return Welcome(**{**values, **fields})


def check(message, authenticated=None, is_over=False):
    return check_hello(OWN, message, WITHOUT, authenticated=authenticated, is_over=is_over)


# ---- hello --------------------------------------------------------------------------------------


def test_schemes_are_those_of_both_in_our_order():
    assert check(hello()) == ["nixl", "tcp"]
    assert check(hello(schemes=["tcp", "smoke", "shm"])) == ["shm", "tcp"]
    assert check(hello(), authenticated="peer") == ["nixl", "tcp"]


@pytest.mark.parametrize(
    ("message", "given_name", "is_over", "why"),
    [
        (hello(version=VERSION + 1), None, False, "upgrade the older"),
        (hello(), "other", False, "the key is that of 'other', not of 'peer'"),
        (hello(name="own"), None, False, "two nodes are named"),
        (hello(name=""), None, False, "without a name"),
        (hello(name="disk"), None, False, "cannot be named 'disk'"),
        (hello(), None, True, "has ended"),
        (hello(layouts=[b"c"]), None, False, "no engine of 'peer' has the KV layout"),
        (hello(schemes=["smoke"]), None, False, "no channel in common"),
    ],
)
def test_a_hello_is_refused_with_the_reason(message, given_name, is_over, why):
    with pytest.raises(PeerRefused, match=why):
        check(message, authenticated=given_name, is_over=is_over)


@pytest.mark.parametrize(("ours", "theirs"), [([], [b"c"]), ([b"a"], []), ([], []), ([b"a", b"c"], [b"c"])])
def test_layouts_matter_only_where_both_sides_have_engines(ours, theirs):
    own = msgspec.structs.replace(OWN, layouts=ours)
    assert check_hello(own, hello(layouts=theirs, schemes=["tcp"]), {}, authenticated=None, is_over=False) == ["tcp"]


# ---- welcome ------------------------------------------------------------------------------------


def test_a_welcome_gives_what_was_opened_in_our_order():
    assert check_welcome(OWN, "peer", welcome(), WITHOUT) == ["nixl", "tcp"]
    assert check_welcome(OWN, "peer", welcome(["tcp"]), WITHOUT) == ["tcp"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (welcome(version=VERSION + 1), "upgrade the older"),
        (welcome(name="third"), "the roster has a wrong address"),
        (welcome(epoch=1), "this node itself"),
        (welcome(layouts=[b"c"]), "no engine of 'peer'"),
        (welcome(["smoke", "fog"]), "; fog: too thick$"),
    ],
)
def test_a_welcome_is_refused_with_the_reason(message, why):
    with pytest.raises(PeerRefused, match=why):
        check_welcome(OWN, "peer", message, WITHOUT)
