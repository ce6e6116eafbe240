"""The contract of a channel: one-sided writes between registered memory, with a notification after each.

A backend is one family of files beside this one, with one subclass of each class here, reached through `registry`. It
moves bytes and reports the outcome. It never retries, sleeps, chooses or keeps deadlines: that is policy, and belongs
to `pdx.node`. No I/O here.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable, PdxError

if TYPE_CHECKING:
    from pdx.cuda.memory import DeviceMemory, Handle

TOKEN_BYTES = 16
MAX_DETAIL_BYTES = 64 << 10
MAX_NOTIFY_BYTES = 64 << 10
MAX_PIECES = 4096  # in one write
# What a listener keeps of one session for `take`. A notification counts for its payload, and this for its objects.
MAX_UNTAKEN_BYTES = 4 << 20
NOTIFICATION_BYTES = 1 << 10

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview

Offset = Annotated[int, Meta(ge=0, le=1 << 48)]
Size = Annotated[int, Meta(ge=1, le=1 << 48)]
Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
SchemeName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """`nbytes` bytes from offset `local` of the writer's region to offset `remote` of the other one."""

    local: Offset
    remote: Offset
    nbytes: Size


class RemoteRegion(msgspec.Struct, array_like=True, frozen=True):
    """A region as it is described to a writer: all that is needed to write to it in one session.

    `token` is the session's secret; `detail` is the backend's own (an address, an agent's metadata), typed and bounded
    on decode like any message.
    """

    scheme: SchemeName
    nbytes: Size
    token: Token
    detail: Annotated[bytes, Meta(max_length=MAX_DETAIL_BYTES)]


class Notification(msgspec.Struct, frozen=True):
    """All bytes of one write of the session `token` have landed; `payload` is what its writer sent with it."""

    token: bytes
    payload: bytes


class Availability(msgspec.Struct, frozen=True):
    """Whether a scheme can work on this machine; if not, why, and how to fix that."""

    is_ok: bool
    why: str = ""
    fix: str = ""


class Memory:
    """A block of host memory to be registered. `path`: the file it maps from offset 0, if there is one. `gpu`: the UUID
    of the GPU that the memory lies on, empty for the host's.

    It keeps the mapping alive until `release`, which its creator calls after the end of every region over it.
    """

    gpu = ""

    def __init__(self, view: memoryview, path: Path | None = None) -> None:
        self._view = view.cast("B")
        self._path = path
        self._anchor: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * self._view.nbytes).from_buffer(self._view)
        self.nbytes = self._view.nbytes
        self.address = ctypes.addressof(self._anchor)

    def __repr__(self) -> str:
        return f"<Memory {self.nbytes >> 10} KiB {self._path or 'anonymous'}>"

    def release(self) -> None:
        """Let the mapping end, even if something still holds this object. Idempotent."""
        self._anchor = None
        with contextlib.suppress(BufferError):  # a buffer of it still exists: the mapping ends with that
            self._view.release()

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def path(self) -> Path | None:
        return self._path


class GpuMemory(Memory):
    """The first `nbytes` of a block of GPU memory. It has no view and no file: asking for them raises the error that a
    backend for host memory alone has to raise anyway.

    `device` stays its owner's, which closes it after every region over it.
    """

    def __init__(self, device: DeviceMemory, nbytes: int = 0) -> None:
        """`nbytes`: how much of it, since the driver rounds up; 0: all."""
        self._device = device
        self.nbytes = nbytes or device.nbytes
        self.address = device.address
        self.gpu = device.gpu

    def __repr__(self) -> str:
        return f"<GpuMemory {self.nbytes >> 10} KiB of {self.gpu}>"

    def release(self) -> None:
        """No-op: the device is its owner's."""

    @property
    def view(self) -> memoryview:
        """:raises ChannelUnavailable: always."""
        raise ChannelUnavailable(f"{self} cannot be read or written by the processor")

    @property
    def path(self) -> Path | None:
        """:raises ChannelUnavailable: always."""
        raise ChannelUnavailable(f"{self} is no file")

    def export(self) -> tuple[Handle, int]:
        """What another process of this host opens it with: a handle, and a descriptor that the caller closes (-1:
        none).

        :raises GpuError: the driver cannot.
        """
        return self._device.export()


