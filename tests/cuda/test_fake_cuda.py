"""The fake driver is as strict as a driver, and other processes can be run with it."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys

import pytest
from fake_cuda import fake_cuda
from fake_cuda_calls import SPOIL_CAPTURES

from pdx.cuda import driver
from pdx.cuda.copies import CopyStream
from pdx.cuda.driver import call
from pdx.cuda.gpu import Gpu, beside_captures
from pdx.cuda.memory import DeviceMemory, _properties
from pdx.errors import GpuError, GpuMemoryFull


@pytest.fixture
def streams(fake):
    """Two streams and an event of GPU 0, as handles."""
    Gpu.find("0").use()
    made = [call("cuStreamCreate", 0), call("cuStreamCreate", 0), call("cuEventCreate", 0)]
    yield made
    for stream in made[:2]:
        call("cuStreamDestroy", stream)
    call("cuEventDestroy", made[2])


def error_of(name, *args):
    try:
        driver.call(name, *args)
    except GpuError as error:
        return error.code
    return ""


def test_a_stream_waits_for_an_event_of_another(fake, streams):
    first, second, event = streams
    order = []
    with fake.hold():
        fake._streams._stream(first).put(lambda: order.append("first"))
        call("cuEventRecord", event, first)
        call("cuStreamWaitEvent", second, event, 0)
        fake._streams._stream(second).put(lambda: order.append("second"))
        assert error_of("cuEventQuery", event) == "CUDA_ERROR_NOT_READY"
    call("cuStreamSynchronize", second)
    assert order == ["first", "second"]
    assert error_of("cuEventQuery", event) == ""


def test_an_event_is_over_before_it_is_recorded(streams):
    call("cuEventSynchronize", streams[2])


def test_calls_need_a_context(fake):
    for name, args in (("cuStreamCreate", (0,)), ("cuMemAlloc", (1,)), ("cuMemHostRegister", (4096, 4096, 0))):
        assert error_of(name, *args) == "CUDA_ERROR_INVALID_CONTEXT"


def test_handles_are_checked(fake):
    Gpu.find("0").use()
    for name, args in (
        ("cuStreamSynchronize", (77,)),
        ("cuEventQuery", (77,)),
        ("cuMemRelease", (77,)),
        ("cuMemUnmap", (4096, 4096)),
        ("cuMemAddressFree", (4096, 4096)),
        ("cuMemFree", (4096,)),
        ("cuIpcCloseMemHandle", (4096,)),
        ("cuMemHostUnregister", (4096,)),
        ("cuMemGetAddressRange", (4096,)),
    ):
        assert error_of(name, *args).startswith("CUDA_ERROR_"), name


def test_mapped_addresses_are_not_given_back(fake):
    with DeviceMemory.create(Gpu.find("0"), 2 << 20) as memory:
        assert error_of("cuMemAddressFree", memory.address, memory.nbytes) == "CUDA_ERROR_INVALID_VALUE"
        assert error_of("cuMemFree", memory.address) == "CUDA_ERROR_INVALID_VALUE"


def test_what_is_left_is_said(caplog):
    with fake_cuda() as fake:
        memory = DeviceMemory.create(Gpu.find("0"), 2 << 20)
        assert fake.leftovers() == {"handles": 1, "reserved": 1, "mapped": 1, "used bytes": 2 << 20}
        memory.close()
        assert fake.leftovers() == {}


def test_functions_that_it_does_not_have(fake):
    with pytest.raises(AttributeError, match="cuLaunchKernel"):
        fake.cuLaunchKernel(0)


def run(*args):
    command = [sys.executable, "-m", "fake_cuda", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_pdx_runs_with_it():
    done = run("--gpus", "2", "--version")
    assert done.returncode == 2  # options of pdx come behind a command of it
    done = run("--no-vmm", "node", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--arena" in done.stdout


def test_a_module_runs_with_it(tmp_path, monkeypatch):
    (tmp_path / "looks.py").write_text(
        "import sys\n"
        "from pdx.cuda.gpu import all_gpus\n"
        "from pdx.cuda.driver import call, version\n"
        "from pdx.errors import GpuError\n"
        "print(sys.argv[1:], len(all_gpus()), all_gpus()[0].supports_vmm, version())\n"
        "try: call('cuMemGetInfo')\n"
        "except GpuError as error: print(error.code)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    settings = ("--gpus", "3", "--no-vmm", "--driver-version", "13000", "--fail", "cuMemGetInfo:0:OUT_OF_MEMORY")
    done = run(*settings, "-m", "looks", "--its", "own")
    assert done.stdout.splitlines() == ["['--its', 'own'] 3 False 13000", "CUDA_ERROR_OUT_OF_MEMORY"], done.stderr


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


def test_memory_is_not_zero_when_it_is_new(fake):
    for kind in ("vmm", "ipc"):
        with DeviceMemory.create(Gpu.find("0"), 2 << 20, kind) as memory:
            assert ctypes.string_at(fake.memory.look(memory.address, 16), 16) != bytes(16)


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


def test_what_is_free_is_the_devices_and_not_the_processs(fake, spawn):
    gpu, other = Gpu.find("0"), spawn(nbytes=64 << 20)
    free = gpu.free_bytes()
    handle, fd = other.export(40 << 20, 1)
    assert gpu.free_bytes() == free - (40 << 20)
    with pytest.raises(GpuMemoryFull, match="24 of 64 MiB are free"):
        DeviceMemory.create(gpu, 30 << 20)
    with DeviceMemory.open(handle, fd, on=gpu):
        os.close(fd)
        other.kill()
        assert gpu.free_bytes() == free - (40 << 20), "whoever has it mapped keeps it"
    assert gpu.free_bytes() == free


def test_only_whole_pages_of_the_process_are_page_locked(fake):
    Gpu.find("0").use()
    host = mmap.mmap(-1, 3 * 4096)
    place = (ctypes.c_char * len(host)).from_buffer(host)
    address = ctypes.addressof(place)
    for at, nbytes in ((address + 64, 4096), (address, 4096 + 64), (address, 0), (1 << 20, 4096)):
        assert error_of("cuMemHostRegister", at, nbytes, 0) == "CUDA_ERROR_INVALID_VALUE"
    assert fake.leftovers() == {}


def test_page_locking_has_a_limit():
    with fake_cuda(lock_limit=8192) as fake:
        Gpu.find("0").use()
        host = mmap.mmap(-1, 3 * 4096)
        place = (ctypes.c_char * len(host)).from_buffer(host)
        address = ctypes.addressof(place)
        call("cuMemHostRegister", address, 8192, 0)
        assert error_of("cuMemHostRegister", address + 8192, 4096, 0) == "CUDA_ERROR_OUT_OF_MEMORY"
        call("cuMemHostUnregister", address)
        call("cuMemHostRegister", address + 8192, 4096, 0)
        call("cuMemHostUnregister", address + 8192)
        assert fake.leftovers() == {}


def test_what_is_known_of_page_locked_memory(fake):
    Gpu.find("0").use()
    host = mmap.mmap(-1, 2 * 4096)
    place = (ctypes.c_char * len(host)).from_buffer(host)
    address = ctypes.addressof(place)
    known = driver.api().CUpointer_attribute

    def asked(name, at):
        try:
            return int(call("cuPointerGetAttribute", getattr(known, f"CU_POINTER_ATTRIBUTE_{name}"), at))
        except GpuError as error:
            return error.code

    for flags, device in ((3, address + 64), (0, "CUDA_ERROR_INVALID_VALUE")):
        call("cuMemHostRegister", address, 4096, flags)
        assert asked("DEVICE_POINTER", address + 64) == device
        assert asked("RANGE_START_ADDR", address + 64) == address
        assert asked("RANGE_SIZE", address + 64) == 4096
        assert asked("MAPPED", address + 64) == 1
        assert asked("MAPPED", address + 4096) == "CUDA_ERROR_INVALID_VALUE"
        call("cuMemHostUnregister", address)


def test_memory_for_network_cards_can_be_refused():
    with fake_cuda(rdma_memory=False):
        gpu = Gpu.find("0")
        properties = _properties(gpu, is_for_rdma=True)
        assert error_of("cuMemCreate", 2 << 20, properties, 0) == "CUDA_ERROR_NOT_SUPPORTED"


def test_an_imported_handle_is_not_exported_again(fake):
    kind = driver.api().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    with DeviceMemory.create(Gpu.find("0"), 2 << 20) as memory:
        _, fd = memory.export()
        imported = call("cuMemImportFromShareableHandle", fd, kind)
        os.close(fd)
        assert error_of("cuMemExportToShareableHandle", imported, kind, 0) == "CUDA_ERROR_INVALID_VALUE"
        call("cuMemRelease", imported)


def test_legacy_memory_of_a_process_that_is_gone_is_anything(fake, spawn):
    other = spawn()
    handle, _ = other.export(2 << 20, 7, "ipc")
    with DeviceMemory.open(handle, -1, on=Gpu.find("0")) as opened:
        assert ctypes.string_at(fake.memory.look(opened.address, 2), 2) == b"\7\7"
        other.kill()
        assert ctypes.string_at(fake.memory.look(opened.address, 2), 2) != b"\7\7"
