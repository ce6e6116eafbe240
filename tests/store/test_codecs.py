"""The codecs alone: what comes back, and what becomes of damaged bytes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdx.errors import CodecError
from pdx.memory.form import Form, parse_form
from pdx.store.codecs.codec import LOSSLESS, codec_of, decode_slice, encode_slice
from pdx.store.codecs.lossless import Lossless

MIB = 1 << 20
FORMS = [
    Form(codec, elements, shape)
    for codec in ("fp8", "int8")
    for elements in ("bf16", "fp16", "fp32")
    for shape in ((1, 2, 4, 2, 8), (4, 2, 1, 2, 8))
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def nothing() -> None:
    pass


def encoded(name: str, data: bytes, room: int | None = None) -> bytes:
    into = bytearray(2 * len(data) + 64 if room is None else room)
    return bytes(into[: encode_slice(codec_of(name), memoryview(data), memoryview(into), nothing)])


def decoded(name: str, data: bytes, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    decode_slice(codec_of(name), memoryview(data), memoryview(into), nothing)
    return bytes(into)


def kv(dtype: torch.dtype, shape=(8, 2, 4, 2, 8), seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[-4], 1, shape[-2], 1, generator=generator) * 4 + 0.01
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# ---- lossless -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(100))
@given(st.binary(max_size=4096), st.integers(1, 40))
@example(b"", 1)
@example(b"\x00" * 4095, 1)
@example(b"\x7f\xc0\xff\xff\x80\x7f\x00\x00" * 77 + b"abc", 3)
def test_any_bytes_come_back(piece, times):
    data = piece * times
    assert decoded(LOSSLESS, encoded(LOSSLESS, data), len(data)) == data


@pytest.mark.parametrize("nbytes", [1, 64, MIB, 3 * MIB + 5])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "random"])
def test_any_size_comes_back(nbytes, kind):
    generator = np.random.default_rng(nbytes)
    values = generator.standard_normal(nbytes // 2 + 4)
    data = generator.bytes(nbytes) if kind == "random" else raw(torch.tensor(values, dtype=DTYPES[kind]))[:nbytes]
    small = encoded(LOSSLESS, data)
    assert decoded(LOSSLESS, small, len(data)) == data
    assert len(small) <= len(data) + len(data) // MIB + 1  # a byte for each piece is the worst


def test_the_width_of_elements_is_found():
    ratio = {}
    for name, dtype in DTYPES.items():
        data = raw(kv(dtype, (64, 8, 16, 2, 64)))
        ratio[name] = len(data) / len(encoded(LOSSLESS, data))
    assert min(ratio["fp16"], ratio["fp32"], ratio["bf16"] / 1.2) > 1.1


def test_no_room_is_no_error():
    data = bytes(np.random.default_rng(0).bytes(1000))
    assert encoded(LOSSLESS, data, room=1000) == b""
    assert len(encoded(LOSSLESS, data, room=1001)) == 1001


@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_damaged_bytes_are_an_error_or_other_bytes_and_no_crash(data):
    name = data.draw(st.sampled_from([LOSSLESS, *map(str, FORMS)]))
    plain = raw(kv(torch.bfloat16))
    small = bytearray(encoded(name, plain))
    for _ in range(data.draw(st.integers(1, 4))):
        small[data.draw(st.integers(0, len(small) - 1))] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.sampled_from([len(small), len(small) - 1, data.draw(st.integers(0, len(small)))]))
    with contextlib.suppress(CodecError):
        assert len(decoded(name, bytes(small[:end]), len(plain))) == len(plain)


@settings(deadline=None, max_examples=examples(200))
@given(st.binary(max_size=200), st.integers(1, 300))
def test_hostile_bytes_are_an_error_or_fill_the_buffer(data, nbytes):
    with contextlib.suppress(CodecError):
        decoded(LOSSLESS, data, nbytes)


def test_a_frame_that_says_it_is_huge_takes_no_memory():
    import zstandard

    huge = zstandard.ZstdCompressor().compress(bytes(64 * MIB))
    stream = b"\x01" + len(huge).to_bytes(4, "little") + huge
    with pytest.raises(CodecError, match="another size"):
        decoded(LOSSLESS, stream, 128 * 1024)
    into = memoryview(bytearray(1 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MIB))
    with pytest.raises(CodecError, match="another size"):
        Lossless().decode(memoryview(b"\x01" + len(unsized).to_bytes(4, "little") + unsized), into)


def test_what_follows_a_slice_is_an_error():
    with pytest.raises(CodecError, match="follow"):
        decoded(LOSSLESS, encoded(LOSSLESS, bytes(1000)) + b"x", 1000)


@pytest.mark.parametrize(
    "name", ["", "zip", "fp8", "fp8:bf16:1x2x3x4", "fp8:bf16:0x2x4x2x8", "int8:fp64:1x2x4x2x8", "fp8:bf16:" + "9" * 99]
)
def test_an_unknown_codec_is_an_error(name):
    with pytest.raises(CodecError):
        codec_of(name)


# ---- lossy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_lossy_comes_back_nearly_and_then_exactly(form):
    assert parse_form(str(form)) == form
    dtype = DTYPES[form.elements]
    values = kv(dtype, (3, *form.shape))
    small = encoded(str(form), raw(values))
    assert len(small) == 3 * (4 * 4 + 128)
    again = decoded(str(form), small, values.nbytes)
    back = torch.frombuffer(bytearray(again), dtype=dtype).view(values.shape).float()
    most = values.float().abs().amax(dim=(1, 3, 5), keepdim=True)
    error = (back - values.float()).abs()
    if form.codec == "int8":
        assert (error <= most / 127 * 0.51 + most * 2**-8).all()
    else:  # three bits of mantissa, and below that steps of the scale
        assert (error <= torch.maximum(values.float().abs() * 2**-4 * 1.13, most / 448 / 512)).all()
    assert encoded(str(form), again) == small  # nothing is lost a second time
    assert (error > 0).any()


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(deadline=None, max_examples=examples(20))
@given(st.data())
def test_lossy_takes_any_bits(form, data):
    elements = 128
    width = 4 if form.elements == "fp32" else 2
    bits = data.draw(st.lists(st.integers(0, (1 << 8 * width) - 1), min_size=elements, max_size=elements))
    plain = np.array(bits, dtype=f"<u{width}").tobytes()
    small = encoded(str(form), plain)
    again = decoded(str(form), small, len(plain))
    values = torch.frombuffer(bytearray(plain), dtype=DTYPES[form.elements]).float()
    back = torch.frombuffer(bytearray(again), dtype=DTYPES[form.elements]).float()
    assert (back.isnan() == (values.isnan() & (form.codec == "fp8"))).all()
    assert not back.isinf().any()
    assert decoded(str(form), encoded(str(form), again), len(plain)) == again


def test_infinities_become_the_largest_and_each_head_has_its_own_scale():
    form = Form("int8", "fp32", (1, 2, 1, 1, 4))
    values = torch.tensor([[1.0, float("inf"), float("nan"), -2.0], [1000.0, -float("inf"), 1.0, 0.0]])
    back = torch.frombuffer(bytearray(decoded(str(form), encoded(str(form), raw(values)), 32)), dtype=torch.float32)
    expected = torch.tensor([1.0, 2.0, 0.0, -2.0, 1000.0, -1000.0, 0.0, 0.0])
    assert torch.allclose(back, expected, atol=0.008)


def test_fp8_is_what_torch_makes_of_it():
    form = Form("fp8", "fp32", (1, 1, 1, 1, 4096))
    values = torch.cat([torch.linspace(-448, 448, 2048), torch.randn(2048)])
    values[0] = 448.0
    back = torch.frombuffer(
        bytearray(decoded(str(form), encoded(str(form), raw(values)), values.nbytes)), dtype=torch.float32
    )
    theirs = values.half().to(torch.float8_e4m3fn).float()
    assert torch.equal(back, theirs)


def test_bytes_that_are_no_pages_are_an_error():
    with pytest.raises(CodecError, match="no pages"):
        encoded(str(FORMS[0]), bytes(100))
    with pytest.raises(CodecError, match="no pages"):
        decoded(str(FORMS[0]), bytes(1000), 100)
