"""The Python API: named chunks in a node's memory, written by one process, read by others, without a copy.

with pdx.connect() as node:
    with node.reserve("weights", nbytes) as chunk:
        chunk.tensor(torch.float32)[:] = source
        chunk.seal()
    with node.get("weights") as chunk:
        use(chunk.tensor(torch.float32))
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pdx.client.connection import Connection, attached
from pdx.closing import Closing
from pdx.config import default_node
from pdx.errors import ArenaFull, ChunkExists, ChunkMissing, ProtocolError, StaleSlot
from pdx.memory.keys import named_key
from pdx.memory.slot import Slot
from pdx.wire import messages
from pdx.wire.hints import parse
from pdx.wire.status import Explained, NodeStatus
from pdx.wire.verbs import Advise, Advised, Status, Why

if TYPE_CHECKING:
    import torch

    from pdx.cuda.memory import DeviceSpan
    from pdx.memory.arena import Arena

_A = TypeVar("_A", bound=messages.Answer)
_ASK_AGAIN_S = 0.002
_ASK_SELDOM_S = 0.05  # the longest pause between two asks
_FETCH_S = 5.0


def connect(address: str | None = None, timeout_s: float = 5.0) -> Node:
    """Attach this process to the node at `address` (default: PDX_NODE, else this host's socket).

    :raises NodeUnavailable: no node answers within `timeout_s`.
    """
    return Node(attached(address or default_node(), timeout_s), timeout_s)


class Node(Closing):
    """A node as seen by an attached process. Thread-safe. `close()` ends everything."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._arena: Arena | None = connection.arena
        self._device = -1  # ordinal of the GPU that may be working on a tensor of a chunk

    def __repr__(self) -> str:
        return f"<Node {self._connection!r}>"

    @property
    def address(self) -> str:
        """The address of the node's socket."""
        return self._connection.address

    def reserve(self, name: str, nbytes: int, *, parts: int = 1, push_to: str = "") -> WritableChunk:
        """Reserve room for a new chunk of `nbytes`, which may be filled in `parts` equal parts.

        `push_to`: the name of another node that gets the chunk too, each part as soon as it is filled.

        :raises ChunkExists: a chunk of that name exists or is being filled.
        :raises ArenaFull: there is no room now. :raises ArenaTooSmall: there will never be room.
        """
        if nbytes == 0:
            raise ProtocolError("a chunk has at least one byte; nbytes is 0")
        answer = self._call(messages.Admit([named_key(name)], nbytes, layers=parts, push_to=push_to), messages.Admitted)
        if answer.full:
            raise ArenaFull(f"no room for {nbytes} bytes now: the rest is leased, pinned or being filled")
        if not answer.granted:
            raise ChunkExists(f"a chunk named {name!r} is there or being filled; delete it first")
        return WritableChunk(self, name, answer.granted_slots[0], parts)

    def get(self, name: str, *, lease_s: float = 60.0, wait_s: float | None = None, source: str = "") -> ReadableChunk:
        """Lease the sealed chunk of that name for `lease_s` or until released; wait up to `wait_s` for it.

        `source`: the name of another node to fetch it from if it is not here. `wait_s` defaults to 0, or to 5 with a
        source or while the chunk is on its way from the node's disk.

        :raises ChunkMissing: there is no such chunk, or it did not arrive in time.
        """
        ask = messages.Admit([named_key(name)], lease_s=lease_s, source=source)
        started_at = time.monotonic()
        while True:
            answer = self._call(ask, messages.Admitted)
            if answer.hits:
                return ReadableChunk(self, name, answer.slots[0], answer.lease)
            limit_s = wait_s if wait_s is not None else _FETCH_S if source or answer.waiting else 0.0
            waited_s = time.monotonic() - started_at
            if waited_s >= limit_s:
                raise ChunkMissing(f"no sealed chunk is named {name!r}{f' within {limit_s} s' if limit_s else ''}")
            # Pause a tenth of the time waited so far: many callers that wait in vain cost the node little.
            time.sleep(min(max(waited_s / 10, _ASK_AGAIN_S), _ASK_SELDOM_S, limit_s - waited_s))

    def push(self, *names: str, to: str) -> None:
        """Send these sealed chunks to another node, which keeps them under the same names; does not wait.

        :raises ChunkMissing: one is not here; nothing is sent. :raises NodeError: no roster names that node.
        """
        self._call(messages.Push([named_key(name) for name in names], to), messages.Done)

    def lookup(self, names: Sequence[str]) -> int:
        """How many leading names have a sealed chunk."""
        return self._call(messages.Admit([named_key(name) for name in names]), messages.Admitted).hits

    def pin(self, *names: str) -> None:
        """Pin these chunks until they are unpinned as often; pins outlive this process.

        :raises ChunkMissing: one is not there (the others are pinned).
        """
        self._call(messages.Pin([named_key(name) for name in names]), messages.Done)

    def unpin(self, *names: str) -> None:
        """:raises ChunkMissing: one is not there (the others are unpinned)."""
        self._call(messages.Pin([named_key(name) for name in names], pinned=False), messages.Done)

    def advise(self, hints: Mapping[str, Any], *names: str, cache_salt: str = "") -> dict[str, str]:
        """Give hints about the future of these chunks; without names, about the chunks that the last request of the
        session in `hints` used. See docs/hints.md for the envelope.

        :returns: the verdict on each field, which begins with `accepted`, `clipped` or `refused`.
        """
        envelope = parse(dict(hints), cache_salt)
        answer = self._call(Advise(envelope.hints, [named_key(name) for name in names]), Advised)
        return {verdict.field: verdict.told for verdict in envelope.answer(answer.verdicts)}

    def delete(self, *names: str) -> int:
        """Delete these chunks, pinned or not; readers keep theirs until they release them.

        Returns how many there were.
        """
        return self._call(messages.Delete([named_key(name) for name in names]), messages.Done).count

    def status(self) -> NodeStatus:
        """What `pdx node --status` shows."""
        return self._call(Status(), NodeStatus)

    def why(self, request: str = "") -> Explained:
        """Why chunks of the last requests whose name contains `request` were hits or not, the newest first."""
        return self._call(Why(request), Explained)

    def close(self) -> None:
        """Detach: leases end, unsealed chunks are given back. Idempotent.

        GPU memory stays mapped as long as a tensor on it lives. Waits for the GPU to finish its queued work.
        """
        arena, self._arena = self._arena, None
        device, self._device = self._device, -1
        try:
            _synchronize(device)
        finally:
            self._connection.close()
            if arena is not None and arena.gpu:
                arena.close()

    def _call(self, ask: messages.Ask, kind: type[_A]) -> _A:
        return self._connection.call_for(ask, self._timeout_s, kind)


class _MappedChunk:
    """A slot of the arena, mapped into this process; a GPU's is mapped by the first `tensor`."""

    _is_writable = False

    def __init__(self, node: Node, name: str, slot: Slot) -> None:
        self._node = node
        self._arena = node._connection.arena
        self.name = name
        self.slot = slot
        self._open = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.slot.nbytes} bytes{'' if self._open else ' closed'}>"

    @property
    def nbytes(self) -> int:
        return self.slot.nbytes

    def check(self) -> None:
        """:raises StaleSlot: the memory is no longer this chunk's; data read through a view may be torn."""
        self._arena.check(self.slot)

    @property
    def view(self) -> memoryview:
        """The chunk's bytes, writable only while this process fills the chunk.

        :raises StaleSlot: see `check`.
        :raises LayoutError: the bytes are on a GPU; use `tensor`.
        """
        view = self._arena.view(self.slot)
        return view if self._is_writable and self._open else view.toreadonly()

    def tensor(self, dtype: torch.dtype, shape: Sequence[int] = (-1,)) -> torch.Tensor:
        """The chunk's bytes as a tensor that shares them, on the node's GPU if it has one; read-only by convention
        unless this process fills the chunk.

        :raises StaleSlot: see `check`.
        :raises GpuError: this process cannot map that GPU's memory. :raises NodeError: the node does not let it.
        """
        import torch

        if self._arena.gpu:
            self._node._device, span = self._on_gpu()
            return torch.as_tensor(span, device=f"cuda:{self._node._device}").view(dtype).view(tuple(shape))
        return torch.frombuffer(self._arena.view(self.slot), dtype=dtype).view(tuple(shape))

    def _on_gpu(self) -> tuple[int, DeviceSpan]:
        """The GPU's ordinal in this process, and the chunk's bytes, mapped on that GPU."""
        from pdx.cuda.arena import GpuArena
        from pdx.cuda.gpu import Gpu

        assert isinstance(self._arena, GpuArena)
        gpu = Gpu.find(self._arena.gpu)
        self._arena.map(gpu)
        return gpu.ordinal, self._arena.span(self.slot)

    def __enter__(self) -> Self:
        return self


