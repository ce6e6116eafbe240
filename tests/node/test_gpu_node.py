"""A real node whose arena is on a (fake) GPU: who maps it, what dies and what is left, pushes between such nodes."""

import ctypes
import os

import pytest
from gpu_harness import GpuCluster, GpuNode, GpuPuppet, fake_cuda, uuid
from node_harness import MIB, arenas_of
from peers_harness import pattern, put, read

import pdx
from pdx.config import NodeConfig
from pdx.cuda import driver
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import num_mapped
from pdx.errors import LayoutError
from pdx.testing.waiting import wait_until


@pytest.fixture
def start(address):
    """Starts a node on GPU 0; flags of the fake driver, settings of the node."""
    nodes = []

    def start_it(*flags, **settings):
        nodes.append(
            GpuNode(NodeConfig(**{"address": address, "arena_bytes": 4 * MIB, "gpu": "0", **settings}), *flags)
        )
        return nodes[-1]

    yield start_it
    for node in nodes:
        node.close()


@pytest.fixture
def node(start):
    return start().wait_ready()


@pytest.fixture
def puppet(address):
    """Starts client processes with a fake driver of their own, attached when they are returned."""
    puppets = []

    def start_it(**settings):
        puppets.append(GpuPuppet(address, **settings))
        assert puppets[-1].do("mapped") == 0
        return puppets[-1]

    yield start_it
    for each in puppets:
        each.close()


def test_status_says_which_gpu_and_makes_no_context_in_who_asks(node, address):
    with fake_cuda() as fake, pdx.connect(address, timeout_s=30.0) as client:
        status = client.status()
        assert (status.gpu, status.mapped, status.arena_bytes) == (uuid(), 1, 4 * MIB)
        with client.reserve("x", 5000) as chunk:
            with pytest.raises(LayoutError, match=r"use \.tensor\(\)"):
                _ = chunk.view
            chunk.check()
        assert fake.calls.total() == 0
    assert num_mapped() == 0


def test_two_processes_share_the_bytes_on_the_gpu(node, puppet):
    one, other = puppet(), puppet()
    assert one.do("map") == other.do("map") == "vmm"
    slot = one.do("put", "x", 100_000, 7)
    assert other.do("get", "x") == slot
    assert other.do("read", "x") == [7]
    assert node.status().counters["handovers"] == 2
    descriptors = len(os.listdir(f"/proc/{node.pid}/fd"))
    free = node.status().free_bytes
    one.do("put", "half", 100_000, 1, False)
    assert node.status().free_bytes < free
    one.kill()
    wait_until(lambda: node.status().free_bytes == free, what="it leaves nothing")
    assert other.do("read", "x") == [7]
    assert other.do("map") == "vmm", "mapped once"
    assert node.status().mapped == 1, "the dead one's mapping was its own"
    # Fewer, where the connection of who waited for the node was still being closed when they were counted.
    wait_until(lambda: len(os.listdir(f"/proc/{node.pid}/fd")) <= descriptors)


def test_memory_of_a_killed_node_is_readable_and_its_slots_current(node, puppet, start, address):
    """So a copy that is under way ends well; the process is known dead, and nothing new begins."""
    client = puppet()
    client.do("map")
    client.do("put", "x", 100_000, 7)
    node.kill()
    assert client.do("read", "x") == [7]
    assert client.do("is_current", "x") is True
    assert node.handover.exists(), "which the next one replaces"
    again = start().wait_ready()
    newcomer = puppet()
    newcomer.do("map")
    assert newcomer.do("get", "x")[0] == "ChunkMissing"
    newcomer.do("put", "y", 100_000, 9)
    assert client.do("read", "x") == [7], "the old life's memory is not the new one's"
    assert len(arenas_of(address)) == 1
    assert again.status().mapped == 1


@pytest.mark.parametrize(
    ("flags", "settings", "says"),
    [
        ((), {"gpu": "7"}, "there is no GPU '7' here; this process sees: 0 = GPU-"),
        ((), {"arena_bytes": 2 << 30}, "does not fit on GPU 0: choose a smaller --gpu-arena"),
        (("--gpus", "0"), {}, "--gpu 0: cuInit failed: CUDA_ERROR_NO_DEVICE"),
        (("--no-vmm", "--fail", "cuMemAlloc"), {}, "cuMemAlloc failed: CUDA_ERROR_UNKNOWN"),
    ],
)
def test_a_node_that_cannot_have_its_gpu_says_why_and_leaves_nothing(start, address, flags, settings, says):
    node = start(*flags, **settings)
    assert node.process.wait(20) == 1
    assert says in node.log
    assert "Traceback" not in node.log
    assert not arenas_of(address)
    assert not node.handover.exists()


