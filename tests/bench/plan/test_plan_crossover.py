"""Load or compute: crossovers solve the equation, move the right way, and lie where others found them."""

import pytest
from plan_cases import engine

from pdx.bench.plan.transfer import load_s, loads_from

GBPS = 1e9 / 8


def test_the_shape_of_the_lmcache_papers_figure_12():
    """The slower the link, the longer a prompt must be; at 128 Gbps loading is faster at any useful length."""
    chosen = engine("llama-3.1-8b", "h100")
    links = (8, 16, 32, 64, 128)
    starts = [loads_from(chosen.prefill_s, chosen.kv_token_bytes, rate * GBPS) or 10**9 for rate in links]
    assert starts == sorted(starts, reverse=True)
    assert 2_000 < starts[2] < 32_000
    assert starts[4] <= 256


def test_cached_attentions_example():
    """Their paper: 2K tokens of LLaMA-65B on four A100 prefill in 360 ms, 5 GB load in 192 ms at 26 GB/s."""
    chosen = engine("llama-65b", "a100", 4)
    assert chosen.prefill_s(2048) == pytest.approx(0.36, rel=0.5)
    assert load_s(2048, chosen.shapes.kv_token_bytes, 26e9) == pytest.approx(0.192, rel=0.15)
