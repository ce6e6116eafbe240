"""The lossless codec: byte planes, each compressed by zstd, because the exponents of KV elements are alike.

    piece: bytes per element (1), 0: as it is │ for each plane: its bytes (4) │ the planes │ an incomplete element

Plane i has byte i of every element. A plane that does not shrink is stored as it is, as its size shows. The element
size is found by trying, so that the caller need not know what the bytes mean. ADR 53 has the measurements.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from pdx.errors import CodecError
from pdx.store.codecs.codec import LOSSLESS, Codec

WIDTHS = (2, 4, 1)  # bytes per element; in a tie the first one wins
_SAMPLE_BYTES = 32 << 10
_MIN_BYTES = 64  # shorter pieces are not worth compressing
_SIZE = struct.Struct("<I")
# Planes have no long matches; entropy coding of single bytes is what pays. A search for matches of four bytes takes
# three times as long, and finds some that cost more than they save.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, write_content_size=1, write_checksum=0, threads=0
)


class Lossless(Codec):
    """Restores any bytes exactly. See `Codec`."""

    name = LOSSLESS
    piece_bytes = 1 << 20

    def __init__(self) -> None:
        self._width = 0  # not known yet
        self._encoder = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self._decoder = zstandard.ZstdDecompressor(max_window_size=max(self.piece_bytes, 1 << 10))

    def encode(self, data: memoryview, into: memoryview) -> int:
        self._width = self._width or self._found_width(data)
        parts = self._parts(data, self._width)
        nbytes = sum(len(part) for part in parts)
        if nbytes > len(data):
            parts, nbytes = [b"\0", data], 1 + len(data)
        if nbytes > len(into):
            return 0
        used = 0
        for part in parts:
            into[used : used + len(part)] = part
            used += len(part)
        return used

    def _found_width(self, data: memoryview) -> int:
        first = max(0, len(data) - _SAMPLE_BYTES) // 2 // 16 * 16
        sample = data[first : first + _SAMPLE_BYTES]
        return min(WIDTHS, key=lambda width: sum(len(part) for part in self._parts(sample, width)))

    def _parts(self, data: memoryview, width: int) -> list[Any]:
        """The encoded form of a piece, as consecutive parts."""
        count = len(data) // width
        if len(data) < _MIN_BYTES:
            return [b"\0", data]
        whole = np.frombuffer(data, np.uint8, count * width).reshape(count, width)
        sizes, coded = b"", []
        for number in range(width):
            plane = np.ascontiguousarray(whole[:, number])
            small = self._encoder.compress(plane.data)
            coded.append(small if len(small) < count else plane.data)
            sizes += _SIZE.pack(len(coded[-1]))
        return [bytes([width]), sizes, *coded, data[count * width :]]

    def decode(self, data: memoryview, into: memoryview) -> int:
        width = data[0] if len(data) else 255
        if not width:
            _check(data, 1 + len(into))
            into[:] = data[1 : 1 + len(into)]
            return 1 + len(into)
        if width not in WIDTHS or len(into) < width:
            raise CodecError(f"there are no elements of {width} bytes")
        count, rest = divmod(len(into), width)
        used = 1 + _SIZE.size * width
        _check(data, used)
        whole = np.frombuffer(into, np.uint8, count * width).reshape(count, width)
        for number in range(width):
            (size,) = _SIZE.unpack_from(data, 1 + _SIZE.size * number)
            _check(data, used + size)
            whole[:, number] = np.frombuffer(self._plane(data[used : used + size], count), np.uint8)
            used += size
        _check(data, used + rest)
        if rest:
            into[count * width :] = data[used : used + rest]
        return used + rest

    def _plane(self, data: memoryview, count: int) -> Any:
        if len(data) == count:
            return data
        try:
            # zstd allocates the size that the frame declares, so check it first.
            if len(data) > count or zstandard.frame_content_size(data) != count:
                raise CodecError(f"a plane of {count} bytes has another size")
            return self._decoder.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"a plane cannot be decoded: {error}") from error


def _check(data: memoryview, nbytes: int) -> None:
    if len(data) < nbytes:
        raise CodecError(f"a piece ends after {len(data)} of {nbytes} bytes")
