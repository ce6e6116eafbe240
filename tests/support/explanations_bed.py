"""A node's service on a clock of the test, its engines, and what it says of their requests."""

import os

import pytest
from service_stage import keys, serving

from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import VERSION, Admit, Fill, Hello, Release
from pdx.wire.verbs import Why


@pytest.fixture
def service(place, clock, request):
    with serving(place, clock, **getattr(request, "param", {})) as made:
        yield made


@pytest.fixture
def session(service):
    return attach(service, "one")


def attach(service, engine):
    for kind, shard in (("worker", 0), ("scheduler", 0)):
        hello = Hello(VERSION, os.getpid(), kind, engine=engine, shard=shard)
        session, _ = service.attach(f"{engine} {kind}".encode(), hello, os.getpid())
    return session


def worker(service, session):
    return service.sessions.workers(session.hello.engine, 1)[0]


def keep(service, session, numbers, request):
    """All of these are there from now on."""
    answer = service.handle(
        session, Admit(keys(numbers), GRANULE_BYTES, 1, lease_s=60.0, request=request, partial=True)
    )
    if answer.granted:
        service.handle(worker(service, session), Fill(answer.granted_slots, 0, 1, True))
    if answer.lease:
        service.handle(session, Release(answer.lease))
    return answer


def why(service, session, request):
    found = service.handle(session, Why(request)).requests
    return found[0] if found else None


def told(service, session, request):
    """(first, count, is it a hit, text) of each reason."""
    return [(one.first, one.count, one.is_hit, one.text) for one in why(service, session, request).reasons]
