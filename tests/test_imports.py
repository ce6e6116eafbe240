"""Imports point down only: reads every file's imports and fails on an arrow that the design does not have.

Imports under `if TYPE_CHECKING` are no arrows. Imports inside functions are, except where `lazy` allows them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = {f"pdx.{path.stem}" for path in (ROOT / "pdx").glob("*.py") if path.stem != "__init__"} | {"pdx"}
# What a process uses to attach to a node. The proxy talks to nodes, but is not attached to any.
ATTACHED = {"pdx", "pdx.client", "pdx.connection"}
LINKED = ("transports", "kernels", "proxy", "bench")
PARTS = {
    f"pdx.{name}" for name in ("cli", "cuda", "kernels", "node", "proxy", "store", "testing", "transports", "vllm")
}


@dataclass(frozen=True)
class Rule:
    """What the files in `folder` may import: modules of ours, distributions of others, and either inside functions."""

    folder: str
    package: str
    ours: frozenset[str]
    others: frozenset[str] = frozenset()
    lazy: frozenset[str] = frozenset()

    def allows(self, module: str, *, is_lazy: bool) -> bool:
        top = module.partition(".")[0]
        lazy = self.lazy if is_lazy else frozenset()
        if top in sys.stdlib_module_names or "*" in lazy or ("*" in self.others and top != "pdx"):
            return True
        allowed = self.ours | self.others | lazy | {self.package}
        return module in allowed or any(module.startswith(f"{prefix}.") for prefix in allowed - {"pdx"})


def rule(folder: str, ours: set[str], others: str = "", lazy: str = "") -> Rule:
    inner = folder if folder.startswith("pdx") else f"pdx/{folder}"
    # The files of the core lie in the folder of the package, whose name would allow everything in it.
    package = "pdx.client" if folder == "pdx" else inner.replace("/", ".")
    return Rule(folder, package, frozenset(ours), frozenset(others.split()), frozenset(lazy.split()))


RULES = [
    rule("pdx", CORE, "msgspec xxhash zmq prometheus_client", lazy="torch numpy pdx.cuda"),
    rule("pdx/cuda", CORE - ATTACHED, "msgspec", lazy="cuda"),
    rule("pdx/store", CORE - ATTACHED, "msgspec"),
    rule("pdx/node", CORE - ATTACHED | {"pdx.store", "pdx.cuda"}, "msgspec zmq"),
    rule(
        "pdx/vllm",
        CORE | {"pdx.cuda", "pdx.kernels", "pdx.node.start"},
        "msgspec numpy torch vllm prometheus_client",
    ),
    rule("pdx/cli", CORE, "click rich msgspec", lazy="*"),
    rule("pdx/testing", CORE | {"pdx.cuda", "pdx.kernels", "pdx.transports"}, "*", lazy="*"),
    rule("transports", CORE - ATTACHED | {"pdx.cuda"}, "*"),
    rule("kernels", set(), "llvmlite numba numpy torch triton"),
    rule(
        "bench",
        CORE
        | {
            "pdx.cli",
            "pdx.cuda",
            "pdx.kernels",
            "pdx.node",
            "pdx.proxy",
            "pdx.store",
            "pdx.testing",
            "pdx.transports",
            "pdx.vllm",
        },
        "*",
        lazy="*",
    ),
    rule("proxy", CORE - ATTACHED, "aiohttp msgspec prometheus_client zmq"),
]


def arrows(source: str) -> list[tuple[int, str, bool]]:
    """Line, module and whether it is inside a function, for each import that is not for types only."""
    found: list[tuple[int, str, bool]] = []

    def visit(node: ast.AST, *, is_lazy: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child, is_lazy=is_lazy)
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, name.name, is_lazy) for name in node.names)
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from pdx import memory` is an arrow to pdx.memory; `from pdx.memory import Arena` is one to pdx.memory.
            found.extend((node.lineno, f"pdx.{n.name}" if module == "pdx" else module, is_lazy) for n in node.names)
        is_lazy = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, is_lazy=is_lazy)

    visit(ast.parse(source), is_lazy=False)
    return sorted(set(found))


def offences(rule: Rule, source: str, name: str) -> list[str]:
    return [
        f"{name}:{line}: {rule.package} may not import {module}"
        for line, module, is_lazy in arrows(source)
        if not rule.allows(module, is_lazy=is_lazy)
    ]


def files(rule: Rule) -> list[Path]:
    pattern = "*.py" if rule.folder == "pdx" else "**/*.py"
    return sorted((ROOT / rule.folder).glob(pattern))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.folder)
def test_arrows_point_down(rule):
    found = [line for file in files(rule) for line in offences(rule, file.read_text(), str(file.relative_to(ROOT)))]
    assert not found, "\n".join(["", *found])


def test_every_file_has_a_rule():
    ruled = {file for rule in RULES for file in files(rule)}
    ours = {file for folder in ("pdx", *LINKED) for file in (ROOT / folder).rglob("*.py")}
    links = [ROOT / "pdx" / name for name in LINKED]
    assert {file for file in ours if not any(link in file.parents for link in links)} <= ruled


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("pdx", "import torch"),
        ("pdx", "from pdx.node.daemon import run"),
        ("pdx", "def f():\n    import pdx.store.store"),
        ("pdx/store", "import zmq"),
        ("pdx/store", "from pdx import client"),
        ("pdx/store", "from pdx.node import service"),
        ("pdx/node", "from pdx.vllm.plan import StepPlan"),
        ("pdx/node", "import torch"),
        ("pdx/vllm", "from pdx.node.daemon import run"),
        ("pdx/vllm", "from pdx.proxy.app import serve"),
        ("pdx/cli", "import torch"),
        ("pdx/cli", "from pdx.proxy.app import serve"),
        ("transports", "from pdx.node.service import Service"),
        ("kernels", "import zmq"),
        ("kernels", "from pdx.layout import KvLayout"),
        ("proxy", "import torch"),
        ("proxy", "def f():\n    from pdx.client import connect"),
        ("proxy", "from . import router"),
    ],
)
def test_a_wrong_arrow_is_found(folder, source):
    rule = next(rule for rule in RULES if rule.folder == folder)
    assert len(offences(rule, source, "file.py")) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("pdx", "def f():\n    import torch"),
        ("pdx", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("pdx/vllm", "import torch\nfrom pdx.node.start import start\nfrom vllm.v1.core import kv_cache_utils"),
        ("pdx/cli", "def f():\n    from pdx.node.daemon import run"),
        ("transports", "import nixl\nfrom pdx.memory import Arena"),
    ],
)
def test_a_right_arrow_is_not(folder, source):
    rule = next(rule for rule in RULES if rule.folder == folder)
    assert offences(rule, source, "file.py") == []


def test_neither_torch_nor_vllm_is_loaded_by_node_proxy_or_command():
    modules = "pdx, pdx.cli.main, pdx.cli.up, pdx.node.daemon, pdx.proxy.app"
    code = f"import sys, {modules}; sys.exit(', '.join({{'torch', 'vllm', 'numpy'}} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_linked_folders_have_no_init():
    """With one, a repository root on sys.path makes `transformers` import our `kernels`."""
    for name in LINKED:
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "pdx" / name).readlink() == Path("..") / name
