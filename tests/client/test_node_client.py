"""The Python API against a real node: what it promises, and what it raises."""

import signal
import threading

import pytest
from node_harness import MIB, is_stopped

import pdx
from pdx.client import connection
from pdx.errors import (
    ArenaFull,
    ArenaTooSmall,
    ChunkExists,
    ChunkMissing,
    NodeUnavailable,
    ProtocolError,
    StaleSlot,
)
from pdx.memory.keys import named_key
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Admit


@pytest.fixture
def node(module_node):
    yield module_node
    with pdx.connect(module_node.address, timeout_s=30.0) as cleaner:
        cleaner.delete("a", "b", "d", "held", "pinned", "neither", "big")
        wait_until(lambda: len(cleaner.status().attached) == 1)
        status = cleaner.status()
    assert (status.free_bytes, status.chunks, status.leases, status.pins) == (8 * MIB, {}, 0, 0)


@pytest.fixture
def link(node):
    return connection.attached(node.address, 30.0)


@pytest.fixture
def client(link):
    with pdx.Node(link, 30.0) as made:
        yield made


@pytest.fixture
def other(node):
    with pdx.connect(node.address, timeout_s=30.0) as made:
        yield made


def put(client, name, content):
    with client.reserve(name, len(content)) as chunk:
        chunk.view[:] = content
        chunk.seal()


def test_an_application_advises_about_its_chunks_and_is_told_what_became_of_it(client, other):
    put(client, "a", b"a")
    put(client, "b", b"b")
    said = {"version": 1, "lease_s": 5, "priority": 3, "demote": True, "more": 1}
    assert client.advise(said, "a", "b") == {
        "lease_s": "accepted",
        "priority": "accepted",
        "demote": "refused: lease_s keeps the same chunks in memory",
        "more": "refused: version 1 has no such field",
    }
    assert client.status().counters["advised"] == 1
    assert other.advise({"version": 1, "lease_s": 0}, "a", "b") == {"lease_s": "accepted"}
    assert other.advise({"version": 1, "session": "s", "ttl_s": 5})["ttl_s"].startswith("refused: no request of this")
    assert other.advise({"version": 7}, "a") == {"version": "refused: this is version 1"}


def test_one_writes_and_another_reads_the_same_bytes(client, other):
    content = bytes(range(256)) * 37
    put(client, "a", content)
    with other.get("a") as chunk:
        assert bytes(chunk.view) == content
        assert chunk.nbytes == len(content)
        assert chunk.view.readonly
        with pytest.raises(TypeError):
            chunk.view[0] = 1
        chunk.check()


def test_nobody_sees_a_chunk_before_it_is_sealed_and_it_is_filled_once(client, other):
    with client.reserve("a", 100) as chunk:
        assert other.lookup(["a"]) == 0
        with pytest.raises(ChunkMissing, match="'a'"):
            other.get("a")
        with pytest.raises(ChunkExists, match="'a'"):
            other.reserve("a", 100)
        chunk.seal()
    with pytest.raises(ChunkExists):
        client.reserve("a", 100)
    for name in "bd":
        put(client, name, b"x")
    assert other.lookup(["a", "b", "c", "d"]) == 2, "the leading ones"
    assert other.lookup([]) == 0


def test_leaving_without_seal_aborts(client):
    with client.reserve("a", 100):
        pass
    assert client.status().free_bytes == 8 * MIB
    chunk = client.reserve("a", 100)
    chunk.abort()
    chunk.abort()
    assert client.status().free_bytes == 8 * MIB
    with pytest.raises(StaleSlot):
        chunk.check()
    with pytest.raises(StaleSlot):
        _ = chunk.view


def test_parts_may_be_filled_one_by_one_and_nothing_when_it_is_sealed(client):
    with client.reserve("a", 100, parts=4) as chunk:
        for part in range(4):
            chunk.fill(part)
        with pytest.raises(ProtocolError):
            chunk.fill(4)
        chunk.seal()
        assert chunk.view.readonly
        with pytest.raises(StaleSlot):
            chunk.seal()
    assert client.lookup(["a"]) == 1


def test_sealing_after_the_reservation_ended_is_an_error_not_a_loss(start_here):
    node = start_here(reserve_s=0.05)
    with pdx.connect(node.address, timeout_s=30.0) as client:
        chunk = client.reserve("a", 100)
        wait_until(lambda: client.status().chunks == {"quarantined": 1})
        with pytest.raises(StaleSlot, match="reservation"):
            chunk.fill(0)
        with pytest.raises(StaleSlot, match="reservation"):
            chunk.seal()
        chunk.abort()
        assert client.lookup(["a"]) == 0
        assert client.status().free_bytes == 8 * MIB


def test_a_full_arena_and_one_that_is_too_small_are_two_errors(client):
    with client.reserve("a", 8 * MIB), pytest.raises(ArenaFull):
        client.reserve("b", 1)
    with pytest.raises(ArenaTooSmall):
        client.reserve("b", 8 * MIB + 1)


