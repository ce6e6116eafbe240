"""Host memory that is page-locked as an arena is, and copies to and from it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest
from device_bytes import read, write

from pdx.cuda.copies import CopyStream
from pdx.cuda.driver import call
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory
from pdx.cuda.page_lock import PIECE_BYTES, PageLock
from pdx.testing.waiting import wait_until

MIB = 1 << 20
SECONDS = 60.0


class Shared:
    """Shared memory of a file that has no name, as an arena's file in /dev/shm."""

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("pdx-test", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            self.map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.nbytes = nbytes
        self.anchor = (ctypes.c_char * nbytes).from_buffer(self.map)
        self.address = ctypes.addressof(self.anchor)


@contextlib.contextmanager
def locked(gpu: Gpu, shared: Shared) -> Iterator[PageLock]:
    """All of it is."""
    refused: list[str] = []
    lock = PageLock(shared.address, shared.nbytes, gpu, anchor=shared.anchor, on_refused=refused.append)
    try:
        wait_until(lambda: refused or lock.covers(0, shared.nbytes), timeout_s=SECONDS, what="page-locked")
        assert not refused
        yield lock
    finally:
        lock.close()


def test_copies_between_it_and_the_gpu(gpu: Gpu) -> None:
    """Also over the border of two pieces, which are registered one by one."""
    shared = Shared(PIECE_BYTES + 8 * MIB)
    border = PIECE_BYTES - shared.address % PIECE_BYTES
    first = max(0, min(border, shared.nbytes) - 2 * MIB)
    content = os.urandom(4 * MIB)
    with locked(gpu, shared), DeviceMemory.create(gpu, 8 * MIB) as memory, CopyStream(gpu) as stream:
        shared.map[first : first + len(content)] = content
        stream.copy(memory.address, shared.address + first, len(content))
        stream.wait()
        assert read(gpu, memory.address, len(content)) == content
        write(gpu, memory.address, content[::-1])
        stream.copy(shared.address + first, memory.address, len(content))
        stream.wait()
        assert shared.map[first : first + len(content)] == content[::-1]


def test_many_copies_in_one_call(gpu: Gpu) -> None:
    """In both directions, and over the border of two pieces; by one call for each where the driver has no such."""
    count, part = 64, 64 << 10
    shared = Shared(PIECE_BYTES + 8 * MIB)
    border = PIECE_BYTES - shared.address % PIECE_BYTES
    first = max(0, min(border, shared.nbytes - 3 * MIB) - 2 * MIB - 100)
    content = os.urandom(count * part)
    there = [(index * part, (count - 1 - index) * part) for index in range(count)]  # in another order on the GPU
    with locked(gpu, shared), DeviceMemory.create(gpu, count * part) as memory, CopyStream(gpu) as stream:
        host = shared.address + first
        shared.map[first : first + len(content)] = content
        stream.copy_all([(memory.address + on_gpu, host + on_host, part) for on_host, on_gpu in there])
        stream.wait()
        backwards = b"".join(content[on_host : on_host + part] for on_host, _ in reversed(there))
        assert read(gpu, memory.address, len(content)) == backwards
        shared.map[first : first + len(content)] = bytes(len(content))
        stream.copy_all([(host + on_host, memory.address + on_gpu, part) for on_host, on_gpu in there])
        stream.wait()
        assert shared.map[first : first + len(content)] == content


def test_the_gpu_is_let_go_of(gpu: Gpu) -> None:
    shared = Shared(4 * MIB)
    for _ in range(3):
        with locked(gpu, shared):
            pass
    gpu.use()
    call("cuMemHostRegister", shared.address, shared.nbytes, 0)  # would be refused if anything still were
    call("cuMemHostUnregister", shared.address)


def test_copies_run_in_order(gpu: Gpu) -> None:
    """Two parts change places, through a third one; any other order loses one of them."""
    part = 16 * MIB
    with DeviceMemory.create(gpu, 3 * part) as memory, CopyStream(gpu) as stream:
        first, second, between = (memory.address + index * part for index in range(3))
        write(gpu, first, b"\1" * part)
        write(gpu, second, b"\2" * part)
        for _ in range(21):
            stream.copy(between, first, part)
            stream.copy(first, second, part)
            stream.copy(second, between, part)
        stream.wait()
        assert read(gpu, first, part) == b"\2" * part
        assert read(gpu, second, part) == b"\1" * part


def test_pageable_memory_is_copied_too(gpu: Gpu) -> None:
    source, target = ctypes.create_string_buffer(os.urandom(MIB), MIB), ctypes.create_string_buffer(MIB)
    with DeviceMemory.create(gpu, MIB) as memory, CopyStream(gpu) as stream:
        stream.copy(memory.address, ctypes.addressof(source), MIB)
        stream.copy(ctypes.addressof(target), memory.address, MIB)
        stream.wait()
        assert target.raw == source.raw


def test_the_kernel_writes_to_it(cuda: Gpu) -> None:
    torch = pytest.importorskip("torch")
    from pdx.kernels.paged import Batch, PageMap, Place, Run, gather, scatter

    shared = Shared(4 * MIB)
    pages = torch.randint(0, 256, (2, 32, 16 << 10), dtype=torch.uint8, device="cuda")
    before = pages.clone()
    with locked(cuda, shared):
        mapped = PageMap.of(list(pages), 32)
        ids = list(range(31, -1, -1))
        batch = Batch.of(mapped, [Run(ids, shared.address, MIB)])
        gather(mapped, batch, 0, 2, place=Place.HOST)
        torch.cuda.synchronize()
        for layer in range(2):
            expected = before[layer].flip(0).cpu().numpy().tobytes()
            assert shared.map[layer * MIB : layer * MIB + len(expected)] == expected
        pages.zero_()
        scatter(mapped, batch, 0, 2, place=Place.HOST)
        torch.cuda.synchronize()
        assert torch.equal(pages, before)
