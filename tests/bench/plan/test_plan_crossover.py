"""Load or compute: crossovers solve the equation, move the right way, and lie where others found them."""

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import engine

from pdx.bench.plan.transfer import crossover, load_s

GBPS = 1e9 / 8


@settings(max_examples=examples(40))
@given(st.floats(1e-6, 1e-4), st.floats(1e-11, 1e-8), st.floats(1e8, 1e11))
def test_a_crossover_solves_the_equation(linear, quadratic, speed):
    def prefill_s(tokens):
        return linear * tokens + quadratic * tokens**2

    found = crossover(prefill_s, 131_072, speed)
    for turn in found.turns:
        before, at = (prefill_s(n) - load_s(n, 131_072, speed) for n in (turn - 1, turn))
        assert (before > 0) != (at > 0)
    if found.load_from is not None:
        assert prefill_s(found.load_from) >= load_s(found.load_from, 131_072, speed)
        assert found.turns[-1:] in ([], [found.load_from])


@settings(max_examples=examples(12))
@given(st.floats(1e8, 1e11), st.floats(1, 10))
def test_more_bandwidth_never_moves_it_up(speed, times):
    chosen = engine()
    slow, fast = (crossover(chosen.prefill_s, chosen.kv_token_bytes, rate) for rate in (speed, speed * times))
    assert (fast.load_from or 10**9) <= (slow.load_from or 10**9)


def test_the_shape_of_the_lmcache_papers_figure_12():
    """The slower the link, the longer a prompt must be; at 128 Gbps loading is faster at any useful length."""
    chosen = engine("llama-3.1-8b", "h100")
    found = [crossover(chosen.prefill_s, chosen.kv_token_bytes, rate * GBPS) for rate in (8, 16, 32, 64, 128)]
    starts = [one.load_from or 10**9 for one in found]
    assert starts == sorted(starts, reverse=True)
    assert 2_000 < starts[2] < 32_000
    assert starts[4] <= 256


def test_cached_attentions_example():
    """Their paper: 2K tokens of LLaMA-65B on four A100 prefill in 360 ms, 5 GB load in 192 ms at 26 GB/s."""
    chosen = engine("llama-65b", "a100", 4)
    assert chosen.prefill_s(2048) == pytest.approx(0.36, rel=0.5)
    assert load_s(2048, chosen.shapes.kv_token_bytes, 26e9) == pytest.approx(0.192, rel=0.15)
