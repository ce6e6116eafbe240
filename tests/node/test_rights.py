"""Which kind of session may say what: one list, asked for everything that a session says."""

import contextlib

import msgspec
import pytest
from service_stage import attach, serving

from pdx.errors import NodeError, ProtocolError
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
def test_a_process_is_heard_within_its_rights_only(place, clock, kind):
    with serving(place, clock) as service:
        for number, body in enumerate(SAID):
            session = attach(service, str(number), kind, engine=f"{kind}-{number}")
            said = ""
            with contextlib.suppress(NodeError):
                try:
                    service.handle(session, body)
                except ProtocolError as error:
                    said = str(error)
            assert (f"is not for a {kind}" in said) == (type(body) not in RIGHTS[kind]), body


def test_a_peer_does_not_attach_where_processes_do(place, clock):
    with serving(place, clock) as service, pytest.raises(ProtocolError, match="--listen"):
        attach(service, "b", "peer")
