"""Forms of approximate KV: the codec, and what that must know of a slice: its element type, and how heads lie in it.

A request asks for a form, which is part of its chunks' keys and in the header of each chunk stored in it. Pure
arithmetic, like `pdx.memory.layout`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from pdx.errors import CodecError, LayoutError
from pdx.memory.layout import KvLayout

LossyName = Literal["fp8", "int8"]
Elements = Literal["bf16", "fp16", "fp32"]
ELEMENT_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


class Loss(NamedTuple):
    """How much approximate KV may change the text after it, on average, as measured by `pdx bench quality` (ADR 79)."""

    perplexity: float  # at most so many times that of exact KV
    divergence: float  # Kullback-Leibler, at most so many nats per 1,000 tokens
    agreement: float  # at least this share of positions has the same most likely token


PROMISED: dict[str, Loss] = {"fp8": Loss(1.02, 10, 0.95), "int8": Loss(1.01, 2, 0.96)}
MOVED_LOSS = Loss(1.05, 40, 0.9)  # of KV at other positions (ADR 80)
_FORM = re.compile(r"(fp8|int8):(bf16|fp16|fp32):[0-9]{1,8}(x[0-9]{1,8}){4}")
_MAX_PAGE_BYTES = 1 << 31
_DTYPES: dict[str, Elements] = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
_HALVES = "CPU_ATTN"  # vLLM's backend that stores all keys of a head before all its values, packed or not


MOVED = "moved"  # the form of KV loaded at other positions, and of KV computed after that
APART = "\0pdx\0"  # before and after the form, in the cache salt of a request that is kept apart


class Form(msgspec.Struct, frozen=True):
    """A codec and the array that a page is: `shape` is (a, heads, b, parts, c), where the parts are keys and values.
    Each head has a scale for its keys and one for its values."""

    codec: LossyName
    elements: Elements
    shape: tuple[int, int, int, int, int]

    def __post_init__(self) -> None:
        if not all(self.shape) or self.page_bytes > _MAX_PAGE_BYTES:
            raise CodecError(f"no page has the shape {self.shape}")

    def __str__(self) -> str:
        return f"{self.codec}:{self.elements}:{'x'.join(map(str, self.shape))}"

    @property
    def page_bytes(self) -> int:
        """Size of a page that is not encoded."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.elements]

    @property
    def num_scales(self) -> int:
        return self.shape[1] * self.shape[3]


def parse_form(text: str) -> Form:
    """The form that `str(form)` names. :raises CodecError: it names none."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise CodecError(f"{text[:80]!r} is no codec of this release")
    codec, elements, shape = text.split(":")
    a, heads, b, parts, c = map(int, shape.split("x"))
    return Form(codec, elements, (a, heads, b, parts, c))  # type: ignore[arg-type]


def form_of(layout: KvLayout, codec: str) -> Form:
    """The form in which chunks of a layout are stored if a request asks for this lossy codec.

    :raises LayoutError: there is no such codec, or the layout does not say which bytes form an element or a head.
    """
    if codec not in get_args(LossyName):
        raise LayoutError(f"there is no lossy codec {codec!r}; there are {' and '.join(get_args(LossyName))}")
    said, _, kept_as = layout.dtype.removeprefix("torch.").partition(" as ")
    elements = _DTYPES.get(said)
    if elements is None or kept_as not in ("", "auto", said, *(name for name in _DTYPES if _DTYPES[name] == elements)):
        raise LayoutError(f"{codec} is for KV in bfloat16, float16 or float32; this cache has {layout.dtype!r}")
    tokens, heads, dim = layout.block_tokens, layout.num_heads, layout.head_dim
    parts, rest = divmod(layout.page_bytes, tokens * heads * dim * ELEMENT_BYTES[elements])
    if rest or parts not in (1, 2):
        raise LayoutError(
            f"{codec} needs pages of keys and values of {heads} heads, {tokens} tokens and {dim} elements: "
            f"{layout.page_bytes} bytes are not that"
        )
    inner = layout.order[2:] if layout.order[:2] in ("LB", "BL") else ""
    if layout.backend == _HALVES and inner == "HNC":
        return Form(codec, elements, (1, heads, 1, parts, tokens * dim))  # type: ignore[arg-type]
    if inner == "HNC" and not layout.isa:
        return Form(codec, elements, (1, heads, tokens, parts, dim))  # type: ignore[arg-type]
    if inner == "NHC" and not layout.isa:
        return Form(codec, elements, (tokens, heads, 1, parts, dim))  # type: ignore[arg-type]
    raise LayoutError(
        f"{codec} needs to know where in a page a head lies: the order {layout.order!r} of the backend "
        f"{layout.backend!r} {f'packed for {layout.isa} ' if layout.isa else ''}does not say that"
    )


def form_of_shape(shape: Mapping[str, str], codec: str) -> Form:
    """Like `form_of`, for a layout given by its fields as text.

    :raises LayoutError: see `form_of`; or fields of the layout are missing.
    """
    return form_of(layout_of_shape(shape), codec)


def layout_of_shape(shape: Mapping[str, str]) -> KvLayout:
    """The layout with these fields as text (`KvLayout.described`). :raises LayoutError: some are missing."""
    names = KvLayout.__struct_fields__
    try:
        return msgspec.convert({name: shape[name] for name in names if name in shape}, KvLayout, strict=False)
    except msgspec.ValidationError as error:
        raise LayoutError(f"the layout of the chunks is needed, and this is none: {error}") from error


def blended_form(share: float, lengths: Sequence[int]) -> str:
    """The form of KV of a prompt blended from documents of these lengths in tokens (`pdx.blend`)."""
    cuts = hashlib.blake2b(repr(list(lengths)).encode(), digest_size=8, person=b"pdx-blend-1").hexdigest()
    return f"blended:{share:.4f}:{cuts}"


def apart_salt(form: str, salt: str) -> str:
    """The cache salt of a request whose chunks have this form. It differs from every client's salt: engines keep a
    salt that begins with `APART` apart, too, with an empty form."""
    return f"{APART}{form}{APART}{salt}" if form or salt.startswith(APART) else salt


def lossy_fingerprint(fingerprint: bytes, form: str) -> bytes:
    """The fingerprint for keys of chunks in this form; it differs from that of exact chunks and of other forms."""
    return hashlib.blake2b(form.encode(), key=fingerprint, digest_size=16, person=b"pdx-form-1").digest()
