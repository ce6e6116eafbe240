"""The keys of a prompt's chunks, made from its tokens as an engine makes them, without the engine and without vLLM.

An engine whose shape (`Model.shape`) has a `root` hashes blocks as vLLM does: SHA-256 over the previous block's hash,
the block's tokens and, in the first block, the cache salt, serialized by pickle or, for `sha256_cbor`, by CBOR. The
first block is chained to the root. Those bytes are only written here, never read: pickle itself is not used.

Keys made here do not cover what a prompt has beside tokens and salt: an adapter, images or embeddings. The chunks of
such a prompt are named by its request (`Selection.request`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import get_args

from pdx.errors import LayoutError, SelectionError
from pdx.memory.form import LossyName, apart_salt, form_of_shape, lossy_fingerprint
from pdx.memory.keys import chunk_key
from pdx.wire.base import MAX_KEYS
from pdx.wire.verbs import Model

# (hash of the block before, tokens, what else is hashed) -> hash of the block
_Extra = tuple[object, ...] | None
_Hash = Callable[[bytes, tuple[int, ...], _Extra], bytes]
_WIDTHS = ((24, 1), (25, 2), (26, 4), (27, 8))  # in CBOR, for numbers above 23: the mark, and how many bytes follow
_FRAME_BYTES = 1 << 16  # pickle begins another frame after so many
_LEAST = 4  # characters of a name's prefix
_MOST_LISTED = 8


def number_of(model: Model, field: str) -> int:
    """A number above 0 that an engine has told about its chunks, such as `chunk_tokens` or `num_shards`.

    :raises SelectionError: it has not.
    """
    try:
        found = int(model.shape[field])
    except (KeyError, ValueError):
        found = 0
    if found < 1:
        raise SelectionError(f"engine {model.engine!r} has not told its {field}: it is none that PDX keeps chunks for")
    return found


def form_text(model: Model, codec: str) -> str:
    """The form in which chunks of requests with this lossy codec are stored below memory; empty: like all others.

    :raises SelectionError: the engine's layout has no such codec.
    """
    if codec in ("", "none", "lossless"):
        return ""
    if codec not in get_args(LossyName):
        raise SelectionError(f"there is no codec {codec!r:.40}: there are none, lossless, fp8 and int8")
    try:
        return str(form_of_shape(model.shape, codec))
    except LayoutError as error:
        raise SelectionError(f"engine {model.engine!r}: {error}") from error


def chunk_keys(model: Model, tokens: Sequence[int], salt: str = "", codec: str = "") -> list[bytes]:
    """The keys of the full chunks of the prompt `tokens`, as the engine of `model` makes them; `salt`: the requests'
    `cache_salt`, `codec`: that they ask for.

    :raises SelectionError: the tokens fill no chunk or are none of this model's, or only the engine can make its keys.
    """
    return list(each_chunk_key(model, tokens, salt, codec))


def form_keys(model: Model, tokens: Sequence[int], salt: str, form: str) -> list[bytes]:
    """As `chunk_keys`, for requests that are kept apart by this form, which may be any text."""
    return list(_each_key(model, tokens, salt, form))


def each_chunk_key(model: Model, tokens: Sequence[int], salt: str = "", codec: str = "") -> Iterator[bytes]:
    """As `chunk_keys`, lazily."""
    return _each_key(model, tokens, salt, form_text(model, codec))


def _each_key(model: Model, tokens: Sequence[int], salt: str, form: str) -> Iterator[bytes]:
    if groups := model.shape.get("cache_groups"):
        raise SelectionError(
            f"engine {model.engine!r} has {groups:.8} cache groups, each with chunks of its own: name those that a "
            "prompt needs by a request's id"
        )
    per_chunk, per_block = number_of(model, "chunk_tokens"), number_of(model, "block_tokens")
    _check(model, tokens, per_chunk)
    hashed, root = _hash_of(model), _root(model)
    fingerprint = lossy_fingerprint(model.layout, form) if form else model.layout
    extra = _first_extra(model, apart_salt(form, salt))
    for end in range(per_chunk, len(tokens) + 1, per_chunk):
        for start in range(end - per_chunk, end, per_block):
            root = hashed(root, tuple(tokens[start : start + per_block]), extra)
            extra = None
        yield chunk_key(fingerprint, root)


def _check(model: Model, tokens: Sequence[int], per_chunk: int) -> None:
    told = model.shape.get("vocabulary", "")
    vocabulary = int(told) if told.isdecimal() else 0
    limit = min(vocabulary or 1 << 31, 1 << 31)
    is_right = set(map(type, tokens)) <= {int} and min(tokens, default=0) >= 0 and max(tokens, default=0) < limit
    for at, token in enumerate(() if is_right else tokens):
        if type(token) is not int:  # neither a bool, which hashes differently, nor a number of another library
            raise SelectionError(f"token {at} is {token!r:.50}: ids of tokens are whole numbers")
        if not 0 <= token < limit:
            known = f"engine {model.engine!r} knows {vocabulary:,} tokens" if vocabulary else "no model knows so many"
            raise SelectionError(f"token {at} is {token}: {known}; are these ids of another model?")
    if len(tokens) < per_chunk:
        raise SelectionError(
            f"{len(tokens)} tokens fill no chunk of engine {model.engine!r}: one has {per_chunk} tokens, and what "
            f"fills none is named by its request alone"
        )
    if len(tokens) // per_chunk > MAX_KEYS:
        raise SelectionError(f"{len(tokens)} tokens are more than {MAX_KEYS} chunks, which one verb may be about")


def _root(model: Model) -> bytes:
    told = model.shape.get("root", "")
    try:
        root = bytes.fromhex(told)
    except ValueError:
        root = b""
    if not root:
        raise SelectionError(
            f"engine {model.engine!r} hashes its blocks in a way that only it knows: name chunks by a request's id"
        )
    return root


def _first_extra(model: Model, salt: str) -> _Extra:
    if not salt:
        return None
    tag = model.shape.get("salt_tag", "")
    return ((tag, salt),) if tag else (salt,)


def _hash_of(model: Model) -> _Hash:
    hashing = model.shape.get("hashing", "")
    found = {"sha256": _by_pickle, "sha256_cbor": _by_cbor}.get(hashing)
    if found is None:
        raise SelectionError(
            f"engine {model.engine!r} hashes its blocks by {hashing!r}, which is not known here: name chunks by a "
            f"request's id"
        )
    return found


def _by_pickle(parent: bytes, tokens: tuple[int, ...], extra: _Extra) -> bytes:
    body = _opcodes((parent, tokens, extra))
    if len(body) >= _FRAME_BYTES:
        raise SelectionError(f"a block's {len(tokens)} tokens and salt are too long to be hashed here: name a request")
    # Protocol 5, the highest of every Python from 3.8 on; one frame; the end.
    return hashlib.sha256(b"\x80\x05\x95" + (len(body) + 1).to_bytes(8, "little") + body + b".").digest()


def _opcodes(value: object) -> bytes:
    """What pickle writes for the kinds of values in a block's hash, none of which it meets twice."""
    match value:
        case None:
            return b"N"
        case bytes():
            return _sized(b"C", b"B", value)
        case str():
            return _sized(b"\x8c", b"X", value.encode())
        case tuple() if value:
            items = b"".join(map(_number_opcodes if isinstance(value[0], int) else _opcodes, value))
            few = {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value))
            return (items + few if few else b"(" + items + b"t") + b"\x94"
    raise TypeError(f"{value!r:.50} is in no hash of a block")


