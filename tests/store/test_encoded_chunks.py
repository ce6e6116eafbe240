"""Chunks that are encoded where they are kept: in files, and under keys of a store that nodes share."""

from __future__ import annotations

import functools
import os
import struct

import msgspec
import pytest
import xxhash
from disk_bed import KV_BYTES as CHUNK_BYTES
from disk_bed import MIB, KvBed, closing_all, content, key

from pdx.errors import TierError
from pdx.store import chunk_format
from pdx.store.codecs.codec import LOSSLESS
from pdx.store.disk import chunk_file
from pdx.store.disk.chunk_file import ChunkFile
from pdx.store.disk.scrub import num_files, scrub


@pytest.fixture
def make(tmp_path):
    settings = {"slot_bytes": CHUNK_BYTES, "limit_bytes": 16 * MIB, "codec": LOSSLESS}
    with closing_all(functools.partial(KvBed, tmp_path, **settings)) as make_bed:
        yield make_bed


# ---- files ----------------------------------------------------------------------------------


def test_what_does_not_shrink_is_stored_as_it_is(make):
    bed = make(content=content)
    assert bed.store(1)
    assert bed.coded(1) == 0
    assert bed.names == [bed.file(1).name]
    assert bed.load(1) is None


def test_room_for_all_of_a_chunk_is_there_before_it_is_encoded(make, gate):
    """Nobody knows before what it will take; nor does the cap care that it will be less."""
    charge = chunk_file.disk_bytes(CHUNK_BYTES, 4)
    bed = make(limit_bytes=2 * charge)
    assert bed.store(1)
    packing = gate("packed")
    copy = bed.start_store(2, at=2)
    assert packing.arrived.acquire(timeout=60)
    assert bed.tier.used_bytes == charge + ChunkFile(key(1), 0, 4, CHUNK_BYTES, bed.coded(1)).charge
    packing.open()
    assert bed.end(copy) is None
    bed.settle()
    assert bed.tier.used_bytes < charge + charge


def forge(bed, **changes):
    """Chunk 1 says something else of itself, and has the digest for that."""
    whole = memoryview(bytearray(bed.path(1).read_bytes()))
    header = chunk_format.parsed(whole, len(whole), "file")
    body = msgspec.msgpack.encode(msgspec.structs.replace(header, **changes))
    prefix = struct.pack("<8sIIQ", b"PDXCHUNK", chunk_format.VERSION, len(body), xxhash.xxh3_64_intdigest(body))
    whole[: len(prefix + body)] = prefix + body
    bed.path(1).write_bytes(whole)
    return header


def test_a_codec_of_a_later_release_is_a_miss(bed):
    assert bed.store(1)
    forge(bed, codec="later")
    assert bed.load(1).kind == "outdated"
    assert not bed.has(1)


@pytest.mark.parametrize(
    "other", [lambda sizes: bytes([sizes[0] ^ 1]) + sizes[1:], lambda sizes: sizes + bytes(4)], ids=["size", "number"]
)
def test_slices_that_say_they_are_others_are_damaged(bed, other):
    """By somebody who makes digests, too."""
    assert bed.store(1)
    header = forge(bed)
    assert bed.load(1) is None
    forge(bed, sizes=other(header.sizes))
    assert bed.load(1).kind in ("corrupt", "truncated")


def test_a_name_that_says_less_than_it_has_is_no_chunk(bed):
    assert bed.store(1)
    path = bed.path(1)
    path.rename(path.with_name(path.name.replace(f"-{bed.coded(1)}.", f"-{bed.coded(1) - 1}.")))
    bed.restart()
    bed.settle()
    assert not bed.has(1)
    assert bed.counters["disk_truncated"] == 1
    assert bed.files == []


def test_a_file_that_says_it_is_huge_is_no_chunk(bed):
    assert bed.store(1)
    path = bed.path(1)
    huge = path.with_name(path.name.replace(f"-{bed.coded(1)}.", f"-{CHUNK_BYTES}."))
    path.rename(huge)
    os.truncate(huge, 4096 + CHUNK_BYTES)
    bed.restart()
    bed.settle()
    assert not bed.has(1)
    assert bed.counters["disk_corrupt"] == 1


def test_verify_looks_at_encoded_chunks(bed):
    for number in range(4):
        assert bed.store(number)
    bed.close_tier()
    assert num_files(bed.root) == 4
    report = scrub(bed.root, lambda error: None)
    assert (report.good, report.nbytes) == (4, sum(path.stat().st_size for path in bed.files))
    with open(bed.files[0], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    found: list[TierError | None] = []
    report = scrub(bed.root, found.append, remove=True)
    assert (report.good, report.bad) == (3, {"corrupt": 1})
    assert len(bed.files) == 3
    bed.open()
