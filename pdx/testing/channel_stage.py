"""What tests of a channel act on: memory of the host or a GPU, regions over it in this process and in others, and
waiting for both."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from pdx.closing import Closing
from pdx.cuda.copies import CopyStream
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory
from pdx.errors import ChannelBroken
from pdx.testing.waiting import DEADLINE_S, wait_until
from pdx.transports.channel import (
    TOKEN_BYTES,
    Channel,
    GpuMemory,
    Memory,
    Notification,
    Piece,
    Region,
    RemoteRegion,
    Transfer,
)

MIB = 1 << 20
FOLDER = "PDX_SIDES"  # variable that names where `HostFile` puts files; else /dev/shm

# The context of a test and of each of its peers, such as a fake driver: a function or class of some module.
World: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]


# ---- memory -------------------------------------------------------------------------------------


class DeviceView:
    """Bytes of a GPU's memory, copied out and in whenever they are asked for. Any thread may use it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, gpu: Gpu, address: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._gpu = gpu
        self._address = address

    def __getitem__(self, span: slice) -> bytes:
        start, stop = self._span(span)
        found = ctypes.create_string_buffer(max(stop - start, 1))
        self._copy(ctypes.addressof(found), self._address + start, stop - start)
        return ctypes.string_at(found, stop - start)

    def __setitem__(self, span: slice, data: bytes | memoryview) -> None:
        start, stop = self._span(span)
        source = (ctypes.c_char * max(len(data), 1)).from_buffer_copy(data or b"\0")
        if len(data) != stop - start:
            raise ValueError(f"{len(data)} bytes for a span of {stop - start}")
        self._copy(self._address + start, ctypes.addressof(source), stop - start)

    def __bytes__(self) -> bytes:
        return self[:]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bytes | memoryview | DeviceView) and bytes(self) == bytes(other)

    def _span(self, span: slice) -> tuple[int, int]:
        start, stop, step = span.indices(self.nbytes)
        assert step == 1
        return start, max(start, stop)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        with CopyStream(self._gpu) as stream:
            stream.copy(target, source, nbytes)
            stream.wait()


View: TypeAlias = memoryview | DeviceView  # what a test sees of it


class SideMemory(ABC):
    """Memory of one side, of a kind of its own; contents are undefined. Its owner closes it, after all regions."""

    memory: Memory
    view: View
    path: Path | None = None  # where other processes can read it

    def __init__(self, nbytes: int) -> None:
        self.acquire(nbytes)

    @abstractmethod
    def acquire(self, nbytes: int) -> None:
        """Take that much; sets the attributes."""

    @abstractmethod
    def close(self) -> None:
        """Give it back. Idempotent."""


class HostFile(SideMemory):
    """A file in /dev/shm, mapped."""

    path: Path

    def acquire(self, nbytes: int) -> None:
        self.path = Path(os.environ.get(FOLDER, "/dev/shm")) / f"pdx-side-{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # in a full /dev/shm, a write to a sparse file ends in SIGBUS
            view = memoryview(mmap.mmap(fd, nbytes))
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(fd)
        self.view = view
        self.memory = Memory(view, self.path)

    def close(self) -> None:
        """Remove the file; the mapping goes with its last view."""
        self.path.unlink(missing_ok=True)


class GpuBlock(SideMemory):
    """Memory of a GPU, handed over as a descriptor."""

    kind: ClassVar[Literal["vmm", "ipc"]] = "vmm"
    which: ClassVar[str] = "0"  # the GPU

    def acquire(self, nbytes: int) -> None:
        gpu = Gpu.find(self.which)
        self._device = DeviceMemory.create(gpu, nbytes, self.kind)
        self.memory = GpuMemory(self._device, nbytes)
        self.view = DeviceView(gpu, self._device.address, nbytes)

    def close(self) -> None:
        self._device.close()


class LegacyGpuBlock(GpuBlock):
    """Memory of a GPU, handed over as a legacy IPC handle."""

    kind = "ipc"


