"""Hits that end within a chunk: which one begins as a prompt goes on, in memory or in a tier, and what is kept."""

import os
import random

import msgspec
import pytest
from service_stage import Below, attach, serving

from pdx.errors import ProtocolError, TierError
from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.keys import KEY_BYTES
from pdx.store.history import Cause
from pdx.store.lifecycle import State
from pdx.store.tier import Held
from pdx.wire.messages import Admit, Delete, Fill, Ping, Release

WIDTH = 4  # blocks to a chunk, of a granule each
NBYTES = WIDTH * GRANULE_BYTES
LAYERS = 2
ROOT = b"root" * 4


def key(prompt):
    """Of the chunk that ends so: as an engine's, it is the same whenever the prompt is."""
    return prompt.encode().rjust(KEY_BYTES, b"-")


def names(letters):
    return b"".join(letter.encode() * 16 for letter in letters)


def asking(prompt, **settings):
    """A question about a prompt whose blocks are these letters; what is missing is kept."""
    ends = [*range(WIDTH, len(prompt) + 1, WIDTH)]
    ends += [len(prompt)] if len(prompt) % WIDTH else []
    fields = {
        "nbytes": NBYTES, "layers": LAYERS, "lease_s": 20.0, "part": "keeps", "wait_s": 20.0,
        "tail_nbytes": len(prompt) % WIDTH * GRANULE_BYTES,
        "blocks": names(prompt), "chunk_blocks": WIDTH, "parent": ROOT, **settings,
    }  # fmt: skip
    return Admit([key(prompt[:end]) for end in ends], **fields)


class Bed:
    """A node and an engine of it; with a tier `below` it stores there all that is whole."""

    def __init__(self, service):
        self.service, self.store = service, service.store
        self.worker = attach(service, "e", "worker", engine="e")
        self.engine = attach(service, "e", "scheduler", engine="e")
        self.below = None

    def ask(self, ask):
        answer = self.service.handle(self.engine, ask)
        late = self.settle()
        assert len(late) == (answer is None)
        return late[0] if answer is None else answer

    def settle(self):
        """Until the tier is at nothing: the answers that came."""
        answers = []
        for _ in range(2):
            self.service.turn()
            answers += [answer for _, _, answer in self.service.admissions.late_answers()]
            while self.below is not None and self.below.jobs:
                self.below.end()
                self.service.turn()
                answers += [answer for _, _, answer in self.service.admissions.late_answers()]
        return answers

    def keep(self, prompt, **settings):
        """All of the prompt is there from now on; what was granted for that."""
        answer = self.ask(asking(prompt, **settings))
        self.release(answer)
        self.service.handle(self.worker, Fill(answer.granted_slots, layers=LAYERS, seal=True))
        self.settle()  # the tier stores it
        return answer

    def look(self, prompt, **settings):
        """Hits, the blocks behind them, and which chunks have them; nothing is held."""
        answer = self.ask(asking(prompt, nbytes=0, tail_nbytes=0, **settings))
        found = [self.store.at(slot).key.decode().lstrip("-") for slot in answer.slots]
        self.release(answer)
        return answer.hits, answer.part_blocks, found

    def release(self, answer):
        if answer.lease:
            self.service.handle(self.engine, Release(answer.lease))

    def forget(self):
        """Others have taken the room of what is in memory."""
        for chunk in list(self.store.index.slots[0].values()):
            self.store.pools[0].drop(chunk, Cause.EVICTED)

    def there(self):
        return sorted(chunk.key.decode().lstrip("-") for chunk in self.store.index.slots[0].values())


@pytest.fixture
def bed(place, clock):
    with serving(place, clock) as service:
        made = Bed(service)
        yield made
        assert (service.store.num_leases, len(service.copies)) == (0, 0)
        assert {chunk.state for chunk in service.store.index.slots[0].values()} <= {State.SEALED}


class Whole(Below):
    """All that it has are whole chunks."""

    def find(self, keys, shards):
        return [Held(NBYTES, LAYERS) for _ in super().find(keys, shards)]


