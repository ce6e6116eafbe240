"""Places a PDX node's memory and threads on the right NUMA node of a machine: near the GPUs that copy.

A refusal by the system is one WARNING, never an error: the wrong node works too, only slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from pdx.errors import ConfigError, GpuError

log = logging.getLogger(__name__)

SYSFS = Path("/sys")
PREFERRED = 1  # MPOL_PREFERRED: others when the node is full, where MPOL_BIND would have the process killed
_MAX_NODES = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_MAX_NODES // _WORD_BITS)
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # libc has no wrappers for them
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def choose(setting: str, gpu: str = "", sysfs: Path = SYSFS) -> int | None:
    """The NUMA node for an arena on `gpu` (ordinal or UUID; empty: in host memory); None if it does not matter.

    `setting`: a number, "none", or "auto": the node of that GPU, or the one node of all visible GPUs.

    :raises ConfigError: this machine has no node of that number.
    """
    if setting == "none":
        return None
    nodes = online(sysfs)
    if setting != "auto":
        if int(setting) not in nodes:
            raise ConfigError(f"--numa {setting}: this machine has the NUMA nodes {', '.join(map(str, nodes))}")
        return int(setting)
    if len(nodes) < 2:
        return None
    from pdx.cuda.gpu import Gpu, all_gpus, numa_node

    try:
        gpus = [Gpu.find(gpu)] if gpu else all_gpus()
    except GpuError as error:
        log.debug("no NUMA node is preferred: %s", error)
        return None
    near = {numa_node(each, sysfs) for each in gpus}
    return near.pop() if len(near) == 1 else None


def online(sysfs: Path = SYSFS) -> list[int]:
    """The machine's NUMA nodes; just node 0 if it has none."""
    return sorted(_numbers(sysfs / "devices/system/node/online")) or [0]


def cpus_of(node: int, sysfs: Path = SYSFS) -> set[int]:
    """The CPUs of a node; empty for a memory-only node."""
    return _numbers(sysfs / f"devices/system/node/node{node}/cpulist")


def run_on(node: int | None, sysfs: Path = SYSFS) -> None:
    """Keep the calling thread, and threads it starts from now on, on this node's CPUs. None: no-op."""
    if node is None:
        return
    cpus = cpus_of(node, sysfs) & os.sched_getaffinity(0)
    if not cpus:
        log.warning("threads are not kept on NUMA node %d: this process may use none of its CPUs", node)
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        log.warning("threads are not kept on NUMA node %d: %s", node, error)


@contextlib.contextmanager
def memory_on(node: int | None) -> Iterator[None]:
    """Inside the block, the calling thread allocates memory on this node while there is room. None: anywhere."""
    before = None if node is None else _prefer(node)
    try:
        yield
    finally:
        if before is not None:
            _set_policy(*before)


def _prefer(node: int) -> tuple[int, set[int]] | None:
    """Prefer this node's memory in the calling thread; return the policy to restore, None if that was refused."""
    try:
        before = policy()
        _set_policy(PREFERRED, {node})
    except OSError as error:
        log.warning("memory is not kept on NUMA node %d: %s (containers: allow set_mempolicy)", node, error)
        return None
    return before


def policy() -> tuple[int, set[int]]:
    """The calling thread's memory policy: its mode (0: the default) and nodes.

    :raises OSError: the system refuses to say.
    """
    mode, mask = ctypes.c_int(), _Mask()
    _syscall(_GET_MEMPOLICY, ctypes.byref(mode), mask, ctypes.c_ulong(_MAX_NODES + 1), None, ctypes.c_ulong(0))
    return mode.value, {n for n in range(_MAX_NODES) if mask[n // _WORD_BITS] >> n % _WORD_BITS & 1}


def _set_policy(mode: int, nodes: set[int]) -> None:
    mask = _Mask()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    _syscall(_SET_MEMPOLICY, ctypes.c_int(mode), mask, ctypes.c_ulong(_MAX_NODES + 1))


def _syscall(numbers: dict[str, int], *arguments: object) -> None:
    number = numbers.get(platform.machine())
    if number is None:
        raise OSError(f"memory policies of {platform.machine()} are not known here")
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _numbers(path: Path) -> set[int]:
    """The numbers in a kernel's list such as "0-3,8"; empty if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
