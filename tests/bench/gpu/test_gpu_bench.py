"""The GPU benches and the tests of tests/gpu, as far as they can be tried without a GPU: on a fake driver, in small."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


import pdx.bench.gpu.__main__ as gpu_benches  # noqa: E402
from pdx.bench.gpu.__main__ import NO_GPU  # noqa: E402
from pdx.bench.harness.report import ROOT  # noqa: E402

# What these tests start runs beside nothing, also where they themselves do.
NOTHING_VISIBLE = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")} | {
    "CUDA_VISIBLE_DEVICES": ""
}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in the repository's root, without any GPU."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**NOTHING_VISIBLE, **environment},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


# ---- without a GPU --------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = run("-m", "pdx.bench.gpu", "--only", "kernels")
    assert done.returncode == NO_GPU
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("pdx.bench.gpu needs an NVIDIA GPU: ")


@pytest.mark.long
def test_all_gpu_tests_are_collected_and_skipped_with_one_reason() -> None:
    done = run("-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ skipped in", done.stdout, re.MULTILINE), done.stdout
    reasons = {line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("SKIPPED")}
    assert len(reasons) == 1
    assert reasons.pop().startswith("needs an NVIDIA GPU: ")


# ---- the command line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "kernels,typo"], "typo: known are kernels, pinned, llama, hook"),
        (["--only", ","], "known are"),
        (["--bed", "toy"], "--out FOLDER"),
        (["--only", "hook", "--repeats", "3"], "--repeats and --prompts are for --only llama"),
        (["--only", "llama", "--repeats", "0"], "'0' is no positive number"),
        (["--only", "llama", "--prompts", "8192,"], "'' is no positive number"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_benches.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# ---- whole sections, in small ---------------------------------------------------------------


def results(folder: Path, *sections: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    done = run("-m", "pdx.bench.gpu", "--bed", "toy", "--only", ",".join(sections), "--out", str(folder), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads((folder / f"gpu-{name}.json").read_text()) for name in sections}


def check_common(name: str, result: dict[str, Any]) -> None:
    assert result["bench"] == f"gpu-{name}"
    machine = result["machine"]
    assert machine["bed"] == "toy"
    assert machine["gpu"].startswith("Fake")
    assert machine["cuda_driver"] >= 12000
    assert {"date", "python", "versions", "kernel_driver", "torch_cuda"} <= set(machine)
    assert {"triton", "cuda-bindings"} <= set(machine["gpu_versions"])
    assert all(figure["is_met"] is not None for figure in result["figures"] if figure["goal"])


@pytest.mark.long
def test_kernels_and_pinned_on_the_fake_driver(tmp_path: Path) -> None:
    """Each case compares all bytes before it is timed."""
    found = results(tmp_path, "kernels", "pinned")
    for name, result in found.items():
        check_common(name, result)
    assert len(found["kernels"]["details"]["rows"]) == 2 * 2 * 2  # slices, orders, operations
    assert {row["operation"] for row in found["pinned"]["details"]["rows"]} == {"gather", "scatter"}
    assert [figure["goal"] for figure in found["pinned"]["figures"]] == ["≥ 0.9", "≥ 50"] * 2


@pytest.mark.long
def test_llama_with_engines_on_cpus(tmp_path: Path) -> None:
    result = results(tmp_path, "llama", more=("--repeats", "1", "--prompts", "64"))["llama"]
    check_common("llama", result)
    assert "median of 1" in result["title"]
    details = result["details"]
    cases = [(each["prompt_tokens"], each["channel"]) for each in details["handoffs"]]
    assert cases == [(64, ""), (64, "shm")]
    assert details["copy_gb_s"] > 0
    assert all(each["exposed_ms"] > 0 and 0 <= each["hidden_share"] <= 1 for each in details["handoffs"])
    assert all(each["with_ms"] > 0 and each["without_ms"] > 0 for each in details["prefills"])


@pytest.mark.long
def test_hook_with_an_engine_on_a_cpu(tmp_path: Path) -> None:
    result = results(tmp_path, "hook")["hook"]
    check_common("hook", result)
    calls = {(row["call"], row["step"]): row["calls"] for row in result["details"]["rows"]}
    # Two prompts of two pieces, three layers; three decode steps behind the one that gives the first token.
    assert calls["save_layer", "prefill"] == 2 * 2 * 3
    assert calls["save_layer", "decode"] == 3 * 3
    assert calls["end_forward", "prefill"] >= 2 * 2


# ---- arithmetic -----------------------------------------------------------------------------
