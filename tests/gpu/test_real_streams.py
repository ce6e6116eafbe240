"""The copier of GPU engines on torch's own streams: each wait that it has to make is long enough here to be missed.

`torch.cuda._sleep` keeps a stream busy, so that whoever does not wait for it sees bytes of before or after.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from device_bytes import read, write  # noqa: E402
from group_pages import TwoGroups  # noqa: E402

from pdx.cuda.arena import GpuArena  # noqa: E402
from pdx.cuda.gpu import Gpu  # noqa: E402
from pdx.cuda.page_lock import PageLock  # noqa: E402
from pdx.engine.gpu_copier import GpuCopier, page_map  # noqa: E402
from pdx.engine.plan import LoadPlan, MovedTokens, PagesPlan  # noqa: E402
from pdx.engine.streams import Streams  # noqa: E402
from pdx.kernels.turned_gpu import PageStrides, TurnedPages  # noqa: E402
from pdx.memory.arena import GRANULE_BYTES, Arena  # noqa: E402
from pdx.memory.rope import Rope  # noqa: E402
from pdx.memory.share import Share  # noqa: E402
from pdx.memory.slot import Slot  # noqa: E402
from pdx.testing.waiting import wait_until  # noqa: E402

MIB = 1 << 20
LAYERS, BLOCKS, PAGE_BYTES = 4, 32, 16 << 10
IDS = [9, 2, 30, 17]
CHUNK_BYTES = LAYERS * len(IDS) * PAGE_BYTES
TOKENS, HEADS, DIM = 16, 2, 128  # of a page, where its bytes mean something
ROPE = Rope(tuple(1e4 ** (-at / 32) for at in range(32)))
LONG = 400_000_000  # cycles: some 0.2 seconds
GENERATION = 5


class Engine:
    """Pages, a copier, and an arena with one slot that is ours."""

    def __init__(self, gpu: Gpu, arena: Arena) -> None:
        self.gpu = gpu
        self.arena = arena
        self.counts: list[str] = []
        self.pages = torch.zeros((LAYERS, BLOCKS, PAGE_BYTES), dtype=torch.uint8, device="cuda")
        self.source = torch.randint(1, 256, (LAYERS, BLOCKS, PAGE_BYTES), dtype=torch.uint8, device="cuda")
        streams = Streams(torch.device("cuda", gpu.ordinal))
        pages = [[page_map(list(self.pages), BLOCKS, PAGE_BYTES)]]
        layers = [each.view(BLOCKS, HEADS, TOKENS, -1) for each in self.pages]
        strides = PageStrides.of(layers, BLOCKS, HEADS, DIM, torch.bfloat16)
        link, turned = SimpleNamespace(count=self.counts.append), TurnedPages(ROPE, strides, torch.bfloat16)
        self.copier = GpuCopier(pages, Share(0, 1), streams, link, turned)
        self.slot = Slot(0, CHUNK_BYTES, GENERATION)
        self.plan = PagesPlan([self.slot], len(IDS), 0, IDS, completes=True)
        self.copier.use(arena)
        torch.cuda.synchronize()

    @property
    def expected(self) -> bytes:
        """The slot, when all layers of `source` were computed and gathered."""
        return self.source[:, torch.tensor(IDS, device="cuda")].cpu().numpy().tobytes()

    def slot_bytes(self) -> bytes:
        """What is in the slot now."""
        if self.arena.gpu:
            return read(self.gpu, self.arena.address, CHUNK_BYTES)
        return bytes(self.arena.data[:CHUNK_BYTES])

    def poison(self, value: int = 0xEE) -> None:
        """Other bytes in the slot."""
        if self.arena.gpu:
            write(self.gpu, self.arena.address, bytes([value]) * CHUNK_BYTES)
        else:
            self.arena.data[:CHUNK_BYTES] = bytes([value]) * CHUNK_BYTES

    def begin(self) -> None:
        """A step that saves the chunk; until the page-lock covers the slot it cannot."""
        wait_until(
            lambda: self.copier.begin(self.arena, [self.plan]) == [self.plan], timeout_s=30.0, what="within reach"
        )

    def compute(self, layer: int) -> None:
        """One layer, late."""
        torch.cuda._sleep(LONG // LAYERS)
        self.pages[layer].copy_(self.source[layer])

    def finish(self, missing: list[range]) -> threading.Event:
        """The end of the step; what is set when all copies have ended."""
        ended = threading.Event()
        assert all(self.copier.gather(0, layers) for layers in missing)
        self.copier.after_copies(ended.set)
        self.copier.end()
        return ended

    def lag(self, stream: object, cycles: int = LONG) -> None:
        """The stream has something else to do first."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)

    def close(self) -> None:
        """As a worker does."""
        self.copier.close()
        self.copier.use(None)
        torch.cuda.synchronize()


