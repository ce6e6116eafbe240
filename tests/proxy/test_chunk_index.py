"""The proxy's index of chunks against a model, and following a node over a line that loses things."""

import random
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from events_bed import EventsBed, key, random_step
from hypothesis import given
from hypothesis import strategies as st

from pdx.node.events.follower import MAX_REPEATS, Follower
from pdx.proxy import chunk_index
from pdx.proxy.chunk_index import ANY, OTHERS, ChunkIndex
from pdx.proxy.following import Following
from pdx.telemetry.env import Env
from pdx.wire.base import MAX_RUN_KEYS
from pdx.wire.messages import encode
from pdx.wire.proxy import Changes, Run, decode_from_proxy, decode_to_proxy

KEYS = [key(number) for number in range(40)]


def model_lookup(model, keys):
    """`model`: (node, tier) -> set of keys."""
    answer = {}
    for node in {node for node, _ in model}:
        tiers = {tier: found for (each, tier), found in model.items() if each == node}
        counts = {ANY: run(keys, set().union(*tiers.values()))}
        counts |= {tier: run(keys, found) for tier, found in tiers.items()}
        if counts[ANY]:
            answer[node] = {tier: count for tier, count in counts.items() if count}
    return answer


@contextmanager
def traced():
    """Says how many bytes of memory were taken since."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def run(keys, found):
    return next((at for at, each in enumerate(keys) if each not in found), len(keys))


@given(seed=st.integers(0, 1 << 30))
def test_a_lookup_is_that_of_the_model(seed):
    rng = random.Random(seed)
    index, model = ChunkIndex(1000, Counter()), {}
    nodes = ["a", "b", "c"]
    tiers = [*(f"disk {number}" for number in range(rng.randrange(1, chunk_index.TIERS))), OTHERS]
    for _ in range(rng.randrange(60)):
        node, tier = rng.choice(nodes), rng.choice(tiers)
        start = rng.randrange(8)
        some = KEYS[start : start + rng.randrange(1, 30)]
        found = model.setdefault((node, tier), set())
        if rng.random() < 0.6:
            index.add(node, tier, b"".join(some))
            found.update(some)
        elif rng.random() < 0.8:
            index.remove(node, tier, b"".join(some))
            found.difference_update(some)
        else:
            index.drop(node)
            model = {place: found for place, found in model.items() if place[0] != node}
        if rng.random() < 0.3:
            index.sweep()
        first = rng.randrange(4)
        asked = KEYS[first : first + rng.randrange(1, 36)]
        assert index.lookup(asked) == model_lookup(model, asked)
    for _ in range(2 * 256):
        index.sweep()
    assert len(index) == len(set().union(*model.values()))
    assert index.is_complete


def test_what_is_beyond_the_limit_is_left_out_and_said(monkeypatch):
    counters = Counter()
    index = ChunkIndex(10, counters)
    index.add("a", "host", b"".join(KEYS))
    index.add("b", "host", b"".join(KEYS[:10]))
    assert index.lookup(KEYS) == {"a": {ANY: 10, "host": 10}, "b": {ANY: 10, "host": 10}}
    assert (len(index), counters["chunk_index_full"], index.is_complete) == (10, 30, False)
    index.drop("a")
    assert index.is_complete


def test_tiers_beyond_sixteen_are_told_as_one():
    index = ChunkIndex(1000, Counter())
    for number in range(40):
        index.add("a", f"disk {number}", KEYS[0])
    (found,) = index.lookup(KEYS).values()
    assert len(found) == chunk_index.TIERS + 1
    assert found[OTHERS] == found["disk 3"] == found[ANY] == 1


def test_that_another_node_has_a_chunk_costs_no_memory():
    """Equal sets of places are one object."""
    index, many = ChunkIndex(100_000, Counter()), b"".join(number.to_bytes(16, "little") for number in range(50_000))
    index.add("a", "host", many)
    with traced() as grown:
        index.add("b", "host", many)
        assert grown() < 50_000


def test_places_of_nodes_that_are_gone_are_used_again():
    index = ChunkIndex(1000, Counter())
    with traced() as grown:
        for _ in range(1000):
            index.add("a", "host", KEYS[0])
            index.drop("a")
            while len(index):
                index.sweep()
        assert grown() < 100_000


# ---- following ----------------------------------------------------------------------------------


class Line:
    """Between a follower in a node and the proxy, which loses some of what goes over it."""

    def __init__(self, bed, rng, loss, limit=100_000):
        self.bed, self.rng, self.loss = bed, rng, loss
        self.now = 0.0
        self.env = Env(lambda: self.now)
        self.counters = self.env.counters
        self.to_proxy, self.to_node = [], []
        self.last = None  # that the node told
        self.epoch = 1
        self.follower = Follower(bed.log, self.epoch)
        self.index = ChunkIndex(limit, self.counters)
        control = Mock(follow=lambda node, ask: self.to_node.append(encode(ask)))
        self.following = Following(self.index, control, self.env, timeout_s=10.0)

    def send(self, changes):
        if len(self.to_proxy) >= 3:
            return False
        self.last = changes
        self.to_proxy.append(encode(changes))
        return True

    def _is_lost(self):
        return self.rng.random() < self.loss

    def pass_on(self):
        """What is on its way arrives, or does not."""
        frames, self.to_node = self.to_node, []
        for frame in frames:
            if not self._is_lost():
                self.follower.asked(decode_from_proxy(frame))
        self.bed.log.turn()
        self.follower.turn(self.send)
        frames, self.to_proxy = self.to_proxy, []
        for frame in frames:
            if not self._is_lost():
                self.following.took("n", decode_to_proxy(frame))
                if self.loss and self.rng.random() < 0.1:
                    self.following.took("n", decode_to_proxy(frame))

    def settle(self):
        self.loss = 0.0
        for _ in range(300):
            self.following.heard("n", self.epoch)
            self.pass_on()

    def known(self):
        found = {each: self.index.lookup([each]).get("n", {}) for each in map(key, range(256))}
        return {each: set(tiers) - {ANY} for each, tiers in found.items() if tiers}

    def others(self, keys):
        """Another node tells all that it has."""
        self.following.heard("others", 1)
        ask = decode_from_proxy(self.to_node.pop())
        told = Changes(ask.stream, 1, 1, 1, 1, [Run("host", True, b"".join(keys))], first=True)
        self.following.took("others", decode_to_proxy(encode(told)))


@given(seed=st.integers(0, 1 << 30), loss=st.sampled_from([0.0, 0.01, 0.3]))
def test_a_proxy_that_loses_frames_ends_with_what_is_there(tmp_path_factory, seed, loss):
    rng = random.Random(seed)
    bed = EventsBed(tmp_path_factory.mktemp("bed"), slots=6, ring_keys=rng.choice([5, 1000]))
    try:
        line = Line(bed, rng, loss)
        for _ in range(60):
            random_step(bed, rng)
            if rng.random() < 0.3:
                line.following.heard("n", line.epoch)
            if rng.random() < 0.7:
                line.pass_on()
            if rng.random() < 0.02:
                line.follower.gone()  # the line broke
        line.settle()
        assert line.known() == bed.truth()
        assert line.following.is_complete
    finally:
        bed.close()


@pytest.fixture
def line(tmp_path, request):
    """A parameter is the index's limit."""
    bed = EventsBed(tmp_path, slots=6)
    yield Line(bed, random.Random(1), 0.0, *(getattr(request, "param", ())))
    bed.close()


