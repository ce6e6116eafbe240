"""`pdx node --gpu`, its status, and what `pdx doctor` says of GPUs, on the fake driver and on machines without one."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys

import msgspec
import pytest
from click.testing import CliRunner
from fake_cuda import fake_cuda
from gpu_harness import GpuNode, on_fake, uuid
from node_harness import MIB
from rich.console import Console

from pdx.cli import gpus
from pdx.cli.machine import Fact, FindingName
from pdx.cli.main import main
from pdx.cli.tables import view
from pdx.config import NodeConfig
from pdx.wire.status import NodeStatus


@pytest.fixture(autouse=True)
def signals():
    """`pdx node` is a whole process and keeps its handlers; here they would be those of the tests after it."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def pdx(*arguments: str):
    return CliRunner().invoke(main, arguments)


def fact(found, name):
    (row,) = [each for each in found if each.name == name]
    return row


@pytest.mark.parametrize(
    ("fake", "options", "says"),
    [
        (None, ["--numa", "77"], "--numa 77: this machine has the NUMA nodes 0"),
        (None, ["--numa", "near"], "Expected `str` matching regex"),
        ({"gpus": 0}, ["--gpu", "0"], "without --gpu chunks lie in host memory"),
        (
            {"nbytes": 8 * MIB},
            ["--gpu", "0", "--gpu-arena", "1GiB"],
            "an arena of 1025 MiB does not fit on GPU 0: choose a smaller --gpu-arena",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_1(place, fake, options, says):
    with fake_cuda(**fake) if fake else contextlib.nullcontext():
        result = pdx("node", "--node", f"ipc://{place}/node.sock", "--proxy", "", *options)
    assert result.exit_code == 1
    assert says in result.output
    assert len(result.output.splitlines()) == 1


def test_status_of_a_gpu_node_by_a_command_that_never_loads_the_driver(address):
    node = GpuNode(NodeConfig(address=address, arena_bytes=4 * MIB, gpu="0"))
    try:
        node.wait_ready()
        code = (
            "import sys; from pdx.cli.main import main\n"
            "try: main(sys.argv[1:])\n"
            "finally: print([name for name in sys.modules if name.startswith('cuda.')], file=sys.stderr)"
        )
        command = [sys.executable, "-P", "-c", code, "node", "--status", "--json", "--node", address]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]"
    finally:
        node.close()
    status = json.loads(done.stdout)
    assert (status["gpu"], status["mapped"], status["arena_bytes"]) == (uuid(), 1, 4 * MIB)


def test_status_shows_the_gpu():
    status = NodeStatus("a", 1, 2, 3.0, 1 << 30, 1 << 30, {}, {}, 0, 0, 0, [], {}, gpu="GPU-1234", mapped=2)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(status, "ipc:///run/node.sock"))
    shown = console.export_text()
    assert "arena 1.0 GiB on GPU-1234, used 0 B" in shown
    assert "2 blocks of GPU memory mapped" in shown
    console.print(view(msgspec.structs.replace(status, gpu="", mapped=0), "ipc:///run/node.sock"))
    assert "GPU" not in console.export_text()


# ---- doctor -----------------------------------------------------------------------------------


@pytest.fixture
def sysfs(tmp_path):
    """A machine with an NVIDIA GPU on its PCI bus."""
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    return tmp_path


def test_a_machine_without_a_gpu_that_can_be_used_has_one_row(tmp_path, sysfs):
    with fake_cuda(gpus=0):
        (none,), (unusable,) = gpus.facts(tmp_path / "none"), gpus.facts(sysfs)
    assert (none.is_ok, none.finding) == (True, FindingName.GPU_NONE)
    assert none.found.startswith("no GPU: chunks lie in host memory (")
    assert (unusable.is_ok, unusable.finding) == (False, FindingName.GPU_UNUSABLE)
    assert "one is built in" in unusable.found
    assert "--gpus all" in unusable.fix


def test_everything_that_two_good_gpus_can_do():
    with fake_cuda(gpus=2) as fake:
        found = gpus.facts()
        assert fake.leftovers() == {}
    assert all(row.is_ok for row in found), found
    assert [row.name for row in found] == [
        "GPU 0",
        "GPU 1",
        "CUDA driver",
        "GPU arena",
        "peer access",
        "page-locking",
        "copy kernels",
        "cuda_ipc",
    ]
    assert "1.0 GiB, 1.0 GiB of it free" in fact(found, "GPU 0").found
    assert uuid() in fact(found, "GPU 0").found
    assert fact(found, "CUDA driver").found.startswith("CUDA 12.9, cuda-bindings ")
    assert fact(found, "page-locking").found == "works (1.0 MiB tried)"


@pytest.mark.parametrize(
    ("settings", "failing", "name", "words", "finding"),
    [
        ({"vmm": False}, "", "GPU arena", "chunks are gone when their node ends", "gpu-arena-legacy"),
        ({"gpus": 2, "peer_access": False}, "", "peer access", "missing: 0→1 1→0", "gpu-no-peer-access"),
        ({}, "cuMemHostRegister", "page-locking", "cuMemHostRegister failed", "page-lock-refused"),
        ({}, "cuMemCreate", "GPU arena", "cuMemCreate failed", "gpu-failed"),
        ({}, "cuDevicePrimaryCtxRetain", "GPU 0", "cuDevicePrimaryCtxRetain failed", "gpu-failed"),
    ],
)
def test_what_a_gpu_cannot_do_is_one_row_with_what_would_help(settings, failing, name, words, finding):
    with fake_cuda(**settings) as fake:
        if failing:
            fake.fail(failing, times=1 << 30)
        found = gpus.facts()
        fake.heal()
        assert fake.leftovers() == {}
    row = fact(found, name)
    assert (row.is_ok, row.finding) == (False, finding)
    assert words in row.found
    assert row.fix
    assert all(each.finding for each in found if not each.is_ok)
    assert failing or [each.name for each in found if not each.is_ok] == [name]


def test_page_locking_says_what_to_do_in_containers():
    with fake_cuda() as fake:
        fake.fail("cuMemHostRegister", error="NOT_PERMITTED")
        row = fact(gpus.facts(), "page-locking")
    assert "ulimit -l" in row.fix
    assert "ulimit" not in row.found


@pytest.mark.parametrize(
    ("compiler", "headers", "words"),
    [("", "here", "no C compiler"), ("/bin/sh", "elsewhere", "Python.h")],
)
def test_what_triton_lacks_to_build_the_copy_kernels_is_said(monkeypatch, tmp_path, compiler, headers, words):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "Python.h").touch()
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus.sysconfig, "get_paths", lambda: {"include": str(tmp_path / headers)})
    with fake_cuda():
        row = fact(gpus.facts(), "copy kernels")
    assert not row.is_ok
    assert words in row.found
    assert "python3-dev" in row.fix


def test_the_program_prints_what_doctor_reads():
    done = subprocess.run(on_fake("-m", "pdx.cli.gpus"), capture_output=True, check=True)
    assert all(row.is_ok for row in msgspec.json.decode(done.stdout, type=list[Fact]))