@contextlib.contextmanager
def an_arena(kind: str, gpu: Gpu) -> Iterator[Arena]:
    """Of 4 MiB on the GPU, or in host memory that can be page-locked."""
    with tempfile.TemporaryDirectory(prefix="pdx-test-", dir="/dev/shm") as folder:
        path = Path(folder) / "arena"
        arena = GpuArena.create(path, 4 * MIB, gpu) if kind == "gpu" else Arena.create(path, 4 * MIB)
        with contextlib.closing(arena):
            yield arena


@pytest.fixture(params=["gpu", "host"])
def engine(request: pytest.FixtureRequest, cuda: Gpu) -> Iterator[Engine]:
    """With an arena on the GPU, or in page-locked host memory."""
    with an_arena(request.param, cuda) as arena:
        arena.generations[0] = GENERATION
        made = Engine(cuda, arena)
        yield made
        made.close()


def test_gathers_wait_for_the_layer_and_the_next_step_for_the_gathers(engine: Engine) -> None:
    engine.begin()
    for layer in range(LAYERS):
        engine.compute(layer)
        engine.lag(engine.copier._gathering)
        assert engine.copier.gather(0, range(layer, layer + 1))
    ended = engine.finish([])
    engine.pages.zero_()  # the next step's blocks are cleared, or belong to somebody else
    assert not ended.is_set(), "nothing of this has waited for the GPU"
    assert ended.wait(20)
    assert engine.slot_bytes() == engine.expected


def test_nobody_is_told_before_the_copy_has_ended(engine: Engine) -> None:
    engine.begin()
    told: list[bytes] = []
    for layer in range(LAYERS):
        engine.pages[layer].copy_(engine.source[layer])
        engine.lag(engine.copier._gathering)
        engine.copier.gather(0, range(layer, layer + 1))
        engine.copier.after_copies(lambda: told.append(engine.slot_bytes()))
    assert engine.finish([]).wait(20)
    layer_bytes = len(IDS) * PAGE_BYTES
    assert len(told) == LAYERS
    for layer, seen in enumerate(told):
        assert seen[: (layer + 1) * layer_bytes] == engine.expected[: (layer + 1) * layer_bytes]


