"""Chunk keys: 128-bit BLAKE2b names of content.

A full chunk's key is derived from the engine's chained hash of its last block, which already covers all tokens
before it, the LoRA adapter, the multimodal inputs and the cache salt. The layout fingerprint is the MAC key, so
equal tokens of another model, dtype, block size or packing have unrelated keys. The shard is not in the key: the
node stores (key, shard), and a chunk counts as there only where every shard is.
"""

from __future__ import annotations

import hashlib

KEY_BYTES = 16
# In the middle of a client's key: tiers spread chunks over folders and disks by the first and the last bytes of keys.
_MARK, _MARK_AT = b"name", 6


def _digest(person: bytes, secret: bytes, *parts: bytes) -> bytes:
    mac = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=person)
    for part in parts:  # length-prefixed, so that no two lists of parts run together into the same bytes
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


def chunk_key(fingerprint: bytes, block_hash: bytes) -> bytes:
    """The key of the full chunk whose last block has this chained hash."""
    return _digest(b"pdx-chunk-1", fingerprint, block_hash)


def tail_key(fingerprint: bytes, block_hash: bytes, transfer: str) -> bytes:
    """The key of a prompt's tail: the chained hash up to its last token, and the one transfer it is for."""
    return _digest(b"pdx-tail-1", fingerprint, block_hash, transfer.encode())


def short_key(fingerprint: bytes, block_hash: bytes) -> bytes:
    """The key of the blocks at the end of a prompt that fill no chunk; the last one has this chained hash."""
    return _digest(b"pdx-short-1", fingerprint, block_hash)


def root_key(fingerprint: bytes) -> bytes:
    """What leads up to the first chunk of every prompt."""
    return _digest(b"pdx-root-1", fingerprint)


def named_key(name: str) -> bytes:
    """The key of a chunk that a user of the Python API calls `name`. See `is_named`."""
    digest = _digest(b"pdx-named-2", b"", name.encode())
    return digest[:_MARK_AT] + _MARK + digest[_MARK_AT + len(_MARK) :]


def is_named(key: bytes) -> bool:
    """Whether this is the key of a client's name, which says nothing of the bytes.

    Such a key says so itself, because a tier keeps nothing of a chunk but its key and its bytes. Of the keys of content
    one in four billion says so, too.
    """
    return key.startswith(_MARK, _MARK_AT)
