"""Which kind of session may say what: one list, asked for everything that a session says."""

import msgspec
import pytest
from service_stage import attach, serving

from pdx.errors import NodeError, ProtocolError
from pdx.wire.messages import RIGHTS, Admit, Ask, Expect, Fill, Hello, Ping, Settle
from pdx.wire.verbs import Find, Selection

VERBS = "Find Move Prefetch Clear PinIn Recode Evict List Jobs CheckFinish EndJob Drain Models"
ENGINE = "Bye Ping Abort Mark"
SCHEDULER = "Expect Admit Push Release Renew Pin Delete Advise Cancel Status Why"
EXPECTED = {
    "worker": f"{ENGINE} Fill",
    "scheduler": f"{ENGINE} {SCHEDULER} FindMoved",
    "client": f"{ENGINE} {SCHEDULER} Fill",
    "peer": "Bye Ping Chosen Admit Release Push Cancel Settle",
    "controller": f"Bye Ping Status Why Advise {VERBS}",
}


def test_the_list_is_this_and_names_every_kind_and_nothing_but_questions():
    rights = {kind: {each.__name__ for each in messages} for kind, messages in RIGHTS.items()}
    assert rights == {kind: set(names.split()) for kind, names in EXPECTED.items()}
    kinds = msgspec.inspect.type_info(Hello).fields
    assert set(next(field.type.values for field in kinds if field.name == "kind")) == set(RIGHTS)
    assert set().union(*RIGHTS.values()) | {Hello} == set(Ask.__args__)


@pytest.mark.parametrize("kind", ["worker", "scheduler", "client", "controller"])
def test_a_process_is_heard_within_its_rights_only(place, clock, kind):
    with serving(place, clock) as service:
        session = attach(service, "x", kind, engine="e")
        for body in (Ping(), Fill([]), Admit([]), Find(Selection(request="r")), Settle([]), Expect("request")):
            said = ""
            try:
                service.handle(session, body)
            except (NodeError, ProtocolError) as error:
                said = str(error)
            assert (f"is not for a {kind}" in said) == (type(body) not in RIGHTS[kind]), body


def test_a_peer_does_not_attach_where_processes_do(place, clock):
    with serving(place, clock) as service, pytest.raises(ProtocolError, match="--listen"):
        attach(service, "b", "peer")
