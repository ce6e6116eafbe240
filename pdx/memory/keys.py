"""Chunk keys: 128-bit BLAKE2b names of content.

A full chunk's key is derived from the engine's chained hash of its last block, which already covers all tokens
before it, the LoRA adapter, the multimodal inputs and the cache salt. The layout fingerprint is the MAC key, so
equal tokens of another model, dtype, block size or packing have unrelated keys. The shard is not in the key: the
node stores (key, shard), and a chunk counts as there only if all its shards are.
"""

from __future__ import annotations

import hashlib

KEY_BYTES = 16
# In the middle of a key, because tiers spread chunks over folders and disks by the first and the last byte.
_MARK, _MARK_AT = b"name", 6


def _digest(person: bytes, secret: bytes, *parts: bytes) -> bytes:
    mac = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=person)
    for part in parts:  # length-prefixed, so that different lists of parts never concatenate to the same bytes
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


def chunk_key(fingerprint: bytes, block_hash: bytes) -> bytes:
    """The key of the full chunk whose last block has this chained hash."""
    return _digest(b"pdx-chunk-1", fingerprint, block_hash)


def tail_key(fingerprint: bytes, block_hash: bytes, transfer: str) -> bytes:
    """The key of a prompt's tail: the chained hash up to its last token, for one transfer only."""
    return _digest(b"pdx-tail-1", fingerprint, block_hash, transfer.encode())


def short_key(fingerprint: bytes, block_hash: bytes) -> bytes:
    """The key of the blocks at the end of a prompt that do not fill a chunk; the last has this chained hash."""
    return _digest(b"pdx-short-1", fingerprint, block_hash)


def root_key(fingerprint: bytes) -> bytes:
    """The key that counts as the predecessor of every prompt's first chunk."""
    return _digest(b"pdx-root-1", fingerprint)


def named_key(name: str) -> bytes:
    """The key of a chunk that a user of the Python API has named. See `is_named`."""
    digest = _digest(b"pdx-named-2", b"", name.encode())
    return digest[:_MARK_AT] + _MARK + digest[_MARK_AT + len(_MARK) :]


def is_named(key: bytes) -> bool:
    """Whether this is the key of a client's name, not derived from content.

    The mark is in the key itself, because tiers keep only a chunk's key and bytes. One in four billion content keys has
    the mark by chance.
    """
    return key.startswith(_MARK, _MARK_AT)
