"""Imports point down only: reads every file's imports and fails on an arrow that the design does not have.

Imports under `if TYPE_CHECKING` are no arrows. Imports inside functions are, except where `lazy` allows them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("transports", "kernels", "proxy", "bench")
# From the bottom up. A room may import what is in lower layers, and itself; never another room of its own layer.
LAYERS = [
    {"pdx.closing", "pdx.errors", "pdx.extras", "pdx.kernels", "pdx.options"},
    {"pdx.transports.channel"},  # the contract and its registry lie beside the backends, and far below them
    {"pdx.transports.registry"},
    {"pdx.config"},
    {"pdx.proxy.config"},  # the command line is made from it
    {"pdx.memory"},
    {"pdx.wire"},
    {"pdx.telemetry"},
    {"pdx.security"},
    {"pdx.discovery"},
    {"pdx.store.codecs"},  # for the tiers, and for the wire
    {"pdx.cuda", "pdx.proxy"},
    {"pdx.store.history"},
    {"pdx.store.tier"},  # the contract, for our tiers, anybody else's, and their suite
    {"pdx.store", "pdx.transports"},
    {"pdx.node.peers", "pdx.node.events"},
    {"pdx.node"},
    {"pdx.client"},
    {"pdx"},
    {"pdx.engine"},
    {"pdx.vllm"},
    {"pdx.blend"},
    {"pdx.testing"},
    {"pdx.cli"},
    {"pdx.bench"},
]
ROOMS = {room for layer in LAYERS for room in layer}
# The least that works: what a room imports of others' distributions, and what it may import inside functions.
OTHERS = {
    "pdx.options": "msgspec",
    "pdx.config": "msgspec",
    "pdx.proxy.config": "msgspec",
    "pdx.kernels": "llvmlite numba numpy torch triton",
    "pdx.memory": "msgspec xxhash",
    "pdx.wire": "msgspec",
    "pdx.transports.channel": "msgspec",
    "pdx.telemetry": "msgspec opentelemetry prometheus_client",
    "pdx.security": "msgspec zmq",
    "pdx.discovery": "aiohttp msgspec",
    "pdx.cuda": "msgspec",
    "pdx.proxy": "aiohttp msgspec numpy prometheus_client zmq",
    "pdx.store": "msgspec obstore redis sortedcontainers xxhash",
    "pdx.store.codecs": "numpy zstandard",
    "pdx.blend": "numpy torch transformers vllm",
    "pdx.store.history": "msgspec",
    "pdx.store.tier": "msgspec",
    "pdx.transports": "*",
    "pdx.node.peers": "msgspec zmq",
    "pdx.node.events": "msgspec zmq",
    "pdx.node": "msgspec prometheus_client zmq",
    "pdx.client": "msgspec zmq",
    "pdx.engine": "msgspec numpy torch prometheus_client",
    "pdx.vllm": "blake3 huggingface_hub msgspec numpy torch vllm prometheus_client",
    "pdx.testing": "*",
    "pdx.cli": "click rich msgspec",
    "pdx.bench": "*",
}
LAZY = {
    "pdx.engine": "opentelemetry",
    "pdx.memory": "numpy torch",
    "pdx.cuda": "cuda",
    "pdx.client": "numpy torch",
    "pdx.cli": "*",
}
NODE = {"pdx.node", "pdx.node.peers", "pdx.node.events"}
# What lies lower, but is none of a room's business.
FORBIDDEN = {
    **dict.fromkeys(NODE, {"pdx.transports", "pdx.proxy"}),
    "pdx.client": {*NODE, "pdx.store", "pdx.transports", "pdx.proxy"},
    "pdx.engine": {"pdx.node.peers", "pdx.node.events", "pdx.store", "pdx.transports", "pdx.proxy"},
    "pdx.vllm": {*NODE, "pdx.store", "pdx.transports", "pdx.proxy"},
    "pdx.testing": {*NODE, "pdx.store", "pdx.proxy", "pdx.engine", "pdx.vllm"},
    "pdx.cli": {*NODE, "pdx.store", "pdx.proxy", "pdx.engine", "pdx.vllm", "pdx.bench"},
}


def room_of(module: str) -> str | None:
    """The room that a module of ours is in; None: it is somebody else's."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in ROOMS and (end > 1 or len(parts) == 1):
            return ".".join(parts[:end])
    return "no room" if parts[0] == "pdx" else None


def allows(room: str, module: str, *, is_lazy: bool) -> bool:
    """Whether a file in `room` may import `module`."""
    named = OTHERS.get(room, "").split() + (LAZY.get(room, "").split() if is_lazy else [])
    target = room_of(module)
    if target is None:
        top = module.partition(".")[0]
        return top in sys.stdlib_module_names or top in named or "*" in named
    if target == room or "*" in LAZY.get(room, "") and is_lazy:
        return True
    levels = [next(level for level, layer in enumerate(LAYERS) if name in layer) for name in (room, target)]
    return levels[0] > levels[1] and target not in FORBIDDEN.get(room, ())


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
            # `from pdx.wire import messages` and `from pdx.wire.messages import Hello` are arrows to pdx.wire.messages.
            is_room = module in ROOMS
            found.extend((node.lineno, f"{module}.{n.name}" if is_room else module, is_lazy) for n in node.names)
        is_lazy = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                visit(child, is_lazy=is_lazy)

    visit(ast.parse(source), is_lazy=False)
    return sorted(set(found))


def files() -> list[Path]:
    """All of the product and its benches, each once."""
    links = [ROOT / "pdx" / name for name in LINKED]
    found = [file for folder in ("pdx", *LINKED) for file in (ROOT / folder).rglob("*.py")]
    return sorted(file for file in found if not any(link in file.parents for link in links))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "pdx" else ("pdx", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def offences(room: str, source: str, name: str) -> list[str]:
    return [
        f"{name}:{line}: {room} may not import {module}"
        for line, module, is_lazy in arrows(source)
        if not allows(room, module, is_lazy=is_lazy)
    ]


def test_arrows_point_down():
    placed = [(room_of(module_of(file)) or "", file) for file in files()]
    assert {room for room, _ in placed} == ROOMS, "every file is in a room, and no room is without files"
    found = [line for room, file in placed for line in offences(room, file.read_text(), str(file.relative_to(ROOT)))]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("room", "source", "is_allowed"),
    [
        ("pdx.memory", "import torch", False),
        ("pdx.memory", "def f():\n    import torch", True),
        ("pdx.wire", "def f():\n    import pdx.store.store", False),
        ("pdx.wire", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", True),
        ("pdx.node", "from pdx.transports.tcp import TcpRegion", False),
        ("pdx.cli", "from pdx.proxy.workers import run", False),
        ("pdx.cli", "def f():\n    from pdx.node.daemon import run", True),
        ("pdx.proxy", "from . import router", False),
        ("pdx.transports", "import nixl\nfrom pdx.memory.arena import Arena", True),
    ],
)
def test_a_wrong_arrow_is_found(room, source, is_allowed):
    assert len(offences(room, source, "file.py")) == (0 if is_allowed else 1)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("pdx, pdx.cli.main, pdx.cli.up, pdx.node.daemon", {"torch", "vllm", "numpy"}),
        ("pdx.proxy.app", {"torch", "vllm"}),
    ],
)
def test_neither_torch_nor_vllm_is_loaded_by_node_proxy_or_command(modules, heavy):
    code = f"import sys, {modules}; sys.exit(', '.join({heavy} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_linked_folders_have_no_init():
    """With one, a repository root on sys.path makes `transformers` import our `kernels`."""
    for name in LINKED:
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "pdx" / name).readlink() == Path("..") / name
