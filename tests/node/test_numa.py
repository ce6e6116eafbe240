"""NUMA nodes: which one is chosen, and that memory and threads go there or the refusal is said."""

import errno
import logging
import os
import subprocess
import sys
import threading

import pytest
from fake_cuda import fake_cuda

from pdx.errors import ConfigError
from pdx.node import numa


@pytest.fixture
def machine(tmp_path):
    """A /sys with these nodes (number: CPUs), and the node that each PCI device says it is on."""

    def build(nodes, devices=()):
        folder = tmp_path / "devices/system/node"
        folder.mkdir(parents=True)
        numbers = sorted(nodes)
        (folder / "online").write_text(",".join(map(str, numbers)) + "\n")
        for number, cpus in nodes.items():
            (folder / f"node{number}").mkdir()
            (folder / f"node{number}/cpulist").write_text(f"{cpus}\n")
        for pci, number in devices:
            device = tmp_path / "bus/pci/devices" / pci
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{number}\n")
        return tmp_path

    return build


@pytest.fixture
def gpus():
    """The PCI addresses of two fake GPUs."""
    from pdx.cuda.gpu import all_gpus

    with fake_cuda(gpus=2):
        yield [gpu.pci for gpu in all_gpus()]


@pytest.mark.parametrize(("near", "expected"), [((1, 1), 1), ((0, 0), 0), ((0, 1), None), ((-1, -1), None)])
def test_auto_is_the_node_that_all_gpus_hang_on(machine, gpus, near, expected):
    sysfs = machine({0: "0-2,8", 1: ""}, zip(gpus, near, strict=True))
    assert numa.choose("auto", sysfs=sysfs) == expected
    assert [numa.choose("auto", gpu, sysfs) for gpu in "01"] == [each if each >= 0 else None for each in near]
    assert [numa.cpus_of(node, sysfs) for node in (0, 1)] == [{0, 1, 2, 8}, set()], "memory without CPUs"
    with fake_cuda(gpus=0):
        assert numa.choose("auto", sysfs=sysfs) is None


def test_none_and_numbers_and_a_machine_without_nodes(machine, gpus, tmp_path):
    assert (numa.online(tmp_path), numa.choose("auto", "0", tmp_path), numa.choose("0", "", tmp_path)) == ([0], None, 0)
    sysfs = machine({0: "0-3", 2: "4-7"}, zip(gpus, (2, 2), strict=True))
    assert numa.choose("none", "0", sysfs) is None
    assert numa.choose("2", sysfs=sysfs) == 2
    with pytest.raises(ConfigError, match="--numa 1: this machine has the NUMA nodes 0, 2"):
        numa.choose("1", sysfs=sysfs)


def test_memory_is_asked_for_by_the_real_system_call_and_the_policy_is_given_back():
    before = numa.policy()
    with numa.memory_on(0):
        assert numa.policy() == (numa.PREFERRED, {0})
        with numa.memory_on(None):
            assert numa.policy() == (numa.PREFERRED, {0})
    assert numa.policy() == before
    with pytest.raises(KeyError), numa.memory_on(0):
        raise KeyError
    assert numa.policy() == before


def test_a_node_that_is_not_there_is_refused_by_the_system_and_that_is_said(caplog):
    before = numa.policy()
    with numa.memory_on(1000):
        assert numa.policy() == before
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_container_that_forbids_it_goes_on_with_one_warning(monkeypatch, caplog):
    def refuse(*arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(numa, "_syscall", refuse)
    done = []
    with numa.memory_on(0):
        done.append(1)
    assert done
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "set_mempolicy" in record.getMessage()


def in_a_thread(call):
    """Affinity is a thread's own: the test's stays as it is."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_run_on_the_nodes_cpus(machine):
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    sysfs = machine({0: str(first), 1: "1000"})

    def pinned(node):
        numa.run_on(node, sysfs)
        return os.sched_getaffinity(0)

    assert in_a_thread(lambda: pinned(0)) == {first}
    assert in_a_thread(lambda: pinned(None)) == allowed
    assert in_a_thread(lambda: pinned(1)) == allowed, "none of its CPUs is ours"


def test_a_node_leaves_the_cpu_of_the_engine_that_started_it():
    """For all that it may use, whatever their numbers are."""
    code = """
import os, sys
os.cpu_count = lambda: 1
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
from pdx.node.__main__ import main
sys.argv = ["node", "{}"]
assert main() == 1
print(*os.sched_getaffinity(0))
"""
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert {*map(int, found.stdout.split())} == os.sched_getaffinity(0)


def test_an_affinity_that_is_refused_is_one_warning(machine, monkeypatch, caplog):
    def refuse(pid, cpus):
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    numa.run_on(0, machine({0: "0-4095", 1: "4096"}))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