class SecondGpuBlock(GpuBlock):
    """Memory of another GPU."""

    which = "1"


# ---- sides and peers ----------------------------------------------------------------------------


def noise(nbytes: int, seed: int) -> bytes:
    """Bytes that do not repeat, the same ones for the same seed."""
    return random.Random(seed).randbytes(nbytes)


class Side:
    """One region over memory of its own, filled with noise."""

    def __init__(self, region: type[Region], memory: SideMemory, wake: threading.Event, *, seed: int) -> None:
        """Takes `memory` over."""
        self._memory = memory
        self.wake = wake
        try:
            self.view: View = memory.view
            self.view[:] = noise(memory.memory.nbytes, seed)
            self.region = region.register(memory.memory, wake=wake)
        except BaseException:
            memory.close()
            raise
        self.seen: list[Notification] = []

    def __repr__(self) -> str:
        return f"<Side {self._memory.memory}>"

    @property
    def path(self) -> Path | None:
        """The file of its memory, if it is one."""
        return self._memory.path

    def session(self, *spans: tuple[int, int]) -> tuple[bytes, RemoteRegion]:
        """A fresh session that may write to these (offset, nbytes): its token, and what its peer needs."""
        token = secrets.token_bytes(TOKEN_BYTES)
        remote = self.region.listen().invite(token)
        for offset, nbytes in spans:
            self.region.listen().grant(token, offset, nbytes)
        return token, remote

    def connect(self, remote: RemoteRegion) -> Channel:
        """A channel to a region that exists: a loaded machine gets all the time that a test has."""
        return self.region.connect(remote, timeout_s=DEADLINE_S)

    def take(self) -> list[Notification]:
        """All notifications since the side was made, oldest first; `Listener.take` gives each once."""
        self.seen += self.region.listen().take()
        return self.seen

    def payloads(self) -> list[bytes]:
        """The payloads of all of them."""
        return [each.payload for each in self.take()]

    def close(self) -> None:
        """Close the region, then the memory. Idempotent."""
        self.region.close()
        self._memory.close()


def landed(before: bytes, source: bytes | View, pieces: Iterable[Piece]) -> bytes:
    """What memory that held `before` must hold when these pieces of `source` have landed, and nothing else has."""
    after = bytearray(before)
    for piece in pieces:
        after[piece.remote : piece.remote + piece.nbytes] = source[piece.local : piece.local + piece.nbytes]
    return bytes(after)


