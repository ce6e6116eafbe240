"""Everything under docs/examples runs as its docstring says, and the code in docs/python-api.md runs as it stands."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from node_harness import MIB

DOCS = Path(__file__).parent.parent / "docs"
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.long  # two processes that import PyTorch
@needs_torch
def test_exchange_tensor(start_node):
    node = start_node(arena_bytes=300 * MIB)
    result = subprocess.run(
        [sys.executable, str(DOCS / "examples" / "exchange_tensor.py"), node.address],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "got 256 MiB" in result.stdout
    assert "without a copy" in result.stdout
    status = node.status()
    assert (status.free_bytes, status.leases) == (300 * MIB, 0)
    assert (status.counters["sealed"], status.counters["hit_chunks"]) == (1, 1)


def snippets():
    text = (DOCS / "python-api.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("number", range(len(snippets())))
def test_snippets_of_the_python_api(start_here, monkeypatch, number):
    code = snippets()[number]
    if "torch" in code and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    monkeypatch.setenv("PDX_NODE", start_here().address)
    exec(compile(code, f"docs/python-api.md, snippet {number}", "exec"), {})  # noqa: S102
