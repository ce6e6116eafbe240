"""The lossy codecs fp8 (e4m3) and int8: a byte per element, and per page a scale for each head's keys and values.

    piece: consecutive pages. page: its scales (4 bytes each, float32) │ a byte for each element

The scale is the largest finite magnitude of its elements divided by the largest number that a byte can represent.
Infinities become that largest number; NaN becomes 0 with int8, and stays NaN with fp8. Decoded data is encoded to the
same bytes again, so that nothing is lost a second time, however often a chunk moves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from pdx.errors import CodecError
from pdx.memory.form import ELEMENT_BYTES, Form
from pdx.store.codecs.codec import Codec

FP8_MAX, INT8_MAX = 448.0, 127.0
_FP8_NAN = 0x7F
_PIECE_BYTES = 1 << 20
_LEAST_SCALE = float(np.finfo(np.float32).tiny)


class Lossy(Codec):
    """See `Codec`. A slice is a whole number of pages."""

    def __init__(self, form: Form) -> None:
        self.name = str(form)
        self._form = form
        self.piece_bytes = max(1, _PIECE_BYTES // form.page_bytes) * form.page_bytes

    def _encoded_bytes(self, nbytes: int) -> tuple[int, int]:
        """The number of pages in a piece of so many bytes, and their encoded size.

        :raises CodecError: a piece cannot have this size.
        """
        form = self._form
        pages, rest = divmod(nbytes, form.page_bytes)
        if rest or not pages:
            raise CodecError(f"{nbytes} bytes are no pages of {form.page_bytes}, as {self.name} takes them")
        return pages, pages * (4 * form.num_scales + form.page_bytes // ELEMENT_BYTES[form.elements])

    def encode(self, data: memoryview, into: memoryview) -> int:
        pages, nbytes = self._encoded_bytes(len(data))
        if nbytes > len(into):
            return 0
        form = self._form
        values = _floats(data, form.elements).reshape(pages, *form.shape)
        most = INT8_MAX if form.codec == "int8" else FP8_MAX
        magnitude = np.abs(values)
        magnitude[~np.isfinite(magnitude)] = 0.0
        scales = np.maximum(magnitude.max(axis=(1, 3, 5), keepdims=True) / np.float32(most), np.float32(_LEAST_SCALE))
        with np.errstate(over="ignore", invalid="ignore"):
            values /= scales
        np.clip(values, -most, most, out=values)  # NaN stays NaN
        codes = _int8(values) if form.codec == "int8" else _fp8(values)
        head = 4 * form.num_scales
        page = np.frombuffer(into, np.uint8, nbytes).reshape(pages, -1)
        page[:, :head] = scales.reshape(pages, -1).astype("<f4").view(np.uint8)
        page[:, head:] = codes.reshape(pages, -1).view(np.uint8)
        return nbytes

    def decode(self, data: memoryview, into: memoryview) -> int:
        pages, nbytes = self._encoded_bytes(len(into))
        if len(data) < nbytes:
            raise CodecError(f"a piece ends after {len(data)} of {nbytes} bytes")
        form = self._form
        head = 4 * form.num_scales
        page = np.frombuffer(data, np.uint8, nbytes).reshape(pages, -1)
        scales = np.ascontiguousarray(page[:, :head]).view("<f4").reshape(pages, 1, form.shape[1], 1, form.shape[3], 1)
        codes = page[:, head:].reshape(pages, *form.shape)
        values: Any = codes.view(np.int8).astype(np.float32) if form.codec == "int8" else _of_fp8()[codes]
        with np.errstate(over="ignore", invalid="ignore"):  # damaged data may hold any values
            values *= scales
            _store(values, into, form.elements)
        return nbytes


def _floats(data: memoryview, elements: str) -> Any:
    """A copy of these elements as float32."""
    if elements == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return np.frombuffer(data, "<f2" if elements == "fp16" else "<f4").astype(np.float32)


def _store(values: Any, into: memoryview, elements: str) -> None:
    """Write float32 values as these elements, rounded to nearest, ties to even; the largest magnitude stays finite."""
    if elements == "fp32":
        np.frombuffer(into, "<f4")[:] = values.reshape(-1)
    elif elements == "fp16":
        np.frombuffer(into, "<f2")[:] = values.reshape(-1)
    else:
        bits = values.reshape(-1).view("<u4")
        no_number = np.isnan(values.reshape(-1))
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        target = np.frombuffer(into, "<u2")
        target[:] = bits >> np.uint32(16)
        target[no_number] = 0x7FC0


def _int8(values: Any) -> Any:
    np.nan_to_num(values, copy=False, nan=0.0)
    return np.rint(values, out=values).astype(np.int8)


def _fp8(values: Any) -> Any:
    """Convert through float16, whose bits index a table."""
    with np.errstate(invalid="ignore"):
        return _to_fp8()[values.astype("<f2").view("<u2")]


@lru_cache(1)
def _of_fp8() -> Any:
    """The float32 value of each fp8 byte."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 512.0, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(codes & 0x7F) == _FP8_NAN] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


@lru_cache(1)
def _to_fp8() -> Any:
    """The nearest fp8 byte for each float16, by its bits; ties to even."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    magnitude = (halves & 0x7FFF).view("<f2").astype(np.float64)
    steps = _of_fp8()[:_FP8_NAN].astype(np.float64)  # rising
    above = np.clip(np.searchsorted(steps, magnitude), 1, len(steps) - 1)
    below = above - 1
    with np.errstate(invalid="ignore"):
        up, down = steps[above] - magnitude, magnitude - steps[below]
    codes = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    codes[np.isnan(magnitude)] = _FP8_NAN
    return (codes | ((halves >> 8) & 0x80)).astype(np.uint8)
