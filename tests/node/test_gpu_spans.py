"""Memory that a client's tensors share, and the thread that they are made and dropped in, which is not ours."""

import ctypes
import gc
import threading

import pytest
from fake_cuda import fake_cuda

from pdx.cuda import arena as arena_module
from pdx.cuda.arena import GpuArena
from pdx.cuda.copies import CopyStream
from pdx.cuda.driver import call
from pdx.cuda.gpu import Gpu, keeping_context
from pdx.cuda.memory import num_mapped
from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.slot import Slot
from pdx.testing.waiting import wait_until

SLOT = Slot(0, GRANULE_BYTES, 7)


@pytest.fixture
def fake():
    with fake_cuda(gpus=2, nbytes=64 << 20) as made:
        yield made
        assert (made.leftovers(), num_mapped()) == ({}, 0)


@pytest.fixture
def opened(fake, tmp_path, monkeypatch):
    """A client's arena, mapped for the first GPU."""
    gpu = Gpu.find("0")
    with GpuArena.create(tmp_path / "arena", 4 * GRANULE_BYTES, gpu) as arena:
        arena.generations[0] = SLOT.generation

        def export(*_):
            with keeping_context():  # as if it were done in the node's process
                return arena.device.export()

        monkeypatch.setattr(arena_module, "fetch_handle", export)
        with GpuArena.open(arena.path, arena.nbytes, arena.gpu, "/handover", b"t" * 16) as made:
            made.map(gpu)
            yield made


@pytest.mark.parametrize("is_closed_first", [False, True])
def test_it_stays_mapped_until_the_gpu_has_done_what_it_was_asked_to_do(fake, opened, is_closed_first):
    """Unmapping does not wait by itself, and whoever drops a tensor does not know what is still under way."""
    target = ctypes.create_string_buffer(SLOT.nbytes)
    spans = [opened.span(SLOT)]
    if is_closed_first:
        opened.close()
    with CopyStream(Gpu.find("0")) as stream:
        with fake.hold():
            stream.copy(ctypes.addressof(target), spans[0].address, SLOT.nbytes)

            def drop():
                spans.clear()
                gc.collect()
                opened.close()

            dropping = threading.Thread(target=drop)
            dropping.start()
            wait_until(lambda: fake.calls["cuCtxSynchronize"] or num_mapped() == 1, what="it is to be unmapped")
            assert num_mapped() == 2
        dropping.join()
        stream.wait()
    assert num_mapped() == 1


def test_what_the_gpu_refuses_does_not_keep_it_mapped(fake, opened, caplog):
    span = opened.span(SLOT)
    opened.close()
    fake.fail("cuCtxSynchronize")
    del span
    assert num_mapped() == 1
    assert "cuCtxSynchronize" in caplog.text


def current() -> int:
    return int(call("cuCtxGetCurrent"))


def test_the_threads_own_gpu_stays_its_current_one(fake, opened):
    """PyTorch takes the context for the thread's device: its next tensor would be on another GPU."""
    other, second = GpuArena.open(opened.path, opened.nbytes, opened.gpu, "/handover", b"t" * 16), Gpu.find("1")
    second.use()
    before = current()
    other.map(Gpu.find("0"))
    assert current() == before
    span = other.span(SLOT)
    del span
    assert current() == before
    other.close()
    assert current() == before


def test_a_thread_without_a_gpu_has_none_afterwards(fake, opened):
    found = []

    def run():
        with GpuArena.open(opened.path, opened.nbytes, opened.gpu, "/handover", b"t" * 16) as other:
            other.map(Gpu.find("0"))
            found.append(current())
        found.append(current())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0, 0]
