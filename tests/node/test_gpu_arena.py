"""An arena on a (fake) GPU: generations as ever, the data mapped on demand, held while it is used, and given back."""

import ctypes
import gc
import stat
import threading

import pytest
from fake_cuda import fake_cuda
from gpu_harness import GRANULE

from pdx.cuda import arena as arena_module
from pdx.cuda import driver
from pdx.cuda.arena import GpuArena
from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu, keeping_context
from pdx.cuda.memory import DeviceMemory, num_mapped
from pdx.errors import ArenaTooSmall, GpuError, GpuUnavailable, LayoutError, NodeUnavailable, ProtocolError, StaleSlot
from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.slot import Slot
from pdx.testing.waiting import wait_until

NBYTES = 16 * GRANULE_BYTES
SLOT = Slot(3 * GRANULE_BYTES, 100, 7)
GPUS_BYTES = 64 << 20


def fill(address, value, nbytes):
    """What a kernel does, without one."""
    ctypes.memset(driver.api().memory.look(address, nbytes), value, nbytes)


@pytest.fixture
def fake():
    mapped = num_mapped()
    with fake_cuda(gpus=2, nbytes=GPUS_BYTES) as made:
        yield made
        assert made.leftovers() == {}
        assert num_mapped() == mapped


@pytest.fixture
def gpu(fake):
    return Gpu.find("0")


@pytest.fixture
def arena(tmp_path, gpu):
    with GpuArena.create(tmp_path / "arena", NBYTES, gpu) as made:
        made.generations[3] = SLOT.generation
        yield made


@pytest.fixture
def opened(arena, monkeypatch):
    """Opens the arena as an attached process would, with a handover that is a call."""
    made = []
    monkeypatch.setattr(arena_module, "fetch_handle", lambda path, ticket, timeout_s: arena.device.export())

    def open_it(is_node_alive=lambda: True):
        made.append(GpuArena.open(arena.path, arena.nbytes, arena.gpu, "/handover", b"t" * 16, is_node_alive))
        return made[-1]

    yield open_it
    for each in made:
        each.close()


def test_the_file_has_the_tables_alone_and_is_this_users(arena):
    assert arena.path.stat().st_size == NBYTES // GRANULE_BYTES * (8 + 2)
    assert stat.S_IMODE(arena.path.stat().st_mode) == 0o600
    assert arena.nbytes == NBYTES
    assert arena.device.nbytes == GRANULE, "what the driver rounds it up to is not the arena's"


def test_slots_are_checked_as_in_host_memory(arena, opened):
    other = opened()
    other.check(SLOT)
    with pytest.raises(TypeError):
        other.generations[0] = 1
    for wrong in (Slot(SLOT.offset, NBYTES, 7), Slot(SLOT.offset + 1, 1, 7), Slot(0, 1, 1), Slot(1 << 47, 1 << 47, 0)):
        assert not other.is_current(wrong)
    arena.generations[3] += 1
    with pytest.raises(StaleSlot):
        other.check(SLOT)


def test_opening_it_calls_no_driver_and_makes_no_context(arena, opened, fake):
    calls, contexts = fake.calls.total(), fake.counts()["contexts"]
    other = opened()
    other.check(SLOT)
    assert (other.address, other.kind, other.gpu) == (0, "", arena.gpu)
    assert other.populate_in_background() is None
    assert (fake.calls.total(), fake.counts()["contexts"]) == (calls, contexts)


