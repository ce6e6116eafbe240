"""Compiles the copy kernel for GPUs that are not here, through a driver that is a fake, and prints JSON about it.

Run as a process of its own, whose Triton knows no other driver.
Launches run all of Triton's own path up to the driver, so they show what is compiled when, and with what grid.
"""

import json
import re
import sys
import time
from collections import Counter
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from pdx.kernels import paged
from pdx.kernels.page_map import Batch, PageMap, Place, Run

H100, A100, B200 = 90, 80, 100
# GPU, bytes of a piece, pieces of a page: tiles of one piece, of several, with columns left over.
PROBLEMS = [(H100, 64 << 10, 1), (H100, 4 << 10, 8), (H100, 65552, 1), (A100, 18 << 10, 1), (B200, 18 << 10, 1)]


class FakeDriver:
    """A GPU that takes every kernel and runs none. `grids` are the launches, `compiled` the kernels they brought."""

    def __init__(self, arch: int) -> None:
        self.grids = []
        self.compiled = []
        self._arch = arch
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
            load_binary=lambda name, binary, shared, device: (1, 1, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self):
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self):
        return self._arch  # Triton keeps kernels per device

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        ptx = next(kernel for kernel in self._kernels() if kernel.src is source).asm["ptx"]
        names, constants = source.fn.arg_names, {path[0]: value for path, value in source.constants.items()}
        given = {names[at]: value for at, value in constants.items()}
        kernel = {"warps": metadata.num_warps, "is_gather": given["IS_GATHER"], "hint": given["STORE_HINT"]}
        self.compiled.append({**kernel, "accesses": Counter(accesses(ptx))})
        return lambda *arguments: self.grids.append(arguments[0])

    def _kernels(self):
        return [kernel for cache in paged._copy_tiles.device_caches.values() for kernel in cache[0].values()]


def accesses(ptx: str) -> list[str]:
    """All loads and stores of global memory, as `ld.global.cg.v2.b64`."""
    return re.findall(r"\b((?:ld|st)\.global[\w:.]*)", ptx)


def pages_of(piece_bytes: int, pieces: int, *, num_blocks=4096, num_layers=3) -> PageMap:
    """Pages of memory that is not there."""
    table = torch.zeros(num_layers, 3, dtype=torch.int64)
    return PageMap(num_layers, num_blocks, pieces * piece_bytes, table.device, pieces, piece_bytes, table, layers=())


def report(arch: int, piece_bytes: int, pieces: int) -> dict:
    driver = FakeDriver(arch)
    triton.runtime.driver.set_active(driver)
    paged._compiled.clear()  # whose keys have the one device that there is here
    pages = pages_of(piece_bytes, pieces)
    paged.warm_up(pages)
    num_kernels = len(driver.compiled)
    driver.grids.clear()
    for runs, first, num in (([1], 0, 1), ([16], 1, 2), ([1024, 1024, 1, 16], 2, 1), ([1] * 300, 0, 3)):
        batch = Batch.of(pages, [Run(range(n), 1 << 40, n * pages.page_bytes) for n in runs])
        for place in Place:
            paged.gather(pages, batch, first, num, place=place)
            paged.scatter(pages, batch, first, num, place=place)
    num_launches, started = len(driver.grids), time.perf_counter()
    for _ in range(100):
        paged.gather(pages, batch, 1, 1)
    return {
        "arch": arch,
        "page": [piece_bytes, pieces],
        "kernels": driver.compiled[:num_kernels],
        "compiled_late": len(driver.compiled) - num_kernels,
        "num_launches": num_launches,
        "launch_us": (time.perf_counter() - started) * 1e6 / 100,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps([report(*problem) for problem in PROBLEMS]))