def test_a_tensor_is_over_the_slot_and_sealing_waits_for_the_gpu(node, address, monkeypatch):
    """PyTorch has no GPU here: a named stand-in makes a CPU tensor of the interface that it would read."""
    torch = pytest.importorskip("torch")
    steps = []

    def stand_in(span, device):
        interface = span.__cuda_array_interface__
        steps.append(device)
        nbytes, (address, is_read_only) = interface["shape"][0], interface["data"]
        assert (interface["typestr"], interface["strides"], is_read_only) == ("|u1", None, False)
        buffer = (ctypes.c_uint8 * nbytes).from_address(driver.api().memory.look(address, nbytes))
        buffer.span = span
        return torch.frombuffer(buffer, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append(f"wait {device}"))
    with fake_cuda() as fake:
        with pdx.connect(address, timeout_s=30.0) as client:
            with client.reserve("x", 4000) as chunk:
                chunk.tensor(torch.float32, (10, 100))[:] = 2.5
                assert steps == ["cuda:0"]
                chunk.seal()
                assert steps == ["cuda:0", "wait 0"]
            with client.get("x") as chunk:
                tensor = chunk.tensor(torch.float32)
                assert tensor.shape == (1000,)
            assert steps == ["cuda:0", "wait 0", "cuda:0", "wait 0"], "reading ends before the node may evict it"
        assert num_mapped() == 1, "the tensor lives"
        assert tensor.sum() == 2500.0
        del tensor
        wait_until(lambda: num_mapped() == 0)
        assert fake.leftovers() == {}


def test_a_client_says_goodbye_when_the_gpu_has_done_what_it_was_asked_to(node, address, monkeypatch):
    """Before that, the room of an unsealed chunk is not another's."""
    torch = pytest.importorskip("torch")
    steps = []

    def attached():
        """Without who asks."""
        return len(node.status().attached) - 1

    monkeypatch.setattr(torch, "as_tensor", lambda span, device: torch.zeros(4000, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append((device, attached())))
    with fake_cuda():
        client = pdx.connect(address, timeout_s=30.0)
        client.reserve("never sealed", 4000).tensor(torch.float32)
        client.close()
        wait_until(lambda: num_mapped() == 0)
    assert steps == [(0, 1)]
    wait_until(lambda: attached() == 0, what="it has said bye")


# ---- several nodes ----------------------------------------------------------------------------


class Copy:
    """A client of this process that reads and writes chunks on a GPU through the fake."""

    def __init__(self, client):
        self.client = client
        self.arena = client._connection.arena
        if self.arena.gpu:
            self.arena.map(Gpu.find(self.arena.gpu))

    def put(self, name, data, **settings):
        if not self.arena.gpu:
            put(self.client, name, data, **settings)
            return
        with self.client.reserve(name, len(data), **settings) as chunk:
            at = driver.api().memory.look(self.arena.address + chunk.slot.offset, len(data))
            ctypes.memmove(at, data, len(data))
            chunk.seal()

    def read(self, name, **settings):
        if not self.arena.gpu:
            return read(self.client, name, **settings)
        with self.client.get(name, **settings) as chunk:
            data = bytes(self.arena.read(chunk.slot.offset, chunk.nbytes))
            chunk.check()
            return data


@pytest.fixture
def cluster_of(place):
    clusters = []
    with fake_cuda(gpus=2):

        def start(names, gpus, **settings):
            clusters.append(GpuCluster(place, names, gpus, **settings))
            clusters[-1].start(*names)
            return clusters[-1]

        yield start
        for cluster in clusters:
            cluster.close()
        assert num_mapped() == 0


def test_chunks_are_pushed_and_fetched_by_cuda_ipc(cluster_of):
    """Between host memory and a GPU."""
    cluster = cluster_of("ab", {"b": "1"}, digests="always")
    a, b = Copy(cluster["a"]), Copy(cluster["b"])
    sizes = {"one": 1, "odd": 12_345, "large": 3 * MIB}
    for number, (name, nbytes) in enumerate(sizes.items()):
        a.put(name, pattern(number, nbytes), push_to="b")
        b.put(f"b-{name}", pattern(100 + number, nbytes))
    for number, (name, nbytes) in enumerate(sizes.items()):
        assert b.read(name, wait_s=20.0) == pattern(number, nbytes)
        assert a.read(f"b-{name}", wait_s=20.0, source="b") == pattern(100 + number, nbytes)
    assert cluster.peer("a", "b").channel == cluster.peer("b", "a").channel == "cuda_ipc"
    assert cluster.peer("a", "b").why == ""
    cluster.settle()
    assert cluster.counter("b", "digest_mismatches") == 0
    cluster.nodes["a"].kill()
    wait_until(lambda: cluster["b"].status().mapped == 1, what="the dead peer's memory is unmapped")


def test_a_node_that_can_only_be_reached_by_channels_for_host_memory_says_so(cluster_of):
    cluster = cluster_of("ab", {"b": "0"}, channels=["tcp"])
    wait_until(lambda: "is a GPU's" in cluster.nodes["b"].log, what="its own log")
    wait_until(lambda: "tcp moves host memory" in why(cluster, "a", "b"), what="the other node's status")
    assert cluster.nodes["b"].log.count("no channel tcp") == 1, "once, not with every attempt"
    cluster.settle("a")


def why(cluster, name, of):
    peer = cluster.peer(name, of)
    return peer.why if peer is not None else ""