def test_what_is_held_is_not_evicted(client):
    put(client, "held", b"h" * MIB)
    put(client, "pinned", b"p" * MIB)
    put(client, "neither", b"n" * MIB)
    client.pin("pinned")
    with client.get("held") as chunk:
        put(client, "big", b"b" * 6 * MIB)
        assert client.lookup(["neither"]) == 0
        assert bytes(chunk.view) == b"h" * MIB
        assert client.lookup(["pinned"]) == 1
    client.unpin("pinned")
    with pytest.raises(ChunkMissing):
        client.pin("neither")
    with pytest.raises(ChunkMissing):
        client.unpin("neither")


def test_delete_spares_readers(client):
    put(client, "a", b"a" * 100)
    chunk = client.get("a")
    assert client.delete("a", "nothing") == 1
    assert client.lookup(["a"]) == 0
    assert bytes(chunk.view) == b"a" * 100
    chunk.release()
    chunk.release()
    with pytest.raises(StaleSlot):
        chunk.check()
    assert client.status().free_bytes == 8 * MIB


def test_a_lease_ends_and_says_so(start_here):
    node = start_here(max_lease_s=0.05)
    with pdx.connect(node.address, timeout_s=30.0) as client:
        put(client, "a", b"x")
        chunk = client.get("a", lease_s=1000.0)  # the node caps it
        wait_until(lambda: client.status().leases == 0)
        with pytest.raises(ChunkMissing):
            chunk.renew(10.0)
        with pytest.raises(ChunkMissing):
            chunk.release()
        chunk.check()  # nobody needed the room
        assert client.status().counters["leases_expired"] == 1
        with client.get("a", lease_s=0.0) as peek:
            assert bytes(peek.view) == b"x"
            assert client.status().leases == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.reserve("a", 0),
        lambda client: client.reserve("a", 100, parts=5000),
        lambda client: client.get("a", lease_s=float("nan")),
        lambda client: client.lookup([str(n) for n in range(20_000)]),
    ],
)
def test_arguments_out_of_bounds_are_refused_at_once(client, call):
    """The node would drop the message, and the caller wait for an answer in vain."""
    with pytest.raises(ProtocolError):
        call(client)
    assert client.status().counters.get("messages_dropped", 0) == 0


def test_what_is_asked_and_given_up_is_given_back(link, client):
    """A grant and a lease that nobody collects, before and after the answer is there."""
    put(client, "a", b"x")
    for answer_is_there in (False, True):
        lease = link.ask(Admit([named_key("a")], lease_s=60.0))
        slots = link.ask(Admit([named_key("b")], MIB))
        if answer_is_there:
            client.status()  # its answer comes behind theirs
        link.forget(lease)
        link.forget(slots)
        wait_until(lambda: client.status().leases == 0)
        wait_until(lambda: client.status().chunks == {"sealed": 1})


def test_closing_gives_everything_back(link, client, other):
    put(client, "a", b"x" * 100)
    client.get("a")
    kept = client.reserve("b", MIB).view
    link.forget(link.ask(Admit([named_key("c")], MIB)))
    client.close()
    client.close()
    wait_until(lambda: len(other.status().attached) == 1)
    status = other.status()
    assert (status.leases, status.chunks) == (0, {"sealed": 1})
    kept[:1] = b"x"  # still mapped: no crash, whatever it is good for
    with pytest.raises(NodeUnavailable, match="closed"):
        client.status()
    with pytest.raises(NodeUnavailable):
        link.ask(Abort([]))


def test_closing_waits_until_the_node_has_read_the_bye(node, other, monkeypatch):
    """Else a node that is slow may see this process end before it reads that it left, and count a death."""
    monkeypatch.setattr("pdx.client.connection._LINGER_MS", 20_000)
    client = pdx.connect(node.address, timeout_s=30.0)
    closing = threading.Thread(target=client.close)
    node.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: is_stopped(node.pid))
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
    finally:
        node.signal(signal.SIGCONT)
    closing.join()
    assert len(other.status().attached) == 1


def test_any_thread_may_use_a_client(client):
    failures = []

    def work(name):
        try:
            for turn in range(30):
                content = f"{name} {turn}".encode()
                put(client, name, content)
                with client.get(name) as chunk:
                    assert bytes(chunk.view) == content
                assert client.delete(name) == 1
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert client.status().free_bytes == 8 * MIB


def test_tensors_share_the_chunks_memory(client):
    torch = pytest.importorskip("torch")
    source = torch.arange(1000, dtype=torch.float32)
    with client.reserve("a", source.nbytes) as chunk:
        chunk.tensor(torch.float32)[:] = source
        chunk.seal()
    with client.get("a") as chunk:
        tensor = chunk.tensor(torch.float32, (10, 100))
        assert torch.equal(tensor, source.view(10, 100))
        assert bytes(chunk.view) == source.numpy().tobytes()
