"""Processes that die or stop at the worst moment; real signals, real memory (invariants 2 to 4)."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from node_harness import MIB, arenas_of, attached, is_stopped

import pdx
from pdx.client import connection
from pdx.errors import NodeUnavailable
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Ping

pytestmark = pytest.mark.long

BACK_S = 1.0  # after any fault the counters are back at their baseline within this


@pytest.fixture
def short_node(start_node):
    """A node whose reservations end after 2 s."""
    return start_node(reserve_s=2.0)


@pytest.fixture
def client(address, puppets):
    """A client of whatever node the test started, in this process."""
    with pdx.connect(address, timeout_s=30.0) as made:
        yield made


def test_a_client_killed_while_writing_gives_everything_back(node, puppets, client):
    puppet = puppets()
    puppet.do("put", "sealed", MIB, 1)
    puppet.do("reserve", "half", 2 * MIB, 2)
    puppet.do("write", "half", 2)
    puppet.do("fill", "half", 0)
    puppet.do("get", "sealed")
    status = client.status()
    assert (status.chunks, status.leases) == ({"filling": 1, "sealed": 1}, 1)
    puppet.kill()
    wait_until(lambda: client.status().chunks == {"sealed": 1}, timeout_s=BACK_S)
    status = client.status()
    assert (status.leases, status.free_bytes, status.counters["deaths"]) == (0, 7 * MIB, 1)
    with client.get("sealed") as chunk:
        assert set(chunk.view) == {1}, "what was sealed outlives its writer"


def test_a_stopped_writer_keeps_its_room_and_its_late_fill_is_harmless(short_node, puppets, client):
    puppet = puppets()
    puppet.do("reserve", "a", 4 * MIB)
    puppet.stop()
    wait_until(lambda: client.status().chunks == {"quarantined": 1})
    with client.reserve("b", 4 * MIB) as chunk:
        chunk.view[:] = b"\x07" * (4 * MIB)
        with pytest.raises(pdx.PdxError):
            client.reserve("c", 4096)
        chunk.seal()
    puppet.send("write", "a", 9)
    puppet.send("seal", "a")
    puppet.go_on()
    assert puppet.result() is None, "it writes on as if nothing had happened"
    assert puppet.result() == "StaleSlot", "and hears of it when it seals"
    assert client.lookup(["a"]) == 0
    with client.get("b") as chunk:
        assert bytes(chunk.view) == b"\x07" * (4 * MIB)
    wait_until(lambda: client.status().chunks == {"sealed": 1}, timeout_s=BACK_S)
    assert client.status().free_bytes == 4 * MIB


def test_a_stopped_reader_finds_out_that_its_bytes_are_stale(node, puppets, client):
    puppet = puppets()
    puppet.do("put", "a", 4 * MIB, 1)
    assert puppet.do("get", "a", 0.1) == 0
    assert puppet.do("read", "a") == [1]
    puppet.stop()
    wait_until(lambda: client.status().leases == 0)
    client.delete("a")
    with client.reserve("b", 8 * MIB) as chunk:
        chunk.view[:] = b"\x02" * (8 * MIB)
        chunk.seal()
    puppet.send("read", "a")
    puppet.send("check", "a")
    puppet.send("release", "a")
    puppet.go_on()
    assert puppet.result() == [2], "it reads, but not what it was promised"
    assert puppet.result() == "StaleSlot", "and knows"
    assert puppet.result() == "ChunkMissing"


def test_silence_alone_frees_nothing(node, puppets, client):
    """A missed heartbeat is not a death."""
    puppet = puppets()
    puppet.do("reserve", "a", MIB)
    puppet.stop()

    def is_silent():
        return max(attached.silent_s for attached in client.status().attached) > 1.3

    wait_until(is_silent)
    assert client.status().chunks == {"filling": 1}
    puppet.go_on()
    assert puppet.do("seal", "a") is None
    assert client.lookup(["a"]) == 1


# ---- the node itself ------------------------------------------------------------------------------


def test_a_killed_node_is_noticed_and_the_next_one_cleans_up(start_node, address, place):
    node = start_node()
    with pdx.connect(address, timeout_s=30.0) as client:
        epoch = client.status().epoch
        with client.reserve("a", MIB) as chunk:
            chunk.seal()
        reader = client.get("a")
        node.signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(node.pid))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.status)
            wait_until(waiting.running)
            node.kill()
            with pytest.raises(NodeUnavailable, match="has died"):
                waiting.result()
        assert len(arenas_of(address)) == 1, "nobody was there to remove it"
        stale = arenas_of(address)[0]
        assert (place / "node.sock").is_socket()

        start_node()
        assert stale not in arenas_of(address)
        assert len(arenas_of(address)) == 1
        assert len(bytes(reader.view)) == MIB, "the old memory stays mapped as long as somebody looks"
        with pdx.connect(address, timeout_s=30.0) as fresh:
            status = fresh.status()
            assert status.epoch != epoch
            assert status.free_bytes == 8 * MIB
            assert fresh.lookup(["a"]) == 0
        with pytest.raises(NodeUnavailable, match="has died"):  # for good, whoever answers there now
            client.status()


def test_a_stopped_node_is_alive_and_late_answers_are_given_back(node, address):
    link = connection.attached(address, 30.0)
    with pdx.Node(link, 30.0) as client:
        node.signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(node.pid))
        hasty = pdx.Node(link, 0.1)
        for ask in (lambda: hasty.reserve("a", MIB), lambda: hasty.get("a")):
            with pytest.raises(NodeUnavailable, match="does not answer within"):
                ask()
        node.signal(signal.SIGCONT)
        with attached(address) as other:
            wait_until(lambda: other.status().free_bytes == 8 * MIB, timeout_s=2 * BACK_S)
        with client.reserve("a", MIB) as chunk:
            chunk.seal()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_clean_end_of_a_node_leaves_nothing(start_node, address, place, number):
    node = start_node()
    with pdx.connect(address, timeout_s=30.0) as client:
        client.reserve("a", MIB)
        node.signal(number)
        assert node.process.wait(30) == 0
        assert not arenas_of(address)
        assert not (place / "node.sock").exists()
        with pytest.raises(NodeUnavailable, match="has died"):
            client.status()


def test_a_client_that_reads_no_answers_costs_only_itself(node, address, client):
    with attached(address) as rude:
        for _ in range(20_000):
            rude.tell(Ping(), reply=True)
        assert client.status().free_bytes == 8 * MIB
    with client.reserve("a", MIB) as chunk:
        chunk.seal()
