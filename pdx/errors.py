"""Every error PDX raises, in one tree; the class says what the caller may do.

PdxError
├── ConfigError           fix the configuration; retrying cannot help
├── SelectionError        this names no chunks or no place; the text says what would
├── LayoutError           this layout, or the place of this memory, is not supported here
├── ProtocolError         a peer sent something that is not our protocol; drop it, keep going
├── NodeError             the node could not do what was asked
│   ├── NodeUnavailable   no node answers; reattach later, recompute meanwhile
│   ├── NodeRunning       another node already owns this socket; use that one
│   ├── ArenaTooSmall     the arena can never hold this; make it bigger
│   ├── ArenaFull         no room now; ask again later or go on without
│   ├── ChunkExists       somebody else fills or filled this chunk; look it up instead
│   ├── ChunkMissing      the chunk is not there (any more); recompute
│   ├── StaleSlot         the slot is no longer what was promised; drop what was copied
│   ├── TierUnknown       the node has no such tier; the text names those that it has
│   ├── JobUnknown        the node knows no such job (any more)
│   └── JobConflict       another job works on one of these chunks; wait for it, or cancel it
├── ChannelError          bytes did not get from one node to another
│   ├── ChannelUnavailable   this scheme cannot work here, or not to that peer; use another
│   ├── ChannelBroken     the peer or the way to it is gone; connect again
│   ├── WriteRefused      the receiver has not granted (any more) what was to be written
│   └── TransferAborted   it was asked to stop
├── TierError             a tier could not store or load a chunk; it counts as a miss
├── CodecError            bytes are not what a codec has made, or none that it can encode; treat them as damaged
├── GpuError              a GPU or its driver did not do what was asked
│   ├── GpuUnavailable    no such GPU, driver or library here; use host memory
│   ├── GpuMemoryFull     the GPU cannot hold it; ask for less
│   └── GpuHandleDead     whoever exported this memory is gone; attach again
├── PeerError             another node cannot be worked with
│   ├── PeerUnknown       no roster names it; add it, or use its right name
│   └── PeerRefused       one side turned the other down; the text says why
└── ProxyError            inside the proxy; clients see an OpenAI-style error
    ├── RequestRefused    a client's request is not one, or too much; the status and the text are for the client
    ├── LegFailed         an engine gave no usable answer; ask another, or the decoder alone
    ├── NoEngine          nobody is there to decode; the client may come back
    ├── VerbRefused       a node did not do what a controller asked; `error` names the class that it says
    ├── Exhausted         this process lacks descriptors, ports or buffers; the client may come back
    └── ClientGone        the client has left; stop working for it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class PdxError(Exception):
    """Base of all PDX errors; never raised itself."""


class ConfigError(PdxError):
    """A setting is missing, unknown or out of range."""


class SelectionError(PdxError):
    """Tokens, a model, an instance or a place are none that a controller's verb could be about."""


class LayoutError(PdxError):
    """The engine's KV layout is one PDX does not move (yet), or memory lies where this call cannot reach it."""


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
    """The chunk is already sealed, or somebody is filling it."""


class ChunkMissing(NodeError):
    """No sealed chunk of that key is in the store."""


class StaleSlot(NodeError):
    """The slot's generation or epoch changed: it belongs to somebody else now."""


class TierUnknown(NodeError):
    """The node has no tier of that name."""


class JobUnknown(NodeError):
    """The job is of another life of the node, or over for so long that it is forgotten, or there never was one."""


class JobConflict(NodeError):
    """A chunk is being moved or recoded by another job."""


class ChannelError(PdxError):
    """A write from one node's memory to another's failed."""


class ChannelUnavailable(ChannelError):
    """The scheme's library or device is missing, or it cannot reach that peer."""


class ChannelBroken(ChannelError):
    """The peer, or the connection to it, is gone."""


class WriteRefused(ChannelError):
    """The receiver did not take a write: it was not inside granted slots."""


class TransferAborted(ChannelError):
    """The write was aborted before all of it was sent."""


class TierError(PdxError):
    """A tier could not store or load a chunk. `kind` is one word, by which such errors are counted; `is_left`: what was
    stored in part could not be removed.
    """

    def __init__(self, text: str, kind: str, *, is_left: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.is_left = is_left


class CodecError(PdxError):
    """Encoded bytes were not made by this codec, or are damaged; or the codec is unknown, or not for such bytes."""


class GpuError(PdxError):
    """A call of the CUDA driver failed; the text names the call and the driver's own error."""

    code = ""  # the driver's name of it, "CUDA_ERROR_…", where it was the driver


class GpuUnavailable(GpuError):
    """There is no such GPU, no driver, or no library to reach it."""


class GpuMemoryFull(GpuError):
    """The GPU has not enough free memory."""


class GpuHandleDead(GpuError):
    """The process that exported this memory is gone, and the memory with it."""


class PeerError(PdxError):
    """Another node cannot be worked with."""


class PeerUnknown(PeerError):
    """No node of that name is in the roster."""


class PeerRefused(PeerError):
    """The handshake between two nodes failed."""


class ProxyError(PdxError):
    """Something that the proxy deals with while it serves a request."""


class RequestRefused(ProxyError):
    """The proxy itself turns a client's request down. The text quotes nothing of it."""

    def __init__(self, status: int, text: str, *, retry_after_s: int | None = None, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.param = param  # what of the request is wrong, as vLLM names it
        self.retry_after_s = retry_after_s  # None: coming back does not help


class Refusal(NamedTuple):
    """What an engine says in place of an answer."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str]


class LegFailed(ProxyError):
    """An engine did not give a usable answer. If `unsent`, it cannot have begun to work on the request."""

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
        self.answer = answer  # for the client, if no other engine has a better one


class Exhausted(ProxyError):
    """This process could not even connect: it lacks what `lack` names (EMFILE, say). No engine is to blame."""

    def __init__(self, lack: str, text: str) -> None:
        super().__init__(f"{text} ({lack})")
        self.lack = lack


class VerbRefused(ProxyError):
    """A node refused a controller's verb; `error` is the name of the class in this module that the node gave."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(text)
        self.error = error


class NoEngine(ProxyError):
    """No engine is known that could decode."""


class ClientGone(ProxyError):
    """The client closed its connection; there is nobody left to work for."""
