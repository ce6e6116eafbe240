"""Deployments: parts add up, more is never worse, and both kinds agree with engines simulated step by step (seeded)."""

import random
import statistics

import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import case, engine

from pdx.bench.plan.fleet import max_batch, steady_batch

RATES = st.floats(0.1, 30)


def fewer(chosen, **change):
    return msgspec.structs.replace(chosen, work=msgspec.structs.replace(chosen.work, **change))


class Simulated:
    """One engine with Poisson arrivals: prompts in chunks, first come first served, beside the tokens it decodes."""

    def __init__(self, chosen, *, chunk, num_requests, does_prefill=True, seed=5):
        self.chosen, self.chunk, self.does_prefill = chosen, chunk, does_prefill
        draw, now = random.Random(seed), 0.0
        self.arrivals = []
        for _ in range(num_requests):
            now += draw.expovariate(chosen.work.rate)
            self.arrivals.append(now)
        self.firsts, self.gaps = [], []

    def run(self):
        work, now = self.chosen.work, 0.0
        waiting, decoding, coming = [], [], list(self.arrivals)
        while coming or waiting or decoding:
            while coming and coming[0] <= now:
                waiting.append([coming.pop(0), work.input_tokens if self.does_prefill else 0])
            if not self.does_prefill:
                decoding += [[at, at, work.output_tokens - 1] for at, _ in waiting]
                waiting = []
            if not waiting and not decoding:
                now = coming[0]
                continue
            size = min(waiting[0][1], self.chunk) if waiting else 0
            done = work.input_tokens - waiting[0][1] if waiting else 0
            now += self.chosen.engine.step_s(len(decoding), work.context, size, done)
            for request in decoding:
                self.gaps.append(now - request[1])
                request[1], request[2] = now, request[2] - 1
            decoding = [request for request in decoding if request[2]]
            if waiting:
                waiting[0][1] -= size
                if not waiting[0][1]:
                    self.firsts.append(now - waiting[0][0])
                    decoding.append([waiting.pop(0)[0], now, work.output_tokens - 1])
        return self


@pytest.mark.parametrize(("rate", "chunk"), [(0.8, 512), (1.6, 2048), (2.2, 1024)])
def test_a_mixed_engine_does_what_a_simulated_one_does(rate, chunk):
    chosen = case(rate=rate, output=100)
    service = chosen.mixed(1, chunk)
    found = Simulated(chosen, chunk=chunk, num_requests=600).run()
    assert service.itl_s == pytest.approx(statistics.fmean(found.gaps), rel=0.2)
    assert service.ttft_s - chosen.request_s == pytest.approx(statistics.fmean(found.firsts), rel=0.2)
    assert service.itl_high_s == pytest.approx(statistics.quantiles(found.gaps, n=20)[-1], rel=0.15)


@pytest.mark.parametrize("rate", [2.0, 6.0])
def test_a_decode_engine_does_what_a_simulated_one_does(rate):
    chosen = case(rate=rate, output=100)
    batch = steady_batch(chosen.engine, rate, chosen.work, 0.95)
    found = Simulated(chosen, chunk=1, num_requests=700, does_prefill=False).run()
    assert batch.step_s == pytest.approx(statistics.fmean(found.gaps), rel=0.05)
    assert batch.step_high_s == pytest.approx(statistics.quantiles(found.gaps, n=20)[-1], rel=0.12)


@settings(max_examples=examples(40))
@given(RATES, st.integers(100, 20_000))
def test_the_parts_of_a_request_add_up(rate, tokens):
    service = case(rate=rate, tokens=tokens).split(8, 8)
    request = service.request
    handoff = request.wire_s + request.control_s + request.scatter_s
    first = request.request_s + request.queue_s + request.load_s + request.prefill_s
    assert request.total_s == pytest.approx(first + handoff + request.first_decode_s)
    assert (service.ttft_s, request.handoff_s) == (request.ttft_s, handoff)
    assert min(msgspec.structs.astuple(request)) >= 0
    assert service.ttft_high_s >= service.ttft_s
    assert service.itl_high_s >= service.itl_s


def test_beyond_its_capacity_a_deployment_says_what_is_too_small():
    limits = case(rate=1000.0, wire=1e9).split(2, 2).limits
    texts = "\n".join(limit.text for limit in limits)
    assert "prompts come faster than 2 engines can prefill them" in texts
    assert "decoding falls behind" in texts
    assert "the link of each prefill engine would have to carry" in texts
    assert {limit.part for limit in limits} == {"prefill", "decode"}
    assert "prompts come faster than 1 engine can" in case(rate=1000.0).mixed(1, 512).limits[0].text


def test_memory_bounds_the_batch():
    chosen = case(rate=6.0, tokens=60_000, output=500)
    assert max_batch(chosen.engine, chosen.work) == pytest.approx(chosen.engine.kv_room_tokens / 60_500)
    service = chosen.split(100, 1)
    assert service.decode_batch == float("inf")
    assert "at most 6 requests fit" in next(limit.text for limit in service.limits if limit.part == "decode")


def test_reuse_saves_prefill_and_costs_a_load():
    plain = case().split(4, 4)
    warm = fewer(case(), reuse=0.5, reuse_bytes_s=25e9)
    service = warm.split(4, 4)
    assert service.request.prefill_s < plain.request.prefill_s * 0.6
    assert service.request.load_s == pytest.approx(0.002 + 4000 * 131_072 / 25e9)
    assert service.overlap.nbytes == plain.overlap.nbytes
    narrow = fewer(case(), reuse=0.5, reuse_bytes_s=1e9)
    for crowded, roomy in ((narrow.split(5, 9), narrow.split(6, 9)), (narrow.mixed(5, 512), narrow.mixed(6, 512))):
        assert "the link that reused KV comes over would have to carry 105%" in crowded.limits[-1].text
        assert not any("reused" in limit.text for limit in roomy.limits)


def test_the_roofline_of_a_step():
    one = engine()
    weights = 16.06e9 - 128_256 * 4096 * 2
    assert one.step_s(1, 0) == pytest.approx(0.003 + weights / (3350e9 * 0.7), rel=0.02)
    assert one.step_s(0, 0, 8192) == pytest.approx(0.003 + (2 * 6.98e9 * 8192 + 1.76e13) / (989e12 * 0.5), rel=0.02)
    assert one.prefill_s(20_000) > one.prefill_s(8192) + one.prefill_s(11_808)


# Prompt lengths and mean TTFT in ms without the transfer: Mooncake's documentation, Qwen3-8B on 8 H800 per engine.
MOONCAKE = {8192: 212.05 - 8.84, 16_384: 387.52 - 16.43, 32_768: 749.62 - 31.65}


@pytest.mark.parametrize("tokens", MOONCAKE)
def test_mooncakes_prefill(tokens):
    predicted_ms = (0.040 + engine("qwen3-8b", "h800", 8).prefill_s(tokens)) * 1e3  # 40 ms: their TTFT of 128 tokens
    assert 1 / 2 < predicted_ms / MOONCAKE[tokens] < 1.5
