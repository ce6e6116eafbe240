"""Interpreted kernels reach what a GPU's would reach; everything else is an illegal address, for good."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from fake_cuda_kernels import install  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from pdx.cuda import driver  # noqa: E402
from pdx.cuda.driver import call  # noqa: E402
from pdx.cuda.gpu import Gpu  # noqa: E402
from pdx.cuda.memory import DeviceMemory  # noqa: E402
from pdx.errors import GpuError  # noqa: E402

NBYTES = 2 << 20


def copy_words(source, target, count, WORDS: tl.constexpr):
    words = tl.arange(0, WORDS)
    mask = words < count
    found = tl.load(source.to(tl.pointer_type(tl.int64)) + words, mask=mask, other=0)
    tl.store(target.to(tl.pointer_type(tl.int64)) + words, found, mask=mask)


def copy(source, target, count=4):
    """`count` words by a kernel."""
    install()
    InterpretedFunction(copy_words)[(1,)](source, target, count, WORDS=8)


class Shared:
    """Host memory that others may have mapped, as an arena."""

    def __init__(self):
        fd = os.memfd_create("pdx-test", os.MFD_CLOEXEC)
        os.ftruncate(fd, NBYTES)
        self.map = mmap.mmap(fd, NBYTES)
        os.close(fd)
        self.anchor = (ctypes.c_char * NBYTES).from_buffer(self.map)
        self.address = ctypes.addressof(self.anchor)


@pytest.fixture
def memory(fake):
    with DeviceMemory.create(Gpu.find("0"), NBYTES) as made:
        yield made


def is_refused(fake, *args):
    """By the kernel, and every later call of the driver."""
    with pytest.raises(Exception, match="not the GPU's to use"):
        copy(*args)
    with pytest.raises(GpuError) as caught:
        driver.call("cuMemGetInfo")
    fake.heal()
    return caught.value.code == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_device_memory_and_the_engines_own(fake, memory):
    own, back = (ctypes.create_string_buffer(data, 64) for data in (b"a page of the engine", b""))
    copy(ctypes.addressof(own), memory.address + 128)
    copy(memory.address + 128, ctypes.addressof(back))
    assert back.raw[:32] == own.raw[:32]


def test_what_is_masked_out_is_not_touched(fake, memory):
    end = memory.address + NBYTES
    copy(end - 16, memory.address, 2)
    assert is_refused(fake, end - 16, memory.address, 3)


def test_memory_that_is_not_mapped_any_more(fake, memory):
    with DeviceMemory.create(Gpu.find("0"), NBYTES) as lost:
        address = lost.address
    assert is_refused(fake, memory.address, address)


@pytest.mark.parametrize(("flags", "is_reached"), [(3, True), (0, False), (None, False)])
def test_shared_host_memory_is_reached_when_it_is_page_locked_for_kernels(fake, memory, flags, is_reached):
    shared = Shared()
    Gpu.find("0").use()
    if flags is not None:
        call("cuMemHostRegister", shared.address, NBYTES, flags)
    if is_reached:
        copy(memory.address, shared.address)
        call("cuMemHostUnregister", shared.address)
        flags = None
    assert is_refused(fake, memory.address, shared.address)
    if flags is not None:
        call("cuMemHostUnregister", shared.address)