class WritableChunk(_MappedChunk):
    """A chunk being filled by this process. Leaving its `with` block without `seal()` aborts it."""

    _is_writable = True

    def __init__(self, node: Node, name: str, slot: Slot, parts: int) -> None:
        super().__init__(node, name, slot)
        self._parts = parts

    def fill(self, part: int) -> None:
        """Declare one part filled. `seal()` takes all other parts as filled.

        On a GPU, this and `seal` wait for the GPU to finish its queued work.

        :raises StaleSlot: the reservation has ended.
        """
        self._fill(messages.Fill([self.slot], first_layer=part))

    def seal(self) -> None:
        """Declare the chunk whole: from now on other processes can get it, and no process may write to it.

        :raises StaleSlot: the reservation has ended.
        """
        self._fill(messages.Fill([self.slot], layers=self._parts, seal=True))
        self._open = False

    def _fill(self, fill: messages.Fill) -> None:
        _synchronize(self._node._device)
        if not self._node._call(fill, messages.Done).count:
            raise StaleSlot(f"the reservation of {self!r} ended before it was sealed")

    def abort(self) -> None:
        """Give the room back. Idempotent."""
        if self._open:
            self._open = False
            _synchronize(self._node._device)
            self._node._call(messages.Abort([self.slot]), messages.Done)

    def __exit__(self, *error: object) -> None:
        self.abort()


class ReadableChunk(_MappedChunk):
    """A sealed chunk, leased until released."""

    def __init__(self, node: Node, name: str, slot: Slot, lease: int) -> None:
        super().__init__(node, name, slot)
        self._lease = lease

    def renew(self, lease_s: float) -> None:
        """Extend the lease to `lease_s` from now. :raises ChunkMissing: the lease has already ended."""
        self._node._call(messages.Renew(self._lease, lease_s), messages.Done)

    def release(self) -> None:
        """End the lease, so that the node may evict the chunk. Idempotent.

        :raises ChunkMissing: the lease had already ended, so the memory may have held another chunk meanwhile.
        """
        if self._open and self._lease:
            self._open = False
            _synchronize(self._node._device)
            self._node._call(messages.Release(self._lease), messages.Done)

    def __exit__(self, *error: object) -> None:
        self.release()


def _synchronize(device: int) -> None:
    """Wait for all work that this process has queued on that GPU, including work on chunks' tensors."""
    if device >= 0:
        import torch

        torch.cuda.synchronize(device)
