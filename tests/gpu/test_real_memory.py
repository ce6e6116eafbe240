"""Memory of a GPU between processes: whoever is killed, the other one goes on, and the GPU gets its memory back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
from device_bytes import read, write
from gpu_child import GpuChild

from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory, Handle, num_mapped
from pdx.errors import GpuHandleDead
from pdx.testing.waiting import wait_until

pytestmark = pytest.mark.serial
MIB = 1 << 20
NBYTES = 64 * MIB
SLACK = 48 * MIB  # what the driver may keep for itself; less than NBYTES
CONTENT = bytes(range(256)) * 16
SECONDS = 20.0


@pytest.fixture(params=["vmm", "ipc"])
def kind(request: pytest.FixtureRequest, gpu: Gpu) -> str:
    """How memory is shared."""
    if request.param == "vmm" and not gpu.supports_vmm:
        pytest.skip(f"{gpu.name} cannot export memory as a file descriptor")
    return str(request.param)


@contextlib.contextmanager
def exported(handle_and_fd: tuple[Handle, int]) -> Iterator[tuple[Handle, int]]:
    """The descriptor is closed in the end."""
    try:
        yield handle_and_fd
    finally:
        if handle_and_fd[1] >= 0:
            os.close(handle_and_fd[1])


@contextlib.contextmanager
def everything_comes_back(gpu: Gpu) -> Iterator[None]:
    """As much of the GPU is free after this as before."""
    before = gpu.free_bytes()
    yield
    wait_until(lambda: gpu.free_bytes() >= before - SLACK, timeout_s=SECONDS, what=f"{before >> 20} MiB are free again")


def test_another_process_reads_and_writes_it(gpu: Gpu, child: Callable[[], GpuChild], kind: str) -> None:
    other = child()
    with everything_comes_back(gpu), DeviceMemory.create(gpu, NBYTES, kind) as made:
        write(gpu, made.address, CONTENT)
        with exported(made.export()) as (handle, fd):
            assert other.open(handle, fd, len(CONTENT)) == CONTENT
        other.write(CONTENT[::-1])
        assert read(gpu, made.address, len(CONTENT)) == CONTENT[::-1]
        other.close_all()


def test_memory_of_another_process(gpu: Gpu, child: Callable[[], GpuChild], kind: str) -> None:
    other = child()
    made = exported(other.export(NBYTES, CONTENT, kind))
    with made as (handle, fd), DeviceMemory.open(handle, fd, on=gpu) as opened:
        assert read(gpu, opened.address, len(CONTENT)) == CONTENT
        assert num_mapped() == 1
    other.close_all()


def test_who_maps_it_is_killed(gpu: Gpu, child: Callable[[], GpuChild], kind: str) -> None:
    with everything_comes_back(gpu):
        other = child()
        with DeviceMemory.create(gpu, NBYTES, kind) as made:
            write(gpu, made.address, CONTENT)
            with exported(made.export()) as (handle, fd):
                assert other.open(handle, fd, len(CONTENT)) == CONTENT
            other.kill()
            assert read(gpu, made.address, len(CONTENT)) == CONTENT
            write(gpu, made.address, CONTENT[::-1])
            assert read(gpu, made.address, len(CONTENT)) == CONTENT[::-1]


def test_who_made_it_is_killed(gpu: Gpu, child: Callable[[], GpuChild], kind: str) -> None:
    """A descriptor keeps the memory alive; a legacy handle is dead, and what it had mapped can still be closed."""
    with everything_comes_back(gpu):
        other = child()
        with exported(other.export(NBYTES, CONTENT, kind)) as (handle, fd):
            with DeviceMemory.open(handle, fd, on=gpu) as opened:
                other.kill()
                if kind == "vmm":
                    assert read(gpu, opened.address, len(CONTENT)) == CONTENT
            if kind == "vmm":
                with DeviceMemory.open(handle, fd, on=gpu) as again:
                    assert read(gpu, again.address, len(CONTENT)) == CONTENT
            else:
                with pytest.raises(GpuHandleDead):
                    DeviceMemory.open(handle, fd, on=gpu)
    with DeviceMemory.create(gpu, MIB) as unharmed:  # the context is still good
        write(gpu, unharmed.address, CONTENT)
        assert read(gpu, unharmed.address, len(CONTENT)) == CONTENT


def test_nothing_adds_up(gpu: Gpu, child: Callable[[], GpuChild], kind: str) -> None:
    other = child()
    with exported(other.export(NBYTES, CONTENT, kind)) as (handle, fd), everything_comes_back(gpu):
        for _ in range(30):
            with DeviceMemory.create(gpu, NBYTES, kind), DeviceMemory.open(handle, fd, on=gpu) as opened:
                assert read(gpu, opened.address, 16) == CONTENT[:16]
