"""The conformance suite of tiers: PDX's own pass it, and others' should.

A test file needs no more than

    class TestMyTier(TierConformance):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

and pytest. A `TierStore` opens tiers over one store and, if it can, damages and silences it. What a tier declares about
itself (`is_shared`, `can_recode`, `can_pin`) says which tests apply; the others are skipped.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdx.errors import CodecError, NodeError, TierError
from pdx.memory.form import Form
from pdx.store.history import Cause
from pdx.testing.tier_stage import DAMAGE, Content, TierStage, TierStore, alike, content, key

KV_BYTES = 256 << 10  # a chunk's, which can be encoded with a loss
FORM = Form("int8", "bf16", (1, 4, 16, 2, 64))  # pages of 16 KiB: 16 in a chunk, 4 in a slice
MIB = 1 << 20
LOOP_S = 0.25  # the most that a call of the control loop may take; no deadline of a store is as short
Make = Callable[..., TierStage]
DAMAGED = ("corrupt", "truncated", "outdated")
_used = itertools.count(1)


class TierConformance:
    @pytest.fixture
    def store(self) -> TierStore:
        """The store, of one test or of many, which use different chunks."""
        raise NotImplementedError("say which store the tier is opened over")

    @pytest.fixture
    def make(self, store: TierStore, tmp_path: Path) -> Iterator[Make]:
        made: list[TierStage] = []

        def make_one(codec: str = "none", content: Content = content, **settings: Any) -> TierStage:
            made.append(TierStage(tmp_path, lambda host: store.open(host, codec), content=content, **settings))
            return made[-1].opened()

        yield make_one
        for each in made:
            each.close()

    @pytest.fixture
    def stage(self, make: Make) -> TierStage:
        return make()

    @pytest.fixture
    def numbers(self) -> list[int]:
        """The numbers of chunks that no other test uses."""
        first = next(_used) * 64
        return list(range(first, first + 64))

    @pytest.fixture
    def other(self, stage: TierStage, store: TierStore, make: Make) -> TierStage:
        """Another node, if several share the store."""
        if not stage.tier.is_shared:
            pytest.skip("each node has its own")
        return make()

    # ---- bytes ------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("codec", "nbytes", "layers"),
        [
            *(("none", *of) for of in ((1, 1), (4096, 4), (40, 64), (70_000, 4096), ((9 << 20) + 1, 5))),
            *(("lossless", *of) for of in ((1, 1), (7000, 3), (70_000, 4096), ((2 << 20) + 1, 5))),
        ],
    )
    def test_what_is_loaded_is_what_was_stored(
        self, make: Make, store: TierStore, numbers: list[int], codec: str, nbytes: int, layers: int
    ) -> None:
        """Of any size, encoded or not, and after a restart."""
        stage = make(codec, alike, slot_bytes=nbytes, slots=3)
        number = numbers[0]
        copy = stage.start_store(number, layers=layers)
        assert stage.end(copy) is None
        assert 0 < copy.job.start_ns <= copy.job.end_ns
        assert copy.job.coded_bytes < nbytes
        if codec == "none" or nbytes > MIB:
            assert (copy.job.coded_bytes > 0) == (codec != "none")
        if store.is_durable:
            stage.reopen()
        assert stage.count(numbers[:2]) == 1
        [held] = stage.tier.find([key(number)], 1)
        assert (held.nbytes, held.layers) == (nbytes, layers)
        assert stage.load(number, layers=layers) is None

    def test_nodes_with_another_codec_read_what_is_there(
        self, make: Make, stage: TierStage, store: TierStore, numbers: list[int]
    ) -> None:
        assert stage.store(numbers[0])
        if not stage.tier.is_shared:
            stage.close_tier()
        second = make("lossless", alike)
        assert second.store(numbers[1])
        second.content = content
        assert second.count(numbers[:2]) == 2
        assert second.load(numbers[0]) is None
        second.close_tier()
        third = make("none", alike)
        assert third.count(numbers[:2]) == 2
        assert third.load(numbers[1]) is None

    def test_a_chunk_of_a_request_that_allows_a_loss_says_its_form(self, make: Make, numbers: list[int]) -> None:
        stage = make("lossless", alike, slot_bytes=KV_BYTES)
        assert stage.end(stage.start_store(numbers[0], form=str(FORM))) is None
        assert stage.count(numbers[:1]) == 1
        copy = stage.start_load(numbers[0])
        assert stage.end(copy) is None
        assert copy.job.form == str(FORM)
        assert 0 < copy.job.coded_bytes < 0.6 * KV_BYTES
        assert stage.tier.tally.read_bytes == copy.job.coded_bytes

    def test_a_load_leaves_the_neighbours_alone(self, stage: TierStage, numbers: list[int]) -> None:
        assert stage.store(numbers[0], nbytes=5000)
        for at in (1, 3):
            stage.put(stage.slot(at), content(at, 0, stage.slot_bytes))
        assert stage.count(numbers[:1]) == 1
        assert stage.load(numbers[0], at=2, nbytes=5000) is None
        for at in (1, 3):
            assert stage.bytes_at(stage.slot(at)) == content(at, 0, stage.slot_bytes)

    def test_a_slot_that_is_anothers_now_is_neither_read_nor_written(
        self, stage: TierStage, numbers: list[int]
    ) -> None:
        assert stage.store(numbers[0])
        assert stage.count(numbers[:1]) == 1
        slot = stage.slot(3)
        stage.arena.generations[slot.offset // 4096] += 1
        mine = content(9, 0, slot.nbytes)
        stage.put(slot, mine)
        copy = stage.copy([key(numbers[1])])
        assert stage.granted(copy) == [0]
        assert stage.end(stage.give("store", copy, numbers[1], 0, slot)).kind == "stale"
        assert stage.end(stage.give("load", stage.copy([key(numbers[0])]), numbers[0], 0, slot)).kind == "stale"
        assert bytes(stage.arena.data[slot.offset : slot.offset + slot.nbytes]) == mine
        assert not stage.has(numbers[1])
        assert stage.has(numbers[0]), "the tier's own is good"

    # ---- what is there ----------------------------------------------------------------------

    def test_a_chunk_is_there_when_all_its_shards_are(self, stage: TierStage, numbers: list[int]) -> None:
        assert stage.store(numbers[0], 0, shards=2)
        assert not stage.has(numbers[0], 2)
        stage.now += 2.0
        assert stage.store(numbers[0], 1, shards=2)
        assert stage.has(numbers[0], 2)
        assert stage.tier.holds(key(numbers[0]), 2)
        assert not stage.tier.holds(key(numbers[0]), 3)
        assert [stage.load(numbers[0], shard) for shard in (0, 1)] == [None, None]

    def test_a_lookup_ends_at_the_first_key_that_is_missing(self, stage: TierStage, numbers: list[int]) -> None:
        """With more keys than one message asks for, if it has to ask."""
        for number in [*numbers[:40], *numbers[41:44]]:
            assert stage.store(number)
        assert stage.count(numbers) == 40
        assert len(stage.tier.find([key(number) for number in numbers], 1)) == 40

    def test_what_is_there_is_not_stored_again(self, stage: TierStage, numbers: list[int]) -> None:
        assert stage.store(numbers[0])
        assert stage.has(numbers[0])
        assert stage.start_store(numbers[0]) is None
        assert stage.store(numbers[1], 0, shards=2)
        copy = stage.copy([key(numbers[1])], 2)
        assert stage.granted(copy) == [0]
        assert stage.end(stage.give("store", copy, numbers[1], 0, stage.slot(0))) is None

    def test_it_says_what_came_and_what_went(self, stage: TierStage, numbers: list[int]) -> None:
        stage.tier.changed = {}
        assert stage.store(numbers[0])
        assert stage.has(numbers[0])
        assert key(numbers[0]) in stage.tier.changed
        assert key(numbers[0]) in set(stage.tier.keys())
        assert stage.tier.holds(key(numbers[0]))
        stage.tier.changed.clear()
        assert stage.tier.evict([key(numbers[0])]) == 1
        assert key(numbers[0]) in stage.tier.changed
        assert not stage.tier.holds(key(numbers[0]))
        assert key(numbers[0]) not in set(stage.tier.keys())

    def test_what_was_done_is_counted(self, stage: TierStage, numbers: list[int]) -> None:
        kind, tally = stage.tier.kind, stage.tier.tally
        assert [stage.store(number) for number in numbers[:2]] == [True, True]
        assert stage.count(numbers[:1]) == 1
        assert stage.load(numbers[0]) is None
        assert (tally.stores, tally.loads, tally.errors, tally.dropped) == (2, 1, 0, 0)
        assert (tally.stored_bytes, tally.loaded_bytes) == (2 * stage.slot_bytes, stage.slot_bytes)
        assert (stage.counters[f"{kind}_stored"], stage.counters[f"{kind}_loaded"]) == (2, 1)
        assert (stage.status.is_up, stage.status.name) == (True, stage.tier.name)

    def test_another_node_finds_what_one_has_stored(
        self, stage: TierStage, other: TierStage, numbers: list[int]
    ) -> None:
        """It does not store it a second time, and asks again for what it took for missing."""
        assert other.count(numbers[:3]) == 0
        assert [stage.store(number) for number in numbers[:2]] == [True, True]
        other.now += 2.0
        assert other.count(numbers[:3]) == 2
        assert [other.load(number) for number in numbers[:2]] == [None, None]
        assert other.start_store(numbers[0]) is None
        assert other.tier.evict([key(numbers[0])], 1) == 1
        other.settle()
        stage.now += 60.0
        assert not stage.has(numbers[0])

    # ---- what is deleted --------------------------------------------------------------------

    def test_what_is_deleted_is_gone(self, stage: TierStage, store: TierStore, numbers: list[int]) -> None:
        """Also for the next tier; a later store works again."""
        for shard in range(2):
            assert stage.store(numbers[0], shard, shards=2)
        assert stage.store(numbers[1])
        assert stage.tier.evict([key(numbers[0]), key(numbers[2])]) == 1
        assert not stage.tier.find([key(numbers[0])], 2)
        stage.settle()
        if store.is_durable:
            stage.reopen()
        assert not stage.has(numbers[0], 2)
        assert stage.has(numbers[1])
        assert stage.store(numbers[0])
        stage.now += 2.0
        assert stage.has(numbers[0])
        assert stage.load(numbers[0]) is None

    def test_what_is_deleted_before_its_turn_is_not_stored(self, stage: TierStage, numbers: list[int]) -> None:
        """Its copy was admitted before the delete, and gives the tier its jobs later."""
        copy = stage.copy([key(number) for number in numbers[:2]])
        assert stage.granted(copy) == [0, 1]
        stage.tier.evict([key(numbers[0])])
        for number in numbers[:2]:
            stage.give("store", copy, number, 0, stage.slot(0))
            stage.until(lambda: copy.number in stage.over)
            assert stage.over.pop(copy.number) is None
        stage.tier.copy_ended(copy)
        stage.settle()
        assert [stage.has(number) for number in numbers[:2]] == [False, True]

    def test_what_is_deleted_while_it_is_stored_is_not_there_afterwards(
        self, stage: TierStage, numbers: list[int]
    ) -> None:
        """Whether the store had begun, or was over without the control loop's knowledge."""
        copies = [stage.start_store(number, at=at) for at, number in enumerate(numbers[:8])]
        stage.tier.evict([key(number) for number in numbers[:4]])
        call = stage.next_call()
        stage.tier.evict([key(number) for number in numbers[4:8]])
        call()
        for copy in copies:
            error = stage.end(copy)
            assert error is None or error.kind == "cancelled"
        stage.settle()
        stage.now += 2.0
        assert not any(stage.has(number) for number in numbers[:8])

    # ---- ends of jobs -----------------------------------------------------------------------

    def test_what_is_cancelled_ends_once(self, stage: TierStage, numbers: list[int]) -> None:
        copies = [stage.start_store(number, at=at) for at, number in enumerate(numbers[:12])]
        for copy in copies:
            stage.tier.cancel(copy)
        assert {error and error.kind for error in map(stage.end, copies)} <= {None, "cancelled"}
        stage.settle()

    def test_closing_ends_every_job(self, stage: TierStage, numbers: list[int]) -> None:
        assert stage.store(numbers[0])
        copies = [stage.start_store(number, at=at) for at, number in enumerate(numbers[1:13])]
        copies += [stage.start_load(numbers[0], at=14) for _ in range(8)]
        stage.close_tier()
        stage.tier.close()
        assert {error and error.kind for error in map(stage.end, copies)} <= {None, "cancelled"}
        assert stage.end(stage.start_load(numbers[0])).kind == "cancelled"

    @pytest.mark.parametrize("seed", range(2))
    def test_whatever_is_under_way_at_once_no_wrong_byte_is_loaded(
        self, make: Make, numbers: list[int], seed: int
    ) -> None:
        stage, random_ = make(("none", "lossless")[seed], alike), random.Random(seed)
        for _ in range(20):
            copies: list[Any] = []
            for at in range(12):
                number = numbers[random_.randrange(12)]
                if (what := random_.random()) < 0.5:
                    copies.append((number, at, stage.start_store(number, at=at)))
                elif what < 0.8 and stage.tier.find([key(number)], 1):
                    copies.append((number, at, stage.start_load(number, at=at)))
                elif what < 0.9:
                    stage.tier.evict([key(number)])
                elif copies and copies[-1][2] is not None:
                    stage.tier.cancel(copies[-1][2])
            for number, at, copy in copies:
                error = stage.end(copy) if copy is not None else None
                assert error is None or error.kind in ("cancelled", "busy", "missing")
                if copy is not None and error is None:
                    assert stage.bytes_at(stage.slot(at)) == stage.content(number, 0, stage.slot_bytes)
            stage.count(numbers[:12])
        stage.settle()
        assert not {"corrupt", "failed"} & {name.rpartition("_")[2] for name in stage.counters}

    # ---- damage and silence -----------------------------------------------------------------

    @pytest.mark.parametrize("damage", [*DAMAGE, "another's"])
    @pytest.mark.parametrize("codec", ["none", "lossless"])
    def test_whatever_is_stored_no_wrong_byte_is_loaded(
        self, make: Make, store: TierStore, numbers: list[int], codec: str, damage: str
    ) -> None:
        """Damage costs a miss and a counter, and the chunk is stored again; others are not touched."""
        stage = make(codec, alike)
        assert [stage.store(number) for number in numbers[:2]] == [True, True]
        assert stage.count(numbers[:2]) == 2
        others: list[bytes] = []

        def kept(good: bytes) -> bytes:
            others.append(good)
            return good

        self._alter(store, numbers[1], kept)
        self._alter(store, numbers[0], DAMAGE.get(damage, lambda good: others[0]))
        error = stage.load(numbers[0])
        assert isinstance(error, TierError)
        assert error.kind in DAMAGED
        assert stage.counters[f"{stage.tier.kind}_{error.kind}"] == stage.tier.tally.errors == 1
        assert not stage.has(numbers[0])
        assert stage.status.is_up, "the store is not to blame"
        assert stage.load(numbers[1]) is None
        assert stage.store(numbers[0])
        stage.now += 2.0
        assert stage.has(numbers[0])
        assert stage.load(numbers[0]) is None

    def test_what_somebody_else_has_removed_is_a_miss(
        self, stage: TierStage, store: TierStore, numbers: list[int]
    ) -> None:
        assert stage.store(numbers[0])
        assert stage.has(numbers[0])
        self._alter(store, numbers[0], lambda good: None)
        assert stage.load(numbers[0]).kind == "missing"
        assert stage.counters[f"{stage.tier.kind}_missing"] == 1
        assert not stage.has(numbers[0])
        assert stage.store(numbers[0])

    def _alter(self, store: TierStore, number: int, change: Callable[[bytes], bytes | None]) -> None:
        try:
            store.alter(key(number), 0, change)
        except NotImplementedError:
            pytest.skip("nobody can damage what is stored there")

    def test_a_store_that_does_not_answer_keeps_nobody_waiting(
        self, stage: TierStage, store: TierStore, numbers: list[int]
    ) -> None:
        """Neither the control loop, nor earlier jobs, nor later ones; afterwards all is as before."""
        assert [stage.store(number) for number in numbers[:4]] == [True] * 4
        assert stage.count(numbers[:4]) == 4
        try:
            with store.silent():
                copies = [stage.start_load(number, at=at + 1) for at, number in enumerate(numbers[:4])]
                copies.append(stage.start_store(numbers[9], at=9))

                def is_paused() -> bool:
                    stage.now += 6.0
                    return not stage.timed(lambda: stage.tier.takes_stores)

                while not is_paused():
                    if not stage.is_quiet or stage.tier.is_shared:
                        stage.turn()
                assert not stage.timed(lambda: stage.tier.find([key(numbers[0])], 1))
                assert stage.timed(lambda: stage.tier.why_not(key(numbers[0])))
                assert not stage.status.is_up
                assert stage.start_store(numbers[10], at=10) is None
                assert stage.tier.tally.dropped == 1
                gone = stage.tier.history.why(key(numbers[10]))
                assert gone is not None
                assert gone.why is Cause.NOT_STORED
                assert stage.tier.tally.errors
        except NotImplementedError:
            pytest.skip("nobody can silence that store")
        for copy in copies:
            stage.end(copy)

        stage.now += 11.0
        while not stage.tier.takes_stores:
            stage.turn()
            stage.now += 11.0
        stage.settle()
        assert stage.count(numbers[:4]) == 4
        assert [stage.load(number) for number in numbers[:4]] == [None] * 4
        assert stage.store(numbers[10])
        assert stage.longest_s < LOOP_S

    # ---- pins and forms ---------------------------------------------------------------------

    def test_pins_are_counted_and_bounded_or_refused(self, stage: TierStage, numbers: list[int]) -> None:
        tier = stage.tier
        assert [stage.store(number) for number in numbers[:2]] == [True, True]
        assert not tier.is_pinned(key(numbers[0]))
        if not tier.can_pin:
            with pytest.raises(NodeError):
                tier.pin([key(numbers[0])], pinned=True, share=1.0)
            return
        tier.pin([key(numbers[0])], pinned=True, share=0.9)
        tier.pin([key(numbers[0])], pinned=True, share=0.9)
        tier.pin([key(numbers[0])], pinned=False, share=0.9)
        assert [tier.is_pinned(key(number)) for number in numbers[:2]] == [True, False]
        with pytest.raises(NodeError, match="pin"):
            tier.pin([key(numbers[1])], pinned=True, share=0.0)
        tier.pin([key(numbers[0])], pinned=False, share=0.9)
        assert not tier.is_pinned(key(numbers[0]))

    def recode(self, stage: TierStage, numbers: list[int], codec: str, *, to: int = 0, shards: int = 1) -> Any:
        """Have the tier store these in another form. Returns what failed, by kind."""
        if not stage.tier.can_recode:
            pytest.skip("it stores chunks in one form")
        told: dict[bytes, Any] = {}
        pairs = [(key(number), key(number + to)) for number in numbers]
        recoding = stage.tier.recode(pairs, codec, shards, told.__setitem__)
        stage.until(lambda: recoding.is_over)
        stage.settle()
        assert (recoding.total, recoding.done + recoding.failed.total()) == (len(pairs), len(told))
        return {at: error and error.kind for at, error in zip(numbers, map(told.get, map(key, numbers)), strict=True)}

    def test_chunks_are_stored_in_another_form_and_back(self, make: Make, store: TierStore, numbers: list[int]) -> None:
        """Under the same key, if nothing is lost."""
        stage = make("none", alike)
        assert [stage.store(number, shard, shards=2) for number in numbers[:2] for shard in (0, 1)] == [True] * 4
        sizes: list[int] = []
        for codec in ("none", "lossless", "lossless", "none"):
            assert self.recode(stage, numbers[:3], codec, shards=2) == {
                numbers[0]: None,
                numbers[1]: None,
                numbers[2]: "missing",
            }
            assert stage.count(numbers[:2], 2) == 2
            assert [stage.load(numbers[1], shard) for shard in (0, 1)] == [None, None]
            copy = stage.start_load(numbers[0])
            assert stage.end(copy) is None
            sizes.append(copy.job.coded_bytes)
        assert sizes[0] == sizes[3] == 0 < sizes[1] == sizes[2] < stage.slot_bytes

    def test_with_a_loss_a_chunk_has_another_key_and_the_old_one_goes(self, make: Make, numbers: list[int]) -> None:
        stage = make("none", alike, slot_bytes=KV_BYTES)
        assert [stage.store(number, shard, shards=2) for number in numbers[:2] for shard in (0, 1)] == [True] * 4
        stage.tier.changed = {}
        assert self.recode(stage, numbers[:1], str(FORM), to=8, shards=2) == {numbers[0]: None}
        assert {key(numbers[0]), key(numbers[8])} <= set(stage.tier.changed)
        assert not stage.tier.holds(key(numbers[0]))
        assert [stage.has(numbers[at], 2) for at in (0, 8)] == [False, True]
        copy = stage.start_load(numbers[8], 1)
        assert stage.end(copy) is None
        assert copy.job.form == str(FORM)

    def test_of_a_chunk_that_is_damaged_no_shard_gets_another_form(
        self, make: Make, store: TierStore, numbers: list[int]
    ) -> None:
        stage = make("none", alike, slot_bytes=KV_BYTES)
        assert [stage.store(numbers[0], shard, shards=2) for shard in (1, 0)] == [True, True]
        self._alter(store, numbers[0], DAMAGE["last bit"])
        assert self.recode(stage, numbers[:1], str(FORM), to=8, shards=2) == {numbers[0]: "corrupt"}
        assert not stage.has(numbers[8], 2)
        assert not stage.has(numbers[8], 1)

    @pytest.mark.parametrize(
        ("to", "codec", "error"), [(0, str(FORM), TierError), (1, "lossless", TierError), (0, "zip", CodecError)]
    )
    def test_what_loses_nothing_keeps_its_key_and_what_does_changes_it(
        self, stage: TierStage, numbers: list[int], to: int, codec: str, error: type[Exception]
    ) -> None:
        if not stage.tier.can_recode:
            pytest.skip("it stores chunks in one form")
        with pytest.raises(error):
            stage.tier.recode([(key(numbers[0]), key(numbers[to]))], codec, 1, lambda *_: None)
