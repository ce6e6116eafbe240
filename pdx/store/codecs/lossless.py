"""Byte planes, each by itself through zstd: what KV has in common are the exponents of its elements.

    piece: bytes of an element (1), 0: as it is │ for each plane: its bytes (4) │ the planes │ what is no whole element

Plane number i has byte i of every element. A plane that does not shrink stands there as it is, so that its size says
so. How many bytes an element has is found out by trying, so nobody need say what the bytes mean. ADR 53 says what was
measured.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from pdx.errors import CodecError
from pdx.store.codecs.codec import LOSSLESS, Codec

WIDTHS = (2, 4, 1)  # bytes of an element; of equals the first one
_SAMPLE_BYTES = 32 << 10
_MIN_BYTES = 64  # fewer are not worth a try
_SIZE = struct.Struct("<I")
# Planes have no long matches: what pays is to code each byte by how often it occurs. Looking for matches of four bytes
# takes three times as long, and finds some that cost more than they save.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, write_content_size=1, write_checksum=0, threads=0
)


class Lossless(Codec):
    """See `Codec`. Any bytes come back as they were."""

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
        """What stands there for a piece."""
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
            # A frame takes as much memory as it says: it must say what is known.
            if len(data) > count or zstandard.frame_content_size(data) != count:
                raise CodecError(f"a plane of {count} bytes has another size")
            return self._decoder.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"a plane cannot be decoded: {error}") from error


def _check(data: memoryview, nbytes: int) -> None:
    if len(data) < nbytes:
        raise CodecError(f"a piece ends after {len(data)} of {nbytes} bytes")
