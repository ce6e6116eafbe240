"""A digest of a model's weight files that differs wherever their KV would, but reads only a part of them.

Small tensors are hashed whole: two checkpoints of one shape may differ only in norms, biases or scales of a cache.
Large ones are sampled, because training changes such a tensor everywhere.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WHOLE_BYTES = 1 << 20  # tensors below this are hashed whole
PIECE_BYTES = 16 << 10
STRIDE_BYTES = 4 << 20  # a piece of every so many bytes of a large tensor, and its end
BLIND_STRIDE_BYTES = 256 << 10  # of a file that does not say where its tensors lie

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_MAX_HEADER_BYTES = 100 << 20  # what the format allows
_THREADS = 8


# A file's table of tensors: bytes that stand for all of it, each tensor's (offset, bytes), the stride of samples.
_Table = tuple[bytes, Sequence[tuple[int, int]], int]


def weight_files(place: Path) -> list[Path]:
    """The files at `place`, a file or a folder, that hold weights, in order of their names."""
    if place.is_file():
        return [place]
    return sorted(path for path in place.iterdir() if path.suffix in SUFFIXES)


def weights_digest(files: Iterable[Path]) -> bytes:
    """16 bytes for the files' names, sizes, tables of tensors, all small tensors and samples of the large ones.

    It reads 0.4 % of large tensors, no less than two pieces of each, and blocks for as long as that takes.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"pdx-weights-1")
    ordered = list(files)
    with ThreadPoolExecutor(_THREADS, "pdx-weights") as pool:
        for file, content in zip(ordered, pool.map(_file_digest, ordered), strict=True):
            digest.update(f"{file.name}:{file.stat().st_size}:".encode() + content)
    return digest.digest()


def pieces(spans: Iterable[tuple[int, int]], stride: int = STRIDE_BYTES) -> Iterator[tuple[int, int]]:
    """The (offset, bytes) to read of tensors that lie at `spans`."""
    for offset, nbytes in spans:
        if nbytes < WHOLE_BYTES:
            yield offset, nbytes
            continue
        for start in (*range(0, nbytes - PIECE_BYTES, stride), nbytes - PIECE_BYTES):
            yield offset + start, PIECE_BYTES


def _file_digest(file: Path) -> bytes:
    size = file.stat().st_size
    told = _safetensors_table(file, size) or _zip_table(file)
    head, spans, stride = told or (b"", [(0, size)], BLIND_STRIDE_BYTES)
    digest = hashlib.blake2b(head, digest_size=16)
    with file.open("rb") as stream:
        for offset, nbytes in pieces(spans, stride):
            stream.seek(offset)
            digest.update(stream.read(nbytes))
    return digest.digest()


def _safetensors_table(file: Path, size: int) -> _Table | None:
    """For a safetensors file. None: not such a file, or a damaged one, which the engine itself will refuse."""
    if file.suffix != ".safetensors" or size < 8:
        return None
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(size - 8, _MAX_HEADER_BYTES):
            return None
        head = stream.read(length)
    try:
        tensors = json.loads(head)
        tensors.pop("__metadata__", None)
        offsets = [tensor["data_offsets"] for tensor in tensors.values()]
        spans = sorted((8 + length + start, end - start) for start, end in offsets)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    is_sound = all(nbytes >= 0 and 0 <= start <= size - nbytes for start, nbytes in spans)
    return (head, spans, STRIDE_BYTES) if is_sound else None


def _zip_table(file: Path) -> _Table | None:
    """For a file of torch: every tensor is a member, stored as it is, with its CRC-32. None: not such a file."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile):
        return None
    head = json.dumps([(each.filename, each.file_size, each.CRC) for each in members]).encode()
    # A member's bytes follow its own header, whose length only the file itself tells: a piece begins with the header.
    return head, [(each.header_offset, each.compress_size) for each in members], STRIDE_BYTES
