"""What tests of systems to compare are started on, without starting any; and fonts for tests that draw."""

import json

import pytest

from pdx.bench.systems.system import Bed
from pdx.cli import placement


@pytest.fixture
def bed(tmp_path):
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    return Bed(tmp_path / "secret" / "model", "tiny", ("--enforce-eager",), env, tmp_path / "logs", 6000, "1GiB")


@pytest.fixture
def model(tmp_path):
    """A folder that says what a model is like."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    shape = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 800}
    (folder / "config.json").write_text(json.dumps({**shape, "torch_dtype": "float32"}))
    return folder


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(placement, "cores", lambda: [0, 1])
    monkeypatch.setattr(placement, "gpus", list)


@pytest.fixture(scope="session")
def fonts():
    """Loaded before the first test that draws, because matplotlib keeps their files open."""
    from pdx.bench.harness.plot_style import Sheet

    sheet = Sheet("bold", [1.0])
    sheet.ax(0, 0, "$10^1$ $x$ \ufffe", "x").set_yscale("log")
    sheet.figure.draw_without_rendering()
