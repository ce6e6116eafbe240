"""One thread per listener that takes notifications and checks digests, while the bytes are still in a cache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

import msgspec

from pdx.errors import GpuError, ProtocolError
from pdx.memory.digest import Readable, digests
from pdx.memory.layout import slice_span
from pdx.telemetry.mailbox import Mailbox
from pdx.transports.channel import Listener, Notification
from pdx.wire.base import DIGEST_BYTES
from pdx.wire.messages import Landed, Slices, decode_landed

log = logging.getLogger("pdx.node")

POLL_S = 0.0002  # between looks at listeners that cannot wake us, while something is expected
IDLE_S = 0.05
MAX_UNHEARD = 1024  # notifications that the control loop was told of and has not heard yet


class WriteGrant(msgspec.Struct, frozen=True):
    """A slot that a peer may write to, as the thread must know it."""

    token: bytes
    generation: int
    nbytes: int
    layers: int


class Verdict(msgspec.Struct, frozen=True):
    """Slices that landed whole, and those whose bytes are not what was sent."""

    token: bytes
    admit: int
    good: list[Slices]
    bad: list[Slices]
    nbytes: int


class ReceiveThread:
    """`grants` (by offset) belongs to the control loop and is only read here; so is `is_expecting`."""

    def __init__(
        self,
        scheme: str,
        *,
        listener: Listener,
        memory: Readable,
        grants: Mapping[int, WriteGrant],
        wake: threading.Event,
        is_polled: bool,
        needs_digests: bool,
        mailbox: Mailbox,
        on_landed: Callable[[str, Verdict], None],
        on_malformed: Callable[[str, str], None],
    ) -> None:
        """`wake` is set when there may be notifications."""
        self.scheme = scheme
        self.is_expecting = False
        self._listener = listener
        self._memory = memory
        self._grants = grants
        self._is_polled = is_polled
        self._needs_digests = needs_digests
        self._mailbox = mailbox
        self._on_landed = on_landed
        self._on_malformed = on_malformed
        self._event = wake
        self._closing = False
        self._posted = 0  # notifications of which the control loop was told; only the thread counts them
        self._heard = 0  # only the control loop does
        self._thread = threading.Thread(target=self._run, name=f"pdx-land-{scheme}"[:15], daemon=True)
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
                log.exception("taking notifications of %s failed", self.scheme)
                self._failed(error)
            for notification in notifications:
                try:
                    self._take(notification)
                except Exception as error:  # one that cannot be handled shall not take the others with it
                    log.exception("a notification of %s cannot be handled", self.scheme)
                    self._failed(error)
            poll_s = POLL_S if self.is_expecting else IDLE_S
            self._event.wait(poll_s if self._is_polled else 1.0)

    def _failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self._tell(lambda: self._on_malformed(self.scheme, text))

    def _tell(self, call: Callable[[], None]) -> None:
        """Have the control loop call this. The thread only."""
        self._posted += 1

        def hear() -> None:
            self._heard += 1
            if self._posted - self._heard == MAX_UNHEARD // 2:
                self._event.set()
            call()

        self._mailbox.post(hear)

    def _take(self, notification: Notification) -> None:
        token = notification.token
        try:
            landed = decode_landed(notification.payload)
        except ProtocolError as error:
            text = str(error)
            self._tell(lambda: self._on_malformed(self.scheme, text))
            return
        if landed.admit:
            verdict = self._check(token, landed)
            self._tell(lambda: self._on_landed(self.scheme, verdict))

    def _check(self, token: bytes, landed: Landed) -> Verdict:
        good: list[Slices] = []
        bad: list[Slices] = []
        nbytes = 0
        for slices in landed.slices:
            grant = self._grants.get(slices.offset)
            if grant is None or grant.token != token or grant.generation != slices.generation:
                continue  # given up meanwhile, or never this peer's: nobody waits for it
            if slices.first_layer + slices.layers > grant.layers:
                bad.append(slices)
                continue
            if self._is_whole(slices, grant):
                nbytes += slice_span(grant.nbytes, grant.layers, slices.first_layer, slices.layers)[1]
                good.append(slices)
            else:
                bad.append(slices)
        return Verdict(token, landed.admit, good, bad, nbytes)

    def _is_whole(self, slices: Slices, grant: WriteGrant) -> bool:
        if not slices.digests and not self._needs_digests:
            return True
        if len(slices.digests) != slices.layers * DIGEST_BYTES:
            return False
        spans = []
        for layer in range(slices.first_layer, slices.first_layer + slices.layers):
            start, size = slice_span(grant.nbytes, grant.layers, layer, 1)
            spans.append((slices.offset + start, size))
        try:
            return digests(self._memory, spans) == slices.digests
        except GpuError as error:
            log.warning("slices that landed by %s cannot be checked: %s", self.scheme, error)
            return False
