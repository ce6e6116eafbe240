"""Spans of pushes between two nodes: each write of a transfer, from its submission to its acknowledgement."""

import time
from collections import Counter

import pytest
from node_harness import MIB, attached
from peers_harness import LocalCluster, pattern, put, read

from pdx.config import NodeConfig
from pdx.errors import ConfigError
from pdx.node.daemon import Daemon
from pdx.telemetry import trace
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Cancel, Fill

TRANSFER = "transfer-0123456789"
LAYERS = 4
TAIL = 8192
KEYS = [bytes([number]) * 16 for number in range(3)]  # two chunks of 1 MiB per layer, and a tail
PER_LAYER = 2 * MIB + TAIL // LAYERS


@pytest.fixture
def folder(place):
    made = place / "spans"
    made.mkdir(mode=0o700)
    trace.switch(made, True)
    return made


@pytest.fixture
def cluster(place, folder):
    with LocalCluster(place, "ab", channels=["tcp"], trace=str(folder), peer_share=1.0) as made:
        made.start("a", "b")
        yield made


def reserve(prefill):
    return prefill.ask(
        Admit(KEYS, LAYERS * MIB, layers=LAYERS, tail_nbytes=TAIL, transfer=TRANSFER, push_to="b", part="writes")
    )


def wait_sent(cluster, nbytes):
    wait_until(lambda: cluster.counter("a", "peer_stored_bytes") == nbytes, what=f"{nbytes} bytes are acknowledged")


def spans_of(folder, nbytes):
    """The spans, as soon as they account for so many bytes."""

    def found():
        spans = trace.read(folder)
        return spans if sum(span.nbytes for span in spans) >= nbytes else None

    return wait_until(found, timeout_s=30.0, what="the spans are written while the nodes go on")


def by_layer(spans):
    found = Counter()
    for span in spans:
        for layer in range(span.first_layer, span.first_layer + span.num_layers):
            found[layer] += span.nbytes / span.num_layers
    return dict(found)


def test_every_layer_is_written_once_and_when_it_is_filled(cluster, folder):
    bounds = []
    with attached(cluster.address("a")) as prefill:
        slots = reserve(prefill).granted_slots
        for layer in range(LAYERS):
            is_last = layer == LAYERS - 1
            bounds.append(time.monotonic_ns())
            prefill.ask(Fill(slots, layer, 1, seal=is_last))
            wait_sent(cluster, (layer + 1) * PER_LAYER)
        bounds.append(time.monotonic_ns())
        sent = LAYERS * PER_LAYER
        spans = spans_of(folder, sent)
    assert sum(span.nbytes for span in spans) == sent == cluster.counter("a", "peer_stored_bytes")
    assert by_layer(spans) == dict.fromkeys(range(LAYERS), PER_LAYER)
    assert cluster.counter("a", "peer_stored_ns") == sum(span.end_ns - span.start_ns for span in spans)
    for span in spans:
        assert (span.lane, span.transfer, span.who, span.num_layers) == ("wire", TRANSFER, "a", 1)
        assert bounds[span.first_layer] <= span.start_ns <= span.end_ns <= bounds[span.first_layer + 1]
    cluster.settle()


def test_a_transfer_that_is_given_up_has_spans_of_what_was_sent(cluster, folder):
    with attached(cluster.address("a")) as prefill:
        slots = reserve(prefill).granted_slots
        prefill.ask(Fill(slots, 0, 1))
        wait_sent(cluster, PER_LAYER)
        prefill.ask(Cancel(TRANSFER))
        prefill.ask(Fill(slots, 1, LAYERS - 1, seal=True))
        cluster.settle()
        assert by_layer(spans_of(folder, PER_LAYER)) == {0: PER_LAYER}


def test_what_is_no_transfer_or_not_asked_for_has_none(cluster, folder):
    a, b = cluster["a"], cluster["b"]
    put(a, "chunk", pattern(1, MIB), push_to="b")
    assert read(b, "chunk", wait_s=10.0) == pattern(1, MIB)
    trace.switch(folder, False)
    with attached(cluster.address("a")) as prefill:
        prefill.ask(Fill(reserve(prefill).granted_slots, 0, LAYERS, seal=True))
        wait_sent(cluster, MIB + LAYERS * PER_LAYER)
    cluster.settle()
    cluster.close()  # which writes what is left
    assert trace.read(folder) == []
    assert sorted(path.stat().st_size for path in folder.glob("*.spans")) == [0, 0]


def test_a_folder_that_is_not_there_ends_the_start_and_leaves_nothing(address, place):
    with pytest.raises(ConfigError, match="mkdir -m 700"):
        Daemon(NodeConfig(address=address, arena_bytes=MIB, trace=f"{place}/none"))
    assert list(place.iterdir()) == []