class Transfer(ABC):
    """One write in flight. Thread-safe.

    Once `poll()` is True it stays True, the local bytes may be reused, and nothing of this write will be sent any more.
    A failure is a completion, too: `error` says which. Without an error every byte is in the remote memory and its
    owner gets the notification. After a `ChannelBroken`, bytes may have landed, and may still land until the write's
    spans are revoked: nothing else may be written there before.
    """

    error: ChannelError | None = None
    _is_over = False

    def __init__(self, wake: threading.Event) -> None:
        """`wake` is set when it is over."""
        self._wake = wake

    def poll(self) -> bool:
        """Whether it is over. Never blocks."""
        return self._is_over

    @abstractmethod
    def abort(self) -> None:
        """Do not begin what has not begun; completion follows, with or without an error. Never blocks. Idempotent."""

    def finish(self, error: ChannelError | None) -> None:
        """Complete the transfer: the first call counts. For its backend."""
        if not self._is_over:
            self.error = error
            self._is_over = True
            self._wake.set()


class Channel(ABC):
    """The connection from a local region to one remote region. One thread writes; another may call `close`.

    If writes are neither checked nor can be stopped, one that is closed or aborted may still read local memory and
    write remote memory until it ends. It is never notified, and `Listener.revoke` tells when it has ended.
    """

    is_closed = False  # its region need not close it any more

    @abstractmethod
    def write(self, pieces: Sequence[Piece], notify: bytes) -> Transfer:
        """Start to write the pieces; their bytes must not change until the transfer is over. Never blocks for long.

        Writes may complete in any order. A broken channel returns a transfer that is over, with the error.

        :raises ValueError: a piece lies outside a region, there are none or more than MAX_PIECES, or `notify` is longer
            than MAX_NOTIFY_BYTES.
        """

    @abstractmethod
    def close(self) -> None:
        """End the channel; transfers in flight complete with `ChannelBroken`. Idempotent."""


