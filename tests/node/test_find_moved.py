"""What engines tell a node of their chunks' tokens, and ask by them."""

import struct

import pytest
from service_stage import attach, keys, serving

from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import Admit, Delete, Fill, FindMoved
from pdx.wire.moved import PromptTokens
from pdx.wire.verbs import Clear, Selection

SCOPE = b"s" * 16
HISTORY = range(100, 140)


@pytest.fixture
def service(place, clock):
    with serving(place, clock) as made:
        yield made


@pytest.fixture
def session(service):
    attach(service, "e", "worker", engine="e")
    return attach(service, "e", "scheduler", engine="e")


def ids(tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


def save(service, session, tokens=HISTORY, **more):
    """Chunks of all of it are there from now on."""
    prompt = PromptTokens(SCOPE, ids(tokens), 4)
    answer = service.handle(session, Admit(keys(range(len(tokens) // 4)), GRANULE_BYTES, 1, tokens=prompt, **more))
    service.handle(worker_of(service, session), Fill(answer.granted_slots, 0, 1, True))


def worker_of(service, session):
    if session.hello.kind == "client":
        return session
    return service.sessions.workers("e", 1)[0]


def found(service, session, tokens):
    pieces = service.handle(session, FindMoved(SCOPE, ids(tokens), 4)).pieces
    return [(int.from_bytes(piece.key, "big"), piece.first, piece.count, piece.shift) for piece in pieces]


CUT = [*HISTORY[:4], *HISTORY[22:30]]
PIECES = [(0, 0, 4, 0), (5, 2, 2, -18), (6, 0, 4, -18), (7, 0, 2, -18)]


def test_what_was_told_with_a_request_for_room_is_found_moved(service, session):
    save(service, session)
    assert found(service, session, CUT) == PIECES


def test_a_tail_has_no_tokens_that_others_find(service, session):
    prompt_tokens, sizes = PromptTokens(SCOPE, ids(HISTORY[:8]), 4), {"nbytes": GRANULE_BYTES, "tail_nbytes": 16}
    answer = service.handle(session, Admit(keys(range(3)), layers=1, part="keeps", tokens=prompt_tokens, **sizes))
    service.handle(worker_of(service, session), Fill(answer.granted_slots, 0, 1, True))
    assert found(service, session, list(HISTORY[:12])) == [(0, 0, 4, 0), (1, 0, 4, 0)]


def test_what_is_not_whole_yet_is_not_found_nor_what_is_gone(service, session):
    prompt_tokens = PromptTokens(SCOPE, ids(HISTORY), 4)
    answer = service.handle(session, Admit(keys(range(10)), GRANULE_BYTES, 1, tokens=prompt_tokens))
    assert found(service, session, CUT) == []
    service.handle(worker_of(service, session), Fill(answer.granted_slots[:6], 0, 1, True))
    assert found(service, session, CUT) == [(0, 0, 4, 0)], "where the next run begins is not known"
    service.handle(worker_of(service, session), Fill(answer.granted_slots[6:], 0, 1, True))
    assert len(found(service, session, CUT)) == len(PIECES)
    service.store.delete(keys([7]))
    assert found(service, session, CUT) == PIECES[:-1]


def test_tokens_that_others_than_engines_tell_are_nothing(service, session):
    save(service, attach(service, "c"))
    assert found(service, session, CUT) == []


def test_what_is_deleted_is_not_found_and_its_tokens_are_forgotten(service, session):
    save(service, session)
    service.handle(session, Delete(keys([6])))
    assert found(service, session, CUT) == [(0, 0, 4, 0)]
    assert len(service.names) == 9
    service.control(Clear(Selection(keys([7]))))
    assert len(service.names) == 8
    service.control(Clear(Selection(), everything=True, dry_run=True))
    assert len(service.names) == 8
    service.control(Clear(Selection(), everything=True))
    assert len(service.names) == 0
