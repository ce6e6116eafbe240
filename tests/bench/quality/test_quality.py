"""`pdx bench quality` on stand-ins: what its numbers mean, and that it sees a loss where there is one."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from pdx.bench.harness.report import ROOT  # noqa: E402
from pdx.bench.harness.tiny_llama import make_model  # noqa: E402
from pdx.bench.quality.kinds import INT4, Kind, int4, kinds, stored  # noqa: E402
from pdx.bench.quality.run import Row, figures, judge  # noqa: E402
from pdx.bench.quality.texts import CONTEXT_TOKENS, FOLLOWING_TOKENS, Sample, samples  # noqa: E402
from pdx.memory.form import PROMISED, Loss, LossyName  # noqa: E402

SHAPE = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "intermediate": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), **SHAPE)


def kv_of(tokens: int) -> torch.Tensor:
    """[2 layers, 2, 3 heads, tokens, 16], with heads of very different sizes."""
    drawn = torch.randn(2, 2, 3, tokens, 16, generator=torch.Generator().manual_seed(1))
    return (drawn * torch.tensor([0.01, 1.0, 100.0])[:, None, None]).bfloat16().float()


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("fp8", 14), (INT4, 7)])
def test_each_element_is_as_near_as_its_head_and_block_allow(name, levels, block):
    kv = kv_of(512)
    back = int4(kv, block) if name == INT4 else stored(kv, name, block)
    assert back.shape == kv.shape
    assert not torch.equal(back, kv)
    most = kv.unflatten(3, (-1, block)).abs().amax(dim=(4, 5), keepdim=True)
    error = (back - kv).unflatten(3, (-1, block)).abs() / most
    assert 0.2 / levels < error.max() < 0.6 / levels + 2**-8  # and bfloat16's


def test_samples_are_of_all_lengths_and_no_text_comes_twice(model):
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    drawn = list(samples(tokenizer, 20, seed=0))
    assert len({sample.name for sample in drawn}) == 20
    assert {sample.name.split()[0] for sample in drawn} == {"topic", "module"}
    assert {len(sample.context) for sample in drawn} == set(CONTEXT_TOKENS)
    assert all(len(sample.following) == FOLLOWING_TOKENS for sample in drawn)
    assert drawn == list(samples(tokenizer, 20, seed=0)) != list(samples(tokenizer, 20, seed=1))


class Stage:
    """In place of a model: KV says which token follows, and how surely."""

    computed = 0

    def kv(self, tokens):
        self.computed += 1
        return torch.tensor([2.0, 0.0])

    def scores(self, kv, following):
        return kv.log_softmax(-1).expand(len(following) - 1, -1)


def test_what_the_numbers_mean():
    sample = Sample("text", [0], [0] * 5)
    same = Kind("", lambda model, sample, kv: kv)
    turned = Kind("", lambda model, sample, kv: kv.flip(0))
    surer = Kind("", lambda model, sample, kv: kv * 2)
    stage = Stage()
    first, second, third = judge(stage, sample, {"same": same, "turned": turned, "surer": surer})
    assert stage.computed == 1
    sure = 1 / (1 + math.exp(-2))
    assert (first.loss, first.divergence, first.agreement) == (pytest.approx(first.exact_loss), pytest.approx(0), 1)
    assert first.exact_loss == pytest.approx(-math.log(sure))
    assert second.loss == pytest.approx(-math.log(1 - sure))
    assert second.divergence == pytest.approx(2 * sure - 2 * (1 - sure))
    assert second.agreement == 0
    very_sure = 1 / (1 + math.exp(-4))
    parts = ((sure, very_sure), (1 - sure, 1 - very_sure))
    assert third.divergence == pytest.approx(sum(p * math.log(p / q) for p, q in parts))
    assert (third.loss < third.exact_loss, third.agreement) == (True, 1)


def row(kind: str, loss: float, agreement: float = 1.0) -> Row:
    return Row(kind, "text", 256, 1.0, loss, 0.0, agreement)


def test_a_promise_holds_where_the_worse_end_of_the_interval_does():
    promised = {"kept": Kind("", None, Loss(1.02, 10, 0.9)), "broken": Kind("", None, Loss(1.02, 10, 0.9))}
    rows = [row("kept", 1.01) for _ in range(20)] + [row("broken", 1.0 + 0.04 * (n % 2)) for n in range(20)]
    found = {figure.name: figure for figure in figures(rows, promised)}
    kept, broken = (found[f"{name}: perplexity, exact = 1"] for name in promised)
    assert (kept.value, kept.is_met) == (pytest.approx(math.exp(0.01), abs=1e-4), True)
    assert (broken.value, broken.is_met) == (pytest.approx(math.exp(0.02), abs=1e-4), False)
    assert broken.value < 1.0203  # its mean alone would be within it
    agreement = next(figures([row("kept", 1.0, 0.5 + 0.5 * (n % 4 > 0)) for n in range(20)], promised))
    assert agreement.is_met
    worst = list(figures([row("kept", 1.0, 0.85 + 0.1 * (n % 2)) for n in range(20)], {"kept": promised["kept"]}))[2]
    assert worst.value == pytest.approx(0.9)
    assert not worst.is_met


# ---- what is offered --------------------------------------------------------------------------


def test_every_codec_that_is_offered_was_measured_and_keeps_what_it_promises():
    assert set(PROMISED) == set(get_args(LossyName))
    details = json.loads((ROOT / "bench" / "results" / "quality.json").read_text())["details"]
    assert details["settings"]["block_tokens"] == 128, "the largest blocks lose most"
    rows = [Row(**told) for told in details["rows"]]
    assert len({told.text for told in rows}) >= 20
    known = kinds(128)
    assert {told.kind for told in rows} >= {*PROMISED, INT4}
    found = list(figures(rows, known))
    assert [figure for figure in found if figure.is_met is False] == []
    # The control: what loses more is seen to.
    for promise in PROMISED.values():
        perplexity, *_ = figures(rows, {INT4: Kind("", known[INT4].make, promise)})
        assert perplexity.is_met is False


def test_what_moves_keeps_what_it_promises_and_blending_recovers_what_it_should():
    details = json.loads((ROOT / "bench" / "results" / "quality_places.json").read_text())["details"]
    rows = [Row(**told) for told in details["rows"]]
    assert len({told.text for told in rows}) >= 20
    found = list(figures(rows, kinds(128)))
    assert {figure.name.partition(":")[0] for figure in found if figure.is_met} >= {"moved", "blended"}
    assert [figure for figure in found if figure.is_met is False] == []


def test_the_page_on_codecs_says_what_was_measured():
    page = (ROOT / "docs" / "codecs.md").read_text()
    found = json.loads((ROOT / "bench" / "results" / "quality.json").read_text())["figures"]
    for name, promise in PROMISED.items():
        (line,) = re.findall(rf"^\| {name} \|.*$", page, re.MULTILINE)
        ratio, divergence, agreement = (figure for figure in found if figure["name"].startswith(f"{name}:"))
        said = f"| {name} | {ratio['value'] - 1:+.2%} | {divergence['value']:.2f} | {agreement['value']:.1%} |"
        promised = f" {promise.perplexity - 1:+.0%}, {promise.divergence:g}, {promise.agreement:.0%} |"
        assert line == (said + promised).replace("%", " %")


# ---- the command ------------------------------------------------------------------------------

WHOLE = """
import sys, torch
from pathlib import Path
from pdx.bench.quality.model import Model
model, tokens = Model(Path(sys.argv[1])), [3 * n % 200 for n in range(400)]
whole = model.causal(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
kv = model.kv(tokens[:256])
behind = model.scores(kv, tokens[256:])
torch.testing.assert_close(behind, whole[256:-1], rtol=1e-4, atol=1e-3)
other = kv.clone()
other[1, 0, 0, 100] += 1
assert (model.scores(other, tokens[256:]) - behind).abs().max() > 0.01
"""


@pytest.mark.long  # transformers are imported
def test_scores_behind_exact_kv_are_those_of_one_forward_pass(model):
    """In a process of its own: transformers warns about much, and warnings are errors here."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-P", "-W", "ignore", "-c", WHOLE, model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long  # transformers are imported
def test_the_command_says_that_a_promise_is_broken(model, tmp_path, monkeypatch):
    """Random weights magnify what a codec loses."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-P", "-W", "ignore", "-m", "pdx.cli.main", "bench", "quality"]
    command += ["--model", str(model), "--samples", "4", "--kinds", "fp8,bf16", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads((tmp_path / "quality.json").read_text())
    assert [figure["name"].partition(":")[0] for figure in result["figures"]] == ["bf16"] * 3 + ["fp8"] * 3
    assert len(result["details"]["rows"]) == 8
    exact, *_ = result["details"]["rows"]
    assert exact["loss"] == pytest.approx(exact["exact_loss"], rel=0.2)
    command[command.index("fp8,bf16")] = "int3"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "int3" in done.stderr
