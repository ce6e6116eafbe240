"""Connected stream sockets: whole buffers in and out, without copies, with the GIL released."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence

from pdx.transports.channel import Buffer

IOV_MAX = os.sysconf("SC_IOV_MAX")


def fill(sock: socket.socket, view: Buffer, *, deadline: float | None = None) -> bool:
    """Receive until `view` is full. False: the stream ended before its first byte.

    :param deadline: in terms of `time.monotonic`; None waits for ever, which suits streams that may be idle for hours.
    :raises ConnectionError: the stream ended in the middle.
    :raises OSError: the stream broke, or the deadline is over (`TimeoutError`).
    """
    left = memoryview(view)
    total = left.nbytes
    while left.nbytes:
        if deadline is None:
            # One call takes the whole buffer: no wake-up of this thread, and no GIL, per segment.
            got = sock.recv_into(left, 0, socket.MSG_WAITALL)
        else:
            sock.settimeout(max(deadline - time.monotonic(), 1e-6))
            got = sock.recv_into(left)
        if not got:
            if left.nbytes < total:
                raise ConnectionError(f"the stream ended {left.nbytes} bytes before the end of a frame")
            return False
        left = left[got:]
    return True


def take(sock: socket.socket, view: Buffer, *, deadline: float | None = None) -> None:
    """As `fill`, but an end of the stream before the first byte is a `ConnectionError`, too."""
    if not fill(sock, view, deadline=deadline):
        raise ConnectionError("the stream ended in the middle of what was to come")


def fill_all(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Receive until all of `views` are full, many of them in one call. :raises OSError: the stream ended or broke."""
    for start in range(0, len(views), IOV_MAX):
        batch = views[start : start + IOV_MAX]
        got = 0
        if len(batch) > 1:
            got = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            if not got:
                raise ConnectionError("the stream ended in the middle of a write")
        for view in batch:
            done = min(got, view.nbytes)
            got -= done
            if done < view.nbytes:
                take(sock, view[done:])


def send_some(sock: socket.socket, buffers: Sequence[Buffer], limit: int) -> Sequence[Buffer]:
    """Send what the kernel takes at once, at most about `limit` bytes. Returns what is left of `buffers`.

    :raises OSError: the stream broke.
    """
    batch: list[Buffer] = []
    for buffer in buffers[:IOV_MAX]:
        batch.append(memoryview(buffer)[:limit])
        limit -= len(batch[-1])
        if limit <= 0:
            break
    try:
        return _behind(buffers, sock.sendmsg(batch, [], socket.MSG_DONTWAIT))
    except BlockingIOError:
        return buffers


def _behind(buffers: Sequence[Buffer], nbytes: int) -> Sequence[Buffer]:
    """The rest of `buffers` behind their first `nbytes`."""
    for index, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [memoryview(buffer)[nbytes:], *buffers[index + 1 :]]
        nbytes -= len(buffer)
    return []


def shut(sock: socket.socket) -> None:
    """Shut down both directions, so that a thread blocked in the socket returns. The descriptor stays. Idempotent."""
    with contextlib.suppress(OSError):  # the other side was faster
        sock.shutdown(socket.SHUT_RDWR)
