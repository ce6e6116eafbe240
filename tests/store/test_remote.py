"""The remote tier over real stores: Redis, a cluster of Redis, and SeaweedFS by its S3 interface."""

import itertools
import random
import threading

import pytest
from disk_bed import closing_all
from remote_bed import Bed, SeaweedFs, connections, key, made

from pdx.store.remote.tier import NOT_THERE_S, THERE_S, THREADS
from pdx.testing.waiting import wait_until

KINDS = ["redis", "cluster", "s3"]


@pytest.fixture(scope="module", params=KINDS)
def server(request, tmp_path_factory):
    server = made(request.param, tmp_path_factory.mktemp("store") / "server")
    with pytest.MonkeyPatch.context() as patch:
        try:
            server.start()
            for name, value in server.env().items() if hasattr(server, "env") else ():
                patch.setenv(name, value)
            yield server
        finally:
            server.kill()


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


@pytest.fixture
def bed(make):
    return make()


@pytest.mark.parametrize(("nbytes", "layers"), [(32 << 10, 4), (32 << 10, 1), (7000, 3), (1, 1), (32 << 10, 200)])
def test_what_is_loaded_is_what_was_stored(bed, numbers, nbytes, layers):
    assert bed.store(numbers[0], nbytes=nbytes, layers=layers) is None
    assert bed.sought(numbers[:2]) == 1
    [held] = bed.tier.find([key(numbers[0])], 1)
    assert (held.nbytes, held.layers) == (nbytes, layers)
    assert bed.load(numbers[0], nbytes=nbytes, layers=layers) is None
    assert (bed.counters["remote_stored"], bed.counters["remote_loaded"]) == (1, 1)


@pytest.mark.parametrize(("nbytes", "layers"), [(32 << 10, 4), (70_001, 3), (1 << 20, 200), (2 << 20, 4096)])
def test_nodes_with_different_codecs_read_each_others_chunks(make, server, numbers, nbytes, layers):
    settings = {"slot_bytes": nbytes, "content": alike}
    one, other = make(codec="lossless", **settings), make(**settings)
    assert one.store(numbers[0], layers=layers) is None
    assert other.store(numbers[1], layers=layers) is None
    small, large = (len(server.raw(f"v3/{key(number).hex()}-0")) for number in numbers[:2])
    assert small < large
    for bed in (one, other):
        assert bed.sought(numbers[:3]) == 2
        assert [bed.load(number, layers=layers) for number in numbers[:2]] == [None, None]
        assert bed.store(numbers[0], layers=layers) == "left out"


@pytest.mark.parametrize("at", [10, 200, -1])
def test_damage_of_an_encoded_chunk_is_found(make, server, numbers, at):
    bed = make(codec="lossless", content=alike)
    assert bed.store(numbers[0]) is None
    name = f"v3/{key(numbers[0]).hex()}-0"
    data = bytearray(server.raw(name))
    data[at] ^= 1
    server.put(name, bytes(data))
    error = bed.load(numbers[0])
    assert error is None if at == 200 else error.kind in ("corrupt", "outdated")  # nothing is there
    assert (name in server.names()) == (at == 200)


def alike(number, shard, nbytes):
    """Elements of two bytes, of which one is the same in all of them."""
    return bytes(byte & 3 if at % 2 else byte for at, byte in enumerate(random.Random(number).randbytes(nbytes)))


def test_first_loads_find_connections_open(server, make, numbers):
    """What a connection takes to be made would count as what the store takes, by which loads pay or do not."""
    if isinstance(server, SeaweedFs):
        pytest.skip("its client opens them as it likes")
    connected = [connections(member) for member in members(server)]
    make()
    for member, before in zip(members(server), connected, strict=True):
        assert connections(member) - before >= THREADS


def members(server):
    return getattr(server, "members", [server])


def test_another_node_finds_what_one_has_stored(make, numbers):
    one, other = make(), make()
    assert other.sought(numbers[:3]) == 0
    assert [one.store(number) for number in numbers[:2]] == [None, None]
    other.now += NOT_THERE_S + 0.1
    assert other.sought(numbers[:3]) == 2
    assert [other.load(number) for number in numbers[:2]] == [None, None]


def test_what_another_node_has_stored_is_not_stored_again(make, server, numbers):
    one, other = make(), make()
    assert one.store(numbers[0]) is None
    assert other.store(numbers[0]) is None
    assert other.sought(numbers[:1]) == 1
    assert other.store(numbers[0]) == "left out"


def test_a_chunk_is_there_when_all_its_shards_are(bed, numbers):
    assert bed.store(numbers[0], 0, shards=2) is None
    assert bed.sought(numbers[:1], shards=2) == 0
    bed.now += NOT_THERE_S + 0.1
    assert bed.store(numbers[0], 1, shards=2) is None
    assert bed.sought(numbers[:1], shards=2) == 1
    assert [bed.load(numbers[0], shard) for shard in (0, 1)] == [None, None]


def test_a_long_prompt_is_found_to_its_first_missing_chunk(bed, numbers):
    """More than one message asks for."""
    for number in [*numbers[:40], *numbers[41:50]]:
        assert bed.store(number) is None
    assert bed.sought(numbers) == 40
    assert bed.counters["remote_hits"] >= 40


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
    monkeypatch.setattr("pdx.store.remote.tier.MAX_KNOWN", 4)
    assert [bed.store(number) for number in numbers[:6]] == [None] * 6
    assert bed.sought(numbers[:3]) == 3
    assert bed.sought(numbers[3:6]) == 3
    assert list(bed.tier._known) == [key(number) for number in numbers[2:6]]
    assert not bed.tier.find([key(numbers[0])], 1)
    asked = bed.counters["remote_hits"]
    assert bed.sought(numbers[:2]) == 2
    assert bed.counters["remote_hits"] == asked + 2


