"""A node whose chunks lie on a GPU, as a real process: it hands its memory over, pushes it, and may be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")
pytest.importorskip("zmq")

from node_harness import NodeProcess  # noqa: E402

import pdx  # noqa: E402
from pdx.config import handover_path  # noqa: E402
from pdx.cuda.arena import fetch_handle  # noqa: E402
from pdx.cuda.gpu import Gpu  # noqa: E402
from pdx.cuda.memory import num_mapped  # noqa: E402
from pdx.errors import LayoutError, NodeError, NodeUnavailable  # noqa: E402
from pdx.testing.waiting import wait_until  # noqa: E402

pytestmark = pytest.mark.serial
MIB = 1 << 20
SLACK = 48 * MIB
ATTACH_S = 20.0
# A client of a GPU node that looks, and must not make a CUDA context.
LOOKER = """
import sys
import pdx
with pdx.connect(sys.argv[1], 20.0) as node:
    print(node.status().gpu, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def gpu_node(cuda: Gpu, start_node: Callable[..., NodeProcess]) -> NodeProcess:
    """A node with 64 MiB of the first GPU."""
    return start_node(gpu="0", arena_bytes=64 * MIB)


@pytest.fixture
def client(gpu_node: NodeProcess) -> Iterator[pdx.Node]:
    """A client of it in this process."""
    with pdx.connect(gpu_node.address, ATTACH_S) as node:
        yield node


def put(node: pdx.Node, name: str, *, push_to: str = "") -> torch.Tensor:
    """A chunk of 4 MiB with bytes of its own."""
    content = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8, device="cuda")
    with node.reserve(name, content.numel(), parts=4, push_to=push_to) as chunk:
        part = chunk.tensor(torch.uint8).view(4, -1)
        for index, piece in enumerate(content.view(4, -1)):
            part[index] = piece
            chunk.fill(index)
        chunk.seal()
        del part
    return content


def test_chunks_are_tensors_on_the_gpu(gpu_node: NodeProcess, client: pdx.Node, cuda: Gpu) -> None:
    content = put(client, "chunk")
    with pdx.connect(gpu_node.address, ATTACH_S) as other, other.get("chunk") as chunk:
        found = chunk.tensor(torch.uint8)
        assert found.device.type == "cuda"
        assert torch.equal(found, content)
        with pytest.raises(LayoutError, match="tensor"):
            _ = chunk.view
        del found
    assert client.status().gpu == cuda.uuid


def test_who_only_looks_makes_no_context(gpu_node: NodeProcess, cuda: Gpu) -> None:
    """A context would take hundreds of megabytes of the GPU."""
    free = cuda.free_bytes()
    command = [sys.executable, "-c", LOOKER, gpu_node.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as looker:
        assert looker.stdout is not None
        assert looker.stdout.readline().strip() == cuda.uuid
        assert cuda.free_bytes() > free - SLACK
        looker.communicate()


def test_who_has_a_wrong_ticket_gets_nothing(gpu_node: NodeProcess, client: pdx.Node) -> None:
    with pytest.raises(NodeError):
        fetch_handle(handover_path(gpu_node.address), bytes(16), 5.0)
    wait_until(lambda: gpu_node.status().counters.get("handover_refused"), what="counted")
    assert num_mapped() == 0


def test_an_arena_that_does_not_fit_is_said(cuda: Gpu, start_node: Callable[..., NodeProcess]) -> None:
    with pytest.raises(NodeUnavailable, match="does not fit"):
        start_node(gpu="0", arena_bytes=cuda.total_bytes * 2)


def test_a_killed_node_leaves_its_chunks_to_who_maps_them(cuda: Gpu, start_node: Callable[..., NodeProcess]) -> None:
    """And when that one lets go, the GPU has its memory back."""
    free = cuda.free_bytes()
    gpu_node = start_node(gpu="0", arena_bytes=256 * MIB)
    with pdx.connect(gpu_node.address, ATTACH_S) as node:
        content = put(node, "chunk")
        chunk = node.get("chunk")
        found = chunk.tensor(torch.uint8)
        gpu_node.kill()
        if cuda.supports_vmm:
            assert torch.equal(found, content)
        del found, chunk
    wait_until(lambda: num_mapped() == 0, what="unmapped")
    del content
    torch.cuda.empty_cache()
    wait_until(lambda: cuda.free_bytes() >= free - SLACK, timeout_s=20.0, what="the arena's memory is free")
    start_node()  # clears away what a killed one has left


def test_a_killed_client_leaves_nothing(gpu_node: NodeProcess, cuda: Gpu) -> None:
    free = cuda.free_bytes()
    code = f"""
import sys, torch, pdx.client.api
node = pdx.connect({gpu_node.address!r}, 20.0)
chunk = node.reserve("half", {4 * MIB})
chunk.tensor(torch.uint8).fill_(1)
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stdout.readline().strip() == "ready"
        it.kill()
    wait_until(lambda: gpu_node.status().free_bytes == 64 * MIB, timeout_s=20.0, what="its reservation is given back")
    wait_until(lambda: cuda.free_bytes() >= free - SLACK, timeout_s=20.0, what="its context is gone")


def test_two_nodes_push_over_cuda_ipc(cuda: Gpu) -> None:
    from pdx.bench.harness.nodes import TO, node_pair

    free = cuda.free_bytes()
    with node_pair("cuda_ipc", 64 * MIB, gpu="0") as (a, b):
        content = put(a, "pushed", push_to=TO)
        wait_until(lambda: b.lookup(["pushed"]) == 1, timeout_s=20.0, what="it is there")
        with b.get("pushed") as chunk:
            found = chunk.tensor(torch.uint8)
            assert torch.equal(found, content)
            del found
        [peer] = a.status().peers
        assert peer.sent_bytes >= content.numel()
    del content
    torch.cuda.empty_cache()
    wait_until(lambda: cuda.free_bytes() >= free - SLACK, timeout_s=20.0, what="both arenas are free again")


def test_a_node_without_that_gpu_says_which_there_are(cuda: Gpu, start_node: Callable[..., NodeProcess]) -> None:
    with pytest.raises(NodeUnavailable, match=cuda.uuid):
        start_node(gpu="GPU-00000000-0000-0000-0000-000000000000", arena_bytes=64 * MIB)
