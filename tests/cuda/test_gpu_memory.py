"""Memory of a GPU is shared between processes, and whatever fails, nothing stays mapped or reserved."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os

import msgspec
import pytest
from fake_cuda import fake_cuda

from pdx.cuda import driver
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory, Handle, num_mapped
from pdx.errors import GpuError, GpuHandleDead, GpuMemoryFull, GpuUnavailable

MIB = 1 << 20
RELEASES = {"cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuMemFree", "cuIpcCloseMemHandle"}


@contextlib.contextmanager
def received(handle, fd):
    """What was handed over, whose descriptor is closed in the end."""
    try:
        yield handle, fd
    finally:
        if fd >= 0:
            os.close(fd)


def exported(memory):
    return received(*memory.export())


def byte_at(memory, offset=0):
    return ctypes.string_at(driver.api().memory.look(memory.address + offset, 1), 1)[0]


def fill(memory, value, offset=0):
    ctypes.memset(driver.api().memory.look(memory.address + offset, 1), value, 1)


def test_both_sides_see_the_same_bytes(fake):
    first, second = Gpu.find("0"), Gpu.find("1")
    with DeviceMemory.create(first, 3 * MIB) as made:
        assert (made.kind, made.gpu, made.nbytes) == ("vmm", first.uuid, 4 * MIB)
        with exported(made) as (handle, fd):
            assert not os.get_inheritable(fd)
            opened = DeviceMemory.open(handle, fd, on=second)
        assert (opened.gpu, opened.nbytes, num_mapped()) == (first.uuid, 4 * MIB, 2)
        fill(made, 7, 4 * MIB - 1)
        assert byte_at(opened, 4 * MIB - 1) == 7
        opened.close()
        opened.close()
        assert num_mapped() == 1
        assert byte_at(made, 4 * MIB - 1) == 7


def test_who_opened_vmm_memory_outlives_who_made_it_and_cannot_export_it(gpu):
    """No driver promises that a handle which was imported can be exported, and nothing needs it."""
    made = DeviceMemory.create(gpu, MIB)
    fill(made, 9)
    with exported(made) as (handle, fd):
        opened = DeviceMemory.open(handle, fd, on=gpu)
    made.close()
    with opened:
        assert byte_at(opened) == 9
        with pytest.raises(GpuError, match="who made"):
            opened.export()


@pytest.mark.parametrize("kind", ["vmm", "ipc"])
def test_another_process_maps_it(fake, spawn, kind):
    gpu, other = Gpu.find("0"), spawn()
    with DeviceMemory.create(gpu, MIB, kind) as made, exported(made) as (handle, fd):
        assert handle.kind == kind
        fill(made, 42)
        before = fake.counts()
        assert other.open(handle, fd) == bytes([42])
        assert other.mapped() == 1
        assert other.open(handle, fd) == bytes([42])
        other.kill()
        assert fake.counts() == before
        assert byte_at(made) == 42


@pytest.mark.parametrize("error", ["", "OPERATING_SYSTEM", "INVALID_CONTEXT", "UNKNOWN"])
def test_a_legacy_handle_dies_with_its_exporter_whatever_the_driver_says(fake, gpu, spawn, error):
    """What it says is not documented; that nobody is there any more says enough."""
    other = spawn()
    handle, fd = other.export(MIB, bytes([6]), "ipc")
    assert (fd, len(handle.data), handle.pid) == (-1, 64, other.process.pid)
    with DeviceMemory.open(handle, -1, on=gpu) as opened:
        assert byte_at(opened) == 6
    for is_alive in (True, False) if error else (False,):
        if not is_alive:
            other.kill()
        if error:
            fake.fail("cuIpcOpenMemHandle", error=error)
        kind, words = (GpuUnavailable, error) if is_alive else (GpuHandleDead, f"process {other.process.pid}.*{error}")
        with pytest.raises(kind, match=words):
            DeviceMemory.open(handle, -1, on=gpu)


def test_a_gpu_without_vmm_uses_legacy_handles_and_says_so(caplog):
    with fake_cuda(vmm=False) as fake:
        gpu = Gpu.find("0")
        with caplog.at_level(logging.WARNING), DeviceMemory.create(gpu, MIB) as made:
            assert made.kind == "ipc"
        assert gpu.uuid in caplog.text
        with pytest.raises(GpuUnavailable, match="file descriptor"):
            DeviceMemory.create(gpu, MIB, "vmm")
        assert fake.leftovers() == {}


def test_a_peer_without_access_is_refused_by_name():
    with fake_cuda(gpus=2, peer_access=False) as fake:
        first, second = Gpu.find("0"), Gpu.find("1")
        with DeviceMemory.create(first, MIB) as made, exported(made) as (handle, fd):
            with pytest.raises(GpuUnavailable, match=f"{second.uuid}.*{first.uuid}.*peer access"):
                DeviceMemory.open(handle, fd, on=second)
            assert num_mapped() == 1
        assert fake.leftovers() == {}


@pytest.mark.parametrize("kind", ["vmm", "ipc"])
def test_whether_memory_of_a_gpu_that_this_process_does_not_see_can_be_mapped_is_the_drivers_to_say(fake, spawn, kind):
    strict, open_minded = spawn(gpus=1), spawn(gpus=1, reaches_unseen=True)
    with DeviceMemory.create(Gpu.find("1"), MIB, kind) as made, exported(made) as (handle, fd):
        said = strict.open(handle, fd)
        assert str(said).startswith("GpuUnavailable")
        assert f"does not see GPU {made.gpu} (CUDA_VISIBLE_DEVICES=" in said
        assert strict.mapped() == 0
        assert isinstance(open_minded.open(handle, fd), bytes)
        assert open_minded.mapped() == 1


@pytest.mark.parametrize("kind", ["vmm", "ipc"])
def test_memory_that_does_not_fit(fake, kind):
    with DeviceMemory.create(Gpu.find("0"), 60 * MIB):
        with pytest.raises(GpuMemoryFull, match="no room for 8 MiB on Fake GPU 0.*4 of 64 MiB are free"):
            DeviceMemory.create(Gpu.find("0"), 8 * MIB, kind)
        assert num_mapped() == 1
    with pytest.raises(ValueError, match="bytes of GPU memory"):
        DeviceMemory.create(Gpu.find("0"), 0)


def test_mixed_driver_versions_are_named_when_the_import_fails(fake, spawn):
    other = spawn(driver_version=13000)
    with received(*other.export(MIB, bytes([1]))) as (handle, fd):
        fake.fail("cuMemImportFromShareableHandle", error="NOT_SUPPORTED")
        with pytest.raises(GpuUnavailable, match=r"NOT_SUPPORTED.*version 13000, this process's 12090"):
            DeviceMemory.open(handle, fd, on=Gpu.find("0"))
        with DeviceMemory.open(handle, fd, on=Gpu.find("0")) as opened:
            assert byte_at(opened) == 1


def good_handle(**changes):
    values = {"kind": "vmm", "gpu": Gpu.find("0").uuid, "nbytes": 2 * MIB, "driver": 12090, "pid": 1, "data": b""}
    return Handle(**values | changes)


@pytest.mark.parametrize(
    "changes",
    [{"data": bytes(64)}, {"kind": "ipc", "data": bytes(64)}, {"kind": "ipc", "data": bytes(63)}],
    ids=str,
)
def test_a_handle_that_is_neither_kind_never_reaches_the_driver(fake, gpu, changes):
    handle = good_handle(**changes)
    with open("/dev/null") as file:
        before = fake.calls.copy()
        with pytest.raises(GpuUnavailable, match="a handle"):
            DeviceMemory.open(handle, file.fileno(), on=gpu)
        assert fake.calls == before


def test_handles_are_bounded_on_decode_and_descriptors_looked_at_by_the_driver(gpu):
    for absurd in ({"kind": "what"}, {"gpu": "../../etc"}, {"nbytes": 0}, {"nbytes": 1 << 60}, {"driver": -1},
                   {"pid": 0}, {"data": bytes(65)}):  # fmt: skip
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(good_handle(**absurd)), type=Handle)
    handle = msgspec.msgpack.decode(msgspec.msgpack.encode(good_handle()), type=Handle)
    assert handle == good_handle()
    with open("/dev/null") as file, pytest.raises(GpuUnavailable, match="cannot be opened"):
        DeviceMemory.open(handle, file.fileno(), on=gpu)


def test_a_handle_that_promises_more_than_there_is(fake, spawn):
    gpu = Gpu.find("0")
    with DeviceMemory.create(gpu, 2 * MIB) as made, exported(made) as (handle, fd):
        bigger = msgspec.structs.replace(handle, nbytes=4 * MIB)
        with pytest.raises(GpuError, match="cuMemMap"):
            DeviceMemory.open(bigger, fd, on=gpu)
        odd = msgspec.structs.replace(handle, nbytes=MIB)
        with pytest.raises(GpuUnavailable, match="granules"):
            DeviceMemory.open(odd, fd, on=gpu)
    legacy, _ = spawn().export(2 * MIB, bytes([1]), "ipc")
    with pytest.raises(GpuUnavailable, match="promises"):
        DeviceMemory.open(msgspec.structs.replace(legacy, nbytes=4 * MIB), -1, on=gpu)
    assert num_mapped() == 0


def vmm_life(fake, _):
    gpu = Gpu.find("0")
    with (
        DeviceMemory.create(gpu, 2 * MIB) as made,
        exported(made) as (handle, fd),
        DeviceMemory.open(handle, fd, on=gpu),
        DeviceMemory.open(handle, fd, on=Gpu.find("1")),
    ):
        pass


def ipc_life(fake, handle):
    gpu = Gpu.find("0")
    with DeviceMemory.create(gpu, 2 * MIB, "ipc") as made, exported(made):
        pass
    with DeviceMemory.open(handle, -1, on=gpu):
        pass


@pytest.mark.parametrize("life", [vmm_life, ipc_life])
def test_whatever_call_fails_nothing_is_left(spawn, life, forget_mapped, caplog):
    """Every call of a life fails once. If it is one that gives back, the others are still made, and it is logged."""
    foreign = spawn().export(2 * MIB, bytes([1]), "ipc")[0]
    with fake_cuda(gpus=2) as fake:
        life(fake, foreign)
        clean = fake.calls.copy()
    failed = set()
    for n in range(clean.total()):
        with fake_cuda(gpus=2) as fake:
            caplog.clear()
            mapped = num_mapped()
            fake.fail(after=n)
            with contextlib.suppress(GpuError):
                life(fake, foreign)
            (name,) = fake.failed
            failed.add(name)
            if name in RELEASES:
                assert {name: fake.calls[name] for name in RELEASES} == {name: clean[name] for name in RELEASES}
                assert f"not released cleanly: {name} failed" in caplog.text
            else:
                fake.heal()
                assert (fake.leftovers(), num_mapped()) == ({}, mapped), name
    assert failed == clean.keys()


def test_what_the_driver_does_not_release_still_counts(fake, forget_mapped, caplog):
    made = DeviceMemory.create(Gpu.find("0"), MIB)
    fake.fail("cuMemUnmap")
    made.close()
    assert "cuMemUnmap failed" in caplog.text
    assert num_mapped() == 1
    assert fake.leftovers() == {"reserved": 1, "mapped": 1, "used bytes": 2 * MIB}
    fake.memory.close()


def test_a_gpu_that_makes_no_memory_for_network_cards_has_an_arena_all_the_same(spawn, caplog):
    """It says that it could. Without the kernel's part, as in many virtual machines, the driver refuses then."""
    with fake_cuda(rdma_memory=False) as fake:
        gpu = Gpu.find("0")
        assert gpu.supports_rdma
        with caplog.at_level(logging.WARNING), DeviceMemory.create(gpu, MIB) as made, exported(made) as (handle, fd):
            assert made.kind == "vmm"
            fill(made, 3)
            assert spawn().open(handle, fd) == bytes([3])
        assert fake.calls["cuMemCreate"] == 2
        [record] = caplog.records
        assert gpu.uuid in record.message
        assert "network cards" in record.message
        assert "NOT_SUPPORTED" in record.message
        assert fake.leftovers() == {}
