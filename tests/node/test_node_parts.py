"""Hits that end within a chunk, as the node sees them: which chunk begins as a prompt goes on, and what is kept."""

import msgspec
import pytest
from node_harness import MIB

from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import Admit, Delete, Fill, Refused, Release

WIDTH = 4  # blocks to a chunk
NBYTES = WIDTH * GRANULE_BYTES
ROOT = b"root" * 4
KEYS = [bytes([number]) * 16 for number in range(8)]


def names(letters):
    return b"".join(letter.encode() * 16 for letter in letters)


def asking(keys, letters, **settings):
    """A question of an engine about a prompt whose blocks are these letters; it keeps what is missing."""
    tail = len(letters) % WIDTH
    fields = {
        "nbytes": NBYTES, "layers": 2, "lease_s": 20.0, "part": "keeps", "tail_nbytes": tail * GRANULE_BYTES,
        "blocks": names(letters), "chunk_blocks": WIDTH, "parent": ROOT, **settings,
    }  # fmt: skip
    return Admit(keys, **fields)


@pytest.fixture
def engine(node_here, attach):
    engine = attach(node_here, name="one")
    yield engine
    engine.ask(Delete(KEYS))
    status = engine.status()
    assert (status.free_bytes, status.chunks, status.leases, status.transfers) == (8 * MIB, {}, 0, 0)


def keep(engine, keys, letters, **settings):
    """All of the prompt is there from now on."""
    answer = engine.ask(asking(keys, letters, **settings))
    engine.ask(Release(answer.lease))
    engine.ask(Fill(answer.granted_slots, layers=2, seal=True))
    return answer


def look(engine, keys, letters, **settings):
    """Hits and blocks behind them, and the slots of both; nothing is held."""
    answer = engine.ask(asking(keys, letters, nbytes=0, tail_nbytes=0, **settings))
    engine.ask(Release(answer.lease))
    return answer.hits, answer.part_blocks, answer.slots


def test_the_leading_blocks_of_the_chunk_that_begins_alike_are_a_hit(engine):
    kept = keep(engine, KEYS[:2], "abcdefgh")
    assert look(engine, [KEYS[0], KEYS[2]], "abcdefxy") == (1, 2, kept.granted_slots)
    assert look(engine, [KEYS[2]], "abxy") == (0, 2, kept.granted_slots[:1])
    assert look(engine, [KEYS[2]], "xbcd") == (0, 0, [])
    assert look(engine, [KEYS[2]], "abxy", parent=KEYS[0]) == (0, 0, []), "the same blocks behind something else"
    assert engine.status().counters["part_hit_blocks"] >= 4


def test_the_end_of_a_prompt_is_kept_and_found_by_its_blocks(engine):
    kept = keep(engine, KEYS[:2], "abcdef")
    assert [slot.nbytes for slot in kept.granted_slots] == [NBYTES, 2 * GRANULE_BYTES]
    assert look(engine, [KEYS[0], KEYS[2]], "abcdefgh") == (1, 2, kept.granted_slots)
    assert look(engine, [KEYS[0], KEYS[2]], "abcdexyz") == (1, 1, kept.granted_slots)


def test_what_another_chunk_has_all_of_is_not_kept_again(engine):
    keep(engine, KEYS[:2], "abcdefgh")
    answer = engine.ask(asking([KEYS[0], KEYS[2]], "abcdef"))
    assert (answer.hits, answer.part_blocks, answer.granted) == (1, 2, [])
    engine.ask(Release(answer.lease))


def test_the_end_of_a_prompt_goes_when_a_chunk_has_all_of_it(engine):
    keep(engine, KEYS[:2], "abcdef")
    keep(engine, [KEYS[0], KEYS[2]], "abcdefgh")
    assert engine.status().chunks == {"sealed": 2}
    assert look(engine, [KEYS[0], KEYS[3]], "abcdefgx")[:2] == (1, 3)


def test_what_is_being_read_stays_when_a_chunk_has_all_of_it(engine):
    keep(engine, KEYS[:2], "abcdef")
    reading = engine.ask(asking([KEYS[0], KEYS[3]], "abcdex", nbytes=0, tail_nbytes=0))
    keep(engine, [KEYS[0], KEYS[2]], "abcdefgh")
    assert engine.status().chunks == {"sealed": 3}
    engine.ask(Release(reading.lease))
    engine.ask(Delete([KEYS[1]]))


def test_a_lease_on_a_part_keeps_the_chunk(engine):
    keep(engine, [KEYS[0]], "abcd")
    answer = engine.ask(asking([KEYS[2]], "abxy", nbytes=0))
    engine.ask(Delete([KEYS[0]]))
    assert engine.status().chunks == {"retired": 1}
    engine.ask(Release(answer.lease))


def test_the_tail_of_a_transfer_is_kept_after_it_if_its_blocks_have_names(engine):
    transfer = "transfer-parts-0123456789"
    answer = engine.ask(asking(KEYS[:2], "abcdef", part="writes", transfer=transfer, lease_s=0.0))
    engine.ask(Fill(answer.granted_slots, layers=2, seal=True))
    read = engine.ask(Admit(KEYS[:2], lease_s=20.0, transfer=transfer))
    assert read.hits == 2
    engine.ask(Release(read.lease))
    assert engine.status().chunks == {"sealed": 2}
    assert look(engine, [KEYS[0], KEYS[2]], "abcdefgh")[:2] == (1, 2)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"blocks": b"x" * 17}, "17 bytes of block names"),
        ({"chunk_blocks": 0}, "0 blocks to a chunk"),
        ({"nbytes": NBYTES + 1}, "4 blocks to a chunk of"),
        ({"blocks": names("abcdefg")}, "names of 7 blocks, where the keys and the tail have 6"),
    ],
)
def test_names_that_do_not_fit_the_keys_are_refused(engine, changed, text):
    ask = msgspec.structs.replace(asking(KEYS[:2], "abcdef"), **changed)
    refused = engine.ask(ask)
    assert isinstance(refused, Refused)
    assert text in refused.text
