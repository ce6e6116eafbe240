"""One thread per listener that takes notifications and checks digests while the bytes are still in a CPU cache."""

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

POLL_S = 0.0002  # between polls of a listener that cannot wake the thread, while writes are expected
IDLE_S = 0.05
MAX_UNHEARD = 1024  # posted notifications that the control loop has not handled yet


class ReceiveThread:
    """The thread of one region's listener. It only reads `is_expecting`, `InboundPushes.grants` and what that leads to:
    they belong to the control loop."""

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
        self._posted = 0  # notifications posted to the control loop; only the thread changes it
        self._heard = 0  # of these, handled; only the control loop changes it
        self._thread = threading.Thread(target=self._run, name=f"pdx-land-{region.scheme}"[:15], daemon=True)
        self._thread.start()

    def expect(self, expecting: bool) -> None:
        """Set whether peers may write now; this only matters for channels that must be polled."""
        if expecting and not self.is_expecting:
            self._event.set()
        self.is_expecting = expecting

    def close(self) -> None:
        """Stop the thread and wait for it. Idempotent."""
        self._closing = True
        self._event.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._event.clear()
            notifications: list[Notification] = []
            try:
                if self._posted - self._heard < MAX_UNHEARD:  # else take none, which holds up writers
                    notifications = self._listener.take()
            except Exception as error:  # the thread's root; a third party's listener, too
                log.exception("taking notifications of %s failed", self._region.scheme)
                self._failed(error)
            for notification in notifications:
                try:
                    self._take(notification)
                except Exception as error:  # a bad notification must not take the others with it
                    log.exception("a notification of %s cannot be handled", self._region.scheme)
                    self._failed(error)
            poll_s = POLL_S if self.is_expecting else IDLE_S
            self._event.wait(poll_s if self._region.is_polled else 1.0)

    def _failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self._tell(lambda: self._pushes.malformed(self._region.scheme, text))

    def _tell(self, call: Callable[[], None]) -> None:
        """Have the control loop call this; called on the thread only."""
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
        """Slices that landed whole, slices whose bytes do not match, and the number of bytes in the former."""
        good: list[Slices] = []
        bad: list[Slices] = []
        nbytes = 0
        for slices in landed.slices:
            push = self._pushes.grants.get(slices.offset)
            chunk = push.chunks.get(slices.offset) if push is not None and push.session.token == token else None
            if chunk is None or chunk.slot.generation != slices.generation:
                continue  # given up meanwhile, or never this peer's
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
