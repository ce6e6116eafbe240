"""Hears the marks of transfers from nodes, in the place of a proxy."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

import zmq

from pdx.telemetry.timeline import Breakdown, Event, Moment, breakdown
from pdx.wire.messages import decode_to_proxy


class Scribe:
    """Nodes whose `proxy` is `address` report to it; it answers nothing."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/scribe.sock"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.address)
        self._moments: dict[str, list[Moment]] = {}

    def transfer(self, name: str, last: Event, timeout_s: float = 10.0) -> Breakdown:
        """A transfer's times, when everything up to RUNNABLE and `last` was told.

        :raises RuntimeError: that did not happen in time.
        """
        deadline = time.monotonic() + timeout_s
        wanted = {Event.PREFILL_END, Event.SEALED, Event.RUNNABLE, last}
        while missing := wanted - {moment.event for moment in self._moments.get(name, [])}:
            if not self._router.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
                raise RuntimeError(f"not told of {name} within {timeout_s} s: {', '.join(sorted(missing))}")
            self._hear()
        return breakdown(self._moments.pop(name))

    def _hear(self) -> None:
        _, frame = self._router.recv_multipart()
        for mark in decode_to_proxy(frame).marks:
            moment = Moment(mark.event, mark.at_ns, mark.engine, mark.nbytes, mark.tokens)
            self._moments.setdefault(mark.transfer, []).append(moment)

    def __enter__(self) -> Scribe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)
