"""NIXL called directly on GPU memory: single pages, read and written, which `pdx.bench.gpu.ipc` compares with."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from pdx.bench.channels.raw import nixl_agent
from pdx.bench.gpu.bed import REAL, Bed
from pdx.transports.registry import find

PAGES_IN_FLIGHT = 64
END_S = 60.0
READ, WRITE = "read", "write"
LOG = "ucx-%p.log"
# Without an active NVLink, UCX's cuda_ipc refuses reads unless it is told not to, and takes TCP for them.
# UCX_PROTO_INFO makes UCX say which lane it takes; its log goes to a file, because standard output may have a reader.
UCX_SETTINGS = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y", "UCX_PROTO_INFO": "y"}

Span = tuple[int, int, int]  # address, bytes, ordinal of the GPU


def start_nixl(bed: Bed, memory: Tensor, folder: Path) -> tuple[VramNixl | None, str]:
    """An agent over that memory, or why there is none. UCX's log goes into `folder`."""
    if bed.name != REAL:
        return None, "NIXL needs a GPU"
    if importlib.util.find_spec("nixl") is None:
        return None, "nixl is not installed"
    for name, value in {**UCX_SETTINGS, "UCX_LOG_FILE": str(folder / LOG)}.items():
        os.environ.setdefault(name, value)
    found = find("nixl").availability()
    if not found.is_ok:
        return None, found.why
    try:
        return VramNixl(memory, bed.gpu.ordinal), ""
    except Exception as error:  # noqa: BLE001  # NIXL's errors have no base of their own; the reason is reported
        return None, f"NIXL cannot use this GPU's memory: {type(error).__name__}: {error}"


def ucx_settings() -> dict[str, str]:
    """The variables of this process's environment that UCX reads."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")}


def lanes(log: str) -> dict[str, str]:
    """By operation (READ, WRITE) the lane that UCX says it takes for large pieces of GPU memory; from UCX_PROTO_INFO.

    A table's head names the function and the memory, its row up to `inf` the lane in the last column.
    """
    found, operation = {}, ""
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|") if cell.strip()]
        if head := re.search(r" by ucp_(\w+)", line):
            operation = {"get": READ, "put": WRITE}.get(head[1], "") if "cuda" in line else ""
        elif operation and len(cells) > 1 and cells[0].endswith("inf"):
            found[operation] = cells[-1]
    return found


class VramNixl:
    """One end: an agent with the UCX backend. The other end only lends its memory."""

    def __init__(self, memory: Tensor, ordinal: int) -> None:
        self.address = memory.data_ptr()
        self.ordinal = ordinal
        span = (self.address, memory.numel() * memory.element_size(), ordinal)
        self._bindings, self._agent, self._backends, self._registered = nixl_agent("VRAM_SEG", span)
        self._peer = ""
        self._peer_address = 0
        self._peer_ordinal = 0

    def detail(self) -> bytes:
        """What the other end needs."""
        address: bytes = self.address.to_bytes(8)
        return address + self.ordinal.to_bytes(1) + bytes(self._agent.getLocalMD())

    def connect(self, detail: bytes) -> None:
        """To the end that lends its memory."""
        self._peer_address, self._peer_ordinal = int.from_bytes(detail[:8]), detail[8]
        self._peer = self._agent.loadRemoteMD(detail[9:]).decode()

    def move(self, operation: str, local: Iterable[int], remote: Iterable[int], nbytes: int) -> None:
        """READ the peer's pages of `nbytes` at these offsets to these of ours, or WRITE the other way round, a request
        per page; returns when all are there.

        :raises RuntimeError: not within END_S seconds. NIXL's own errors come as they are.
        """
        under_way: deque[Any] = deque()
        deadline = time.monotonic() + END_S
        for mine, theirs in zip(local, remote, strict=True):
            under_way.append(
                self._begin(
                    operation,
                    (self.address + mine, nbytes, self.ordinal),
                    (self._peer_address + theirs, nbytes, self._peer_ordinal),
                )
            )
            if len(under_way) == PAGES_IN_FLIGHT:
                self._finish(under_way.popleft(), deadline)
        while under_way:
            self._finish(under_way.popleft(), deadline)

    def _begin(self, operation: str, local: Span, remote: Span) -> Any:
        bindings = self._bindings
        verb = bindings.NIXL_READ if operation == READ else bindings.NIXL_WRITE
        lists = [bindings.nixlXferDList(bindings.VRAM_SEG, [span]) for span in (local, remote)]
        handle = self._agent.createXferReq(verb, *lists, self._peer, b"", self._backends)
        self._agent.postXferReq(handle)
        return handle

    def _finish(self, handle: Any, deadline: float) -> None:
        while self._agent.getXferStatus(handle) != self._bindings.NIXL_SUCCESS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"NIXL did not move all pages within {END_S} s")
        self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """End the agent. Idempotent."""
        if self._agent is not None:
            self._agent.deregisterMem(self._registered, self._backends)
            self._agent = None
