"""The technologies that channels use, called directly and as fast as possible: the reference of `pdx.bench.channels`.

Each has a receiver (`listen`, `take`) in one process and a sender (`connect`, `send`) in another. None checks bounds,
keeps sessions or survives errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import re
import socket
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy

from pdx.transports.channel import Memory

Begun = TypeVar("Begun")
NIXL_DELAY_US = 1000


@dataclass(frozen=True, slots=True)
class Flow:
    """`count` messages of `nbytes`, `depth` in flight, starting at offset `first` of both memories and wrapping around.

    `first` is a multiple of `nbytes`; the remainder after the last whole message of a memory is not used.
    """

    first: int
    nbytes: int
    count: int
    depth: int

    def offsets(self, ring: int) -> Iterator[int]:
        """Offsets of the messages, in memories of `ring` bytes."""
        used = ring - ring % self.nbytes
        return ((self.first + index * self.nbytes) % used for index in range(self.count))

    def carry_out(self, ring: int, begin: Callable[[int], Begun], finish: Callable[[Begun], object]) -> None:
        """Start a message at each offset, finishing the oldest whenever `depth` are in flight, and all of them at the
        end."""
        under_way: deque[Begun] = deque()
        for offset in self.offsets(ring):
            under_way.append(begin(offset))
            if len(under_way) == self.depth:
                finish(under_way.popleft())
        while under_way:
            finish(under_way.popleft())


class SharedFile:
    """A mapped file in /dev/shm with all pages touched; its creator removes it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        with path.open("r+b" if path.exists() else "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self.view = memoryview(mmap.mmap(file.fileno(), nbytes))
        self.array = numpy.frombuffer(self.view, dtype=numpy.uint8)
        self.array[::4096] |= 0  # so that no page is touched for the first time while timing
        self.memory = Memory(self.view, path)


class Raw(ABC):
    """One technology; an object is one end."""

    scheme: ClassVar[str]

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @abstractmethod
    def listen(self) -> bytes:
        """Start receiving; returns what the sender needs."""

    @abstractmethod
    def connect(self, detail: bytes) -> None:
        """Connect to a receiver."""

    @abstractmethod
    def send(self, flow: Flow) -> None:
        """Send all messages; returns when their bytes are in the receiver's memory."""

    def take(self) -> None:  # noqa: B027
        """Process notifications at the receiver, if the technology has any."""

    @abstractmethod
    def close(self) -> None:
        """Close this end."""


class RawShm(Raw):
    """memcpy from the sender's mapping to one of the receiver's file, with as many threads as the channel uses."""

    scheme = "shm"
    threads: ClassVar[int] = 2

    def listen(self) -> bytes:
        return os.fsencode(str(self.memory.path))

    def connect(self, detail: bytes) -> None:
        self._target = SharedFile(Path(os.fsdecode(detail)), self.memory.nbytes)
        self._pool = ThreadPoolExecutor(self.threads)

    def send(self, flow: Flow) -> None:
        threads = min(flow.depth, self.threads)
        if threads == 1:
            self._copy(flow, 0, 1)
        else:
            list(self._pool.map(lambda thread: self._copy(flow, thread, threads), range(threads)))

    def _copy(self, flow: Flow, start: int, step: int) -> None:
        source, target, copy = self.memory.address, self._target.memory.address, ctypes.memmove
        for offset in itertools.islice(flow.offsets(self.memory.nbytes), start, None, step):
            copy(target + offset, source + offset, flow.nbytes)

    def close(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.shutdown()


class RawTcp(Raw):
    """One stream: `sendall`, and `recv_into` of whole messages. With one in flight, each is answered by a byte. With
    many, the sender does not wait, so the kernel's buffers are full; the answer follows the last message."""

    scheme = "tcp"
    _HEAD = struct.Struct("!QQQQ")

    def listen(self) -> bytes:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()
        return str(self._server.getsockname()[1]).encode()

    def _receive(self) -> None:
        with contextlib.suppress(OSError), self._server.accept()[0] as stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = bytearray(self._HEAD.size)
            while stream.recv_into(head, 0, socket.MSG_WAITALL):
                flow = Flow(*self._HEAD.unpack(head))
                for offset in flow.offsets(self.memory.nbytes):
                    left = self.memory.view[offset : offset + flow.nbytes]
                    while left.nbytes:
                        left = left[stream.recv_into(left, 0, socket.MSG_WAITALL) :]
                    if flow.depth == 1:
                        stream.send(b"!")
                if flow.depth > 1:
                    stream.send(b"!")

    def connect(self, detail: bytes) -> None:
        self._stream = socket.create_connection(("127.0.0.1", int(detail)))
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, flow: Flow) -> None:
        stream = self._stream
        stream.sendall(self._HEAD.pack(flow.first, flow.nbytes, flow.count, flow.depth))
        for offset in flow.offsets(self.memory.nbytes):
            stream.sendall(self.memory.view[offset : offset + flow.nbytes])
            if flow.depth == 1:
                stream.recv(1)
        if flow.depth > 1:
            stream.recv(1)

    def close(self) -> None:
        if hasattr(self, "_stream"):
            self._stream.close()
        if hasattr(self, "_server"):
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
            self._thread.join()


class RawNixl(Raw):
    """Write requests of one descriptor with a notification. The sender polls without a pause.

    A process can load only one wheel: the one chosen by the channel. NIXL's own thread is configured to sleep until
    woken: by default it spins, which on a machine with few cores takes one from the copying and slows everything down.
    """

    scheme = "nixl"

    def _start(self) -> None:
        self._bindings = bindings = next(
            sys.modules[name] for name in sys.modules if re.fullmatch(r"nixl_\w+\._bindings", name)
        )
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = NIXL_DELAY_US
        self.agent = bindings.nixlAgent(f"bench-{os.getpid()}-{self.memory.address}", config)
        self._backends = [self.agent.createBackend("UCX", {})]
        self._registered = bindings.nixlRegDList(bindings.DRAM_SEG, [(self.memory.address, self.memory.nbytes, 0, "")])
        self.agent.registerMem(self._registered, self._backends)

    def listen(self) -> bytes:
        self._start()
        detail: bytes = self.memory.address.to_bytes(8) + self.agent.getLocalMD()
        return detail

    def connect(self, detail: bytes) -> None:
        self._start()
        self.target = int.from_bytes(detail[:8])
        self._name = self.agent.loadRemoteMD(detail[8:]).decode()

    def _begin(self, offset: int, nbytes: int) -> int:
        bindings = self._bindings
        starts = (self.memory.address + offset, self.target + offset)
        lists = [bindings.nixlXferDList(bindings.DRAM_SEG, [(start, nbytes, 0)]) for start in starts]
        handle: int = self.agent.createXferReq(bindings.NIXL_WRITE, *lists, self._name, b"", self._backends)
        self.agent.postXferReq(handle, b"raw")
        return handle

    def _wait(self, handle: int) -> None:
        while self.agent.getXferStatus(handle) != self._bindings.NIXL_SUCCESS:
            pass
        self.agent.releaseXferReq(handle)

    def send(self, flow: Flow) -> None:
        flow.carry_out(self.memory.nbytes, lambda offset: self._begin(offset, flow.nbytes), self._wait)

    def take(self) -> None:
        self.agent.getNotifs({}, self._backends)

    def close(self) -> None:
        if hasattr(self, "agent"):
            self.agent.deregisterMem(self._registered, self._backends)
            del self.agent


RAW: dict[str, type[Raw]] = {raw.scheme: raw for raw in (RawShm, RawTcp, RawNixl)}
