"""The fake driver is as strict as a driver, and other processes can be run with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdx.cuda import driver
from pdx.cuda.driver import call
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory
from pdx.testing.fake_cuda import fake_cuda


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
    return driver.attempt(name, *args).error


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
    command = [sys.executable, "-m", "pdx.testing.fake_cuda", *args]
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
        "from pdx.cuda.driver import attempt, version\n"
        "print(sys.argv[1:], len(all_gpus()), all_gpus()[0].supports_vmm, version())\n"
        "print(attempt('cuMemGetInfo').error)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = ("--gpus", "3", "--no-vmm", "--driver-version", "13000", "--fail", "cuMemGetInfo:0:OUT_OF_MEMORY")
    done = run(*settings, "-m", "looks", "--its", "own")
    assert done.stdout.splitlines() == ["['--its', 'own'] 3 False 13000", "CUDA_ERROR_OUT_OF_MEMORY"], done.stderr