def test_a_node_of_whose_first_telling_a_part_was_lost_begins_anew(line):
    for number in range(10_000):
        line.bed.disk.put(number.to_bytes(16, "big"))
    line.bed.log.turn()
    line.following.heard("n", 1)
    line.follower.asked(decode_from_proxy(line.to_node.pop()))
    line.follower.turn(line.send)
    line.following.took("n", decode_to_proxy(line.to_proxy.pop(0)))
    assert 0 < len(line.index) < 10_000
    line.to_proxy.clear()
    for _ in range(MAX_REPEATS):
        line.following.heard("n", 1)
        line.follower.asked(decode_from_proxy(line.to_node.pop()))
    line.settle()
    assert len(line.index) == 10_000
    assert line.following.is_complete
    line.bed.disk.put(key(1))
    line.settle()
    assert len(line.index) == 10_001


def test_a_node_in_a_new_life_is_asked_for_everything(line):
    line.bed.disk.put(key(1))
    line.settle()
    assert line.known() == {key(1): {"disk"}}
    line.bed.disk.there.clear()
    line.bed.disk.put(key(2))
    line.epoch = 2
    line.bed.log.leave(line.follower)
    line.follower = Follower(line.bed.log, 2)
    line.settle()
    assert line.known() == {key(2): {"disk"}}


