"""One thread per listener that takes notifications and checks digests, while the bytes are still in a cache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdx.errors import GpuError, ProtocolError
from pdx.memory.digest import digests
from pdx.memory.layout import slice_span
from pdx.node.peers.regions import are_digests_due
from pdx.store.chunk import Chunk
from pdx.transports.channel import Listener, Notification, Region
from pdx.wire.base import DIGEST_BYTES
from pdx.wire.messages import Landed, Slices, decode_landed

if TYPE_CHECKING:
    from pdx.node.peers.inbound_pushes import InboundPushes

log = logging.getLogger("pdx.node")

POLL_S = 0.0002  # between looks at listeners that cannot wake us, while something is expected
IDLE_S = 0.05
MAX_UNHEARD = 1024  # notifications that the control loop was told of and has not heard yet


class ReceiveThread:
    """Of one region's listener. `InboundPushes.grants` and what it leads to belong to the control loop and are only
    read here; so is `is_expecting`."""

    def __init__(self, pushes: InboundPushes, region: Region, listener: Listener, *, digests: str) -> None:
        """`digests`: the setting, see `NodeConfig`. Sleeps until the region's `wake` is set."""
        self.is_expecting = False
        self._pushes = pushes
        self._region = region
        self._listener = listener
        self._memory = pushes.regions.arena
        self._event = region.wake
        self._needs_digests = are_digests_due(digests, region)
        self._closing = False
        self._posted = 0  # notifications of which the control loop was told; only the thread counts them
        self._heard = 0  # only the control loop does
        self._thread = threading.Thread(target=self._run, name=f"pdx-land-{region.scheme}"[:15], daemon=True)
        self._thread.start()

    def expect(self, expecting: bool) -> None:
        """Whether somebody may write now; only matters for channels that must be polled."""
        if expecting and not self.is_expecting:
            self._event.set()
        self.is_expecting = expecting

    def close(self) -> None:
        """Stop, and wait until it has stopped. Idempotent."""
        self._closing = True
        self._event.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._event.clear()
            notifications: list[Notification] = []
            try:
                if self._posted - self._heard < MAX_UNHEARD:  # else writers are held up by what is not taken
                    notifications = self._listener.take()
            except Exception as error:  # the thread's root; a third party's listener, too
                log.exception("taking notifications of %s failed", self._region.scheme)
                self._failed(error)
            for notification in notifications:
                try:
                    self._take(notification)
                except Exception as error:  # one that cannot be handled shall not take the others with it
                    log.exception("a notification of %s cannot be handled", self._region.scheme)
                    self._failed(error)
            poll_s = POLL_S if self.is_expecting else IDLE_S
            self._event.wait(poll_s if self._region.is_polled else 1.0)

    def _failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self._tell(lambda: self._pushes.malformed(self._region.scheme, text))

    def _tell(self, call: Callable[[], None]) -> None:
        """Have the control loop call this. The thread only."""
        self._posted += 1

        def hear() -> None:
            self._heard += 1
            if self._posted - self._heard == MAX_UNHEARD // 2:
                self._event.set()
            call()

        self._pushes.env.mailbox.post(hear)

    def _take(self, notification: Notification) -> None:
        token = notification.token
        try:
            landed = decode_landed(notification.payload)
        except ProtocolError as error:
            text = str(error)
            self._tell(lambda: self._pushes.malformed(self._region.scheme, text))
            return
        if landed.admit:
            good, bad, nbytes = self._check(token, landed)
            self._tell(lambda: self._pushes.landed(self._region.scheme, token, landed.admit, good, bad, nbytes))

    def _check(self, token: bytes, landed: Landed) -> tuple[list[Slices], list[Slices], int]:
        """Slices that landed whole, those whose bytes are not what was sent, and the bytes of the former."""
        good: list[Slices] = []
        bad: list[Slices] = []
        nbytes = 0
        for slices in landed.slices:
            push = self._pushes.grants.get(slices.offset)
            chunk = push.chunks.get(slices.offset) if push is not None and push.session.token == token else None
            if chunk is None or chunk.slot.generation != slices.generation:
                continue  # given up meanwhile, or never this peer's: nobody waits for it
            if slices.first_layer + slices.layers <= chunk.layers and self._is_whole(slices, chunk):
                nbytes += slice_span(chunk.slot.nbytes, chunk.layers, slices.first_layer, slices.layers)[1]
                good.append(slices)
            else:
                bad.append(slices)
        return good, bad, nbytes

    def _is_whole(self, slices: Slices, chunk: Chunk) -> bool:
        if not slices.digests and not self._needs_digests:
            return True
        if len(slices.digests) != slices.layers * DIGEST_BYTES:
            return False
        spans = []
        for layer in range(slices.first_layer, slices.first_layer + slices.layers):
            start, size = slice_span(chunk.slot.nbytes, chunk.layers, layer, 1)
            spans.append((slices.offset + start, size))
        try:
            return digests(self._memory, spans) == slices.digests
        except GpuError as error:
            log.warning("slices that landed by %s cannot be checked: %s", self._region.scheme, error)
            return False
