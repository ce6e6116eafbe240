"""What is known of nodes that controllers name, and orders that are answered in one go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cache_stage import LAYOUT, SHAPE

from pdx.errors import NodeUnavailable, SelectionError
from pdx.proxy.cache import verbs
from pdx.proxy.cache.verbs import FORGET_S, Instances
from pdx.telemetry.env import Env
from pdx.wire.messages import VERSION, Mark
from pdx.wire.proxy import EngineReport, NodeReport

SILENT_S = 5.0


class Bed:
    """Instances with a clock and a roster that a test sets."""

    def __init__(self, members=None):
        self.now = 100.0
        self.members = members
        self.instances = Instances(
            SimpleNamespace(members=lambda: self.members), Env(lambda: self.now), silent_s=SILENT_S
        )

    def heard(self, name):
        self.instances.check_heard(self.instances.get(name))

    def report(self, name, *engines, epoch=1):
        return self.instances.report(NodeReport(VERSION, name, epoch, 1, 1, list(engines), []))


def test_a_node_that_is_silent_is_known_until_it_is_forgotten():
    bed = Bed()
    assert not bed.report("a")
    bed.heard("a")
    bed.now += SILENT_S
    with pytest.raises(NodeUnavailable, match="node 'a' has not been heard of for 5 s"):
        bed.heard("a")
    assert not bed.report("a")
    bed.heard("a")
    assert bed.report("a", epoch=2), "another life"
    bed.now += FORGET_S + 1
    with pytest.raises(SelectionError, match="there are none"):
        bed.heard("a")


def test_the_roster_says_which_nodes_there_are():
    bed = Bed({"a", "b"})
    bed.report("a")
    bed.report("x")
    assert list(bed.instances.all()) == ["a", "b"]
    with pytest.raises(NodeUnavailable, match="is in the roster, and has not reported"):
        bed.heard("b")
    bed.members = {"b"}
    with pytest.raises(SelectionError, match="no node 'a' is known here; there are b"):
        bed.heard("a")


def test_how_many_are_known_is_bounded_and_their_marks_are_not_kept(monkeypatch):
    monkeypatch.setattr(verbs, "MAX_NODES", 2)
    bed = Bed()
    mark = Mark("t" * 16, "sealed", 1, 0, 0, "")
    bed.instances.report(NodeReport(VERSION, "a", 1, 1, 1, [], [mark]))
    for name in ("b", "c"):
        bed.report(name)
    assert list(bed.instances.all()) == ["a", "b"]
    assert bed.instances.all()["a"].report.marks == []
    bed.now += FORGET_S / 2
    bed.report("b")
    bed.now += FORGET_S / 2 + 1
    bed.report("c")
    assert list(bed.instances.all()) == ["b", "c"]


def engine(name, layout=LAYOUT, shape=SHAPE):
    return EngineReport(name, "both", f"http://{name}:1", 0, layout=layout, shape=shape)


def test_models_are_those_of_nodes_that_were_heard_of_lately():
    bed = Bed()
    bed.report("a", engine("e"), engine("untold", layout=b"", shape={}))
    bed.report("b", engine("f"))
    assert [model.engine for model in bed.instances.models()] == ["e", "f"]
    bed.report("b")
    bed.now += SILENT_S
    assert bed.instances.models() == []