def test_a_silent_node_is_forgotten_and_comes_back(line):
    line.bed.disk.put(key(1))
    line.settle()
    line.now = 11.0
    line.following.look(None)
    assert line.known() == {}
    line.settle()
    assert line.known() == {key(1): {"disk"}}
    line.following.look({"others"})
    assert line.known() == {}


def test_a_node_that_begins_anew_without_end_does_not_make_the_index_wider(line, caplog, monkeypatch):
    """Each time it is another place until the last one was swept out, and all numbers get longer."""
    monkeypatch.setattr(chunk_index, "SWEEP_S", 0.0)
    line.others([key(1)])
    told = line.counters["chunk_changes"]
    for frame in range(1, 200):
        line.following.heard("n", 1)
        ask = decode_from_proxy(line.to_node[-1])
        number = ask.frame + 1
        runs = [Run("disk", True, key(frame))]
        line.following.took("n", Changes(ask.stream, 1, number, 1, frame, runs, first=True, whole=True))
    assert line.counters["chunk_changes"] - told <= chunk_index.MAX_LEAVING + 1
    assert line.index.lookup([key(1)])["others"] == {ANY: 1, "host": 1}
    assert sum("begins anew" in record.message for record in caplog.records) == 1
    for _ in range(2 * 256):
        line.following.look(None)
    line.bed.disk.put(key(7))
    line.settle()
    assert line.known() == {key(7): {"disk"}}


def test_a_frame_of_more_keys_than_a_frame_has_is_not_taken_in(line, caplog):
    line.settle()
    runs = [Run(f"disk {at}", True, at.to_bytes(16, "big") * MAX_RUN_KEYS) for at in range(2)]
    changes = Changes(line.last.stream, line.last.telling, line.last.frame + 1, 1, 1, runs)
    line.following.took("n", decode_to_proxy(encode(changes)))
    assert len(line.index) == 0
    assert not line.following.is_complete
    assert sum("keys in one frame" in record.message for record in caplog.records) == 1
    line.bed.disk.put(key(7))
    line.settle()
    assert line.known() == {key(7): {"disk"}}


@pytest.mark.parametrize("line", [[20]], indirect=True)
def test_others_are_known_whole_again_once_there_is_room(line):
    line.others(KEYS[20:35])
    for number in range(10):
        line.bed.disk.put(key(number))
    line.settle()
    assert not line.following.is_complete
    told = line.counters["chunk_changes"]
    for _ in range(300):
        line.following.look({"n", "others"})
    line.settle()
    assert (len(line.known()), line.counters["chunk_changes"]) == (5, told), "there is no room: it is not told again"
    for _ in range(300):
        line.following.look({"n"})
    line.settle()
    assert line.following.is_complete
    assert line.known() == {key(number): {"disk"} for number in range(10)}
    told = line.counters["chunk_changes"]
    for _ in range(300):
        line.following.look({"n"})
    line.settle()
    assert line.counters["chunk_changes"] == told
