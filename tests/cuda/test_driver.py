"""Calls of the driver become values or errors; and all names that pdx.cuda uses exist in the real bindings."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from cuda.bindings import driver as bindings
from fake_cuda import fake_cuda

from pdx.cuda import driver
from pdx.cuda.gpu import Gpu, all_gpus, numa_node, why_no_gpu
from pdx.errors import GpuError, GpuMemoryFull, GpuUnavailable

SOURCES = sorted((Path(driver.__file__).parent).glob("*.py"))
# Newer bindings have it under the plain name; `gpu` asks which.
ONLY_IN_SOME = {"cuDeviceGetUuid_v2"}


def names_used():
    """Every name of the driver that a source file has in code or in a string, without docstrings."""
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ""
            if isinstance(node, ast.Attribute):
                text = node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                text = node.value
                if path.name == "driver.py" and re.fullmatch("[A-Z]+(_[A-Z]+)+", text):  # names of errors, in short
                    text = f"CUDA_ERROR_{text.removeprefix('CUDA_ERROR_')}"
            if re.fullmatch(r"cu[A-Z]\w+|CU[a-z_]\w+|CUDA_ERROR_\w+", text) and not text.endswith("_"):
                found[text] = path.name
        attributes = re.findall(r'(?:_attribute\(device, |\.attribute\()"(\w+)"', path.read_text())
        found |= {f"CU_DEVICE_ATTRIBUTE_{name}": path.name for name in attributes}
    return found


def test_every_name_exists_in_the_real_bindings():
    enums = [value for value in vars(bindings).values() if hasattr(value, "__members__")]
    known = set(dir(bindings)) | {member for enum in enums for member in enum.__members__}
    used = names_used()
    assert {"cuMemMap", "CUmemAllocationProp", "CU_EVENT_BLOCKING_SYNC", "CU_MEMHOSTREGISTER_PORTABLE"} <= used.keys()
    assert {"CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED", "CUDA_ERROR_NO_DEVICE"} <= used.keys()
    assert used.keys() - known - ONLY_IN_SOME == set()


def test_the_fake_takes_as_many_arguments_as_the_real_bindings():
    with fake_cuda() as fake:
        functions = dict(fake.functions)
    checked = 0
    for name, function in functions.items():
        if name in dir(bindings):
            signature = getattr(bindings, name).__doc__.splitlines()[0]
            assert signature.startswith(f"{name}("), signature
            inner = re.sub(r"\[[^]]*\]", "", signature.partition("(")[2].rpartition(")")[0])
            expected = len(inner.split(",")) if inner else 0
            assert len(inspect.signature(function).parameters) == expected, signature
            checked += 1
    assert checked > 30


def test_errors_name_the_call_and_what_the_driver_says(fake):
    fake.fail("cuMemGetInfo", error="UNKNOWN")
    with pytest.raises(GpuError, match=r"cuMemGetInfo failed: CUDA_ERROR_UNKNOWN \(unknown\)") as caught:
        Gpu.find("0").free_bytes()
    assert type(caught.value) is GpuError


@pytest.mark.parametrize(
    ("error", "kind"),
    [("OUT_OF_MEMORY", GpuMemoryFull), ("INVALID_DEVICE", GpuUnavailable), ("ILLEGAL_ADDRESS", GpuError)],
)
def test_the_class_says_what_to_do(fake, error, kind):
    fake.fail("cuDeviceGetCount", error=error)
    with pytest.raises(kind) as caught:
        driver.call("cuDeviceGetCount")
    assert type(caught.value) is kind


def test_cuinit_is_called_once_by_many_threads(fake):
    initialise = fake.cuInit
    fake.cuInit = lambda flags: (time.sleep(0.05), initialise(flags))[1]  # so that the others come, too
    threads = [threading.Thread(target=driver.version) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.calls["cuInit"] == 1


def test_without_a_gpu():
    with fake_cuda(gpus=0):
        assert "CUDA_ERROR_NO_DEVICE" in why_no_gpu()
        with pytest.raises(GpuUnavailable, match="NO_DEVICE"):
            Gpu.find("0")


def test_without_a_driver():
    def cuInit(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    with fake_cuda(gpus=0) as fake:
        fake.cuInit = cuInit
        assert why_no_gpu() == "cuInit: no NVIDIA driver can be loaded here (Failed to dlopen libcuda.so.1)"
        with pytest.raises(GpuUnavailable):
            all_gpus()


def test_without_bindings(monkeypatch):
    driver.replace(None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "pip install 'cuda-bindings" in why_no_gpu()


def test_gpus_are_found_by_ordinal_and_uuid(fake, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    first, second = all_gpus()
    assert (first.ordinal, first.name, first.pci, first.total_bytes) == (0, "Fake GPU 0", "0000:3b:00.0", 64 << 20)
    assert first.supports_vmm
    assert Gpu.find("1") == Gpu.find(second.uuid) == Gpu.find(second.uuid.removeprefix("GPU-").upper()) == second
    assert first.uuid.startswith("GPU-")
    assert len(first.uuid) == 40
    for which in ("2", "", "-1", "GPU-00000000-0000-0000-0000-000000000000"):
        with pytest.raises(GpuUnavailable, match=rf"{second.uuid}.*CUDA_VISIBLE_DEVICES=3,4"):
            Gpu.find(which)


def test_peer_access():
    with fake_cuda(gpus=2, peer_access=False):
        first, second = all_gpus()
        assert first.can_access(first.uuid)
        assert not first.can_access(second.uuid)
        unseen = "GPU-00000000-0000-0000-0000-000000000000"
        assert (first.can_access(unseen), first.sees(unseen), first.sees(second.uuid)) == (True, False, True)


@pytest.mark.parametrize(("text", "expected"), [("1\n", 1), ("-1\n", None), ("what", None), (None, None)])
def test_numa_node(fake, tmp_path, text, expected):
    if text is not None:
        folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    assert numa_node(Gpu.find("0"), tmp_path) == expected
