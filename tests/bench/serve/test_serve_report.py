"""What is made of the times of requests: objectives, figures of several blocks, and how two services compare."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.bench.serve.report import Report, Slo, file_name, ratio, summary
from pdx.bench.serve.run import Block, Server, Settings
from pdx.bench.systems.engine_metrics import Found
from pdx.errors import ConfigError

SETTINGS = Settings(workload="random", requests=4, input_len=100, output_len=21, rate=math.inf)


def missed(slo, *, ttft=1.0, latency=3.0, itls=(0.1,) * 20, tokens=21):
    return slo.missed(ttft=ttft, itls=itls, latency=latency, tokens=tokens)


def result(*requests, duration=2.0):
    """Of (seconds to the first token, error)."""
    return {
        "duration": duration,
        "input_lens": [100] * len(requests),
        "output_lens": [0 if error else 21 for _, error in requests],
        "ttfts": [ttft for ttft, _ in requests],
        "itls": [[] if error else [0.1] * 20 for _, error in requests],
        "latencies": [ttft + 2.0 for ttft, _ in requests],
        "start_times": [0.0] * len(requests),
        "generated_texts": [f"text {ttft}" for ttft, _ in requests],
        "errors": [error for _, error in requests],
    }


def served(label, *blocks):
    made = [Block([each], 1.0, {"http://e": Found(60.0, 30.0, 10.0)}) for each in blocks]
    return Server(label, f"http://{label}", "toy", "/models/toy", None, blocks=made)


def test_written_objectives():
    assert Slo.parse(" ttft=2s, itl=50ms ,e2e=1.5s,tpot=25 ms") == Slo(ttft=2000, itl=50, e2e=1500, tpot=25)
    assert Slo.parse("") == Slo()


@pytest.mark.parametrize("text", ["ttft", "ttft=2", "ttft=fast", "latency=2s", "ttft=-1s", "ttft=1s,ttft=2s", "=2s"])
def test_a_wrong_objective_is_named(text):
    with pytest.raises(ConfigError, match="slo"):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("slo", "names"),
    [
        (Slo(), []),
        (Slo(ttft=1000), []),
        (Slo(ttft=999), ["ttft"]),
        (Slo(tpot=100), []),  # 2 s for the 20 tokens after the first
        (Slo(tpot=99), ["tpot"]),
        (Slo(e2e=3000), []),
        (Slo(e2e=2999), ["e2e"]),
        (Slo(itl=100), []),
        (Slo(ttft=999, itl=99, e2e=9000), ["ttft", "itl"]),
    ],
)
def test_each_objective_can_be_missed(slo, names):
    assert missed(slo) == names


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=50), st.floats(1, 10_000))
def test_one_gap_in_twenty_of_a_good_request_may_be_long(gaps, bound_ms):
    long = sum(gap > bound_ms / 1000 for gap in gaps)
    assert (missed(Slo(itl=bound_ms), itls=gaps) == []) == (long <= int(len(gaps) * 0.05))


def test_figures_are_over_all_blocks_and_without_what_failed():
    found = summary([result((1.0, ""), (3.0, "")), result((2.0, ""), (9.0, "gone"))], Slo(ttft=2500))
    assert (found["completed"], found["failed"], found["duration"]) == (3, 1, 4.0)
    assert found["mean_ttft_ms"] == pytest.approx(2000)
    assert found["p50_tpot_ms"] == found["mean_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx(4000)
    assert found["request_throughput"] == 0.75
    assert found["output_throughput"] == pytest.approx(3 * 21 / 4)
    assert found["goodput"] == {"good": 2, "share": 0.5, "per_s": 0.5, "missed": {"ttft": 1}}
    assert summary([], Slo(ttft=1))["goodput"]["share"] == 0.0


def test_two_services_are_compared_block_by_block(tmp_path):
    report = Report(SETTINGS, Slo(), tmp_path, tokenizer="t")
    one = served("one", result((1.0, ""), (1.0, "")), result((2.0, ""), (2.0, "gone")))
    other = served("other", result((2.0, ""), (1.0, "")), result((3.0, ""), (3.0, "")), result((9.0, "")))
    found = report.compare(one, other)
    assert found["ratios"]["mean_ttft_ms"]["blocks"] == pytest.approx([1.5, 1.5])
    assert found["ratios"]["request_throughput"]["blocks"] == pytest.approx([1.0, 0.5])
    assert found["answers"] == {"both_answered": 3, "same": 1}
    assert ratio("mean_ttft_ms", {"mean_ttft_ms": 0.0}, {"mean_ttft_ms": 1.0}) is None


def test_answers_are_compared_by_conversation(tmp_path):
    """One that failed has no later rounds, so that those of the others move up."""
    one, other = served("one"), served("other")
    one.blocks.append(Block([result((1.0, ""), (2.0, "")), result((3.0, ""), (4.0, ""))]))
    other.blocks.append(Block([result((1.0, "gone"), (2.0, "")), result((4.0, ""))]))
    found = Report(SETTINGS, Slo(), tmp_path, tokenizer="t").compare(one, other)
    assert found["answers"] == {"both_answered": 2, "same": 2}


def test_each_request_is_kept(tmp_path):
    blocks = served("a b", result((1.0, "")), result((2.0, "gone")))
    report = Report(SETTINGS, Slo(ttft=1500), tmp_path, tokenizer="t")
    found = report.result(blocks, is_complete=True)
    assert len(found["ttfts"]) == 2
    assert found["pdx"]["errors"] == {"gone": 1}
    assert found["pdx"]["found_tokens"]["all"] == {"computed": 120.0, "local": 60.0, "external": 20.0}
    assert found["pdx"]["client_cpu_share_of_a_core"] == 0.5
    assert [path.name for path in report.write([blocks], is_complete=True)] == [file_name("a b")] == ["serve-a-b.json"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rate": 0.0}, "--rate 0"),
        ({"workload": "chat", "rounds": 3}, "conversations are whole"),
        ({"workload": "long-document", "shared_len": 100}, "--shared-len 100"),
        ({"workload": "shared-prompt", "shared": 3}, "--shared 3"),
    ],
)
def test_what_cannot_be_sent_is_refused(change, named):
    asked = {"workload": "random", "requests": 4, "input_len": 100, "output_len": 5, "rate": 1.0} | change
    with pytest.raises(ConfigError, match=named):
        Settings(**asked).check()
