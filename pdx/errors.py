"""Every error PDX raises, in one tree; the class says what the caller may do.

PdxError
├── ConfigError           fix the configuration; retrying cannot help
├── SelectionError        this selects no chunks or no place; the text says what would
├── LayoutError           this layout, or memory in this place, is not supported here
├── ProtocolError         a peer violated the protocol; drop the message, keep going
├── NodeError             the node could not serve a request
│   ├── NodeUnavailable   no node answers; reattach later, recompute meanwhile
│   ├── NodeRunning       another node already owns this socket; use that one
│   ├── ArenaTooSmall     the arena can never hold this; make it larger
│   ├── ArenaFull         no room now; retry later, or go on without
│   ├── ChunkExists       the chunk is there or being filled; look it up instead
│   ├── ChunkMissing      the chunk is not there (any more); recompute
│   ├── StaleSlot         the slot is no longer valid; drop what was copied
│   ├── TierUnknown       the node has no such tier; the text names those that it has
│   ├── JobUnknown        the node knows no such job (any more)
│   └── JobConflict       another job works on one of these chunks; wait for it, or cancel it
├── ChannelError          bytes did not get from one node to another
│   ├── ChannelUnavailable   this scheme does not work here, or not to that peer; use another
│   ├── ChannelBroken     the peer, or the connection to it, is gone; connect again
│   ├── WriteRefused      the receiver has not granted (any more) the slots to be written
│   └── TransferAborted   the write was cancelled
├── TierError             a tier could not store or load a chunk; it counts as a miss
├── CodecError            a codec cannot decode these bytes, or not encode them; treat them as damaged
├── GpuError              a call to a GPU or its driver failed
│   ├── GpuUnavailable    no such GPU, driver or library here; use host memory
│   ├── GpuMemoryFull     the GPU cannot hold it; ask for less
│   └── GpuHandleDead     the process that exported this memory is gone; attach again
├── PeerError             another node cannot be used
│   ├── PeerUnknown       the peer is not in the roster; add it, or correct its name
│   └── PeerRefused       one side refused the other; the text says why
└── ProxyError            inside the proxy; clients see an OpenAI-style error
    ├── RequestRefused    a client's request is invalid or too much; the status and the text are for the client
    ├── LegFailed         an engine gave no usable answer; try another, or only the decoder
    ├── NoEngine          no engine can decode; the client may retry
    ├── VerbRefused       a node refused a controller's verb; `error` names the node's error class
    ├── Exhausted         this process lacks descriptors, ports or buffers; the client may retry
    └── ClientGone        the client has left; stop working for it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class PdxError(Exception):
    """Base of all PDX errors; not raised itself."""


class ConfigError(PdxError):
    """A setting is missing, unknown or out of range."""


class SelectionError(PdxError):
    """A controller's verb names tokens, a model, an instance or a place to which it cannot apply."""


class LayoutError(PdxError):
    """PDX does not support the engine's KV layout (yet), or this call cannot reach the memory."""


class ProtocolError(PdxError):
    """A message does not parse, is out of bounds, or is out of order."""


class NodeError(PdxError):
    """The node refused or could not serve a request."""


class NodeUnavailable(NodeError):
    """No node answered within the deadline."""


class NodeRunning(NodeError):
    """A second node was started on a socket that is already owned."""


class ArenaTooSmall(NodeError):
    """The request is larger than the whole arena, or the host cannot back the arena."""


class ArenaFull(NodeError):
    """There is no room now: everything is leased, pinned or being filled."""


class ChunkExists(NodeError):
    """The chunk is already sealed or being filled."""


class ChunkMissing(NodeError):
    """No sealed chunk of that key is in the store."""


class StaleSlot(NodeError):
    """The slot's generation or epoch has changed: it may belong to another owner now."""


class TierUnknown(NodeError):
    """The node has no tier of that name."""


class JobUnknown(NodeError):
    """The job never existed, was of an earlier run of the node, or ended so long ago that it is forgotten."""


class JobConflict(NodeError):
    """A chunk is being moved or recoded by another job."""


class ChannelError(PdxError):
    """A write from one node's memory to another's failed."""


class ChannelUnavailable(ChannelError):
    """The scheme's library or device is missing, or it cannot reach that peer."""


class ChannelBroken(ChannelError):
    """The peer, or the connection to it, is gone."""


class WriteRefused(ChannelError):
    """The receiver refused a write outside granted slots."""


class TransferAborted(ChannelError):
    """The write was aborted before all of it was sent."""


class TierError(PdxError):
    """A tier could not store or load a chunk. `kind` is one word, by which such errors are counted; `is_left`: a partly
    written file could not be removed, or a bad one is still there.
    """

    def __init__(self, text: str, kind: str, *, is_left: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.is_left = is_left


class CodecError(PdxError):
    """Encoded bytes are damaged or of another codec; or the codec is unknown, or cannot encode such bytes."""


class GpuError(PdxError):
    """A call to the CUDA driver failed; the text names the call and the driver's own error."""

    code = ""  # the driver's name of the error, "CUDA_ERROR_…", if it came from the driver


class GpuUnavailable(GpuError):
    """There is no such GPU, no driver, or no library to reach it."""


class GpuMemoryFull(GpuError):
    """The GPU does not have enough free memory."""


class GpuHandleDead(GpuError):
    """The process that exported this memory is gone, and the memory with it."""


class PeerError(PdxError):
    """Another node cannot be used."""


class PeerUnknown(PeerError):
    """No node of that name is in the roster."""


class PeerRefused(PeerError):
    """The handshake between two nodes failed."""


class ProxyError(PdxError):
    """An error that the proxy handles while it serves a request."""


class RequestRefused(ProxyError):
    """The proxy itself refuses a client's request. The text quotes nothing of the request."""

    def __init__(self, status: int, text: str, *, retry_after_s: int | None = None, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.param = param  # the wrong parameter, as vLLM names it
        self.retry_after_s = retry_after_s  # None: a retry does not help


class Refusal(NamedTuple):
    """An engine's error response."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str]


class LegFailed(ProxyError):
    """An engine gave no usable answer. If `unsent`, it cannot have begun to work on the request."""

    def __init__(
        self,
        reason: str,
        engine: str,
        url: str,
        text: str = "",
        *,
        unsent: bool = False,
        answer: Refusal | None = None,
    ) -> None:
        self.why = f"{reason}{': ' if text else ''}{text}"
        super().__init__(f"engine {engine}: {self.why}")
        self.reason = reason
        self.engine = engine
        self.url = url
        self.unsent = unsent
        self.answer = answer  # for the client, if no other engine gives a better one


class Exhausted(ProxyError):
    """This process could not even connect: it lacks the resource that `lack` names (EMFILE). No engine is to blame."""

    def __init__(self, lack: str, text: str) -> None:
        super().__init__(f"{text} ({lack})")
        self.lack = lack


class VerbRefused(ProxyError):
    """A node refused a controller's verb; `error` is the name of a class in this module, as given by the node."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(text)
        self.error = error


class NoEngine(ProxyError):
    """No known engine can decode."""


class ClientGone(ProxyError):
    """The client has closed its connection."""
