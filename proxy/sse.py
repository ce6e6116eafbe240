"""Server-sent events as bytes: split a stream into whole events, read and write an event's data. Pure."""

from __future__ import annotations

import re

from pdx.errors import ProtocolError

MAX_EVENT_BYTES = 64 << 20
DONE = b"data: [DONE]\n\n"
_BLANK = b"\n\n"
_LINE = re.compile(rb"[\r\n][^:\r\n]")  # the beginning of one that is no comment, behind another
_BEGUN = re.compile(rb"(?:event: response\.(?:created|in_progress)\r?\ndata:[^\r\n]*+[\r\n]++)+")
_ERROR = re.compile(rb'data: ?\{"error"|event: (error|response\.failed)\b')  # no text in an event begins a line
_END = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Splits a byte stream into whole events, however it is chunked.

    Relaying only whole events never leaves a client with half an event when the sender dies.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0

    @property
    def rest(self) -> bytes:
        """The bytes after the last whole event."""
        return bytes(self._pending)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events completed by `chunk`, each with its blank line; joined, they equal the bytes that came in.

        :raises ProtocolError: an event exceeds the size limit.
        """
        if not self._pending and chunk.endswith(_BLANK) and not chunk.endswith(b"\n\n\n") and b"\r" not in chunk:
            if chunk.find(_BLANK) == len(chunk) - len(_BLANK):  # avoids a copy
                return [chunk]
            return [each + _BLANK for each in chunk[: -len(_BLANK)].split(_BLANK)]  # the common case
        self._pending += chunk
        events: list[bytes] = []
        start = 0
        # A terminator may have begun in an earlier chunk, with at most three of its bytes.
        at = max(0, self._searched - 3)
        while (end := _END.search(self._pending, at)) is not None:
            events.append(bytes(self._pending[start : end.end()]))
            start = at = end.end()
        del self._pending[:start]
        self._searched = len(self._pending)
        if self._searched > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event of a stream exceeds {MAX_EVENT_BYTES} bytes")
        return events


def event(payload: bytes) -> bytes:
    """`payload`, which has no line breaks, as an event."""
    return b"data: " + payload + b"\n\n"


def with_data(whole: bytes, payload: bytes) -> bytes:
    """The event with `payload` as its data."""
    name = next((line + b"\n" for line in whole.splitlines() if line.startswith(b"event:")), b"")
    return name + event(payload)


def bare(event: bytes) -> bytes:
    """The event without the comments before it, which are lines of their own."""
    found = _LINE.search(event) if event.startswith(b":") else None
    return event if found is None else event[found.start() + 1 :]


def is_comment(found: bytes) -> bool:
    """Whether all that was read only keeps a connection alive: it is no part of the answer."""
    return found.startswith(b":") and found.endswith((b"\r", b"\n")) and _LINE.search(found) is None


def is_empty(found: bytes) -> bool:
    """Whether a server says this by itself, without its model: comments, that there is a response, an error."""
    event = bare(found)
    return is_comment(found) or is_error(event) or _BEGUN.fullmatch(event) is not None


def is_error(event: bytes) -> bool:
    """Whether a server reports a fault in this event."""
    return _ERROR.match(event) is not None


def is_done(event: bytes) -> bool:
    """Whether this event ends a stream."""
    return b"[DONE]" in event and data(event) == b"[DONE]"


def data(whole: bytes) -> bytes | None:
    """The event's data; None if it has none, like a comment."""
    lines = [line[5:].removeprefix(b" ") for line in whole.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
