"""Calibration and check: what the model itself produced is found again, and it agrees with what was measured."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import CONTROL_S, CPU, REQUEST_S, SCATTER, TINY, measured

from pdx.bench.breakdown import records
from pdx.bench.plan.check import alone, check, control_s, handoff_s, mean_first_s, mean_gap_s, pair, table, way
from pdx.bench.plan.fit import (
    calibrate,
    choose_system,
    fit_flops,
    load_result,
    points,
    shapes_measured,
)
from pdx.bench.plan.options import ask
from pdx.bench.plan.shapes import PRESETS
from pdx.errors import ConfigError


def test_what_the_model_produced_is_found_again():
    result = measured()
    found = calibrate(result, points(result, "pdx"), PRESETS["tiny"])
    assert found.at_tokens == [1000, 4000, 8000]
    assert found.engine.speeds.flops == pytest.approx(CPU.flops, rel=0.02)
    assert found.engine.speeds.attention_flops == pytest.approx(CPU.attention_flops, rel=0.02)
    assert found.engine.speeds.memory_bytes == pytest.approx(CPU.memory_bytes, rel=0.05)
    assert found.scatter_bytes_s == pytest.approx(SCATTER)
    assert found.control_s == pytest.approx(CONTROL_S)
    assert found.request_s == pytest.approx(REQUEST_S, rel=0.01)


def test_one_length_predicts_the_others():
    found = check(measured(), at=4000)
    assert {row.quantity for row in found.rows} == {"prefill", "scatter", "handoff", "hidden", "TTFT", "ITL"}
    assert found.errors["handoff"] < 0.001
    assert found.errors["prefill"] < 0.12  # one speed for matrices and attention, which differ by a fifth
    assert found.errors["TTFT"] < 0.12
    assert found.errors["ITL"] < 0.12
    own = [row for row in found.rows if row.is_own]
    assert {(row.tokens, row.concurrency) for row in own} == {(4000, 1)}
    assert all(abs(row.error) < 0.01 for row in own if row.quantity != "ITL")
    assert table(found).row_count == len(found.rows)


def test_two_nodes_hide_what_they_can():
    result = measured()
    wired = [
        msgspec.structs.replace(
            request,
            parts=msgspec.structs.replace(request.parts, wire=records.Part(request.prompt_tokens * 0.065, 1.0)),
            decode_first_ms=request.decode_first_ms + 40,
            hidden_share=0.9,
        )
        for request in result.requests
        if request.parts
    ]
    found = check(msgspec.structs.replace(result, requests=wired))
    assert found.calibration.is_wired
    assert found.calibration.wire_bytes_s == pytest.approx(65_536 / 65e-6, rel=0.01)
    hidden = {row.tokens: row.predicted for row in found.rows if row.quantity == "hidden"}
    assert hidden[1000] == pytest.approx(7 / 8, abs=0.01)
    assert hidden[8000] > 0.95  # in four steps
    own = [row.error for row in found.rows if row.quantity == "handoff" and row.is_own]
    assert own == [pytest.approx(0, abs=1e-6)]


def test_what_a_wire_does_not_hide_counts_once(tmp_path):
    """A plan from a measurement of two nodes has the handoff that was measured, not the exposed wire twice."""
    tokens, wire_ms = 4000, 10_000.0  # much longer than prefill
    one = measured((tokens,), (1,))
    wired = [
        msgspec.structs.replace(
            request, parts=msgspec.structs.replace(request.parts, wire=records.Part(wire_ms, wire_ms)), hidden_share=0.4
        )
        for request in one.requests
        if request.parts
    ]
    found = calibrate(one, points(msgspec.structs.replace(one, requests=wired), "pdx"), PRESETS["tiny"])
    exposed_s = way(found, tokens).exposed_s
    assert exposed_s > 1
    wired = [
        msgspec.structs.replace(request, decode_first_ms=request.decode_first_ms + exposed_s * 1e3) for request in wired
    ]
    one = msgspec.structs.replace(one, requests=wired)
    found = calibrate(one, points(one, "pdx"), PRESETS["tiny"])
    assert control_s(found) == pytest.approx(CONTROL_S, rel=0.01)
    path = tmp_path / "result.json"
    records.save(one, path)
    asked = ask(
        SimpleNamespace(
            **dict.fromkeys(("model", "gpu", "tp", "weights", "kv", "reuse_link", "memory", "system"), ""),
            **dict.fromkeys(("step", "control"), "1ms"),
            **dict.fromkeys(("prefillers", "decoders", "input_variation", "reuse"), 0),
            **dict.fromkeys(("mfu", "mbu", "link_share"), 1.0),
            **{"link": "1GB/s", "links": "1GB/s", "arena": "host", "rate": 0.001, "share": 0.95},
            **{"input_tokens": str(tokens), "output_tokens": "16", "ttft": "60s", "itl": "60s", "calibrate": path},
        )
    )
    planned = asked.case.split(1, 1).request.handoff_s
    assert planned == pytest.approx(handoff_s(found, tokens), abs=0.01)  # the plan's wire has a latency
    assert planned == pytest.approx(points(one, "pdx")[0].handoff_s, abs=0.01)


def test_a_system_that_moves_everything_after_prefill():
    result = measured()
    nixl = [
        msgspec.structs.replace(
            request,
            system="nixl",
            parts=msgspec.structs.replace(request.parts, wire=request.parts.scatter, scatter=records.Part(0.0, 0.0)),
            hidden_share=None,
        )
        for request in result.requests
        if request.parts
    ]
    found = check(msgspec.structs.replace(result, requests=nixl), at=4000)
    assert not found.calibration.is_wired
    assert found.errors["handoff"] < 0.001
    assert "hidden" not in found.errors


@given(
    st.floats(1e9, 1e15), st.floats(1e9, 1e15), st.lists(st.integers(100, 50_000), min_size=2, max_size=5, unique=True)
)
def test_two_speeds_from_many_lengths(flops, attention, lengths):
    shapes = PRESETS["tiny"]
    times = [(n, shapes.linear_flops(n) / flops + shapes.attention_flops(n, 0) / attention) for n in lengths]
    found = fit_flops(shapes, times)
    for tokens, seconds in times:
        fitted = shapes.linear_flops(tokens) / found[0] + shapes.attention_flops(tokens, 0) / found[1]
        assert fitted == pytest.approx(seconds, rel=0.5 if max(lengths) < 1.5 * min(lengths) else 0.01)


def test_speeds_are_never_negative():
    assert min(fit_flops(PRESETS["tiny"], [(1000, 1.0), (2000, 1.1)])) > 0


def test_requests_sent_at_once():
    prefill_s, step_s = TINY.prefill_s(4000), TINY.step_s(1, 4008)
    one = pair(TINY, 4000, 1, 16, handoff_s=0.05)
    assert (mean_first_s(one), one[0].gaps_s[0]) == (pytest.approx(prefill_s), pytest.approx(0.05 + step_s))
    four = pair(TINY, 4000, 4, 16, handoff_s=0.05)
    assert mean_first_s(four) == pytest.approx(2.5 * prefill_s, rel=0.05)
    single = alone(TINY, 4000, 4, 16)
    assert mean_first_s(single) >= mean_first_s(four)
    assert mean_gap_s(single) > 3 * mean_gap_s(four)  # prompts interrupt decoding
    assert all(len(request.gaps_s) == 15 for request in (*four, *single))
    assert mean_gap_s(alone(TINY, 100, 2, 1)) == 0.0


def test_what_does_not_fit_is_refused(tmp_path):
    result = measured()
    with pytest.raises(ConfigError, match=r"system 'nixl' measured nothing in that result; there are pdx, plain"):
        choose_system(result, "nixl")
    with pytest.raises(ConfigError, match=r"no prefill of 2,000 tokens .* there is: 1,000, 4,000, 8,000"):
        check(result, at=2000)
    with pytest.raises(ConfigError, match=r"llama-3.1-8b has 131,072 bytes of KV per token, .* with 65,536"):
        shapes_measured(result, PRESETS["llama-3.1-8b"])
    with pytest.raises(ConfigError, match="model 'mine' of that result is not known"):
        shapes_measured(measured(model={"name": "mine", "kv_bytes_per_token": 10}), None)
    path = tmp_path / "result.json"
    path.write_text('{"kind": "other"}')
    with pytest.raises(ConfigError, match="is not the result.json of `pdx bench breakdown`"):
        load_result(path)
    records.save(msgspec.structs.replace(result, requests=[]), path)
    with pytest.raises(ConfigError, match="has no requests"):
        load_result(path)
