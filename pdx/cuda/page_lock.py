"""Page-locking of host memory, so that a GPU reads and writes it itself; in the background, because it takes long."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable
from typing import Any

from pdx.cuda.driver import api, call
from pdx.cuda.gpu import Gpu, beside_captures
from pdx.errors import GpuError

# Pieces end at addresses that are multiples of this. The driver refuses a copy that spans two pieces, so `CopyStream`
# cuts every copy there, without knowing which memory is page-locked.
PIECE_BYTES = 256 << 20
_WHAT_TO_DO = (
    "allow this process to lock memory (ulimit -l unlimited; in containers --ulimit memlock=-1 or --cap-add IPC_LOCK, "
    "and --ipc=host), or make the arena smaller"
)
_MAPPING = ("DEVICE_POINTER", "MAPPED", "RANGE_START_ADDR", "RANGE_SIZE")
_log = logging.getLogger(__name__)


class PageLock:
    """Registers [address, address + nbytes) of host memory with CUDA, piece by piece, in a thread of its own.

    All or nothing: once a piece is refused, nothing counts as covered any more. What is registered stays so until
    `close`, because kernels that use it may be in flight: its owner closes it when they have ended (also from
    `on_refused`). `covers` and `error` are for any thread.

    `anchor` keeps the memory mapped; it is released when nothing is registered any more. `on_refused` is called at most
    once, from the thread, with a text that says what to do.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        gpu: Gpu,
        *,
        anchor: object,
        on_refused: Callable[[str], None],
        is_read_only: bool = False,
    ) -> None:
        """`is_read_only`: this process may not write to the memory, and the GPU will not.

        :raises ValueError: `address` is not the start of a page, or there are no bytes.
        """
        if address % mmap.PAGESIZE or nbytes <= 0:
            raise ValueError(f"{nbytes} bytes at {address:#x}: whole pages can be locked")
        self.error = ""
        self._start = address
        self._end = address + nbytes
        self._gpu = gpu
        self._anchor: object = anchor
        self._on_refused = on_refused
        self._is_read_only = is_read_only
        self._covered = 0  # bytes from the start that are registered; written by the thread, and by `close`
        self._pieces: list[int] = []  # addresses that we registered; the thread's, then `close`'s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._register, name="pdx-page-lock", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = f"refused: {self.error}" if self.error else f"{self._covered >> 20} of {self._total >> 20} MiB"
        return f"<PageLock {state}>"

    @property
    def _total(self) -> int:
        return self._end - self._start

    def covers(self, offset: int, nbytes: int) -> bool:
        """Whether the GPU can reach all of [offset, offset + nbytes) now. Never blocks."""
        return offset >= 0 and 0 <= nbytes <= self._covered - offset

    def close(self) -> None:
        """Stop and unregister; blocks for the current piece. No kernel or copy may still use it. Idempotent."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._covered = 0
        try:
            if self._pieces:
                self._gpu.use()
                with beside_captures():
                    self._unregister()
        except GpuError as error:
            _log.warning("page-locked memory was not released cleanly: %s", str(error))
        self._unregister()
        self._anchor = None

    def _unregister(self) -> None:
        while self._pieces:
            try:
                call("cuMemHostUnregister", self._pieces.pop())
            except GpuError as error:
                _log.warning("page-locked memory was not released cleanly: %s", str(error))

    def _register(self) -> None:
        try:
            self._gpu.use()
            with beside_captures():
                self._register_pieces(self._flags())
        except GpuError as error:
            done, self._covered = self._covered, 0
            self.error = (
                f"page-locking {self._total >> 20} MiB for GPU {self._gpu.uuid} was refused after {done >> 20} MiB: "
                f"{error}; {_WHAT_TO_DO}"
            )
            self._on_refused(self.error)

    def _register_pieces(self, flags: int) -> None:
        address = self._start
        while address < self._end and not self._stop.is_set():
            piece = min(self._end - address, PIECE_BYTES - address % PIECE_BYTES)
            if self._register_piece(address, piece, flags):
                self._pieces.append(address)
            address += piece
            self._covered = address - self._start

    def _register_piece(self, address: int, nbytes: int, flags: int) -> bool:
        """Register a piece. False: others have registered it already. Raises GpuError for anything less."""
        try:
            call("cuMemHostRegister", address, nbytes, flags)
            return True
        except GpuError as error:
            # The driver says this for any overlap: another registration may be shorter, or not be mapped for the GPU.
            if error.code == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" and _is_reachable(address, nbytes):
                return False
            raise

    def _flags(self) -> int:
        if not self._gpu.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"):
            raise GpuError("this GPU reaches host memory at other addresses than the host does")
        flags = int(api().CU_MEMHOSTREGISTER_PORTABLE) | int(api().CU_MEMHOSTREGISTER_DEVICEMAP)
        if self._is_read_only:
            if not self._gpu.attribute("READ_ONLY_HOST_REGISTER_SUPPORTED"):
                raise GpuError("this GPU cannot lock memory that the process may only read")
            flags |= int(api().CU_MEMHOSTREGISTER_READ_ONLY)
        return flags


def _is_reachable(address: int, nbytes: int) -> bool:
    """Whether the GPU reaches all of this host memory at the host's addresses, thanks to others' registrations."""
    end = address + nbytes
    while address < end:
        try:
            found = [call("cuPointerGetAttribute", _attribute(name), address) for name in _MAPPING]
        except GpuError:
            return False
        device, is_mapped, start, size = map(int, found)
        if device != address or not is_mapped or not start <= address < start + size:
            return False
        address = start + size
    return True


def _attribute(name: str) -> Any:
    return getattr(api().CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
