"""The tier of docs/tutorials/add-a-tier.md: its own test file passes, and a real node keeps chunks there."""

import contextlib
import importlib.util
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from node_harness import MIB, NodeProcess
from raw_engine import CHUNK_BYTES, Engine, key

from pdx.config import NodeConfig
from pdx.testing.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SHELF = ROOT / "docs" / "examples" / "shelf"


def _load(name):
    spec = importlib.util.spec_from_file_location(name, SHELF / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_load("shelf")
TestShelf = _load("test_shelf").TestShelf


def test_what_the_page_shows_is_in_the_files():
    page = (ROOT / "docs" / "tutorials" / "add-a-tier.md").read_text()
    whole = "".join(" ".join(path.read_text().split()) for path in sorted(SHELF.iterdir()) if path.is_file())
    shown = re.findall(r"^```(?:python|toml)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    assert not [code for code in shown if " ".join(code.split()) not in whole]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package, as `pip install` would leave it, for processes that are started."""
    (tmp_path / "shelf.py").write_text((SHELF / "shelf.py").read_text())
    project = tomllib.loads((SHELF / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    [(name, where)] = project["entry-points"]["pdx.tiers"].items()
    (info / "entry_points.txt").write_text(f"[pdx.tiers]\n{name} = {where}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))


def test_a_node_keeps_chunks_in_the_tier_that_its_settings_name(tmp_path, installed):
    place = tmp_path / "chunks"
    place.mkdir()
    saved = {key(number): os.urandom(CHUNK_BYTES) for number in range(4)}
    for is_first in (True, False):  # the second node finds what the first has stored
        address = f"ipc://{tmp_path}/{is_first}.sock"
        node = NodeProcess(NodeConfig(address=address, arena_bytes=16 * MIB, remote=f"shelf://{place}")).wait_ready()
        with contextlib.closing(Engine(node.address)) as engine:
            wait_until(lambda node=node: node.status().tiers[0].is_up, what="the folder was looked at")
            if is_first:
                engine.save(saved)
                wait_until(lambda: sum(path.is_file() for path in place.rglob("*-0")) == 4, what="all is stored")
            else:
                assert engine.look(list(saved)) == list(saved.values())
            node.close()
