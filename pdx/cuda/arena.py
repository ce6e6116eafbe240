"""An arena on a GPU: generations in a shared file as ever, the data in device memory.

Opening it maps only the tables, so a scheduler half or `pdx node --status` never has a CUDA context. A process that
moves bytes maps the data, too (`map`), by a handle that the node hands over (`pdx.node.handover`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec

from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu, keeping_context
from pdx.cuda.memory import DeviceMemory, DeviceSpan, Handle
from pdx.errors import (
    ArenaTooSmall,
    GpuError,
    GpuMemoryFull,
    GpuUnavailable,
    LayoutError,
    NodeError,
    NodeUnavailable,
    ProtocolError,
)
from pdx.memory.arena import Arena, check_span, not_mapped, round_up
from pdx.memory.slot import Slot
from pdx.security.unix_peer import peer_of, receive_fds

HANDOVER_S = 5.0
MAX_ANSWER_BYTES = 1024
_MAX_FDS = 2  # one is right
_TIMEVAL = struct.Struct("@ll")
_decoder = msgspec.msgpack.Decoder(Handle)
_log = logging.getLogger(__name__)


class GpuArena(Arena):
    """See `Arena`. `address` is 0 until the data is mapped.

    The data stays mapped until `unmap` or `close`, and beyond it as long as it is held (`hold`, or a `DeviceSpan`).
    """

    _has_data_in_file: ClassVar[bool] = False

    def __init__(
        self,
        path: Path,
        nbytes: int,
        *,
        writable_generations: bool,
        gpu: str,
        handover: Path | None = None,
        ticket: bytes = b"",
        is_node_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(path, nbytes, writable_generations=writable_generations)
        self.gpu = gpu
        self.address = 0
        self._handover = handover
        self._ticket = ticket
        self._is_node_alive = is_node_alive
        # Guards the next five; not held during driver calls. Reentrant: the garbage collector may end a span anywhere.
        self._lock = threading.RLock()
        self._memory: DeviceMemory | None = None
        self._on: Gpu | None = None
        self._holds = 0
        self._is_wanted = False  # mapped, to stay so without holds
        self._is_closed = False
        self._had_spans = False  # other libraries got its addresses, and may have work in flight there
        self._streams: list[CopyStream] = []  # idle ones of `read`

    @classmethod
    def create(cls, path: Path, nbytes: int, gpu: Gpu) -> GpuArena:  # type: ignore[override]  # by class, not object
        """Allocate the data on `gpu` and the file of generations (mode 0600), and map both. Raises ArenaTooSmall if the
        GPU, or the file system, cannot hold it; GpuUnavailable if this GPU's memory cannot be shared between
        processes."""
        nbytes = round_up(nbytes)
        try:
            memory = DeviceMemory.create(gpu, nbytes)
        except GpuMemoryFull as error:
            raise ArenaTooSmall(
                f"an arena of {nbytes >> 20} MiB does not fit on GPU {gpu.ordinal}: choose a smaller --gpu-arena, "
                f"start the node before the engines, or let them leave it room (vllm --gpu-memory-utilization); {error}"
            ) from error
        try:
            with cls._allocated(path, nbytes):
                arena = cls(path, nbytes, writable_generations=True, gpu=gpu.uuid)
        except BaseException:
            memory.close()
            raise
        arena._take(memory, gpu)
        return arena

    @classmethod
    def open(  # type: ignore[override]  # by class, not by object
        cls,
        path: Path,
        nbytes: int,
        gpu: str,
        handover: Path,
        ticket: bytes,
        is_node_alive: Callable[[], bool] = lambda: True,
    ) -> GpuArena:
        """Map the generations of an arena that a node made, read-only; raises NodeUnavailable if it has ended. Needs
        neither a GPU nor its driver. `is_node_alive`: asked about legacy IPC memory, which ends with its node."""
        try:
            return cls(
                path,
                nbytes,
                writable_generations=False,
                gpu=gpu,
                handover=handover,
                ticket=ticket,
                is_node_alive=is_node_alive,
            )
        except OSError as error:
            raise not_mapped(path, error) from error

    # ---- the data ---------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """How the data is shared, "vmm" or "ipc"; empty until it is mapped."""
        memory = self._memory
        return memory.kind if memory is not None else ""

    def map(self, on: Gpu) -> None:
        """Map the data for copies and kernels of the GPU `on`. Idempotent; may take as long as `HANDOVER_S`. Raises
        what `fetch_handle` raises, ProtocolError for what is not this arena, and GpuError if it cannot be mapped for
        that GPU, or is for another one."""
        with self._lock:
            self._is_wanted = self._memory is not None and not self._is_closed
        if self._on is None and self._handover is not None:
            handle, fd = fetch_handle(self._handover, self._ticket, HANDOVER_S)
            try:
                self._check(handle)
                memory = self._open(handle, fd, on)
            finally:
                if fd >= 0:
                    os.close(fd)
            if not self._take(memory, on):  # another thread was faster, or it was closed
                memory.close()
        mapped_on = self._on
        if mapped_on is None:
            raise GpuUnavailable(f"{self!r} is closed")
        if mapped_on.uuid != on.uuid:
            raise GpuUnavailable(f"{self!r} is mapped for GPU {mapped_on.uuid}, and cannot be for {on.uuid}, too")

    @property
    def device(self) -> DeviceMemory:
        """The data, which this arena closes; raises GpuUnavailable if it is not mapped."""
        memory = self._memory
        if memory is None:
            raise GpuUnavailable(f"{self!r} is not mapped")
        return memory

    def hold(self) -> int:
        """Keep the data mapped until `let_go`, even if the arena is closed. Returns its address; raises GpuUnavailable
        if it is not mapped (any more)."""
        with self._lock:
            if self._memory is None or not self._is_wanted:
                raise GpuUnavailable(f"{self!r} is not mapped")
            self._holds += 1
            return self.address

    def unmap(self) -> None:
        """Unmap the data as soon as it has no holds. It may be mapped again. Idempotent."""
        with self._lock:
            self._is_wanted = False
        self._unmap_if_over()

    def let_go(self) -> None:
        """End one `hold`. The last one after `unmap` or `close` unmaps the data."""
        with self._lock:
            self._holds -= 1
        self._unmap_if_over()

    def span(self, slot: Slot) -> DeviceSpan:
        """The slot's bytes, without a copy, checked. They stay mapped as long as the span lives."""
        self.check(slot)
        span = DeviceSpan(self.hold() + slot.offset, slot.nbytes)
        self._had_spans = True
        weakref.finalize(span, self.let_go).atexit = False
        return span

    @property
    def data(self) -> memoryview:
        """:raises LayoutError: always; the CPU cannot access it."""
        raise LayoutError(f"this chunk is on GPU {self.gpu}: use .tensor(), or read a copy")

    def read(self, offset: int, nbytes: int) -> memoryview:
        """A copy of these bytes in host memory, as `Arena.read`."""
        check_span(offset, nbytes, self.nbytes)
        copy = bytearray(nbytes)
        if not nbytes:
            return memoryview(copy)
        address = self.hold()
        try:
            stream = self._stream()
            try:
                stream.copy(ctypes.addressof(ctypes.c_char.from_buffer(copy)), address + offset, nbytes)
                stream.wait()
            except BaseException:
                stream.close()
                raise
            self._streams.append(stream)
        finally:
            self.let_go()
        return memoryview(copy)

    def is_current(self, slot: Slot) -> bool:
        """Whether the slot is still what it was promised to be, and its memory is still there."""
        return super().is_current(slot) and (self.kind != "ipc" or self._is_node_alive())

    def close(self) -> None:
        """Unmap everything; the data as soon as it has no holds. Idempotent."""
        with self._lock:
            was_closed, self._is_closed, self._is_wanted = self._is_closed, True, False
        if not was_closed and self.kind == "ipc" and self._handover is None:
            # Other processes lose their mappings now, while this process still lives: no slot is current from here on.
            self._table[:] = b"\xff" * len(self._table)
        self._unmap_if_over()
        super().close()

    def _check(self, handle: Handle) -> None:
        if handle.gpu != self.gpu or handle.nbytes < self.nbytes:
            raise ProtocolError(
                f"the node hands over {handle.nbytes} bytes of GPU {handle.gpu} instead of {self.nbytes} of {self.gpu}"
            )

    @staticmethod
    def _open(handle: Handle, fd: int, on: Gpu) -> DeviceMemory:
        with contextlib.ExitStack() as undo:
            with keeping_context():
                memory = DeviceMemory.open(handle, fd, on=on)
                undo.callback(memory.close)
            undo.pop_all()
        return memory

    def _take(self, memory: DeviceMemory, on: Gpu) -> bool:
        with self._lock:
            if self._memory is not None or self._is_closed:
                return False
            self._memory, self._on, self.address, self._is_wanted = memory, on, memory.address, True
            return True

    def _stream(self) -> CopyStream:
        with contextlib.suppress(IndexError):
            return self._streams.pop()
        assert self._on is not None
        return CopyStream(self._on)

    def _unmap_if_over(self) -> None:
        with self._lock:
            if self._holds or self._is_wanted or self._memory is None:
                return
            memory, on, self._memory, self._on, self.address = self._memory, self._on, None, None, 0
            streams, self._streams = self._streams, []
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(keeping_context())
            if self._had_spans and on is not None:
                on.wait()  # dropping a tensor does not wait for kernels that use it, nor does unmapping
        except GpuError as error:
            _log.warning("memory of GPU %s may be unmapped under work that uses it: %s", self.gpu, str(error))
        for stream in streams:
            stream.close()
        memory.close()
        try:
            stack.close()
        except GpuError as error:  # what remains to be done needs no GPU
            _log.warning("the thread's current GPU may not be the one of before: %s", str(error))