@pytest.fixture
def below(bed):
    bed.below = Whole(bed.service.copies)
    bed.service.tiers.below.append([bed.below])
    return bed.below


# ---- in memory -----------------------------------------------------------------------------------


def test_the_leading_blocks_of_the_chunk_that_begins_alike_are_a_hit(bed):
    bed.keep("abcdefgh")
    assert bed.look("abcdefxy") == (1, 2, ["abcd", "abcdefgh"])
    assert bed.look("abxy") == (0, 2, ["abcd"])
    assert bed.look("xbcd") == (0, 0, [])
    assert bed.look("abxy", parent=key("abcd")) == (0, 0, []), "the same blocks behind something else"
    assert bed.service.counters["part_hit_blocks"] == 4


def test_the_end_of_a_prompt_is_kept_and_found_by_its_blocks(bed):
    kept = bed.keep("abcdef")
    assert [slot.nbytes for slot in kept.granted_slots] == [NBYTES, 2 * GRANULE_BYTES]
    assert bed.look("abcdefgh") == (1, 2, ["abcd", "abcdef"])
    assert bed.look("abcdexyz") == (1, 1, ["abcd", "abcdef"])


def test_the_end_of_a_prompt_is_not_kept_when_a_chunk_has_all_of_it(bed):
    """Whichever of the two comes first; but for what is being read."""
    bed.keep("abcdef")
    bed.keep("mnopqr")
    reading = bed.ask(asking("mnopqx", nbytes=0, tail_nbytes=0))
    bed.keep("abcdefgh")
    bed.keep("mnopqrst")
    assert bed.there() == ["abcd", "abcdefgh", "mnop", "mnopqr", "mnopqrst"]
    bed.release(reading)
    answer = bed.ask(asking("abcdefg"))
    assert (answer.hits, answer.part_blocks, answer.granted) == (1, 3, [])
    bed.release(answer)
    assert bed.look("abcdefgx")[:2] == (1, 3)


def test_a_lease_on_a_part_keeps_the_chunk(bed):
    bed.keep("abcd")
    answer = bed.ask(asking("abxy", nbytes=0))
    bed.service.handle(bed.engine, Delete([key("abcd")]))
    assert bed.service.store.index.census()[0] == {"retired": 1}
    bed.release(answer)


def test_the_tail_of_a_transfer_is_kept_after_it_if_its_blocks_have_names(bed):
    transfer = "transfer-parts-0123456789"
    bed.keep("abcdef", part="writes", transfer=transfer, lease_s=0.0)
    read = bed.ask(Admit(asking("abcdef").keys, lease_s=20.0, transfer=transfer))
    assert read.hits == 2
    bed.release(read)
    assert bed.look("abcdefgh")[:2] == (1, 2)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"blocks": b"x" * 17}, "17 bytes of block names"),
        ({"chunk_blocks": 0}, "0 blocks to a chunk"),
        ({"nbytes": NBYTES + 1}, "4 blocks to a chunk of"),
        ({"blocks": names("abcdefg")}, "names of 7 blocks, where the keys and the tail have 6"),
    ],
)
def test_names_that_do_not_fit_the_keys_are_refused(bed, changed, text):
    with pytest.raises(ProtocolError, match=text):
        bed.ask(msgspec.structs.replace(asking("abcdef"), **changed))


# ---- from a tier below ---------------------------------------------------------------------------


def test_a_chunk_that_begins_alike_is_loaded(bed, below):
    bed.keep("abcdefgh")
    bed.forget()
    assert bed.look("abcdefxy") == (1, 2, ["abcd", "abcdefgh"])
    assert bed.there() == ["abcd", "abcdefgh"]
    below.keys.clear()
    assert bed.look("abcdefgx") == (1, 3, ["abcd", "abcdefgh"]), "in memory it has its names again"
    bed.forget()
    assert bed.look("abxy") == (0, 0, []), "it is nowhere any more"


def test_what_begins_with_no_more_of_it_than_memory_has_is_not_loaded(bed, below):
    bed.keep("abcd")
    bed.forget()
    bed.keep("abxy", lease_s=0.0)
    assert bed.look("abzz") == (0, 2, ["abxy"])
    assert bed.there() == ["abxy"]


