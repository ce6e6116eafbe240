"""The fake driver is as strict as a driver; interpreted kernels reach what a GPU's would reach, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys

import pytest
import triton.language as tl
from fake_cuda_calls import SPOIL_CAPTURES
from fake_cuda_kernels import install
from triton.runtime.interpreter import InterpretedFunction

from pdx.cuda import driver
from pdx.cuda.copies import CopyStream
from pdx.cuda.driver import call
from pdx.cuda.gpu import Gpu, beside_captures
from pdx.cuda.memory import DeviceMemory
from pdx.errors import GpuError


def error_of(name, *args):
    try:
        driver.call(name, *args)
    except GpuError as error:
        return error.code
    return ""


# ---- what a GPU refuses ---------------------------------------------------------------------


def test_the_cpu_cannot_look_at_device_memory():
    """Who takes an address of a GPU for one of the host ends as on a real machine."""
    code = (
        "import ctypes\n"
        "from pdx.cuda.gpu import Gpu\n"
        "from pdx.cuda.memory import DeviceMemory\n"
        "from fake_cuda import fake_cuda\n"
        "with fake_cuda() as fake, DeviceMemory.create(Gpu.find('0'), 1 << 20, {kind!r}) as memory:\n"
        "    print(ctypes.string_at(fake.memory.look(memory.address, 1), 1) != b'', flush=True)\n"
        "    ctypes.string_at(memory.address, 1)\n"
        "    print('unreachable')\n"
    )
    for kind in ("vmm", "ipc"):
        command = [sys.executable, "-c", code.format(kind=kind)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "True\n"), done.stderr


@pytest.fixture
def prohibited(fake):
    """Calls that end a capture, with arguments that are right otherwise."""
    Gpu.find("0").use()
    stream, event = call("cuStreamCreate", 0), call("cuEventCreate", 0)
    host, other = mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
    places = [(ctypes.c_char * 4096).from_buffer(each) for each in (host, other)]
    call("cuMemHostRegister", ctypes.addressof(places[0]), 4096, 0)
    memory = call("cuMemAlloc", 4096)
    yield {
        "cuCtxSynchronize": (),
        "cuStreamSynchronize": (stream,),
        "cuEventQuery": (event,),
        "cuEventSynchronize": (event,),
        "cuMemAlloc": (4096,),
        "cuMemFree": (memory,),
        "cuMemHostRegister": (ctypes.addressof(places[1]), 4096, 0),
        "cuMemHostUnregister": (ctypes.addressof(places[0]),),
    }
    fake.capture(is_under_way=False)
    fake.spoiled.clear()
    call("cuStreamDestroy", stream)
    call("cuEventDestroy", event)


def test_calls_that_spoil_a_capture_are_refused_and_remembered(fake, prohibited):
    assert prohibited.keys() == SPOIL_CAPTURES
    fake.capture(is_under_way=True)
    for name, args in prohibited.items():
        assert error_of(name, *args) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", name
    assert fake.spoiled == list(prohibited)
    fake.capture(is_under_way=False)
    call("cuMemFree", *prohibited["cuMemFree"])
    call("cuMemHostUnregister", *prohibited["cuMemHostUnregister"])


def test_a_thread_that_has_nothing_to_do_with_captures_may_call_all_but_one(fake, prohibited):
    """Waiting for a whole context is never possible beside a capture."""
    fake.capture(is_under_way=True)
    with beside_captures():
        assert {name for name, args in prohibited.items() if error_of(name, *args)} == {"cuCtxSynchronize"}
    assert fake.spoiled == ["cuCtxSynchronize"]
    assert error_of("cuEventQuery", *prohibited["cuEventQuery"]) == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    fake.capture(is_under_way=False)
    call("cuMemHostUnregister", prohibited["cuMemHostRegister"][0])
    [(address, _)] = [(found.start, found) for found in fake.memory.ranges()]
    call("cuMemFree", address)


def test_copies_of_ours_spoil_no_capture(fake):
    """Reading a chunk of a GPU arena, beside an engine that captures."""
    gpu = Gpu.find("0")
    with DeviceMemory.create(gpu, 2 << 20) as memory, CopyStream(gpu) as stream:
        fake.capture(is_under_way=True)
        stream.copy(memory.address, memory.address + 64, 64)
        stream.wait()
        assert fake.spoiled == []
        fake.capture(is_under_way=False)


# ---- interpreted kernels ------------------------------------------------------------------------

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
