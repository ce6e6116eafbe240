"""The border to UCXX: one UCX worker and the one thread that uses it.

All calls into UCX are made by that thread, which sleeps in epoll between them; others hand it work with `run` and
`call`. UCXX's own progress thread is not used: a thread must check for completions in any case.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceSpan
from pdx.errors import ChannelBroken, ChannelUnavailable, GpuError
from pdx.extras import install
from pdx.transports.channel import Availability

_FIX = install("ucx")
_GPU_FIX = f"{_FIX} (libucx with its CUDA plugin), and look at UCX_TLS"
_STEP_S = 0.05  # of waiting; if a step takes longer, this process stood still, and UCX with it
_CALL_S = 10.0  # a bound for what the thread does at once; it does not wait for peers
_POLL_MS = 50  # UCX is known to miss a wake-up now and then
_CLOSING_POLL_MS = 1  # and it wakes nothing for the rest of an endpoint's closing
_CLOSING_S = 0.2
_STOP_S = 4.0  # longer than any endpoint is given to close
_ROUNDS = 64  # of progress before completions are looked at

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@functools.cache
def load() -> Any:
    """`ucxx._lib.libucxx`. Importing ucxx sets environment variables, which would change NIXL's UCX: they are removed.

    :raises ImportError: it is not installed, or does not work here.
    """
    before = dict(os.environ)
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def availability() -> Availability:
    """Whether UCXX imports."""
    try:
        load()
    except (ImportError, OSError) as error:
        return Availability(False, f"UCXX does not import: {error}", _FIX)
    return Availability(True)


Buffer: TypeAlias = memoryview | bytes | bytearray | DeviceSpan


def gpu_transports(context_info: str) -> list[str]:
    """UCX's transports that reach a GPU's memory, according to a context's own description."""
    return sorted(set(re.findall(r"^#\s+resource .* (cuda_\w+|gdr_copy)/\S+$", context_info, re.MULTILINE)))


class Batch:
    """Requests to UCX that belong together. `then` is called by the engine's thread with whether all succeeded."""

    def __init__(self, requests: list[Any], keep: object, then: Callable[[bool], None]) -> None:
        self._requests = requests
        self._keep = keep  # memory that UCX uses
        self._then = then
        self._is_good = True
        self._is_over = False

    def advance(self, errors: type[Exception]) -> bool:
        """Whether all are over. May be called again when they are."""
        if self._is_over:
            return True
        while self._requests:
            request = self._requests[-1]  # the last one is usually the last to complete
            if not request.completed:
                return False
            try:
                request.check_error()
            except errors:
                self._is_good = False
            self._requests.pop()
        self._is_over = True
        self._then(self._is_good)
        return True


