"""Tests that are coroutine functions run on a loop of their own, with the checks of `proxy_harness.run`."""

import contextlib
import inspect

import pytest
from cache_stage import stage
from proxy_harness import cluster, run

NODES = {"one": ("a",), "two": ("a", "b")}


@pytest.fixture
def made():
    """A proxy and its engines (see `cluster`), which live on the loop of the test that asks for them."""


@pytest.fixture
def one(tmp_path):
    """Likewise, a proxy with the node "a" and a controller (see `stage`)."""
    return tmp_path


@pytest.fixture
def two(tmp_path):
    """And with the nodes "a" and "b"."""
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def in_place():
        async with contextlib.AsyncExitStack() as stack:
            for name in given:
                if name == "made":
                    given[name] = await stack.enter_async_context(cluster())
                elif name in NODES:
                    given[name] = await stack.enter_async_context(stage(given[name], *NODES[name]))
            await pyfuncitem.obj(**given)

    run(in_place)
    return True
