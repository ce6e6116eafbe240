"""Hits that end within a chunk which memory has no more: it comes from a disk when that is worth it."""

import os
import random
from pathlib import Path

import pytest
from broken_node import BreakableNode
from node_harness import MIB, arenas_of
from remote_bed import made
from test_node_parts import GRANULE_BYTES, ROOT, WIDTH, asking, names

from pdx.config import NodeConfig
from pdx.memory.keys import KEY_BYTES
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Delete, Fill, Ping, Release

LAYERS = 2
GRANULES = 64  # to a block
NBYTES = WIDTH * GRANULES * GRANULE_BYTES  # 1 MiB


def key(letters):
    """Of the chunk that ends so; as an engine's, it is the same whenever the prompt is."""
    return letters.encode().rjust(KEY_BYTES, b"-")


def keys_of(prompt):
    return [key(prompt[: at + WIDTH]) for at in range(0, len(prompt) - WIDTH + 1, WIDTH)]


def content(key_):
    return bytes([sum(key_) % 251]) * NBYTES


def question(prompt, **settings):
    end = len(prompt) // WIDTH * WIDTH
    return asking(keys_of(prompt), prompt[:end], **{"nbytes": NBYTES, "layers": LAYERS, "wait_s": 20.0, **settings})


class Engine:
    """A scheduler and a worker that writes what its node grants."""

    def __init__(self, node, attach):
        names_ = {"engine": "one", "name": "one"}
        self.worker, self.scheduler = (attach(node, kind=kind, **names_) for kind in ("worker", "scheduler"))
        self.status = self.scheduler.status
        self.arena = arenas_of(node.address)[0]

    @property
    def stored(self):
        counters = self.status().counters
        return counters.get("disk_stored", 0) + counters.get("remote_stored", 0)

    def keep(self, prompt):
        """All whole chunks of the prompt are computed, and in the tier."""
        stored = self.stored
        answer = self.scheduler.ask(question(prompt))
        if answer.lease:
            self.scheduler.ask(Release(answer.lease))
        with self.arena.open("r+b") as arena:
            for index, slot in zip(answer.granted, answer.granted_slots, strict=True):
                os.pwrite(arena.fileno(), content(keys_of(prompt)[index]), slot.offset)
        self.worker.ask(Fill(answer.granted_slots, layers=LAYERS, seal=True))
        done = stored + len(answer.granted)
        wait_until(lambda: self.stored == done, what="they are stored")

    def forget(self):
        """Others take the room of what is in memory."""
        for letter in "1234":
            self.keep(letter * WIDTH)

    def look(self, prompt, **settings):
        """Hits, blocks behind them, and whose bytes the chunks have; nothing is held."""
        answer = self.scheduler.ask(question(prompt, **{"part": "reads", "nbytes": 0, **settings}))
        with self.arena.open("rb") as arena:
            found = [os.pread(arena.fileno(), slot.nbytes, slot.offset) for slot in answer.slots]
        if answer.lease:
            self.scheduler.ask(Release(answer.lease))
        return answer.hits, answer.part_blocks, found


@pytest.fixture
def disk(place):
    return str(place / "disk")


@pytest.fixture
def engine(start_here, attach, disk):
    return Engine(start_here(arena_bytes=4 * MIB, disks=[disk]), attach)


def test_a_chunk_that_begins_alike_comes_from_the_disk(engine):
    engine.keep("abcdefgh")
    engine.forget()
    loaded = engine.status().counters.get("disk_loaded", 0)
    first, second = map(content, keys_of("abcdefgh"))
    assert engine.look("abcdefxy") == (1, 2, [first, second])
    counters = engine.status().counters
    assert (counters["disk_loaded"] - loaded, counters["part_hit_blocks"]) == (2, 2)
    assert engine.look("abcdefgx") == (1, 3, [first, second]), "in memory it has its names again"
    assert engine.status().counters["disk_loaded"] - loaded == 2


def test_it_also_comes_where_all_whole_chunks_are_hits(engine):
    engine.keep("abcdefgh")
    engine.forget()
    first, second = map(content, keys_of("abcdefgh"))
    answer = engine.scheduler.ask(
        Admit([key("abcd")], lease_s=20.0, wait_s=20.0, blocks=names("abcdef"), chunk_blocks=WIDTH, parent=ROOT)
    )
    assert (answer.hits, answer.part_blocks) == (1, 2)
    engine.scheduler.ask(Release(answer.lease))
    assert engine.look("abcdefxy") == (1, 2, [first, second])


def test_what_was_found_as_a_whole_is_known_in_part_after_a_restart(start_here, attach, disk):
    node = start_here(arena_bytes=4 * MIB, disks=[disk])
    Engine(node, attach).keep("abcd")
    node.close()
    node = start_here(arena_bytes=4 * MIB, disks=[disk])
    engine = Engine(node, attach)
    wait_until(lambda: engine.status().tiers[0].chunks == 1, what="the index is read")
    assert engine.look("abxy") == (0, 0, []), "nobody has said yet what its blocks are"
    assert engine.look("abcd") == (1, 0, [content(key("abcd"))])
    assert engine.look("abxy") == (0, 2, [content(key("abcd"))])
    engine.forget()
    assert engine.look("axyz") == (0, 1, [content(key("abcd"))])