def test_reading_copies_exactly_what_was_asked_for(arena):
    for offset in range(0, NBYTES, GRANULE_BYTES):
        fill(arena.address + offset, offset // GRANULE_BYTES, GRANULE_BYTES)
    assert bytes(arena.read(GRANULE_BYTES - 1, 2)) == b"\0\1"
    assert bytes(arena.read(NBYTES - 1, 1)) == b"\x0f"
    assert bytes(arena.read(0, 0)) == b""
    for offset, nbytes in ((-1, 1), (NBYTES, 1), (0, NBYTES + 1), (0, -1)):
        with pytest.raises(ValueError, match="not inside"):
            arena.read(offset, nbytes)


def test_a_read_that_fails_gives_its_stream_back(arena, fake):
    before = fake.counts()
    fake.fail("cuMemcpyAsync")
    with pytest.raises(GpuError, match="cuMemcpyAsync"):
        arena.read(0, 10)
    assert fake.counts() == before
    assert len(arena.read(0, 10)) == 10


def test_the_cpu_has_no_view_of_it_and_is_told_what_to_use(arena, opened):
    for look in (lambda: arena.data, lambda: arena.view(SLOT), lambda: opened().view(SLOT)):
        with pytest.raises(LayoutError, match=rf"on GPU {arena.gpu}: use \.tensor"):
            look()


# ---- what does not work -----------------------------------------------------------------------


def test_an_arena_larger_than_the_gpu_says_what_is_free_and_what_to_do(tmp_path, gpu):
    with pytest.raises(ArenaTooSmall, match=r"of 128 MiB .*smaller --gpu-arena.*64 of 64 MiB are free"):
        GpuArena.create(tmp_path / "arena", 2 * GPUS_BYTES, gpu)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_never_taken_over_and_the_memory_is_given_back(tmp_path, gpu):
    (tmp_path / "arena").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        GpuArena.create(tmp_path / "arena", NBYTES, gpu)
    assert (tmp_path / "arena").read_bytes() == b"mine"


def test_whatever_call_fails_while_it_is_made_or_mapped_nothing_is_left(arena, opened, tmp_path, gpu, fake, caplog):
    """The `fake` fixture compares what is left; here, that every call can fail, and that the next try works."""
    before = fake.counts()
    for number in range(100):
        fake.fail(after=number)
        caplog.clear()
        try:
            GpuArena.create(tmp_path / "other", NBYTES, gpu).close()
        except GpuError:
            assert fake.counts() == before, f"call {number}"
            assert not (tmp_path / "other").exists()
            continue
        (tmp_path / "other").unlink()
        if "network cards" not in caplog.text:  # memory that network cards cannot reach was made instead
            break
        assert fake.counts() == before, f"call {number}"
    assert number > 4
    fake.heal()
    for number in range(100):
        fake.fail(after=number)
        other = opened()
        try:
            other.map(gpu)
        except GpuError:
            assert fake.counts() == before, f"call {number}"
            fake.heal()
            other.map(gpu)
            other.close()
            continue
        break
    assert number > 4
    fake.heal()


def test_no_file_of_that_size_is_a_node_that_is_gone(tmp_path, arena):
    for path, nbytes in ((tmp_path / "nothing", NBYTES), (arena.path, 2 * NBYTES)):
        with pytest.raises(NodeUnavailable):
            GpuArena.open(path, nbytes, arena.gpu, "/handover", b"")


def test_what_is_handed_over_must_be_this_arena(arena, opened, gpu, monkeypatch):
    with DeviceMemory.create(Gpu.find("1"), NBYTES) as alien:
        monkeypatch.setattr(arena_module, "fetch_handle", lambda *_: alien.export())
        with pytest.raises(ProtocolError, match="instead of"):
            opened().map(gpu)
    assert num_mapped() == 1


def test_it_is_mapped_for_one_gpu(arena, opened, gpu):
    other = opened()
    other.map(Gpu.find("1"))
    with pytest.raises(GpuUnavailable, match="mapped for GPU"):
        other.map(gpu)


# ---- holding and closing ----------------------------------------------------------------------


def test_what_is_held_stays_mapped_until_the_last_one_lets_go(arena, opened, gpu):
    other = opened()
    other.map(gpu)
    address = other.hold()
    span = other.span(SLOT)
    assert span.__cuda_array_interface__["data"] == (address + SLOT.offset, False)
    assert span.__cuda_array_interface__["shape"] == (SLOT.nbytes,)
    other.close()
    other.close()
    with pytest.raises(GpuUnavailable):
        other.hold()
    assert num_mapped() == 2
    fill(address + SLOT.offset, 9, SLOT.nbytes)
    other.let_go()
    assert num_mapped() == 2
    assert bytes(arena.read(SLOT.offset, 1)) == b"\t"
    del span
    gc.collect()
    assert num_mapped() == 1
    with pytest.raises(GpuUnavailable):
        other.map(gpu)
    assert num_mapped() == 1


def test_a_closed_arena_is_not_mapped_again_by_who_was_just_about_to(arena, opened, gpu, monkeypatch):
    other = opened()

    def close_meanwhile(*_):
        other.close()
        return arena.device.export()

    monkeypatch.setattr(arena_module, "fetch_handle", close_meanwhile)
    with pytest.raises(GpuUnavailable, match="closed"):
        other.map(gpu)
    assert num_mapped() == 1


def test_threads_that_map_at_the_same_time_map_it_once(arena, opened, gpu):
    other = opened()
    start = threading.Barrier(4)
    addresses = []

    def map_it():
        start.wait()
        other.map(gpu)
        addresses.append(other.address)

    threads = [threading.Thread(target=map_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(addresses)) == 1
    assert num_mapped() == 2


# ---- legacy IPC -------------------------------------------------------------------------------


@pytest.fixture
def legacy(tmp_path):
    with fake_cuda(vmm=False) as fake:
        with GpuArena.create(tmp_path / "arena", NBYTES, Gpu.find("0")) as made:
            made.generations[3] = SLOT.generation
            yield made
        assert fake.leftovers() == {}


def test_legacy_memory_is_gone_with_its_node(legacy):
    assert legacy.kind == "ipc"
    alive = [True]
    with GpuArena.open(legacy.path, NBYTES, legacy.gpu, "/handover", b"", lambda: alive[0]) as other:
        # A process cannot open its own legacy handle: what matters here is what it knows of the kind.
        other._take(DeviceMemory.create(Gpu.find("0"), NBYTES, "ipc"), Gpu.find("0"))
        assert other.is_current(SLOT)
        alive[0] = False
        assert not other.is_current(SLOT)
        with pytest.raises(StaleSlot):
            other.span(SLOT)


def test_memory_that_outlives_its_node_does_not_ask_for_it(arena, opened, gpu):
    other = opened(lambda: False)
    other.map(gpu)
    assert other.is_current(SLOT)


def test_a_node_that_ends_makes_all_slots_of_legacy_memory_stale_before_it_frees_it(legacy):
    with GpuArena.open(legacy.path, NBYTES, legacy.gpu, "/handover", b"") as other:
        assert other.is_current(SLOT)
        legacy.close()
        assert not other.is_current(SLOT)
        assert not any(other.is_current(Slot(n * GRANULE_BYTES, 1, 0)) for n in range(16))


def test_the_file_is_let_go_of_when_the_threads_context_cannot_be_put_back(arena, opened, gpu, fake, caplog):
    other = opened()
    other.map(gpu)
    calls = fake.calls["cuCtxSetCurrent"]
    fake.fail("cuCtxSetCurrent", after=1)  # the first one is for unmapping
    other.close()
    assert fake.calls["cuCtxSetCurrent"] == calls + 2
    assert "may not be the one of before" in caplog.text
    assert num_mapped() == 1
    with pytest.raises(ValueError, match="released"):
        _ = other.generations[0]


# ---- what a client's tensors share, and the thread that they are made and dropped in, which is not ours -----------


@pytest.mark.parametrize("is_closed_first", [False, True])
def test_it_stays_mapped_until_the_gpu_has_done_what_it_was_asked_to_do(fake, opened, gpu, is_closed_first):
    """Unmapping does not wait by itself, and whoever drops a tensor does not know what is still under way."""
    other = opened()
    other.map(gpu)
    target = ctypes.create_string_buffer(SLOT.nbytes)
    spans = [other.span(SLOT)]
    if is_closed_first:
        other.close()
    with CopyStream(gpu) as stream:
        with fake.hold():
            stream.copy(ctypes.addressof(target), spans[0].address, SLOT.nbytes)

            def drop():
                spans.clear()
                gc.collect()
                other.close()

            dropping = threading.Thread(target=drop)
            dropping.start()
            wait_until(lambda: fake.calls["cuCtxSynchronize"] or num_mapped() == 1, what="it is to be unmapped")
            assert num_mapped() == 2
        dropping.join()
        stream.wait()
    assert num_mapped() == 1


def test_what_the_gpu_refuses_does_not_keep_it_mapped(fake, opened, gpu, caplog):
    other = opened()
    other.map(gpu)
    span = other.span(SLOT)
    other.close()
    fake.fail("cuCtxSynchronize")
    del span
    assert num_mapped() == 1
    assert "cuCtxSynchronize" in caplog.text


def test_the_threads_own_gpu_stays_its_current_one(arena, opened, gpu, monkeypatch):
    """PyTorch takes the context for the thread's device: its next tensor would be on another GPU."""
    found = []

    def export(*_):
        with keeping_context():  # as if it were done in the node's process
            return arena.device.export()

    monkeypatch.setattr(arena_module, "fetch_handle", export)

    def run(own):
        if own is not None:
            own.use()
        other = opened()
        for step in (lambda: other.map(gpu), lambda: other.span(SLOT), other.close):
            step()
            gc.collect()
            found.append(int(driver.call("cuCtxGetCurrent")))

    for own in (None, Gpu.find("1")):
        thread = threading.Thread(target=run, args=(own,))
        thread.start()
        thread.join()
    assert found[:3] == [0] * 3
    assert len(set(found[3:])) == 1
    assert found[3]
