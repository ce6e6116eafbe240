"""Which kind of session may say what: one list, asked for everything that a session says."""

import msgspec
import pytest
from node_harness import Wire

from pdx.wire.hints import Hints
from pdx.wire.messages import (
    RIGHTS,
    Abort,
    Admit,
    Ask,
    Bye,
    Cancel,
    Chosen,
    Delete,
    Expect,
    Fill,
    FindMoved,
    Hello,
    Mark,
    Pin,
    Ping,
    Push,
    Refused,
    Release,
    Renew,
    Settle,
)
from pdx.wire.verbs import (
    Advise,
    CheckFinish,
    Clear,
    Drain,
    EndJob,
    Evict,
    Find,
    Jobs,
    List,
    Models,
    Move,
    PinIn,
    Prefetch,
    Recode,
    Selection,
    Status,
    Why,
)

TRANSFER = "transfer-0123456789"
NOTHING = Selection()
VERBS = [
    Find(NOTHING),
    Move(NOTHING, "host", "disk"),
    Prefetch(NOTHING),
    Clear(NOTHING, "host"),
    PinIn(NOTHING),
    Recode(NOTHING, "disk", "none"),
    Evict(1, 0),
    List(),
    Jobs(),
    CheckFinish("a:1-1"),
    EndJob("a:1-1"),
    Drain("e"),
    Models(),
]
SAID = [
    Bye(),
    Ping(),
    Expect("request"),
    Admit([]),
    Push([], "b"),
    Fill([]),
    Abort([]),
    Release(1),
    Renew(1, 1.0),
    Pin([]),
    Delete([]),
    Advise(Hints("")),
    Cancel(TRANSFER),
    Mark(TRANSFER, "event", 1),
    Status(),
    Why(),
    Chosen("tcp"),
    Settle([]),
    FindMoved(bytes(16), b"", 256),
    *VERBS,
]
ENGINE = {Bye, Ping, Abort, Mark}
EXPECTED = {
    "worker": ENGINE | {Fill},
    "scheduler": ENGINE | {Expect, Admit, FindMoved, Push, Release, Renew, Pin, Delete, Advise, Cancel, Status, Why},
    "client": ENGINE | {Fill, Expect, Admit, Push, Release, Renew, Pin, Delete, Advise, Cancel, Status, Why},
    "peer": {Bye, Ping, Chosen, Admit, Release, Push, Cancel, Settle},
    "controller": {Bye, Ping, Status, Why, Advise, *map(type, VERBS)},
}


def test_the_list_is_this_and_names_every_kind_and_nothing_but_questions():
    assert RIGHTS == EXPECTED
    kinds = msgspec.inspect.type_info(Hello).fields
    assert set(next(field.type.values for field in kinds if field.name == "kind")) == set(RIGHTS)
    assert {type(body) for body in SAID} | {Hello} == set(Ask.__args__)


@pytest.mark.parametrize("kind", ["worker", "scheduler", "client", "controller"])
@pytest.mark.parametrize("body", SAID, ids=lambda body: type(body).__name__)
def test_a_process_is_heard_within_its_rights_only(node_here, kind, body):
    with Wire(node_here.address) as wire:
        assert not isinstance(wire.hello(kind=kind, engine=f"{kind}-{type(body).__name__}"), Refused)
        answer = wire.ask(body)
        is_refused = isinstance(answer, Refused) and f"is not for a {kind}" in answer.text
        assert is_refused == (type(body) not in RIGHTS[kind])


def test_a_peer_does_not_attach_where_processes_do(node_here):
    with Wire(node_here.address) as wire:
        answer = wire.hello(kind="peer")
        assert isinstance(answer, Refused)
        assert "--listen" in answer.text
