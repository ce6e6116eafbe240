"""The copy kernel natively: the cases of tests/kernels, every kind of memory it reaches, and what it must not do.

`test_whole_batches` is what compute-sanitizer watches (see bench/gpu/sanitizer.py).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("hypothesis")

from gpu_child import GpuChild  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from paged_cases import LAYOUTS, Problem, layer_views, paged, problems, random_bytes  # noqa: E402

from pdx.cuda.gpu import Gpu  # noqa: E402
from pdx.cuda.memory import DeviceMemory  # noqa: E402
from pdx.kernels.page_map import Batch, PageMap, Place, Run  # noqa: E402

GIB = 1 << 30
PLACES = [pytest.param(("cuda", "cuda"), id="device"), pytest.param(("cuda", "pinned"), id="host")]
NAMES = ["gather", "scatter"]
many = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def on_a_gpu(cuda: Gpu) -> Iterator[None]:
    """Errors of a kernel come in the test that launched it."""
    yield
    torch.cuda.synchronize()


def compare(problem: Problem, place: tuple[str, str], name: str) -> None:
    actual, expected = problem.copy(place), problem.copy()
    actual.run(name)
    torch.cuda.synchronize()
    expected.run_reference(name)
    assert actual.is_same(expected)


@pytest.mark.timeout(900)  # each new size of page is compiled
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
@many
@given(problem=problems())
def test_it_is_the_reference_and_touches_nothing_else(place: tuple[str, str], name: str, problem: Problem) -> None:
    compare(problem, place, name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 8])
def test_whole_batches(place: tuple[str, str], name: str, layout: str, heads: int) -> None:
    """Pages as Llama's (64 KB with all heads), all layers and two chunks in one launch, between guards."""
    sizes = {"L": 3, "B": 12, "H": heads, "N": 16, "C": 256}
    page_bytes = heads * 16 * 256 * 2
    views, nbytes = layer_views(layout, sizes, torch.bfloat16, lead=64)
    ids = [11, 0, 7, 3, 5, 2, 9]
    runs = [Run(ids[:4], 64, 4 * page_bytes), Run(ids[4:], 128 + 12 * page_bytes, 3 * page_bytes + 16)]
    slots = random_bytes(128 + 24 * page_bytes + 64, 2)
    compare(Problem(random_bytes(nbytes, 1), slots, views, 12, runs, range(3), Place.HERE), place, name)


