"""A named fake of the CUDA driver, for machines without a GPU: what PDX does up to the driver's calls runs for real.

    with fake_cuda(gpus=2) as fake:                     # in this process: pdx.cuda uses it
    python -m fake_cuda --gpus 2 node …                 # `pdx node …` with it (or `-m MODULE …`)

It takes and returns the structs and enums of `cuda.bindings.driver`. Device memory is a memfd, an exported descriptor
is a real one, so processes with a fake each share memory as processes with a GPU do. Streams are threads that lag. It
is strict where a driver may be lax: a call without a current context, a copy over two registrations of host memory and
a mapping without access are refused. The CPU cannot look at its device memory; kernels under Triton's interpreter can
(`fake_cuda_kernels`), as far as a GPU could. It shows nothing about speed, nor about kernels that run at
the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import runpy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fake_cuda_calls import DeviceCalls, Refused
from fake_cuda_host import HostMemory
from fake_cuda_memory import FakeMemory
from fake_cuda_streams import StreamCalls

from pdx.cuda import driver, gpu


class FakeCuda:
    """Acts like the module `cuda.bindings.driver`. Any thread may call."""

    def __init__(
        self,
        *,
        gpus: int = 1,
        nbytes: int = 1 << 30,
        vmm: bool = True,
        peer_access: bool = True,
        reaches_unseen: bool = False,
        driver_version: int = 12090,
        lag_s: float = 0.002,
        read_only_register: bool = True,
        rdma_memory: bool = True,
        lock_limit: int = -1,
    ) -> None:
        """`nbytes`: memory of each GPU, of which other processes with this one's fake GPUs take their part. `lag_s`:
        what streams lag at most at each copy.

        `reaches_unseen`: memory of GPUs of other processes can be mapped that this one does not have. `rdma_memory`:
        memory can be made for network cards, as the GPU says of itself in any case. `lock_limit`: bytes of host memory
        that may be page-locked; -1: any number.
        """
        self.bindings = driver.real_api()
        self.calls: Counter[str] = Counter()  # by name, also those that failed
        self.failed: list[str] = []  # calls that `fail` made fail
        has = {"vmm": vmm, "rdma": vmm, "host_pointers": True, "read_only_register": read_only_register}
        has |= {"rdma_memory": rdma_memory, "peer_access": peer_access, "unseen": reaches_unseen}
        self._devices = DeviceCalls(self.bindings, gpus, nbytes, version=driver_version, has=has)
        self.memory = FakeMemory(self._devices)
        self.host = HostMemory(self._devices, lock_limit)
        self._streams = StreamCalls(self._devices, self.memory, self.host, lag_s)
        self._lock = threading.Lock()
        self._failures: list[_Failure] = []
        self.functions: dict[str, Callable[..., Any]] = {"cuGetErrorString": _error_string}
        for part in (self._devices, self.memory, self.host, self._streams):
            self.functions |= {name: getattr(part, name) for name in dir(part) if name.startswith("cu")}

    def capture(self, *, is_under_way: bool) -> None:
        """A thread begins or ends to capture a graph."""
        self._devices.is_capturing = is_under_way

    @property
    def spoiled(self) -> list[str]:
        """Calls that have spoiled a capture."""
        return self._devices.spoiled

    def check_capture(self, name: str) -> None:
        """As if this thread called that function, for stand-ins of what calls it natively; raises `Refused`."""
        self._devices.check_capture(name)

    def break_down(self, error: str) -> None:
        """A kernel has failed with CUDA_ERROR_`error`: every later call says so."""
        self._streams.broken = error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and not name.startswith("cuda"):
            if name not in self.__dict__.get("functions", {}) or not hasattr(self.bindings, name):
                raise AttributeError(f"the fake CUDA driver has no {name}, or these bindings have none")
            return functools.partial(self._call, name)
        return getattr(self.bindings, name)

    # --- for tests

    def counts(self) -> dict[str, int]:
        """What this process has not given back, by kind. Contexts stay as long as the process, by design."""
        contexts = {"contexts": self._devices.contexts.total()}
        return self.memory.counts() | {"registered": self.host.count()} | self._streams.counts() | contexts

    def leftovers(self) -> dict[str, int]:
        """`counts()` of what is not zero, without contexts."""
        return {kind: count for kind, count in self.counts().items() if count and kind != "contexts"}

    def fail(self, name: str = "", *, after: int = 0, error: str = "UNKNOWN", times: int = 1) -> None:
        """Calls of that function ("": of any) fail with CUDA_ERROR_`error`: `times` of them, behind `after` good ones.

        A call that fails does nothing.
        """
        with self._lock:
            self._failures.append(_Failure(name, after, error, times))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """No stream does anything inside of the block; what is asked for waits."""
        self._streams.gate.clear()
        try:
            yield
        finally:
            self._streams.gate.set()

    def heal(self) -> None:
        """No more failures."""
        with self._lock:
            self._failures.clear()
        self._streams.broken = ""

    def close(self) -> None:
        """Give everything back; its threads end."""
        self.heal()
        self._streams.close()
        self.memory.close()
        self.host.forget()

    # --- the border

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        results = self.bindings.CUresult
        try:
            self._admit(name)
            self._devices.check_capture(name)
            value = self.functions[name](*args)
        except Refused as refused:
            return (getattr(results, f"CUDA_ERROR_{refused}"), None)
        if value is None:
            return (results.CUDA_SUCCESS,)
        return (results.CUDA_SUCCESS, *value) if isinstance(value, tuple) else (results.CUDA_SUCCESS, value)

    def _admit(self, name: str) -> None:
        if name.startswith("cuGetError"):
            return
        with self._lock:
            self.calls[name] += 1
            for failure in self._failures:
                if failure.hits(name):
                    self.failed.append(name)
                    raise Refused(failure.error)
        if self._streams.broken:
            raise Refused(self._streams.broken)
        if not self._devices.is_initialised and name not in ("cuInit", "cuDriverGetVersion"):
            raise Refused("NOT_INITIALIZED")


class _Failure:
    """One promise of `FakeCuda.fail`."""

    def __init__(self, name: str, after: int, error: str, times: int) -> None:
        self.error = error
        self._name = name
        self._after = after
        self._times = times

    def hits(self, name: str) -> bool:
        if self._name not in ("", name) or not self._times:
            return False
        if self._after:
            self._after -= 1
            return False
        self._times -= 1
        return True


def _error_string(result: Any) -> bytes:
    return str(result.name).removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()


def _forget_contexts() -> None:
    """Let go of every context that `Gpu.use` took. Nobody may be using them."""
    with gpu._contexts_lock:
        while gpu._contexts:
            ordinal, _ = gpu._contexts.popitem()
            driver.call("cuDevicePrimaryCtxRelease", driver.call("cuDeviceGet", ordinal))


@contextlib.contextmanager
def fake_cuda(**settings: Any) -> Iterator[FakeCuda]:
    """`pdx.cuda` uses a fake driver with these settings of `FakeCuda` inside of the block."""
    fake = FakeCuda(**settings)
    _forget_contexts()
    driver.replace(fake)
    try:
        yield fake
    finally:
        fake.heal()
        _forget_contexts()
        driver.replace(None)
        fake.close()


def main() -> None:
    """Run `pdx …`, or with `-m` a module, in a process that has the fake driver."""
    parser = argparse.ArgumentParser(prog="python -m fake_cuda", description=main.__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--no-vmm", dest="vmm", action="store_false")
    parser.add_argument("--no-peer-access", dest="peer_access", action="store_false")
    parser.add_argument("--fail", action="append", default=[], metavar="FUNCTION[:AFTER[:ERROR]]")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run instead, with arguments")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    given = vars(parser.parse_args())
    failures, rest, own = given.pop("fail"), given.pop("rest"), given.pop("module")
    module, rest = (own[0], own[1:]) if own else ("pdx.cli.main", rest)
    with fake_cuda(**given) as fake:
        for failure in failures:
            name, _, more = failure.partition(":")
            after, _, error = more.partition(":")
            fake.fail(name, after=int(after or 0), error=error or "UNKNOWN", times=1 << 30)
        sys.argv[1:] = rest
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    # As itself, not as __main__: tests and what they run must share one copy of this module.
    from fake_cuda import main as run

    run()
