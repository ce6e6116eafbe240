"""A real process with a fake GPU that makes, exports and opens memory as the test tells it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
from typing import Any

import msgspec
from fake_cuda import fake_cuda

from pdx.cuda import driver
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory, Handle, num_mapped
from pdx.errors import PdxError


class GpuProcess:
    """The test's end. Every request is answered; an error of PDX comes back as its class and text."""

    def __init__(self, **settings: Any) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(30)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(settings)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def __enter__(self) -> GpuProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self.process.kill()
        self.process.wait()

    def export(self, nbytes: int, fill: int, kind: str = "") -> tuple[Handle, int]:
        """Memory of its GPU 0, filled with this byte."""
        return self._ask("export", nbytes, fill, kind)[1:]

    def open(self, handle: Handle, fd: int = -1) -> str:
        """What its first byte is there, or the class and text of the error."""
        return self._ask("open", msgspec.msgpack.encode(handle), fd=fd)[0]

    def mapped(self) -> str:
        """How many memories it has mapped."""
        return self._ask("mapped")[0]

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def _ask(self, *request: Any, fd: int = -1) -> tuple[str, Any, int]:
        socket.send_fds(self._sock, [msgspec.msgpack.encode(request)], [fd] if fd >= 0 else [])
        data, fds, _, _ = socket.recv_fds(self._sock, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        text, raw = msgspec.msgpack.decode(data)
        return text, raw and msgspec.msgpack.decode(raw, type=Handle), fds[0] if fds else -1


def serve(sock: socket.socket) -> None:
    """The process's end: one request after the other until the test closes the socket."""
    with contextlib.ExitStack() as kept:
        while True:
            data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
            if not data:
                return
            try:
                text, handle, fd = answer(kept, msgspec.msgpack.decode(data), fds[0] if fds else -1)
            except PdxError as error:
                text, handle, fd = f"{type(error).__name__}: {error}", None, -1
            raw = handle and msgspec.msgpack.encode(handle)
            socket.send_fds(sock, [msgspec.msgpack.encode((text, raw))], [fd] if fd >= 0 else [])
            for used in (*fds, fd):
                if used >= 0:
                    os.close(used)


def answer(kept: contextlib.ExitStack, request: list[Any], fd: int) -> tuple[str, Handle | None, int]:
    match request:
        case "export", nbytes, fill, kind:
            memory = kept.enter_context(DeviceMemory.create(Gpu.find("0"), nbytes, kind))
            ctypes.memset(driver.api().memory.look(memory.address, nbytes), fill, nbytes)
            return "", *memory.export()
        case "open", raw:
            memory = DeviceMemory.open(msgspec.msgpack.decode(raw, type=Handle), fd, on=Gpu.find("0"))
            kept.enter_context(memory)
            return str(ctypes.string_at(driver.api().memory.look(memory.address, 1), 1)[0]), None, -1
        case _:
            return str(num_mapped()), None, -1


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as theirs, fake_cuda(**json.loads(sys.argv[2])):
        serve(theirs)
