"""The fake driver is as strict as a driver about captures."""

from __future__ import annotations

import ctypes
import mmap

import pytest
from fake_cuda_calls import SPOIL_CAPTURES

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