def test_what_the_disk_has_no_more_is_not_waited_for(start_here, attach, disk):
    engine = Engine(start_here(arena_bytes=4 * MIB, disks=[disk], disk_limit_bytes=4 * MIB), attach)
    engine.keep("abcd")
    engine.forget()
    assert engine.look("abxy") == (0, 0, [])
    assert engine.status().counters.get("disk_loaded", 0) == 0


def test_a_file_that_is_damaged_is_a_miss(engine, disk):
    engine.keep("abcd")
    engine.forget()
    (file,) = Path(disk).glob(f"*/{key('abcd').hex()}-*")
    with file.open("r+b") as damaged:
        damaged.seek(-1, os.SEEK_END)
        damaged.write(b"\xff")
    assert engine.look("abxy") == (0, 0, [])
    assert engine.status().counters["disk_corrupt"] == 1
    assert engine.look("abxy") == (0, 0, [])


def test_it_is_not_loaded_where_computing_its_blocks_is_faster(engine):
    engine.keep("abcd")
    engine.keep("efgh")
    engine.forget()
    assert engine.look("abcd")[0] == 1, "the disk is measured"
    engine.worker.ask(Ping(chunk_s=1e-9))
    assert engine.look("efxy") == (0, 0, [])
    engine.worker.ask(Ping(chunk_s=60.0))
    assert engine.look("efxy") == (0, 2, [content(key("efgh"))])


def test_another_one_comes_where_the_best_is_gone(start_here, attach, tmp_path):
    """A store that nodes share must be asked what it still has."""
    redis = made("redis", tmp_path / "redis").start()
    try:
        node = start_here(arena_bytes=4 * MIB, remote=redis.url, remote_lookup_s=20.0, remote_s=20.0)
        wait_until(lambda: node.status().tiers[0].state == "ok", what="it answers")
        engine = Engine(node, attach)
        for prompt in ("abcd", "abxy"):
            engine.keep(prompt)
        engine.forget()
        [gone] = [name for name in redis.names() if key("abcd").hex() in name]
        redis.cli("DEL", f"pdx:{gone}")
        assert engine.look("abcz") == (0, 2, [content(key("abxy"))])
    finally:
        redis.kill()


def test_one_that_asks_for_room_gets_it_behind_the_part(engine):
    engine.keep("abcdefgh")
    engine.forget()
    answer = engine.scheduler.ask(question("abcdefxy"))
    assert (answer.hits, answer.part_blocks, answer.granted) == (1, 2, [1])
    engine.scheduler.ask(Release(answer.lease))
    engine.worker.ask(Fill(answer.granted_slots, layers=LAYERS, seal=True))


def test_deleted_chunks_are_not_found_in_part(engine):
    engine.keep("abcd")
    engine.forget()
    engine.scheduler.ask(Delete([key("abcd")]))
    assert engine.look("abxy") == (0, 0, [])


@pytest.mark.parametrize("seed", range(3))
def test_of_all_that_was_ever_kept_the_best_is_found(engine, seed):
    """The disk has room for all of it, so that the model is a list of prompts."""
    random_ = random.Random(seed)
    kept = set()  # what chunks end with

    def prompt():
        return "".join(random_.choice("ab") for _ in range(random_.randrange(1, 4) * WIDTH))

    for _ in range(60):
        one = prompt()
        if random_.random() < 0.4 and len(kept) < 40:
            engine.keep(one)
            kept.update(one[: at + WIDTH] for at in range(0, len(one), WIDTH))
            continue
        hits = next((at for at in range(0, len(one), WIDTH) if one[: at + WIDTH] not in kept), len(one)) // WIDTH
        behind = one[hits * WIDTH : (hits + 1) * WIDTH]
        siblings = [each for each in kept if len(each) == (hits + 1) * WIDTH and each.startswith(one[: hits * WIDTH])]
        most = max((len(os.path.commonprefix([each[hits * WIDTH :], behind])) for each in siblings), default=0)
        found_hits, blocks, found = engine.look(one)
        assert (found_hits, blocks) == (hits, most), one
        assert found[:hits] == [content(key(one[: at * WIDTH])) for at in range(1, hits + 1)]
        begins = [each for each in siblings if each.startswith(one[: hits * WIDTH + most])]
        assert not most or found[hits] in [content(key(each)) for each in begins]


def test_a_disk_that_cannot_be_read_for_a_while_still_has_what_begins_alike(place, address, attach, disk):
    node = BreakableNode(NodeConfig(address=address, arena_bytes=4 * MIB, disks=[disk]), place)
    try:
        node.wait_ready()
        engine = Engine(node, attach)
        engine.keep("abcd")
        engine.forget()
        (place / "fail").touch()
        assert engine.look("abxy") == (0, 0, [])
        assert engine.look("abxy") == (0, 0, []), "nothing of it is read for some seconds"
        (place / "fail").unlink()
        wait_until(lambda: engine.look("abxy") == (0, 2, [content(key("abcd"))]), what="it is read again")
    finally:
        node.close()
