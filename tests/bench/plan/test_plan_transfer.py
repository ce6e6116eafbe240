"""What hides: bytes are conserved, faster wires never hide less, and known cases come out in closed form."""

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.plan.transfer import group_of, overlap

ROOT = Path(__file__).resolve().parents[3]
STEPS = st.lists(st.tuples(st.integers(1, 8192), st.floats(1e-4, 2.0)), min_size=1, max_size=4)
SHAPE = {"layers": 32, "layer_token_bytes": 4096}


@given(STEPS, st.floats(1e6, 1e12), st.integers(1, 32), st.floats(0, 1e-3))
def test_parts_add_up(steps, speed, group, latency_s):
    way = overlap(steps, **SHAPE, wire_bytes_s=speed, group=group, latency_s=latency_s)
    assert way.nbytes == pytest.approx(sum(tokens for tokens, _ in steps) * 32 * 4096)
    assert way.prefill_s == pytest.approx(sum(seconds for _, seconds in steps))
    assert 0 <= way.early_bytes <= way.nbytes * 1.000001
    assert 0 <= way.exposed_s <= way.wire_s + latency_s + 1e-9
    late = way.nbytes - way.early_bytes
    # What is late goes at the wire's speed, at the end, without a pause.
    assert late / speed == pytest.approx(way.exposed_s, rel=1e-6, abs=latency_s * 1.001 + 1e-9)


def test_a_slow_wire_hides_what_goes_while_prefill_lasts():
    way = overlap([(1000, 0.032)], **SHAPE, wire_bytes_s=4096e5)
    # Layers take 1 ms to compute and 10 ms to send; the wire starts with the end of the first.
    assert way.exposed_s == pytest.approx(0.32 - 0.031)
    assert way.is_wire_bound


def test_layers_travel_together_until_a_message_is_large():
    assert group_of(4096, 32) == 1  # Llama-3.1-8B: 1 MiB per chunk and layer
    assert group_of(8192, 8) == 1  # the benches' tiny model
    assert group_of(1152, 61) == 4  # DeepSeek's latents
    assert group_of(1, 8) == 8


@pytest.mark.parametrize("channel", ["tcp", "nixl", "ucx", "shm"])
def test_the_measured_pushes_of_4000_tokens(channel):
    """32 layers of 8 MB, two of them per message; docs/plan.md says how near it is."""
    rounds = json.loads((ROOT / "bench" / "results" / "across.json").read_text())["details"][channel]
    prefill_s, share = (
        statistics.median(each[name] for each in rounds["layer_by_layer"]) for name in ("prefill_s", "at_end")
    )
    wire = (256 << 20) / statistics.median(each["after_s"] for each in rounds["at_once"])
    way = overlap([(4096, prefill_s)], layers=32, layer_token_bytes=2048, wire_bytes_s=wire, group=2)
    assert way.hidden_bytes_share == pytest.approx(share, abs=0.05)