def test_a_graph_replay_skips_the_hooks_and_nothing_of_ours_is_in_it(engine: Engine) -> None:
    """A step is captured with its hooks. Each replay is gathered at its end, all layers, behind the replay."""
    factor = torch.ones((), dtype=torch.uint8, device="cuda")

    def forward(hook: Callable[[int], None]) -> None:
        for layer in range(LAYERS):
            torch.cuda._sleep(LONG // LAYERS)
            engine.pages[layer].copy_(engine.source[layer] * factor)
            hook(layer)

    gathered: list[bool] = []
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        forward(lambda layer: None)
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    engine.begin()
    engine.poison()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(lambda layer: gathered.append(engine.copier.gather(0, range(layer, layer + 1))))
    assert gathered == [False] * LAYERS
    graph.replay()
    torch.cuda.synchronize()
    assert engine.slot_bytes() == b"\xee" * CHUNK_BYTES, "a gather was captured"
    assert engine.finish([]).wait(20)
    for number in (3, 7):
        factor.fill_(number)
        engine.begin()
        graph.replay()
        engine.lag(engine.copier._gathering)
        ended = engine.finish([range(LAYERS)])
        engine.pages.zero_()
        assert ended.wait(20)
        wanted = (engine.source * number)[:, torch.tensor(IDS, device="cuda")].cpu().numpy().tobytes()
        assert engine.slot_bytes() == wanted


def test_a_graph_may_be_captured_while_copies_run(engine: Engine) -> None:
    """The threads that wait for events, and those that page-lock memory, must not spoil another thread's capture.

    `torch.cuda.graph` would wait for the whole GPU first. Here the capture begins while a waiter sleeps. Then
    the waiter wakes, and memory is locked and let go of.
    """
    scratch, graph, stream = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        scratch.add_(1)  # its kernel is loaded
    torch.cuda.synchronize()
    engine.begin()
    engine.lag(engine.copier._gathering, 10 * LONG)
    for layer in range(LAYERS):
        engine.pages[layer].copy_(engine.source[layer])
        engine.copier.gather(0, range(layer, layer + 1))
    ended = engine.finish([])
    queued = engine.copier._copied._queue  # behind the first event, for which the waiter sleeps, is that of the step
    wait_until(lambda: queued.qsize() < 2, timeout_s=20.0, what="the waiter has taken the event")
    shared = mmap.mmap(-1, 4 * MIB)
    anchor = (ctypes.c_char * len(shared)).from_buffer(shared)
    refused: list[str] = []
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            is_early = not ended.is_set()
            scratch.add_(1)
            lock = PageLock(ctypes.addressof(anchor), len(shared), engine.gpu, anchor=anchor, on_refused=refused.append)
            wait_until(lambda: refused or lock.covers(0, len(shared)), timeout_s=20.0, what="page-locked")
            closing = threading.Thread(target=lock.close)  # CUDA refuses it to the thread that captures
            closing.start()
            closing.join(20)
            assert ended.wait(20)
            scratch.add_(1)
        finally:  # a capture that is left open spoils all tests behind this one
            graph.capture_end()  # raises if the capture was spoiled
    assert is_early, "the copies were over before the capture began"
    assert not refused
    graph.replay()
    torch.cuda.synchronize()
    assert scratch.eq(3).all()
    assert engine.slot_bytes() == engine.expected


def test_loads_wait_for_what_was_computed_before(engine: Engine) -> None:
    """The blocks' last owner still writes to them when the load is begun."""
    engine.begin()
    engine.pages.copy_(engine.source)
    assert engine.finish([range(LAYERS)]).wait(20)
    expected = engine.expected
    torch.cuda._sleep(LONG)
    engine.pages.zero_()
    scatter = engine.copier.loading(engine.arena)
    assert scatter is not None
    failed: list[list[PagesPlan]] = []
    loads = LoadPlan.of("r", None, [engine.plan]).pages_of(Share(0, 1))
    thread = threading.Thread(target=lambda: failed.append(scatter.copy(loads, range(LAYERS))))
    thread.start()
    thread.join(30)
    assert failed == [[]]
    scatter.close()
    torch.cuda.synchronize()
    found = engine.pages[:, torch.tensor(IDS, device="cuda")].cpu().numpy().tobytes()
    assert found == expected
    others = [block for block in range(BLOCKS) if block not in IDS]
    assert not engine.pages[:, torch.tensor(others, device="cuda")].any()


def test_a_slot_that_was_taken_away_is_reported(engine: Engine) -> None:
    engine.begin()
    assert engine.finish([range(LAYERS)]).wait(20)
    scatter = engine.copier.loading(engine.arena)
    assert scatter is not None
    engine.arena.generations[0] = GENERATION + 1
    results: list[list[PagesPlan]] = []
    thread = threading.Thread(target=lambda: results.append(scatter.copy([engine.plan], range(LAYERS))))
    thread.start()
    thread.join(30)
    assert results == [[engine.plan]]
    scatter.close()
    assert engine.copier.begin(engine.arena, [engine.plan]) == []


def test_tokens_at_other_positions_are_turned_behind_what_was_computed_before(engine: Engine) -> None:
    """Of two heads, 16 tokens to a page, half of each key without a position."""
    engine.begin()
    source = torch.randn((LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=torch.bfloat16, device="cuda")
    engine.pages.copy_(source.view(torch.uint8).view(engine.pages.shape))
    assert engine.finish([range(LAYERS)]).wait(20)
    torch.cuda._sleep(LONG)
    engine.pages.zero_()
    first, target, count, shift, blocks = 5, 21, 40, -1234, [3, 8, 1, 12]
    scatter = engine.copier.loading(engine.arena)
    assert scatter is not None
    moved = msgspec.structs.replace(engine.plan, block_ids=blocks, moved=MovedTokens(first, target, count, shift))
    failed: list[list[PagesPlan]] = []
    thread = threading.Thread(target=lambda: failed.append(scatter.copy([moved], range(LAYERS))))
    thread.start()
    thread.join(30)
    assert failed == [[]]
    scatter.close()
    torch.cuda.synchronize()
    ids = torch.tensor(IDS, device="cuda")
    tokens = source[:, ids].transpose(2, 3).reshape(LAYERS, -1, HEADS, 2 * DIM)[:, first : first + count].float()
    pairs = len(ROPE.frequencies)
    angles = torch.tensor(ROPE.angles(shift), device="cuda")
    x, y = tokens[..., :pairs].clone(), tokens[..., pairs : 2 * pairs].clone()
    tokens[..., :pairs] = x * angles.cos() - y * angles.sin()
    tokens[..., pairs : 2 * pairs] = y * angles.cos() + x * angles.sin()
    expected = torch.zeros_like(source)
    for at in range(count):
        block, token = blocks[(target + at) // TOKENS], (target + at) % TOKENS
        expected[:, block, :, token] = tokens[:, at].bfloat16()
    found = engine.pages.view(torch.bfloat16).view(expected.shape)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("kind", ["gpu", "host"])
def test_each_cache_group_is_copied_from_its_own_pages(cuda: Gpu, kind: str) -> None:
    """As of a hybrid model: attention and states lie over the same memory."""
    counts: list[str] = []
    with an_arena(kind, cuda) as arena:
        groups = TwoGroups("cuda")
        for slot in groups.slots:
            arena.generations[slot.offset // GRANULE_BYTES] = GENERATION
        streams = Streams(torch.device("cuda", cuda.ordinal))
        copier = GpuCopier(groups.maps(), Share(0, 1), streams, SimpleNamespace(count=counts.append))
        copier.use(arena)
        try:
            wait_until(lambda: copier.begin(arena, groups.plans) == groups.plans, timeout_s=30.0, what="within reach")
            torch.cuda._sleep(LONG)
            groups.compute()
            for group, layers in enumerate(groups.layers):
                assert copier.gather(group, range(len(layers)))
            ended = threading.Event()
            copier.after_copies(ended.set)
            copier.end()
            computed = groups.raw.clone()
            groups.raw.zero_()
            assert ended.wait(20)
            expected = groups.of_plans(computed)
            scatter = copier.loading(arena)
            assert scatter is not None
            failed: list[list[PagesPlan]] = []

            def load() -> None:
                for group, plan in enumerate(groups.load().pages_of(Share(0, 1))):
                    failed.append(scatter.copy([plan], range(len(groups.layers[group]))))
                scatter.close()

            thread = threading.Thread(target=load)
            thread.start()
            thread.join(30)
            assert failed == [[], []]
            torch.cuda.synchronize()
            assert torch.equal(groups.raw, expected)
        finally:
            copier.close()
            copier.use(None)
            torch.cuda.synchronize()
    assert not counts
