"""What NIXL is told of memory on a GPU. It cannot move it here: a mock stands for it with CUDA."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from cuda_world import two_gpus
from fake_cuda import FakeCuda

from pdx.cuda import driver
from pdx.errors import ChannelUnavailable
from pdx.testing.channel_stage import MIB, GpuBlock, HostFile, SecondGpuBlock
from pdx.transports.channel import Memory, Piece
from pdx.transports.nixl import agent as nixl_agent
from pdx.transports.nixl.agent import NixlAgent, Place
from pdx.transports.nixl.channel import NixlChannel, NixlDetail, NixlPeer
from pdx.transports.nixl.region import NixlRegion
from pdx.transports.ucx import engine as ucx_engine


class MockNixl:
    """Stands for the bindings of NIXL and one agent: notes the descriptors that it gets."""

    DRAM_SEG, VRAM_SEG = "dram", "vram"
    NIXL_READ, NIXL_WRITE, NIXL_SUCCESS = "read", "write", 0
    NIXL_THREAD_SYNC_STRICT = "strict"

    class nixlBackendError(Exception):  # noqa: N801, N818
        """As theirs."""

    class nixlNotFoundError(Exception):  # noqa: N801, N818
        """As theirs."""

    def __init__(self, segments: tuple[str, ...] = ("DRAM_SEG", "VRAM_SEG")) -> None:
        self.segments = list(segments)
        self.registered: list[tuple[str, list[Any]]] = []
        self.requests: list[tuple[str, Any, Any]] = []
        self.refuses = False
        self.has_thread = False
        self.contexts: list[int] = []  # current when messages were taken
        vars(self).update(nixlBackendError=self.nixlBackendError, nixlNotFoundError=self.nixlNotFoundError)

    def nixlAgentConfig(self) -> Any:
        return type("Config", (), {})()

    def nixlAgent(self, name: str, config: Any) -> MockNixl:
        self.has_thread = config.useProgThread
        return self

    def getNotifs(self, known: Any, backends: list[int]) -> dict[str, list[bytes]]:
        self.contexts.append(int(driver.call("cuCtxGetCurrent")))
        return {}

    def nixlRegDList(self, segment: str, spans: list[Any]) -> Any:
        return (segment, spans)

    nixlXferDList = nixlRegDList

    def getAvailPlugins(self) -> list[str]:
        return ["UCX"]

    def getPluginParams(self, plugin: str) -> tuple[dict[str, str], list[str]]:
        return {}, self.segments

    def createBackend(self, plugin: str, params: dict[str, str]) -> int:
        return 7

    def registerMem(self, descriptors: Any, backends: list[int]) -> None:
        if self.refuses and descriptors[0] == self.VRAM_SEG:
            raise self.nixlBackendError("NIXL_ERR_BACKEND")
        self.registered.append(descriptors)

    def deregisterMem(self, descriptors: Any, backends: list[int]) -> None:
        self.registered.remove(descriptors)

    def getLocalMD(self) -> bytes:
        return b"metadata"

    def createXferReq(self, verb: str, local: Any, remote: Any, *rest: Any) -> int:
        self.requests.append((verb, local, remote))
        return len(self.requests)

    def postXferReq(self, handle: int, message: bytes) -> None:
        """Begun."""


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with two_gpus() as fake:
        yield fake


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> MockNixl:
    mock = MockNixl()
    monkeypatch.setattr(nixl_agent, "_load", lambda: mock)
    return mock


@pytest.mark.parametrize(("kind", "has_thread"), [(SecondGpuBlock, False), (HostFile, True)])
def test_no_thread_without_a_context_of_the_gpu_is_in_nixl(fake, nixl, kind, has_thread):
    """UCX's CUDA transport ends the process otherwise: a thread of NIXL's own would have none."""
    with closing(kind(MIB)) as block:
        agent = NixlAgent(block.memory, {})
        assert nixl.has_thread is has_thread
        thread = threading.Thread(target=agent.take)
        thread.start()
        thread.join()
        (context,) = nixl.contexts
        assert bool(context) is not has_thread
        agent.close()


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (SecondGpuBlock, Place(), ("vram", 1, "dram", 0)),
        (HostFile, Place("VRAM_SEG", 5), ("dram", 0, "vram", 5)),
    ],
)
def test_nixl_writes_name_both_kinds_of_memory(fake, nixl, here, there, expected):
    """The other side's device is what it said, in its own process's numbers; greetings read into host memory."""
    with closing(here(MIB)) as block:
        agent = NixlAgent(block.memory, {})
        base = block.memory.address
        ours, page = nixl.registered
        assert ours == (expected[0], [(base, MIB, expected[1], "")])
        assert page[0] == "dram"  # what greetings read into
        agent.write("other", [(base + 64, 16), (base, 8)], [(1 << 40, 16), (2 << 40, 8)], there)
        agent.read_byte("other", 1 << 40, there)
        (verb, local, remote), (read, page, byte) = nixl.requests
        assert verb == "write"
        assert local == (expected[0], [(base + 64, 16, expected[1]), (base, 8, expected[1])])
        assert remote == (expected[2], [(1 << 40, 16, expected[3]), (2 << 40, 8, expected[3])])
        assert (read, page[0], byte) == ("read", "dram", (expected[2], [(1 << 40, 1, expected[3])]))
        agent.close()
        assert not nixl.registered


def test_a_nixl_channel_uses_the_place_that_the_peer_told(fake, nixl):
    """All the way from `write` of a channel, with the detail as it crosses the wire."""
    with closing(GpuBlock(MIB)) as block:
        region = NixlRegion.register(block.memory)
        detail = NixlDetail(f"pdx-{secrets.token_hex(16)}", b"m", 1 << 40, MIB, Place("VRAM_SEG", 3))
        peer = NixlPeer(msgspec.msgpack.decode(msgspec.msgpack.encode(detail), type=NixlDetail))
        remote = region.listen().invite(secrets.token_bytes(16))
        channel = NixlChannel(region, peer, remote, lambda: None)
        channel._begin = lambda begin, message: begin()  # the descriptors are all that is looked at
        channel.write([Piece(16, 32, 64)], b"")
        assert nixl.requests == [
            ("write", ("vram", [(block.memory.address + 16, 64, 0)]), ("vram", [((1 << 40) + 32, 64, 3)]))
        ]
        region.close()


def test_nixl_without_cuda_says_so(fake, nixl):
    with closing(GpuBlock(MIB)) as block:
        nixl.segments = ["DRAM_SEG"]
        with pytest.raises(ChannelUnavailable, match="takes no memory of GPUs, only DRAM_SEG"):
            NixlAgent(block.memory, {})
        nixl.segments = ["DRAM_SEG", "VRAM_SEG"]
        nixl.refuses = True
        with pytest.raises(ChannelUnavailable, match="cannot register.*UCX one with CUDA"):
            NixlAgent(block.memory, {})


def test_nixl_as_it_is_installed_refuses_or_registers(fake):
    """The real library, which has no CUDA driver here: an error of ours, not a crash."""
    if not NixlRegion.availability().is_ok:
        pytest.skip("NIXL is not installed")
    with closing(GpuBlock(MIB)) as block, pytest.raises(ChannelUnavailable, match="NIXL"):
        NixlRegion.register(block.memory)


def test_memory_of_a_gpu_that_is_not_there_is_refused(nixl):
    """Its process sees other GPUs than this one."""
    with two_gpus(), closing(GpuBlock(MIB)) as block:
        memory: Memory = block.memory
        memory.gpu = "GPU-00000000-0000-0000-0000-000000000000"
        for register in (lambda: NixlAgent(memory, {}), lambda: ucx_engine._used(memory.gpu)):
            with pytest.raises(ChannelUnavailable, match="no GPU"):
                register()
