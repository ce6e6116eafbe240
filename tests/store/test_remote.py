"""The remote tier over real stores: Redis, a cluster of Redis, and SeaweedFS by its S3 interface."""

import itertools
import threading

import pytest
from disk_bed import closing_all
from remote_bed import Bed, SeaweedFs, connections, key, made, running

from pdx.store.remote.catalog import NOT_THERE_S, THERE_S
from pdx.store.remote.tier import THREADS
from pdx.testing.waiting import wait_until

KINDS = ["redis", "s3"]


@pytest.fixture(scope="module", params=KINDS)
def server(request, tmp_path_factory):
    server = made(request.param, tmp_path_factory.mktemp("store") / "server")
    with pytest.MonkeyPatch.context() as patch, running(server, patch):
        yield server


_used = iter(range(1, 1000))


@pytest.fixture
def numbers():
    """Of chunks that no other test has."""
    first = next(_used) * 64
    return list(range(first, first + 64))


@pytest.fixture
def make(server, tmp_path):
    folders = (tmp_path / str(number) for number in itertools.count())
    with closing_all(lambda **settings: Bed(next(folders), server.url, **settings).opened()) as make_bed:
        yield make_bed


def test_first_loads_find_connections_open(server, make, numbers):
    """What a connection takes to be made would count as what the store takes, by which loads pay or do not."""
    if isinstance(server, SeaweedFs):
        pytest.skip("its client opens them as it likes")
    before = connections(server)
    make()
    assert connections(server) - before >= THREADS


def test_what_is_known_is_not_asked_for(bed, numbers, monkeypatch):
    assert bed.store(numbers[0]) is None
    assert bed.sought(numbers[:2]) == 1
    monkeypatch.setattr(bed.tier, "_ask", None)
    assert bed.sought(numbers[:2]) == 1
    bed.now += NOT_THERE_S + 0.1
    assert bed.tier.find([key(numbers[0])], 1)
    bed.now += THERE_S
    assert not bed.tier.find([key(numbers[0])], 1)


def test_what_is_known_is_bounded(bed, numbers, monkeypatch):
    """What was found first is forgotten first, and asked for again."""
    monkeypatch.setattr("pdx.store.remote.catalog.MAX_KNOWN", 4)
    assert [bed.store(number) for number in numbers[:6]] == [None] * 6
    assert bed.sought(numbers[:3]) == 3
    assert bed.sought(numbers[3:6]) == 3
    assert list(bed.tier._catalog._known) == [key(number) for number in numbers[2:6]]
    assert not bed.tier.find([key(numbers[0])], 1)
    asked = bed.counters["remote_hits"]
    assert bed.sought(numbers[:2]) == 2
    assert bed.counters["remote_hits"] == asked + 2


def test_many_that_seek_the_same_ask_once(bed, numbers):
    assert bed.store(numbers[0]) is None
    keys = [key(number) for number in numbers[:4]]
    assert all(bed.tier.seeks(keys[at:], 1) for at in (0, 1, 0, 3))
    assert bed.tier._catalog.seeking == 1
    assert bed.sought(numbers[:4]) == 1


def test_what_waits_for_a_thread_is_asked_for_by_one_call(bed, numbers, monkeypatch):
    """A store that is far away answers as many at once as ask, and those of one client do not keep others waiting."""
    assert [bed.store(number) for number in numbers[:40]] == [None] * 40
    calls, goes_on, heads = [], threading.Event(), bed.tier._backend.heads

    def late(names, nbytes):
        calls.append(len(names))
        goes_on.wait(30)
        return heads(names, nbytes)

    monkeypatch.setattr(bed.tier._backend, "heads", late)
    strangers = [[key(number * 16 + at + 30_000) for at in range(16)] for number in range(100)]
    assert all(bed.tier.seeks(keys, 1) for keys in strangers)
    keys = [key(number) for number in numbers[:41]]
    assert bed.tier.seeks(keys, 1)
    goes_on.set()
    while not bed.tier.find(keys[:1], 1):
        bed.turn()
    assert len(calls) <= THREADS + -(-97 * 16 // bed.tier._backend.most) + THREADS, "not one for each"
    while bed.tier._catalog.seeking:
        bed.turn()
    assert len(bed.tier.find(keys, 1)) == 40
    assert max(calls) <= bed.tier._backend.most + bed.tier._backend.batch


def test_questions_are_bounded(bed, numbers, monkeypatch):
    """What is over the bound is missing, and counts."""
    monkeypatch.setattr("pdx.store.remote.catalog.MAX_SOUGHT", 64)
    keys = [key(number + 20_000) for number in range(64 + 5)]
    assert sum(bed.tier.seeks([name], 1) for name in keys) == 64
    assert bed.counters["remote_not_asked"] == 5
    while bed.tier._catalog.seeking:
        bed.turn()
    assert not bed.tier._catalog._sought


def test_what_is_too_old_is_not_found(make, server, numbers):
    bed = make(ttl_s=1.0)
    assert bed.store(numbers[0]) is None

    def is_gone():
        bed.now += NOT_THERE_S + THERE_S
        return bed.sought(numbers[:1]) == 0

    wait_until(is_gone, what="it is older than a second", timeout_s=20.0)
    assert bed.load(numbers[0]).kind == "missing"


def test_a_value_of_another_type_costs_itself_alone(make, server, numbers):
    """A list of Redis, say, where a chunk should be."""
    if not hasattr(server, "put_list"):
        pytest.skip("this store has bytes only")
    bed = make()
    assert [bed.store(number) for number in numbers[:6] if number != numbers[4]] == [None] * 5
    assert bed.store(numbers[6]) is None
    names = [f"v3/{key(numbers[at]).hex()}-0" for at in (4, 6)]
    assert bed.sought(numbers[6:7]) == 1
    for name in names:
        server.put_list(name)
    assert bed.sought(numbers[:6]) == 4
    assert bed.load(numbers[6]).kind == "truncated"
    assert names[1] not in server.names(), "it is removed"
    assert bed.tier._health._errors == 0, "the store is not to blame"
    assert bed.counters["remote_failed"] == 0
    assert bed.store(numbers[4]) is None, "it takes the place of what is there"
    assert bed.load(numbers[4]) is None