class RoundTrip:
    """Random pages of a few layers, and whether they come back from slots at some address."""

    def __init__(self, num_layers: int, ids: list[int]) -> None:
        self._pages = torch.randint(0, 256, (num_layers, len(ids), 64 << 10), dtype=torch.uint8, device="cuda")
        self._mapped = PageMap.of(list(self._pages), len(ids))
        self._ids = ids
        self.nbytes = self._pages.numel()

    def check(self, address: int) -> None:
        kernels, before = paged("cuda"), self._pages.clone()
        num_layers = self._mapped.num_layers
        batch = Batch.of(self._mapped, [Run(self._ids, address, self.nbytes // num_layers)])
        kernels.gather(self._mapped, batch, 0, num_layers)
        self._pages.zero_()
        kernels.scatter(self._mapped, batch, 0, num_layers)
        torch.cuda.synchronize()
        assert torch.equal(self._pages, before)


@pytest.mark.parametrize("kind", ["vmm", "ipc"])
def test_slots_in_memory_of_the_driver(cuda: Gpu, kind: str) -> None:
    """As in a node's arena, not torch's memory."""
    if kind == "vmm" and not cuda.supports_vmm:
        pytest.skip(f"{cuda.name} cannot export memory as a file descriptor")
    trip = RoundTrip(4, torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist())
    with DeviceMemory.create(cuda, trip.nbytes, kind) as memory:
        trip.check(memory.address)


def test_slots_on_a_peer(cuda: Gpu, peer_gpu: Gpu) -> None:
    """The kernel of one GPU reads and writes memory of another."""
    trip = RoundTrip(2, list(reversed(range(16))))
    with DeviceMemory.create(peer_gpu, trip.nbytes) as theirs:
        handle, fd = theirs.export()
        try:
            ours = DeviceMemory.open(handle, fd, on=cuda)  # whose context is the current one again
        finally:
            os.close(fd)
        with ours:
            trip.check(ours.address)


def test_more_than_32_bits_of_everything(cuda: Gpu) -> None:
    if cuda.free_bytes() < 12 * GIB:
        pytest.skip("needs 12 GiB of free memory")
    kernels, page_bytes = paged("cuda"), 64 << 10
    num_blocks = (5 * GIB) // page_bytes
    pages, slots = (torch.zeros(5 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    rows = pages.view(num_blocks, page_bytes)
    ids = [num_blocks - 1, 0, (4 * GIB) // page_bytes, (2 * GIB) // page_bytes]
    content = torch.randint(0, 256, (len(ids), page_bytes), dtype=torch.uint8, device="cuda")
    rows[torch.tensor(ids, device="cuda")] = content
    mapped = PageMap.of([rows, rows], num_blocks)
    address = slots.data_ptr() + 16
    batch = Batch.of(mapped, [Run(ids, address, 9 * GIB // 2)])
    kernels.gather(mapped, batch, 1, 1)
    torch.cuda.synchronize()
    at = 16 + 9 * GIB // 2
    assert torch.equal(slots[at : at + content.numel()].view(content.shape), content)
    assert not slots[:at].any()
    rows.zero_()
    kernels.scatter(mapped, batch, 1, 1)
    assert torch.equal(rows[torch.tensor(ids, device="cuda")], content)
    assert not rows[1 : ids[3]].any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", NAMES)
def test_a_launch_waits_for_nothing_and_allocates_nothing(cuda: Gpu, name: str) -> None:
    kernels = paged("cuda")
    pages = torch.zeros((2, 16, 16 << 10), dtype=torch.uint8, device="cuda")
    slots = torch.zeros(2 * 16 * (16 << 10), dtype=torch.uint8, device="cuda")
    mapped = PageMap.of(list(pages), 16)
    kernels.warm_up(mapped)
    batch = Batch.of(mapped, [Run(list(range(16)), slots.data_ptr(), 16 * (16 << 10))])
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(50_000_000)
        running = torch.cuda.Event()
        running.record()
        for layer in range(2):
            getattr(kernels, name)(mapped, batch, layer, 1)
        assert not running.query(), "the calls have waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


def test_nothing_is_compiled_behind_warm_up(cuda: Gpu) -> None:
    """Whatever the counts, layers and addresses of a step are."""
    kernels = paged("cuda")
    pages = torch.zeros((3, 40, 8 << 10), dtype=torch.uint8, device="cuda")
    slots = torch.zeros(3 * 40 * (8 << 10) + 64, dtype=torch.uint8, device="cuda")
    mapped = PageMap.of(list(pages), 40)
    kernels.warm_up(mapped)

    def compiled() -> int:
        return sum(len(entry[0]) for entry in kernels._copy_tiles.device_caches.values())

    before = compiled()
    assert before
    for count, offset, first, num in ((1, 0, 0, 1), (2, 16, 1, 2), (16, 32, 0, 3), (17, 48, 2, 1), (40, 64, 0, 3)):
        batch = Batch.of(mapped, [Run(list(range(count)), slots.data_ptr() + offset, 40 * (8 << 10))])
        for place in Place:
            kernels.gather(mapped, batch, first, num, place=place)
            kernels.scatter(mapped, batch, first, num, place=place)
    torch.cuda.synchronize()
    assert compiled() == before


def test_another_process_sees_what_was_gathered(cuda: Gpu, child: Callable[[], GpuChild]) -> None:
    kernels = paged("cuda")
    pages = torch.randint(0, 256, (1, 8, 16 << 10), dtype=torch.uint8, device="cuda")
    mapped = PageMap.of(list(pages), 8)
    other = child()
    with DeviceMemory.create(cuda, 1 << 20) as memory:
        kernels.gather(mapped, Batch.of(mapped, [Run([5], memory.address, 16 << 10)]), 0, 1)
        torch.cuda.synchronize()
        handle, fd = memory.export()
        try:
            assert other.open(handle, fd, 4096) == ctypes.string_at(pages[0, 5].cpu().data_ptr(), 4096)
        finally:
            if fd >= 0:
                os.close(fd)
        other.close_all()
