"""What every codec is: a pair of pure functions on bytes, a piece at a time.

A slice is encoded as pieces of `piece_bytes`, the last one perhaps shorter, one behind the other. How long a piece is
when decoded is known before: so nothing that is read decides how much memory is taken. Any thread may use a codec, one
at a time; work of any size releases the interpreter's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from pdx.errors import CodecError
from pdx.memory.form import parse_form

NONE, LOSSLESS = "none", "lossless"


class Codec(ABC):
    """One for each chunk that is encoded or decoded."""

    name: str  # as the header of a chunk says it; `codec_of` finds the codec by it
    piece_bytes: int

    @abstractmethod
    def encode(self, data: memoryview, into: memoryview) -> int:
        """Encode one piece; the bytes written. 0: there is no room for it.

        :raises CodecError: it cannot be encoded.
        """

    @abstractmethod
    def decode(self, data: memoryview, into: memoryview) -> int:
        """Decode one piece, which fills `into`, from the beginning of `data`; how much of that it was.

        :raises CodecError: that is no such piece. `into` may hold anything then.
        """


def codec_of(name: str) -> Codec:
    """The codec of this name: `lossless`, or the text of a `pdx.memory.form.Form`.

    :raises CodecError: there is none.
    """
    if name == LOSSLESS:
        from pdx.store.codecs.lossless import Lossless

        return Lossless()
    form = parse_form(name)  # before anything is imported for it
    from pdx.store.codecs.lossy import Lossy

    return Lossy(form)


def encode_slice(codec: Codec, data: memoryview, into: memoryview, on_piece: Callable[[], None]) -> int:
    """Encode a slice; the bytes written, 0 where there is no room for them. `on_piece` is called before each piece.

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

    :raises CodecError: `data` are not such a slice. `into` may hold anything then.
    """
    used = 0
    for first in range(0, len(into), codec.piece_bytes):
        on_piece()
        used += codec.decode(data[used:], into[first : first + codec.piece_bytes])
    if used != len(data):
        raise CodecError(f"{len(data) - used} bytes follow the slice")