class Listener(ABC):
    """The receiving side of a region. Thread-safe.

    A session is one peer's permission to write, named by its token; what it may write to is granted span by span. If
    the technology lets the receiver look at a write before it lands (`Region.checks_writes`), a write that is not
    wholly inside granted spans of its session is refused: nothing of it is written, and the writer's transfer ends with
    `WriteRefused`.
    """

    @abstractmethod
    def invite(self, token: bytes) -> RemoteRegion:
        """Open a session under this fresh secret. Returns what its peer needs to connect."""

    @abstractmethod
    def grant(self, token: bytes, offset: int, nbytes: int) -> None:
        """Let the session write to [offset, offset + nbytes) from now on."""

    @abstractmethod
    def revoke(self, token: bytes, offset: int, nbytes: int) -> bool:
        """Revoke a span as it was granted. True: from now on nothing of this session lands there. False: something may
        be landing right now, ask again. If writes are not checked, it stays False until the session is known to be
        over. For a span that is not granted (any more) it is True.
        """

    @abstractmethod
    def take(self) -> list[Notification]:
        """The notifications since the last call. Never blocks.

        Of one session at most MAX_UNTAKEN_BYTES are kept, and one write per connection. Further writes do not complete
        before some were taken; if writes are not checked, their notifications are lost instead.
        """

    @abstractmethod
    def expel(self, token: bytes) -> None:
        """End a session: its connections are closed, and its grants are gone except for `revoke`. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """End all sessions and stop listening. Idempotent."""


class Region(ABC):
    """Local memory registered with one technology, once; the root of all its channels and of its listener.

    Closing it closes them. Threads and descriptors that a backend needs are its own and end with `close`. Thread-safe.
    A backend implements how it listens (`_listening`) and connects (`_connected`), or overrides more.
    """

    scheme: ClassVar[str]
    crosses_wire: ClassVar[bool] = True  # bytes leave the host's memory, so digests are due
    checks_writes: ClassVar[bool] = True  # see Listener; if not, only a silent or dead peer is known not to write
    is_polled: ClassVar[bool] = False  # `wake` may not be set: callers must poll transfers and `take`
    takes_gpus: ClassVar[bool] = False  # memory may be a GPU's
    # Only holders of a session's token can reach the memory. If not, everyone who reaches the technology's own ports is
    # trusted, so it is used only if the user says so.
    is_authenticated: ClassVar[bool] = True
    takes_codec: ClassVar[bool] = False  # whether `codec` may be "lossless"
    codec: str = "none"  # by which channels encode what they send, to peers that decode it; set before they connect

    def __init__(self, memory: Memory, host: str, wake: threading.Event) -> None:
        """Called by `register`."""
        self.memory = memory
        self.host = host
        self.wake = wake
        self._lock = threading.RLock()  # guards all below
        self._listener: Listener | None = None
        self._channels: list[Channel] = []  # without those that have ended, at the time of the last `connect`
        self._is_open = True

    @classmethod
    def availability(cls) -> Availability:
        """Whether this scheme can work here. Imports what it needs, opens nothing, raises nothing."""
        return Availability(is_ok=True)

    @classmethod
    def register(cls, memory: Memory, *, host: str = "127.0.0.1", wake: threading.Event | None = None) -> Self:
        """Register `memory`. `host`: the address to listen on and to be reached at. `wake` is set, by any
        thread, when a notification is there, or a transfer of a channel without a `wake` of its own is over.

        :raises ChannelUnavailable: it cannot work here.
        """
        found = cls.availability()
        if not found.is_ok:
            raise ChannelUnavailable(f"{found.why}; {found.fix}")
        if memory.gpu and not cls.takes_gpus:
            raise ChannelUnavailable(
                f"{cls.scheme} moves host memory, and {memory} is a GPU's; "
                "use cuda_ipc on one host, nixl or ucx between hosts"
            )
        return cls(memory, host, wake or threading.Event())

    def listen(self) -> Listener:
        """Begin to receive; the same listener each time. :raises ChannelUnavailable: it cannot listen there."""
        with self._lock:
            if not self._is_open:
                raise ChannelUnavailable("the region is closed")
            if self._listener is None:
                self._listener = self._listening()
            return self._listener

    def connect(self, remote: RemoteRegion, *, timeout_s: float = 5.0, wake: threading.Event | None = None) -> Channel:
        """A channel to a peer's region. Blocks up to `timeout_s`. `wake` is set, by any thread, when a transfer of this
        channel is over; by default it is the region's. So a write to one peer wakes no thread that waits for another.

        :raises ChannelBroken: the peer does not answer or does not know the token.
        :raises ChannelUnavailable: this scheme cannot reach it (another host, another version).
        """
        if remote.scheme != self.scheme:
            raise ChannelUnavailable(f"a region of scheme {remote.scheme!r} cannot be reached over {self.scheme}")
        channel = self._connected(remote, timeout_s, wake or self.wake)
        with self._lock:
            self._channels = [each for each in self._channels if not each.is_closed] + [channel]
            is_open = self._is_open
        if not is_open:
            channel.close()
            raise ChannelBroken("the region is closed")
        return channel

    def close(self) -> None:
        """Close everything and deregister. Idempotent."""
        with self._lock:
            self._is_open = False
            channels, self._channels = self._channels, []
            listener = self._listener
        for channel in channels:
            channel.close()
        if listener is not None:
            listener.close()

    def _listening(self) -> Listener:
        """A new listener. Raises as `listen`."""
        raise NotImplementedError

    def _connected(self, remote: RemoteRegion, timeout_s: float, wake: threading.Event) -> Channel:
        """A new channel to a region of this scheme. Raises as `connect`."""
        raise NotImplementedError


def decoded(decoder: msgspec.msgpack.Decoder[T], packed: Buffer, error: type[PdxError], what: str) -> T:
    """Decode what a peer has sent, typed and bounded. :raises error: it is not `what` it should be."""
    try:
        return decoder.decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as why:
        raise error(f"not {what}: {why}") from why


def check_write(pieces: Sequence[Piece], notify: bytes, local_nbytes: int, remote_nbytes: int) -> None:
    """Check what every backend's `write` checks first. :raises ValueError: see `Channel.write`."""
    if not 0 < len(pieces) <= MAX_PIECES:
        raise ValueError(f"a write has {len(pieces)} pieces; 1 to {MAX_PIECES} are possible")
    if len(notify) > MAX_NOTIFY_BYTES:
        raise ValueError(f"a notification has {len(notify)} bytes; at most {MAX_NOTIFY_BYTES} are possible")
    for piece in pieces:
        inside = 0 <= piece.local <= local_nbytes - piece.nbytes and 0 <= piece.remote <= remote_nbytes - piece.nbytes
        if piece.nbytes <= 0 or not inside:
            raise ValueError(f"{piece} lies outside a region ({local_nbytes} local, {remote_nbytes} remote bytes)")


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The same bytes, with pieces joined that are adjacent on both sides. For backends that send each piece by itself:
    writer and reader come to the same result.
    """
    found: list[Piece] = []
    local, remote, nbytes = pieces[0].local, pieces[0].remote, pieces[0].nbytes
    for piece in pieces[1:]:
        if piece.local == local + nbytes and piece.remote == remote + nbytes:
            nbytes += piece.nbytes
        else:
            found.append(Piece(local, remote, nbytes))
            local, remote, nbytes = piece.local, piece.remote, piece.nbytes
    found.append(Piece(local, remote, nbytes))
    return found
