"""Tests that are coroutine functions run on a loop of their own, with the checks of `proxy_harness.run`."""

import functools
import inspect

import pytest
from proxy_harness import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run(functools.partial(pyfuncitem.obj, **given))
    return True