def fetch_handle(path: Path, ticket: bytes, timeout_s: float) -> tuple[Handle, int]:
    """Ask the node that listens at `path` for the handle, and a descriptor that the caller closes (-1: none).

    Each of the three steps waits at most `timeout_s`. Raises NodeUnavailable if no node answers in time, NodeError if
    it refuses (its log says why), and ProtocolError if what answers is not a node of this user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
        limit = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # `connect` to a full backlog heeds the first
            stream.setsockopt(socket.SOL_SOCKET, option, limit)
        try:
            _connect(stream, path, timeout_s)
            if (uid := peer_of(stream).uid) != os.geteuid():  # another user must not learn the ticket
                raise ProtocolError(f"user {uid} listens at {path}")
            stream.send(ticket)
            message, fds, flags = receive_fds(stream, MAX_ANSWER_BYTES, _MAX_FDS)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise NodeError(f"the node does not hand over its GPU memory; its log says why ({error})") from error
        except OSError as error:
            raise NodeUnavailable(f"no node hands over GPU memory at {path}: {error}") from error
    try:
        return _checked(message, fds, flags)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _connect(stream: socket.socket, path: Path, timeout_s: float) -> None:
    """Connect. If the backlog is full, a stop of this process ends the wait, and Python believes to be connected."""
    until = time.monotonic() + timeout_s
    while True:
        stream.connect(str(path))
        try:
            stream.getpeername()
        except OSError:
            if time.monotonic() >= until:
                raise
        else:
            return


def _checked(message: bytes, fds: list[int], flags: int) -> tuple[Handle, int]:
    if not message:
        raise NodeError("the node does not hand over its GPU memory; its log says why")
    try:
        handle = _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"what the node hands over does not decode: {error}") from error
    if len(fds) != (handle.kind == "vmm") or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ProtocolError(f"the node hands over {len(fds)} descriptors with memory of kind {handle.kind}")
    return handle, fds[0] if fds else -1
