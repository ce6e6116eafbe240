"""The interface of codecs: two pure functions on bytes, applied piece by piece.

A slice is encoded as consecutive pieces of `piece_bytes`, the last one perhaps shorter. The decoded size of a piece is
known in advance, so that data that is read never decides how much memory is allocated. A codec may be used on any
thread, by one at a time; work of any size releases the GIL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from pdx.errors import CodecError
from pdx.memory.form import parse_form

NONE, LOSSLESS = "none", "lossless"


class Codec(ABC):
    """Encodes or decodes one chunk; each chunk gets its own instance."""

    name: str  # in the header of a chunk; `codec_of` finds the codec by it
    piece_bytes: int

    @abstractmethod
    def encode(self, data: memoryview, into: memoryview) -> int:
        """Encode one piece; return the bytes written, or 0 if `into` has no room.

        :raises CodecError: it cannot be encoded.
        """

    @abstractmethod
    def decode(self, data: memoryview, into: memoryview) -> int:
        """Decode one piece from the beginning of `data`, so that it fills `into`; return the bytes read.

        :raises CodecError: the data is no such piece. The content of `into` is then undefined.
        """


def codec_of(name: str) -> Codec:
    """The codec of this name: `lossless`, or the text of a `pdx.memory.form.Form`.

    :raises CodecError: there is none.
    """
    if name == LOSSLESS:
        from pdx.store.codecs.lossless import Lossless

        return Lossless()
    form = parse_form(name)  # first, so that a bad name imports nothing
    from pdx.store.codecs.lossy import Lossy

    return Lossy(form)


def encode_slice(codec: Codec, data: memoryview, into: memoryview, on_piece: Callable[[], None]) -> int:
    """Encode a slice; return the bytes written, 0 if `into` has no room. `on_piece` is called before each piece.

    :raises CodecError: it cannot be encoded.
    """
    used = 0
    for first in range(0, len(data), codec.piece_bytes):
        on_piece()
        count = codec.encode(data[first : first + codec.piece_bytes], into[used:])
        if not count:
            return 0
        used += count
    return used


def decode_slice(codec: Codec, data: memoryview, into: memoryview, on_piece: Callable[[], None]) -> None:
    """Decode a slice, all of `data`, into all of `into`. `on_piece` is called before each piece.

    :raises CodecError: `data` is no such slice. The content of `into` is then undefined.
    """
    used = 0
    for first in range(0, len(into), codec.piece_bytes):
        on_piece()
        used += codec.decode(data[used:], into[first : first + codec.piece_bytes])
    if used != len(data):
        raise CodecError(f"{len(data) - used} bytes follow the slice")