class Endpoint:
    """The connection to one other worker. Only the engine's thread uses it."""

    def __init__(self, engine: UcxEngine, native: Any) -> None:
        self._engine = engine
        self._native = native
        self._pending = 0  # batches

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing in flight, or has lost its peer, which ends what was."""
        return not self._pending or not self._native or not self._native.alive

    def send(self, views: Iterable[Buffer], tag: int, then: Callable[[bool], None]) -> None:
        """Send each as a message of its own; they must not change until `then`."""
        self._batch("tag_send", list(views), tag, then)

    def receive(self, views: Iterable[Buffer], tag: int, then: Callable[[bool], None]) -> None:
        """Receive as many messages, in the order in which they were sent."""
        self._batch("tag_recv", list(views), tag, then)

    def _batch(self, verb: str, views: list[Any], tag: int, then: Callable[[bool], None]) -> None:
        # A receive that is posted after UCX has lost the peer would never end: UCXX does not cancel it.
        if self._native is None or not self._native.alive:
            then(False)
            return
        library, array = self._engine.library, self._engine.array
        post, ucx_tag = getattr(self._native, verb), library.UCXXTag(tag)
        self._pending += 1

        def ended(is_good: bool) -> None:
            self._pending -= 1
            then(is_good)

        self._engine.watch(Batch([post(array(view), ucx_tag) for view in views], views, ended))

    def close(self, grace_s: float = 0.0) -> None:
        """Close it, by force after `grace_s`: what is in flight then ends with an error. Idempotent.

        UCXX never frees requests that it had to cancel, nor the worker that they belong to. So if there is time, they
        may end, or the peer be lost.
        """
        if grace_s and not self.is_idle:
            self._engine.close_later(self, grace_s)
        elif self._native is not None:
            native, self._native = self._native, None
            native.remove_close_callback()
            native.close_blocking()
            self._engine.closed()


class UcxEngine:
    """A worker and its thread. `receive` is called by the thread with each message that came under `control_tag`."""

    def __init__(
        self,
        settings: dict[str, str],
        control_tag: int,
        max_bytes: int,
        receive: Callable[[bytes], None],
        *,
        gpu: str = "",
    ) -> None:
        """Environment variables (UCX_…) take precedence over `settings`. `gpu`: the UUID of the GPU whose memory is
        sent and received, empty for host memory.

        :raises ChannelUnavailable: UCX cannot be started so, or has nothing that reaches that GPU.
        """
        self._gpu = _used(gpu) if gpu else None  # its context is there before UCX looks for one
        self.library = library = load()
        self.array = importlib.import_module("ucxx._lib.arr").Array
        self._control = library.UCXXTag(control_tag), library.UCXXTagMask(control_tag)
        self._max_bytes = max_bytes
        self._receive = receive
        config = {key: value for key, value in settings.items() if f"UCX_{key}" not in os.environ}
        try:
            features = (library.Feature.TAG, library.Feature.WAKEUP)
            self._context: Any = library.UCXContext(config, feature_flags=features)
            if gpu and "cuda_copy" not in gpu_transports(self._context.info):
                raise ChannelUnavailable(f"UCX has no cuda_copy here, which memory of GPU {gpu} needs; {_GPU_FIX}")
            self._worker: Any = library.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self.address: bytes = self._worker.address.tobytes()
        except library.UCXError as error:
            raise ChannelUnavailable(f"UCX cannot be started with {config}: {error}") from error
        self._work: deque[Callable[[], None]] = deque()  # appended to by any thread
        self._lost: deque[Callable[[], None]] = deque()  # appended to by UCX's callbacks, which may take no lock
        self._batches: dict[Batch, None] = {}  # in order
        self._is_open = True
        self._closing: dict[Endpoint, float] = {}  # until when each may live
        self._closing_until = 0.0
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()  # guards _wake_fd against being closed
        self._thread = threading.Thread(target=self._main, name="pdx-ucx", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Have the thread do this soon."""
        self._work.append(work)
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def call(self, work: Callable[[], _T]) -> _T:
        """Have the thread do this now; returns its result or raises its error. :raises ChannelBroken: it is closed."""
        if threading.current_thread() is self._thread:
            return work()
        done = threading.Event()
        results: list[_T] = []
        errors: list[Exception] = []

        def do() -> None:
            try:
                results.append(work())
            except Exception as error:  # noqa: BLE001 - raised where the call is
                errors.append(error)
            done.set()

        self.run(do)
        if not self.wait(done, _CALL_S):
            raise ChannelBroken("the region is closed")
        if errors:
            raise errors[0]
        return results[0]

    def wait(self, done: threading.Event, timeout_s: float) -> bool:
        """Wait until the thread sets this, for `timeout_s` in which it could run. Not on the thread."""
        for _ in range(round(timeout_s / _STEP_S)):
            if done.wait(_STEP_S) or not self._thread.is_alive():
                break
        return done.is_set()

    def connect(self, address: bytes, lost: Callable[[], None]) -> Endpoint:
        """An endpoint for another worker; `lost` is called by the thread when that one is gone. Thread only.

        :raises ChannelBroken: UCX cannot make it.
        """
        try:
            remote = self.library.UCXAddress.create_from_buffer(address)
            native = self.library.UCXEndpoint.create_from_worker_address(self._worker, remote, True)
        except self.library.UCXError as error:
            raise ChannelBroken(f"UCX cannot connect: {error}") from error
        native.set_close_callback(self._lost.append, cb_args=(lost,))
        return Endpoint(self, native)

    def watch(self, batch: Batch) -> None:
        """Advance the batch until it is over. Thread only."""
        if not batch.advance(self.library.UCXError):
            self._batches[batch] = None

    def close_later(self, endpoint: Endpoint, grace_s: float) -> None:
        """Close it when it is idle, at the latest after `grace_s`. Thread only."""
        self._closing[endpoint] = time.monotonic() + grace_s

    def closed(self) -> None:
        """An endpoint was closed. Thread only."""
        self._worker.progress()  # cancels what lost endpoints had in flight, unlike progress_once
        self._closing_until = time.monotonic() + _CLOSING_S

    def discard(self, tag: int, mask: int) -> None:
        """Discard messages under such tags that were not received. Thread only."""
        while found := self._worker.tag_probe(self.library.UCXXTag(tag), self.library.UCXXTagMask(mask), remove=True):
            self._take(found, bytearray(1), lambda _: None)

    def close(self) -> None:
        """End the thread and the worker. All endpoints are closed. Idempotent."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return
        self.run(self._stop)
        self._thread.join()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._batches.clear()
        self._worker = None
        self._context = None

    def _stop(self) -> None:
        self.settle(lambda: not self._closing, _STOP_S)
        for endpoint in list(self._closing):
            endpoint.close()
        self._is_open = False

    def settle(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Make progress until `is_done()`, for `timeout_s` in which this process ran. Messages are not handled
        meanwhile. Thread only.
        """
        left_s, before = timeout_s, time.monotonic()
        while not is_done() and left_s > 0:
            self._worker.progress()
            self._advance()
            self._close_due()
            now = time.monotonic()
            left_s -= min(now - before, _STEP_S)
            before = now

    def _close_due(self) -> None:
        for endpoint, end in list(self._closing.items()):
            if endpoint.is_idle or time.monotonic() > end:
                del self._closing[endpoint]
                endpoint.close()

    def _main(self) -> None:
        if self._gpu is not None:
            self._gpu.use()
        poll = select.poll()
        poll.register(self._worker.epoll_file_descriptor, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while self._is_open:
            while self._turn():
                pass
            if not self._work and self._worker.arm():
                is_closing = self._closing or time.monotonic() < self._closing_until
                poll.poll(_CLOSING_POLL_MS if is_closing else _POLL_MS)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)

    def _turn(self) -> bool:
        is_busy = False
        for _ in range(_ROUNDS):
            if not self._worker.progress_once():
                break
            is_busy = True
        for waiting in (self._lost, self._work):
            while waiting:
                is_busy = True
                self._do(waiting.popleft())
        while found := self._worker.tag_probe(*self._control, remove=True):
            is_busy = True
            self._read(found)
        self._close_due()
        return self._advance() or is_busy

    def _advance(self) -> bool:
        has_ended = False
        for batch in list(self._batches):  # what a batch sets off may advance others, and add some
            if batch.advance(self.library.UCXError):
                has_ended = True
                self._batches.pop(batch, None)
        return has_ended

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 - the root of the thread; the other channels go on
            _log.exception("a UCX channel failed")

    def _read(self, found: Any) -> None:
        buffer = bytearray(min(found.length, self._max_bytes) or 1)  # a longer one is truncated, which is an error
        self._take(found, buffer, lambda is_good: self._do(lambda: self._receive(bytes(buffer))) if is_good else None)

    def _take(self, found: Any, buffer: bytearray, then: Callable[[bool], None]) -> None:
        request = self._worker.tag_recv_with_handle(self.array(buffer), found)
        self.watch(Batch([request], buffer, then))


def _used(uuid: str) -> Gpu:
    try:
        gpu = Gpu.find(uuid)
        gpu.use()
    except GpuError as error:
        raise ChannelUnavailable(str(error)) from error
    return gpu
