"""Tests that are coroutine functions run on a loop of their own, with the checks of `proxy_harness.run`."""

import functools
import inspect

import pytest
from proxy_harness import cluster, run


@pytest.fixture
def made():
    """A proxy and its engines (see `cluster`), which live on the loop of the test that asks for them."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    test = functools.partial(pyfuncitem.obj, **given)

    async def in_cluster():
        async with cluster() as made:
            await test(made=made)

    run(in_cluster if "made" in given else test)
    return True
