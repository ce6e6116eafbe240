"""What a real node says of chunks that a tier below has, had, or was never given."""

from contextlib import contextmanager

import pytest
from node_harness import MIB, attached
from remote_bed import made

from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Fill, Release
from pdx.wire.verbs import Why

CHUNK_BYTES = 64 << 10
LAYERS = 4
ROOM = MIB // CHUNK_BYTES


def keys(numbers):
    return [number.to_bytes(4, "big") * 4 for number in numbers]


@contextmanager
def engine(node):
    """Asks for chunks and saves those that are missing; returns word, sentence and chunks of the first reason."""
    with (
        attached(node.address, kind="scheduler", engine="e") as scheduler,
        attached(node.address, kind="worker", engine="e") as worker,
    ):

        def ask(numbers, request):
            fields = {"lease_s": 20.0, "wait_s": 20.0, "partial": True, "request": request}
            answer = scheduler.ask(Admit(keys(numbers), CHUNK_BYTES, LAYERS, **fields))
            if answer.granted_slots:
                worker.ask(Fill(answer.granted_slots, 0, LAYERS, seal=True))
            if answer.lease:
                scheduler.ask(Release(answer.lease))
            reason = scheduler.ask(Why(request)).requests[0].reasons[0]
            return reason.kind, reason.text, reason.count

        yield ask


def ready(node):
    wait_until(lambda: all(tier.state == "ok" for tier in node.status().tiers), what="all tiers are ready")
    return node


def stored(node, count):
    wait_until(lambda: [tier.stores for tier in node.status().tiers] == [count], what="all are stored")


def test_a_store_that_has_the_chunks_and_is_down_is_named(start_here, tmp_path):
    redis = made("redis", tmp_path / "redis").start()
    try:
        node = ready(start_here(arena_bytes=MIB, remote=redis.url, remote_lookup_s=0.3))
        with engine(node) as ask:
            ask(range(8), "first")
            stored(node, 8)
            ask(range(100, 100 + ROOM), "greedy")
            stored(node, 8 + ROOM)
            redis.kill()
            for number in range(200, 204):  # each is a question that fails
                ask([number], "a few")
            wait_until(lambda: "unreachable" in node.status().tiers[0].state, what="it is given up for a while")
            kind, text, count = ask(range(8), "again")
            assert (kind, count) == ("tier", 8)
            assert text.startswith("evicted for request greedy, ")
            assert "; remote does not answer: unreachable: " in text
    finally:
        redis.kill()


def test_what_the_cap_of_a_disk_has_removed_is_said_to_have_gone_from_both(start_here, place):
    node = ready(start_here(arena_bytes=MIB, disks=[str(place / "disk")], disk_limit_bytes=MIB + 200_000))
    with engine(node) as ask:
        ask(range(8), "first")
        stored(node, 8)
        for number in range(1, 4):
            ask(range(100 * number, 100 * number + ROOM), f"greedy {number}")
            stored(node, 8 + number * ROOM)
        kind, text, _ = ask(range(8), "again")
        assert kind == "evicted"
        assert text.startswith("evicted for request greedy 1, ")
        assert "; disk: removed to make room, " in text


@pytest.mark.parametrize("choice", ["twice-seen", "write-back"])
def test_what_the_choice_of_stores_left_out_is_said_to_be_refused(start_here, place, choice):
    node = ready(start_here(arena_bytes=MIB, disks=[str(place / "disk")], store=choice, store_window=0.01))
    with engine(node) as ask:
        ask(range(ROOM), "first")
        ask(range(100, 100 + ROOM), "greedy")
        kind, text, _ = ask([0], "again")
        assert kind == "policy"
        assert text.startswith("evicted for request greedy, ")
        assert f"(--store {choice})" in text