def test_it_is_loaded_also_where_all_whole_chunks_are_hits_and_room_is_had_behind_it(bed, below):
    bed.keep("abcdefgh")
    bed.forget()
    answer = bed.ask(msgspec.structs.replace(asking("abcdef", nbytes=0, tail_nbytes=0), keys=[key("abcd")]))
    assert (answer.hits, answer.part_blocks) == (1, 2)
    bed.release(answer)
    bed.forget()
    answer = bed.keep("abcdefxy")
    assert (answer.hits, answer.part_blocks, answer.granted) == (1, 2, [1])


def test_what_was_found_as_a_whole_is_known_in_part_from_then_on(bed, below):
    """As after a restart of the node."""
    below.keys.add(key("abcd"))
    assert bed.look("abxy") == (0, 0, []), "nobody has said yet what its blocks are"
    assert bed.look("abcd") == (1, 0, ["abcd"])
    assert bed.look("abxy") == (0, 2, ["abcd"])
    bed.forget()
    assert bed.look("axyz") == (0, 1, ["abcd"])


def test_a_load_that_fails_is_a_miss_and_a_tier_that_does_not_work_still_has_it(bed, below):
    bed.keep("abcd")
    bed.forget()
    has, below.keys, below.says = below.keys, set(), "does not answer"
    assert bed.look("abxy") == (0, 0, [])
    below.keys, below.says = has, ""
    assert bed.service.handle(bed.engine, asking("abxy", nbytes=0)) is None, "it is loaded"
    bed.service.turn()
    below.keys = set()
    below.end(TierError("its digest is another", "corrupt"))
    (answer,) = bed.settle()
    assert (answer.hits, answer.part_blocks, answer.slots) == (0, 0, [])


def test_it_is_not_loaded_where_computing_its_blocks_is_faster(bed, below):
    bed.keep("efgh")
    bed.forget()
    below.load_rate.moved(NBYTES, 0, 1_000_000_000)  # a chunk takes a second
    for chunk_s, found in ((1.5, (0, 0, [])), (30.0, (0, 2, ["efgh"]))):
        bed.service.handle(bed.worker, Ping(chunk_s=chunk_s))
        assert bed.look("efxy") == found


def test_another_one_comes_where_the_best_is_gone(bed, below):
    """A store that nodes share must be asked what it still has."""
    for prompt in ("abcd", "abxy"):
        bed.keep(prompt)
    bed.forget()
    below.is_shared = True
    below.keys.discard(key("abcd"))
    assert bed.look("abcz") == (0, 2, ["abxy"])


def test_deleted_chunks_are_not_found_in_part(bed, below):
    bed.keep("abcd")
    bed.forget()
    bed.service.handle(bed.engine, Delete([key("abcd")]))
    assert bed.look("abxy") == (0, 0, [])


def test_of_all_that_was_ever_kept_the_best_is_found(bed, below):
    """The tier has room for all of it, so that the model is a list of prompts."""
    rng = random.Random(7)
    kept = set()  # what chunks end with
    for number in range(200):
        if number % 10 == 9:
            bed.forget()
        prompt = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 4) * WIDTH))
        ends = range(0, len(prompt), WIDTH)
        if rng.random() < 0.3 and len(kept) < 60:
            bed.keep(prompt)
            kept.update(prompt[: at + WIDTH] for at in ends)
            continue
        at = next((at for at in ends if prompt[: at + WIDTH] not in kept), len(prompt))
        siblings = [each for each in kept if len(each) == at + WIDTH and each.startswith(prompt[:at])]
        most = max((len(os.path.commonprefix([each, prompt])) - at for each in siblings), default=0)
        most = most if at < len(prompt) else 0
        hits, blocks, found = bed.look(prompt)
        assert (hits, blocks) == (at // WIDTH, most), prompt
        assert found[:hits] == [prompt[:end] for end in range(WIDTH, at + 1, WIDTH)]
        assert not most or found[hits] in [each for each in siblings if each.startswith(prompt[: at + most])]