class Peer:
    """A region in a process of its own that does what it is told (see `channel_peer`)."""

    def __init__(self, region: type[Region], nbytes: int, *, seed: int, memory: type[SideMemory], world: World) -> None:
        targets = [f"{each.__module__}:{each.__qualname__}" for each in (region, memory, world)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdx.testing.channel_peer", *targets, str(nbytes), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        path = self.result()
        self._path = Path(path) if path else None

    def send(self, verb: str, *arguments: Any) -> None:
        """Tell it to do something; it may be a stopped process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """The result of the oldest `send`: a value, which is no dict, or {"error": the class's name, "text": …}.

        :raises ChannelBroken: its process is dead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChannelBroken(f"the peer process ended with status {self._process.wait(10)}")
        return json.loads(line)

    def do(self, verb: str, *arguments: Any) -> Any:
        """Tell it and wait for the value. :raises ChannelBroken: it is dead, or answers with an error."""
        self.send(verb, *arguments)
        result = self.result()
        if isinstance(result, dict):
            raise ChannelBroken(f"the peer process cannot {verb}: {result['error']}: {result['text']}")
        return result

    def session(self, *spans: tuple[int, int]) -> tuple[bytes, RemoteRegion]:
        token = secrets.token_bytes(TOKEN_BYTES)
        detail = self.do("invite", token.hex())
        for offset, nbytes in spans:
            self.do("grant", token.hex(), offset, nbytes)
        return token, msgspec.msgpack.decode(bytes.fromhex(detail), type=RemoteRegion)

    def connect(self, remote: RemoteRegion, timeout_s: float = DEADLINE_S) -> Any:
        """Connect to this region. Returns the channel's number, or the error as `result` has it."""
        self.send("connect", msgspec.msgpack.encode(remote).hex(), timeout_s)
        return self.result()

    def write(self, channel: int, pieces: Iterable[Piece], notify: bytes = b"") -> Any:
        """Start a write. Returns the transfer's number."""
        return self.do("write", channel, [[piece.local, piece.remote, piece.nbytes] for piece in pieces], notify.hex())

    def bytes(self, offset: int, nbytes: int) -> bytes:
        """Its memory, read by way of its file if it has one: then it may be stopped or dead."""
        if self._path is None:
            return bytes.fromhex(self.do("read", offset, nbytes))
        with open(self._path, "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(nbytes)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the peer is stopped")

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        """End it, whatever state it is in. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Bell(threading.Event):
    """The `wake` of a region or channel: whenever it is set, all that wait on its stage look again."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def set(self) -> None:
        super().set()
        self._stage.wake()


class Stage(Closing):
    """The sides and peers of one test; leaving it closes them. All regions of this process wake it."""

    def __init__(
        self,
        region: type[Region],
        *,
        first_seed: int = 1,
        memories: Sequence[type[SideMemory]] = (HostFile,),
        world: World = contextlib.nullcontext,
    ) -> None:
        """`memories`: kinds of memory for sides and peers, in turn. `world`: around each peer, and already around
        this."""
        self._region = region
        self._memories = itertools.cycle(memories)
        self._world = world
        self._woken = threading.Condition()
        self._num_wakes = 0  # a count, since several threads may wait, each for something else
        self._seeds = itertools.count(first_seed)
        self._open: list[Side | Peer] = []

    def side(self, nbytes: int = 8 * MIB) -> Side:
        side = Side(self._region, next(self._memories)(nbytes), Bell(self), seed=next(self._seeds))
        self._open.append(side)
        return side

    def peer(self, nbytes: int = 8 * MIB) -> Peer:
        memory = next(self._memories)
        peer = Peer(self._region, nbytes, seed=next(self._seeds), memory=memory, world=self._world)
        self._open.append(peer)
        return peer

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
        """Wait for a `wake`, or for each millisecond if a backend is polled, until `condition()` is true."""
        deadline = time.monotonic() + timeout_s
        while True:
            before = self._num_wakes
            if result := condition():
                return result
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"not within {timeout_s} s: {what}")
            if not self._is_woken(before, 0.001 if self._region.is_polled else left) and not self._region.is_polled:
                assert not condition(), f"`wake` was not set: {what}"

    def _is_woken(self, before: int, timeout_s: float) -> bool:
        with self._woken:
            return self._woken.wait_for(lambda: self._num_wakes != before, timeout_s)

    def wake(self) -> None:
        with self._woken:
            self._num_wakes += 1
            self._woken.notify_all()

    def finish(self, transfers: Iterable[Transfer], timeout_s: float = DEADLINE_S) -> list[str]:
        """Wait until all are over. Returns the name of each one's error, "" if it has none."""
        transfers = list(transfers)
        waiting = transfers[::-1]

        def is_over() -> bool:
            while waiting and waiting[-1].poll():
                waiting.pop()  # not polled again: thousands of them are polled once each
            return not waiting

        self.until(is_over, f"{len(transfers)} transfers are over", timeout_s)
        return [type(transfer.error).__name__ if transfer.error else "" for transfer in transfers]

    def written(self, channel: Channel, pieces: list[Piece], notify: bytes = b"") -> str:
        """Write and wait. Returns the name of the error, "" if there is none."""
        return self.finish([channel.write(pieces, notify)])[0]

    def notified(self, side: Side, count: int) -> list[bytes]:
        """Wait for that many notifications since the side was made, and return all their payloads."""
        self.until(lambda: len(side.take()) >= count, f"{count} notifications")
        return side.payloads()

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
