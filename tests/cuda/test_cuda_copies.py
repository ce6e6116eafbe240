"""Copies run behind each other while the caller goes on; what goes wrong is an error, not a crash."""

from __future__ import annotations

import ctypes
import mmap

import pytest
from fake_cuda import fake_cuda

from pdx.cuda.copies import CopyStream
from pdx.cuda.driver import call
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory
from pdx.cuda.page_lock import PIECE_BYTES
from pdx.errors import GpuError

MIB = 1 << 20


@pytest.fixture
def memory(gpu):
    with DeviceMemory.create(gpu, 2 * MIB) as made:
        yield made


@pytest.fixture
def stream(gpu, memory):
    with CopyStream(gpu) as made:
        yield made


def test_host_to_device_to_device_to_host(stream, memory):
    there, back = ctypes.create_string_buffer(b"pages", 4096), ctypes.create_string_buffer(4096)
    stream.copy(memory.address, ctypes.addressof(there), 4096)
    stream.copy(memory.address + MIB, memory.address, 4096)
    stream.copy(ctypes.addressof(back), memory.address + MIB, 4096)
    stream.wait()
    assert back.raw == there.raw


def test_close_waits_for_the_copies(fake, gpu, memory):
    stream = CopyStream(gpu)
    ctypes.memset(fake.memory.look(memory.address, MIB), 8, MIB)
    stream.copy(memory.address + MIB, memory.address, MIB)
    stream.close()
    stream.close()
    stream.wait()
    assert ctypes.string_at(fake.memory.look(memory.address + 2 * MIB - 1, 1), 1) == b"\x08"
    with pytest.raises(GpuError, match="closed"):
        stream.copy(memory.address, memory.address + MIB, 1)


@pytest.mark.parametrize("together", [False, True])
def test_a_copy_is_cut_where_pieces_of_page_locked_memory_meet(fake, stream, memory, together):
    """The driver refuses a copy over two registrations; the fake does, too."""
    host = mmap.mmap(-1, 2 * PIECE_BYTES)
    anchor = (ctypes.c_char * len(host)).from_buffer(host)
    border = -(-(ctypes.addressof(anchor) + MIB) // PIECE_BYTES) * PIECE_BYTES  # with a MiB before it
    for piece in (border - MIB, border):
        call("cuMemHostRegister", piece, MIB, 0)
    ctypes.memset(fake.memory.look(memory.address, 200), 0, 200)
    ctypes.memset(border - 10, 4, 20)
    if together:
        stream.copy_all([(memory.address, border - 10, 20)])
        stream.copy_all([(border - 100, memory.address, 150), (border + 50, memory.address + 150, 50)])
    else:
        stream.copy(memory.address, border - 10, 20)
        stream.copy(border - 100, memory.address, 200)
    stream.wait()
    assert ctypes.string_at(fake.memory.look(memory.address, 21), 21) == bytes([4]) * 20 + b"\0"
    assert ctypes.string_at(border - 100, 20) == bytes([4]) * 20
    bare = call("cuStreamCreate", 0)
    with pytest.raises(GpuError, match="INVALID_VALUE"):
        call("cuMemcpyAsync", memory.address, border - 10, 20, bare)
    call("cuStreamDestroy", bare)
    for piece in (border - MIB, border):
        call("cuMemHostUnregister", piece)
    del anchor
    host.close()


def test_a_copy_beyond_the_memory_is_refused(stream, memory):
    with pytest.raises(GpuError, match=r"cuMemcpyAsync failed: CUDA_ERROR_INVALID_VALUE"):
        stream.copy(memory.address, memory.address + MIB, MIB + 1)


def test_memory_that_was_unmapped_under_a_copy_is_an_error(fake, gpu):
    with CopyStream(gpu) as stream:
        with fake.hold(), DeviceMemory.create(gpu, MIB) as lost:
            stream.copy(lost.address, lost.address + 1000, 10)
            lost.close()
        with pytest.raises(GpuError, match="ILLEGAL_ADDRESS"):
            stream.wait()
        fake.heal()


@pytest.mark.parametrize("n", range(20))
def test_whatever_call_fails_nothing_is_left(n):
    with fake_cuda() as fake:
        gpu = Gpu.find("0")
        with DeviceMemory.create(gpu, MIB) as memory:
            fake.fail(after=n)
            try:
                with CopyStream(gpu) as stream:
                    stream.copy(memory.address, memory.address + 5, 5)
                    stream.wait()
            except GpuError:
                pass
            fake.heal()
            left = fake.leftovers()
        # Only what the driver itself refused to destroy.
        assert sum(left.get(kind, 0) for kind in ("streams", "events")) <= 1
        if {"streams", "events"} & left.keys():
            assert fake.calls["cuStreamDestroy"] == 1


@pytest.mark.parametrize("driver_version", [12090, 12040], ids=["one call", "a call each"])
def test_many_copies_are_one_call_where_the_driver_has_one(driver_version):
    with fake_cuda(driver_version=driver_version) as fake:
        gpu = Gpu.find("0")
        with DeviceMemory.create(gpu, 2 * MIB) as memory, CopyStream(gpu) as stream:
            there = ctypes.create_string_buffer(bytes(range(256)) * 16)
            back = ctypes.create_string_buffer(4096)
            stream.copy(memory.address, ctypes.addressof(there), 4096)
            size = 4096 // 16
            stream.copy_all([(ctypes.addressof(back) + at, memory.address + at, size) for at in range(0, 4096, size)])
            stream.wait()
            assert back.raw == there.raw[:4096]
            assert fake.calls["cuMemcpyBatchAsync"] == (driver_version >= 12080)
            assert fake.calls["cuMemcpyAsync"] == (1 if driver_version >= 12080 else 17)


def test_copies_of_ours_spoil_no_capture(fake):
    """Reading a chunk of a GPU arena, beside an engine that captures."""
    gpu = Gpu.find("0")
    with DeviceMemory.create(gpu, 2 * MIB) as memory, CopyStream(gpu) as stream:
        fake.capture(is_under_way=True)
        stream.copy(memory.address, memory.address + 64, 64)
        stream.wait()
        assert fake.spoiled == []
        fake.capture(is_under_way=False)
