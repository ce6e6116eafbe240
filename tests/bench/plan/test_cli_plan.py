"""`pdx plan` as it is typed: what it says, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pdx.cli.main import main


def plan(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


@pytest.mark.usefixtures("fonts")
def test_it_says_how_many_and_whether(tmp_path):
    result = plan("--model", "llama-3.1-70b", "--ttft", "2s", "--itl", "40ms", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "on 4 x h100 per engine" in result.output
    assert "Yes: 40 GPUs keep the SLO" in result.output
    assert "8 P + 2 D" in result.output
    assert "32 Gbps" in result.output
    said = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert said["verdict"]["helps"] == "yes"
    assert (tmp_path / "out" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_json(tmp_path):
    result = plan("--json", "--reuse", 0.5, "--reuse-link", "200Gbps", "--arena", "gpu")
    said = json.loads(result.stdout)
    assert said["kind"] == "pdx-plan"
    assert said["case"]["work"]["reuse_bytes_s"] == 25e9
    assert any("reuse pays" in reason for reason in said["verdict"]["reasons"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-9"], "model 'gpt-9' is neither a file, nor one of"),
        (["--gpu", "tpu"], "GPU 'tpu' is none of a100"),
        (["--ttft", "1"], "'1' is not a time"),
        (["--rate", "0"], "a rate of 0 requests per second"),
        (["--reuse", "0.5"], "--reuse needs the speed of the link"),
        (["--share", "0.2"], "--share 0.2"),
        (["--prefillers", "2"], "--prefillers and --decoders go together"),
        (["--model", "llama-3.1-70b", "--tp", "1"], "--tp 4 would hold them"),
        (["--model", "llama-3.1-405b", "--gpu", "l40s", "--tp", "8"], "--tp more than 16"),
        (["--links", "32Gbps,fast"], "'fast' is not a speed"),
    ],
)
def test_what_is_wrong_is_said(arguments, words):
    result = plan(*arguments)
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())


def test_neither_matplotlib_nor_numpy_is_needed():
    code = """
import sys
sys.modules["matplotlib"] = sys.modules["numpy"] = sys.modules["torch"] = None
from click.testing import CliRunner
from pdx.cli.main import main
print(CliRunner().invoke(main, ["plan"]).exit_code)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n", done.stdout + done.stderr
