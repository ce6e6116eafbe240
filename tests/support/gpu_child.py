"""A process with a GPU that makes, exports and maps memory as the test tells it; tests kill it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

import msgspec

NO_FD = -1


class GpuChild:
    """The test's end. An error of PDX in the process comes back as its class and text."""

    def __init__(self, fake: dict[str, Any] | None) -> None:
        """`fake`: settings of the fake driver that it is to have; None: it has a real GPU."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(60)  # a first context takes seconds
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(fake)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.close_all()  # answered when it has its context, which takes memory, too

    def export(self, nbytes: int, content: bytes, kind: str = "") -> tuple[Any, int]:
        """New memory that begins with `content`: its handle, and a descriptor that is the caller's (-1: none)."""
        from pdx.cuda.memory import Handle

        answer, fd = self._ask("export", nbytes, content, kind)
        return msgspec.msgpack.decode(answer, type=Handle), fd

    def open(self, handle: Any, fd: int, nbytes: int = 1) -> bytes | str:
        """Map it, and keep it mapped; the first `nbytes` bytes, or the class and text of the error."""
        return self._ask("open", msgspec.msgpack.encode(handle), nbytes, fd=fd)[0]

    def write(self, content: bytes) -> None:
        """Put this at the beginning of what it mapped last."""
        self._ask("write", content)

    def mapped(self) -> int:
        """How many memories it has mapped."""
        return int(self._ask("mapped")[0])

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


def answer(kept: list[Any], fd: int, request: list[Any]) -> tuple[Any, int]:
    """What the process does, and says, and hands over; see the methods of `GpuChild`."""
    from device_bytes import read, write

    from pdx.cuda.gpu import Gpu
    from pdx.cuda.memory import DeviceMemory, Handle, num_mapped

    gpu = Gpu.find("0")
    gpu.use()
    match request:
        case "export", nbytes, content, kind:
            kept.append(DeviceMemory.create(gpu, nbytes, kind))
            write(gpu, kept[-1].address, content)
            handle, exported = kept[-1].export()
            return msgspec.msgpack.encode(handle), exported
        case "open", raw, nbytes:
            kept.append(DeviceMemory.open(msgspec.msgpack.decode(raw, type=Handle), fd, on=gpu))
            return read(gpu, kept[-1].address, nbytes), NO_FD
        case "write", content:
            return write(gpu, kept[-1].address, content), NO_FD
        case ["mapped"]:
            return num_mapped(), NO_FD
        case _:
            while kept:
                kept.pop().close()
            return None, NO_FD


def serve(sock: socket.socket) -> None:
    """One request after the other until the test closes the socket."""
    from pdx.errors import PdxError

    kept: list[Any] = []
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 65536, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        try:
            said, fd = answer(kept, fds[0] if fds else NO_FD, msgspec.msgpack.decode(data))
        except PdxError as error:
            said, fd = f"{type(error).__name__}: {error}", NO_FD
        socket.send_fds(sock, [msgspec.msgpack.encode(said)], [fd] if fd >= 0 else [])
        for used in (*fds, fd):
            if used >= 0:
                os.close(used)


def main() -> None:
    fake = json.loads(sys.argv[2])
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(fileno=int(sys.argv[1])))
        if fake is not None:
            from fake_cuda import fake_cuda

            stack.enter_context(fake_cuda(**fake))
        serve(sock)


if __name__ == "__main__":
    main()
