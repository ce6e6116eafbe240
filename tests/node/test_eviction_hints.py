"""Hints of a request reach the order of eviction."""

import os

import pytest
from service_stage import CHUNKS, Clock, serving

from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import VERSION, Admit, Fill, Hello, Hints


@pytest.fixture
def service(place):
    with serving(place, Clock()) as made:
        yield made


def put(service, session, names, hints):
    keys = [name.to_bytes(16, "big") for name in names]
    admitted = service.handle(session, Admit(keys, GRANULE_BYTES, 1, hints=hints))
    assert len(admitted.granted) == len(keys)
    service.handle(session, Fill(admitted.granted_slots, 0, 1, True))


def kept(service, session, names):
    return [name for name in names if service.handle(session, Admit([name.to_bytes(16, "big")])).hits]


def test_what_the_request_says_is_important_stays_longest(service):
    session, _ = service.attach(b"route", Hello(VERSION, os.getpid(), "client", name="x"), os.getpid())
    important, others = range(4), range(1000, 1000 + CHUNKS - 4)
    put(service, session, important, Hints("a session", priority=7))
    put(service, session, others, Hints("", priority=1))
    put(service, session, range(2000, 2008), Hints(""))
    assert kept(service, session, important) == list(important), "they are the least recently used"
    assert kept(service, session, others) == list(others[:-8]), "the end of a prompt goes first"