@lru_cache(1 << 17)  # most recur
def _number_opcodes(value: int) -> bytes:
    mark, width = (b"K", 1) if value < 1 << 8 else (b"M", 2) if value < 1 << 16 else (b"J", 4)
    return mark + value.to_bytes(width, "little")


def _sized(short: bytes, long: bytes, data: bytes) -> bytes:
    head = short + bytes([len(data)]) if len(data) < 1 << 8 else long + len(data).to_bytes(4, "little")
    return head + data + b"\x94"


def _by_cbor(parent: bytes, tokens: tuple[int, ...], extra: _Extra) -> bytes:
    return hashlib.sha256(_cbor((parent, tokens, extra))).digest()


def _cbor(value: object) -> bytes:
    """RFC 8949, section 4.2: the one shortest form of a value, for the kinds of values in a block's hash."""
    match value:
        case None:
            return b"\xf6"
        case bytes():
            return _head(2, len(value)) + value
        case str():
            text = value.encode()
            return _head(3, len(text)) + text
        case tuple():
            items = map(_number_cbor if value and isinstance(value[0], int) else _cbor, value)
            return _head(4, len(value)) + b"".join(items)
    raise TypeError(f"{type(value).__name__} is in no hash of a block")


@lru_cache(1 << 17)
def _number_cbor(value: int) -> bytes:
    return _head(0, value)


def _head(major: int, number: int) -> bytes:
    if number < _WIDTHS[0][0]:
        return bytes([major << 5 | number])
    mark, width = next((mark, width) for mark, width in _WIDTHS if number < 1 << 8 * width)
    return bytes([major << 5 | mark]) + number.to_bytes(width, "big")


def chosen(models: Sequence[Model], name: str = "") -> list[Model]:
    """The engines that make the same keys and of which one is called `name`: by its name or URL, or by a prefix of its
    name, its layout in hex or its model; without a name, all engines.

    :raises SelectionError: there are none, or they make different keys.
    """
    if not models:
        raise SelectionError(
            "no engine is attached that has told how it names chunks, so nobody knows the keys of these tokens: start "
            "one, or name the chunks by a request's id"
        )
    alike: dict[object, list[Model]] = {}
    for model in models:
        alike.setdefault((model.layout, *sorted(model.shape.items())), []).append(model)
    found = [those for those in alike.values() if not name or any(_is_called(each, name) for each in those)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise SelectionError(f"no engine here is, or has, the model {name!r:.80}; there are {_listed(models)}")
    told = "; ".join(map(_listed, found))
    raise SelectionError(f"engines here name chunks differently, so say of which model the tokens are: {told}")


def _is_called(model: Model, name: str) -> bool:
    is_start = len(name) >= _LEAST and any(
        each.startswith(name) for each in (model.engine, model.layout.hex(), model.shape.get("model", ""))
    )
    return is_start or name in (model.engine, model.url, model.shape.get("model", ""))


def _listed(models: Sequence[Model]) -> str:
    return ", ".join(
        f"engine {model.engine!r:.80}{f' at {model.url}' if model.url else ''} (model "
        f"{model.shape.get('model', '')[:16]!r}, layout {model.layout.hex()[:16]})"
        for model in models[:_MOST_LISTED]
    )
