"""A bed for engines with an exact oracle: a node, and what connects to it."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from node_harness import MIB, NodeProcess, NodeThread

from pdx.bench.harness.tiny_llama import make_model
from pdx.client import connection
from pdx.config import NodeConfig
from pdx.memory.arena import Arena

if TYPE_CHECKING:
    from oracle_bed import OracleBed

NEED_VLLM = (
    "exact_engine",
    "exact_kinds",
    "exact_metrics",
    "exact_releases",
    "exact_stages",
    "connector_storm",
    "plants",
)
collect_ignore = [] if importlib.util.find_spec("vllm") else [f"test_{name}.py" for name in NEED_VLLM]


@pytest.fixture(autouse=True)
def _told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes hear with the next heartbeat of what is counted, and tests wait for that. Nobody touches memory that is not
    used: half a gigabyte for each half of each engine would be most of the time."""
    monkeypatch.setattr(connection, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(Arena, "populate_in_background", lambda arena: None)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What vLLM reads of a model; its weights only name the cache."""
    folder = tmp_path_factory.mktemp("toy") / "model"
    make_model(folder, layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, intermediate=64)
    return folder


@pytest.fixture(scope="module")
def node_here() -> Iterator[NodeThread]:
    """A node in a thread of this process, with room for all that the tests of a file save: chunks of several sizes
    do not fit in each other's place."""
    with tempfile.TemporaryDirectory(prefix="pdx-test-") as folder:
        node = NodeThread(NodeConfig(address=f"ipc://{folder}/node.sock", arena_bytes=512 * MIB))
        try:
            yield node
        finally:
            node.close()


@pytest.fixture
def bed(model: Path, node_here: NodeThread, request: pytest.FixtureRequest) -> Iterator[OracleBed]:
    """Engines on a node that has nothing of this test's prompts."""
    from oracle_bed import OracleBed

    with contextlib.closing(OracleBed(model, node_here, request.node.name)) as made:
        yield made


@pytest.fixture
def own_bed(model: Path, start_node: Callable[..., NodeProcess], request: pytest.FixtureRequest) -> Iterator[OracleBed]:
    """Engines on a node of their own, which may be killed."""
    from oracle_bed import OracleBed

    with contextlib.closing(OracleBed(model, start_node(), request.node.name)) as made:
        yield made
