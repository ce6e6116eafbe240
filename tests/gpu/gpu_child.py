"""A process with a GPU that makes, exports and maps memory as the test tells it; tests kill it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any

import msgspec

NO_FD = -1


class GpuChild:
    """The test's end. An error of PDX in the process comes back as its class and text."""

    def __init__(self, fake_nbytes: int) -> None:
        """`fake_nbytes`: memory of the fake GPU that it is to have; 0: it has a real one."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(60)  # a first context takes seconds
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), str(fake_nbytes)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.close_all()  # answered when it has its context, which takes memory, too

    def export(self, nbytes: int, content: bytes, kind: str) -> tuple[Any, int]:
        """New memory that begins with `content`: its handle, and a descriptor that is the caller's (-1: none)."""
        from pdx.cuda.memory import Handle

        answer, fd = self._ask("export", nbytes, content, kind)
        return msgspec.msgpack.decode(answer, type=Handle), fd

    def open(self, handle: Any, fd: int, nbytes: int) -> bytes | str:
        """Map it, and keep it mapped; the first `nbytes` bytes, or the class and text of the error."""
        return self._ask("open", msgspec.msgpack.encode(handle), nbytes, fd=fd)[0]

    def write(self, content: bytes) -> None:
        """Put this at the beginning of what it mapped last."""
        self._ask("write", content)

    def close_all(self) -> None:
        """Unmap and free everything."""
        self._ask("close")

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> GpuChild:
        return self

    def __exit__(self, *error: object) -> None:
        self._sock.close()
        self.kill()

    def _ask(self, *request: Any, fd: int = NO_FD) -> tuple[Any, int]:
        socket.send_fds(self._sock, [msgspec.msgpack.encode(request)], [fd] if fd >= 0 else [])
        data, fds, _, _ = socket.recv_fds(self._sock, 65536, 1, socket.MSG_CMSG_CLOEXEC)
        assert data, "the process died"
        return msgspec.msgpack.decode(data), fds[0] if fds else NO_FD


class Actor:
    """The process's end."""

    def __init__(self) -> None:
        from pdx.cuda.gpu import Gpu

        self._gpu = Gpu.find("0")
        self._gpu.use()
        self._kept: list[Any] = []

    def export(self, fd: int, nbytes: int, content: bytes, kind: str) -> tuple[Any, int]:
        """See `GpuChild.export`."""
        from device_bytes import write

        from pdx.cuda.memory import DeviceMemory

        self._kept.append(DeviceMemory.create(self._gpu, nbytes, kind))
        write(self._gpu, self._kept[-1].address, content)
        handle, exported = self._kept[-1].export()
        return msgspec.msgpack.encode(handle), exported

    def open(self, fd: int, handle: bytes, nbytes: int) -> tuple[Any, int]:
        """See `GpuChild.open`."""
        from device_bytes import read

        from pdx.cuda.memory import DeviceMemory, Handle

        self._kept.append(DeviceMemory.open(msgspec.msgpack.decode(handle, type=Handle), fd, on=self._gpu))
        return read(self._gpu, self._kept[-1].address, nbytes), NO_FD

    def write(self, fd: int, content: bytes) -> tuple[Any, int]:
        """See `GpuChild.write`."""
        from device_bytes import write

        write(self._gpu, self._kept[-1].address, content)
        return None, NO_FD

    def close(self, fd: int) -> tuple[Any, int]:
        """See `GpuChild.close_all`."""
        while self._kept:
            self._kept.pop().close()
        return None, NO_FD


def serve(sock: socket.socket) -> None:
    """One request after the other until the test closes the socket."""
    from pdx.errors import PdxError

    actor = Actor()
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 65536, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        verb, *arguments = msgspec.msgpack.decode(data)
        try:
            answer, fd = getattr(actor, verb)(fds[0] if fds else NO_FD, *arguments)
        except PdxError as error:
            answer, fd = f"{type(error).__name__}: {error}", NO_FD
        socket.send_fds(sock, [msgspec.msgpack.encode(answer)], [fd] if fd >= 0 else [])
        for used in (*fds, fd):
            if used >= 0:
                os.close(used)


def main() -> None:
    fake_nbytes = int(sys.argv[2])
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(fileno=int(sys.argv[1])))
        if fake_nbytes:
            from fake_cuda import fake_cuda

            stack.enter_context(fake_cuda(nbytes=fake_nbytes))
        serve(sock)


if __name__ == "__main__":
    main()