def test_many_that_seek_the_same_ask_once(bed, numbers):
    assert bed.store(numbers[0]) is None
    keys = [key(number) for number in numbers[:4]]
    assert all(bed.tier.seeks(keys[at:], 1) for at in (0, 1, 0, 3))
    assert bed.tier._seeking == 1
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
    while bed.tier._seeking:
        bed.turn()
    assert len(bed.tier.find(keys, 1)) == 40
    assert max(calls) <= bed.tier._backend.most + bed.tier._backend.batch


def test_questions_are_bounded(bed, numbers, monkeypatch):
    """What is over the bound is missing, and counts."""
    monkeypatch.setattr("pdx.store.remote.tier.MAX_SOUGHT", 64)
    keys = [key(number + 20_000) for number in range(64 + 5)]
    assert sum(bed.tier.seeks([name], 1) for name in keys) == 64
    assert bed.counters["remote_not_asked"] == 5
    while bed.tier._seeking:
        bed.turn()
    assert not bed.tier._sought


def test_what_is_deleted_is_gone(make, server, numbers):
    one, other = make(), make()
    assert one.store(numbers[0]) is None
    assert one.sought(numbers[:1]) == 1
    assert one.tier.evict([key(numbers[0]), key(numbers[1])]) == 1
    one.tier.evict([key(numbers[0])])
    while any(key(numbers[0]).hex() in name for name in server.names()):
        one.turn()
    assert other.sought(numbers[:1]) == 0


def test_what_is_too_old_is_not_found(make, server, numbers):
    bed = make(ttl_s=1.0)
    assert bed.store(numbers[0]) is None

    def is_gone():
        bed.now += NOT_THERE_S + THERE_S
        return bed.sought(numbers[:1]) == 0

    wait_until(is_gone, what="it is older than a second", timeout_s=20.0)
    assert bed.load(numbers[0]).kind == "missing"


@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated", "flipped", "another's", "huge header"])
def test_whatever_is_under_a_key_no_wrong_byte_is_loaded(make, server, numbers, damage):
    bed = make()
    assert [bed.store(number) for number in numbers[:2]] == [None, None]
    assert bed.sought(numbers[:2]) == 2
    name, other = (f"v3/{key(number).hex()}-0" for number in numbers[:2])
    good = server.raw(name)
    damaged = {
        "empty": b"",
        "garbage": b"\xff" * 5000,
        "truncated": good[:9000],
        "flipped": good[:9000] + bytes([good[9000] ^ 4]) + good[9001:],
        "another's": server.raw(other),
        "huge header": good[:12] + b"\xff\xff\xff\xff" + good[16:],
    }[damage]
    server.put(name, damaged)
    error = bed.load(numbers[0])
    assert error.kind in ("corrupt", "truncated")
    assert bed.counters[f"remote_{error.kind}"] == 1
    assert name not in server.names(), "it is removed"
    assert bed.sought(numbers[:1]) == 0
    assert bed.tier._failures == 0, "the store is not to blame"
    server.put(name, damaged)
    fresh = make()
    if damage == "flipped":  # only who loads it sees that
        assert fresh.sought(numbers[:1]) == 1
        assert fresh.load(numbers[0]).kind == "corrupt"
    assert fresh.sought(numbers[:1]) == 0
    assert fresh.store(numbers[0]) is None, "it takes the place of what is there"
    assert fresh.sought(numbers[:1]) == 1
    assert fresh.load(numbers[0]) is None


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
    assert bed.tier._failures == 0, "the store is not to blame"
    assert bed.counters["remote_failed"] == 0
    assert bed.store(numbers[4]) is None, "it takes the place of what is there"
    assert bed.load(numbers[4]) is None


def test_what_the_store_evicts_on_its_own_is_a_miss(bed, server, numbers):
    assert bed.store(numbers[0]) is None
    assert bed.sought(numbers[:1]) == 1
    bed.tier._backend.remove([f"v3/{key(numbers[0]).hex()}-0"])
    assert bed.load(numbers[0]).kind == "missing"
    assert bed.sought(numbers[:1]) == 0
    assert bed.counters["remote_missing"] == 1
    assert bed.tier._failures == 0


def test_a_slot_that_is_anothers_now_is_neither_read_nor_written(bed, numbers):
    assert bed.store(numbers[0]) is None
    copy = bed.start("load", numbers[0], at=2)
    bed.arena.generations[bed.slot(2).offset // 4096] += 1
    bed.arena.data[bed.slot(2).offset : bed.slot(2).offset + 4] = b"mine"
    error = bed.end(copy)
    assert error is None or error.kind == "stale"
    if error is not None:
        assert bytes(bed.arena.data[bed.slot(2).offset : bed.slot(2).offset + 4]) == b"mine"


def test_what_is_cancelled_ends_once(bed, numbers):
    copies = [bed.start("store", number, at=at) for at, number in enumerate(numbers[:12])]
    for copy in copies:
        bed.tier.cancel(copy)
    kinds = {error.kind if (error := bed.end(copy)) is not None else None for copy in copies}
    assert kinds <= {None, "cancelled"}
    assert not bed.tier._under_way


def test_closing_ends_every_job(make, numbers):
    bed = make()
    copies = [bed.start("store", number, at=at) for at, number in enumerate(numbers[:12])]
    bed.tier.close()
    late = bed.start("load", numbers[0])
    for copy in [*copies, late]:
        error = bed.end(copy)
        assert error is None or error.kind == "cancelled"
    assert bed.over[late.number].kind == "cancelled"
