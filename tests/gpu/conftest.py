"""Tests that need an NVIDIA GPU: `pytest tests/gpu`. Without one all of them are skipped, with one reason.

With PDX_FAKE_GPU=1 those that need the driver alone run on the fake one, which tries out the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from gpu_child import GpuChild

from pdx.cuda.gpu import Gpu, all_gpus, why_no_gpu
from pdx.cuda.memory import num_mapped

HERE = Path(__file__).resolve().parent
IS_FAKE = os.environ.get("PDX_FAKE_GPU") == "1"
FAKE_BYTES = 256 << 20


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """A machine that only tests GPUs need not have pytest-timeout, which our settings name."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "unused without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """See `pytest_addoption`. On a real GPU, others' packages may warn as they like: the machine's owner chose them."""
    if not IS_FAKE and not why_no_gpu():
        for line in ("default", "error:::pdx"):  # later lines have precedence
            config.addinivalue_line("filterwarnings", line)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): unused without pytest-timeout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything below is marked `gpu`, and skipped where there is none; what counts free bytes, beside others, too."""
    ours = [item for item in items if HERE in item.path.parents]
    why = "" if IS_FAKE or not ours else why_no_gpu()
    is_crowded = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
    for item in ours:
        item.add_marker("gpu")
        if is_crowded and item.get_closest_marker("serial"):
            item.add_marker(pytest.mark.skip(reason="counts what is free on the whole GPU: run it without -n"))
        if why:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {why}"))


@pytest.fixture(scope="session", autouse=True)
def libraries_are_loaded() -> None:
    """Contexts and pools that stay for good are there before a test is checked for what it leaves behind."""
    if IS_FAKE or why_no_gpu():
        return
    Gpu.find("0").use()
    import torch

    if torch.cuda.is_available():
        torch.ones(1, device="cuda").add_(1).cpu()
        torch.ones(1, pin_memory=True)
        torch.cuda.Event().record()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The first GPU. Whatever is mapped on it is unmapped by the test."""
    if IS_FAKE:
        from fake_cuda import fake_cuda

        around: Any = fake_cuda(gpus=2, nbytes=FAKE_BYTES)
    else:
        around = nullcontext()
    with around:
        yield Gpu.find("0")
        assert num_mapped() == 0


@pytest.fixture
def cuda(gpu: Gpu) -> Gpu:
    """The first GPU, and torch can use it."""
    if IS_FAKE:
        pytest.skip("torch has no CUDA here")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    torch.cuda.set_device(gpu.ordinal)
    return gpu


@pytest.fixture
def peer_gpu(gpu: Gpu) -> Gpu:
    """A second GPU, and each reaches the other's memory."""
    gpus = all_gpus()
    if len(gpus) < 2 or not (gpu.can_access(gpus[1].uuid) and gpus[1].can_access(gpu.uuid)):
        pytest.skip("needs two GPUs with peer access")
    return gpus[1]


@pytest.fixture
def child() -> Iterator[Callable[[], GpuChild]]:
    """Starts processes that make and map memory; ends them after the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(GpuChild({"nbytes": FAKE_BYTES} if IS_FAKE else None))
