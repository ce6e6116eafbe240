"""One plain engine for the expected answers, then a prefiller, a decoder and a proxy around one node.

Never more than two engines at a time: the machines that run these tests have two cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp  # noqa: F401 - fail early where the proxy could not run
import pytest
from cases import CASES
from host import Host
from pair import Pair, plain_answers
from real_models import made_or_skipped
from tiny import make_tiny

from pdx.bench.harness.real_models import gemma3_270m, smollm2
from pdx.bench.harness.report import SCRATCH

pytest.importorskip("vllm")


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private folder with a short path, for sockets and logs."""
    folder = tmp_path_factory.mktemp("e")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="session")
def model(workplace: Path) -> Path:
    return make_tiny(workplace / "model", seed=0)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with real weights and windows."""
    return made_or_skipped(gemma3_270m, tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session", name="smollm2")
def smollm2_folder() -> Path:
    """A model with real weights that speaks; the demo uses it, too."""
    return made_or_skipped(smollm2, SCRATCH)


@pytest.fixture(scope="session")
def expected(workplace: Path, model: Path) -> dict[str, Any]:
    """What a plain engine answers to every case."""
    return plain_answers(workplace, model, CASES)


@pytest.fixture(scope="session")
def pair(workplace: Path, model: Path, expected: dict[str, Any]) -> Iterator[Pair]:
    """Built after the plain engine has ended."""
    pair = Pair(workplace, model)
    try:
        pair.wait_ready()
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module")
def make_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Host]:
    """Whoever makes one closes it."""

    def make() -> Host:
        folder = tmp_path_factory.mktemp("h")
        folder.chmod(0o700)
        return Host(folder)

    return make


@pytest.fixture
def host(make_host: Callable[[], Host]) -> Iterator[Host]:
    with contextlib.closing(make_host()) as made:
        yield made


@pytest.fixture(scope="module")
def shared(make_host: Callable[[], Host]) -> Iterator[Host]:
    """The host of all tests of a module."""
    with contextlib.closing(make_host()) as made:
        yield made
