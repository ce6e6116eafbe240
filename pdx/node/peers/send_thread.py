"""One thread per peer that writes to it: chooses the channel, makes digests, submits writes and waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from pdx.errors import ChannelBroken, ChannelError, TransferAborted
from pdx.memory.digest import digests
from pdx.memory.layout import slice_span
from pdx.memory.slot import Slot
from pdx.node.peers.regions import are_digests_due
from pdx.store.tier import Job, Part
from pdx.transports.channel import Channel, Piece, Transfer
from pdx.wire.messages import Landed, Slices, Welcome, encode

if TYPE_CHECKING:
    from pdx.node.peers.connection import PeerConnection
    from pdx.node.peers.peer_tiers import PeerTier, PeerTiers

log = logging.getLogger("pdx.node")

PROBE_S = 1.0  # for a probe of a few megabytes; a slower scheme is dropped
PROBE_ROUNDS = 5
PROBE_WRITES = 4  # at a time
TRY_BYTES = 4096
POLL_S = 0.0002  # between polls of a channel that cannot wake the thread


class SendThread:
    """The thread of one connection to a peer. Public methods are for the control loop's thread, on which it calls
    `PeerTiers`: `channel_chosen`, `written` once per job, `channel_broken`, and at last `sender_ended`."""

    def __init__(
        self,
        tiers: PeerTiers,
        tier: PeerTier,
        peer: PeerConnection,
        welcome: Welcome,
        order: Sequence[str],
        *,
        measure: bool,
        preferred: str = "",
    ) -> None:
        """`welcome` says where the peer may be written. `order`: the schemes to try; the first that connects is used.
        `measure`: connect all and use the fastest; once `preferred` has connected, no other is tried."""
        self.tier = tier
        self.peer = peer
        self.missing: dict[str, str] = {}  # why a scheme does not work; complete when the channel is chosen
        self._tiers = tiers
        self._remotes = {region.scheme: region for region in welcome.regions}
        self._probe = welcome.probe
        self._order = order
        self._is_measuring = measure
        self._preferred = preferred
        self._jobs: deque[Job] = deque()
        self._event = threading.Event()
        self._closing = False
        self._aborted: set[int] = set()  # copies, by number
        self._digesting: ThreadPoolExecutor | None = None
        self._begun: tuple[Job, Future[bytes]] | None = None  # the next job, and its notification
        self._thread = threading.Thread(target=self._run, name=f"pdx-push-{tier.name}"[:15], daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Enqueue a job; jobs are written in order."""
        self._jobs.append(job)
        self._event.set()

    def abort(self, copy: int) -> None:
        """End the jobs of a copy as soon as possible."""
        self._aborted.add(copy)
        self._event.set()

    def forget(self, copy: int) -> None:
        """Forget a copy of which no job is left."""
        self._aborted.discard(copy)

    def close(self) -> None:
        """End all jobs and the thread, without waiting for it. Idempotent."""
        self._closing = True
        self._event.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread after `close`."""
        self._thread.join(timeout_s)

    # ---- on its own thread ------------------------------------------------------------------

    def _run(self) -> None:
        under_way: list[tuple[Job, Transfer]] = []
        channel: Channel | None = None
        try:
            scheme, channel = self._choose()
            if not self._closing:
                self._serve(scheme, channel, under_way)
        except ChannelError as error:
            self._broken(str(error))
        except Exception as error:  # the thread's root; a third party's channel, too
            log.exception("writing to %s failed", self.tier.name)
            self._broken(f"{type(error).__name__}: {error}")
        finally:
            self._end(channel, under_way)

    def _post(self, call: Callable[[], None]) -> None:
        self._tiers.env.mailbox.post(call)

    def _broken(self, why: str) -> None:
        self._post(lambda: self._tiers.channel_broken(self, why))

    def _end(self, channel: Channel | None, under_way: list[tuple[Job, Transfer]]) -> None:
        """Close the channel, so that no local byte is read any more, and report all jobs."""
        if channel is not None:
            channel.close()
        for job, transfer in under_way:
            # Either not sent or not known to have arrived; both ways the push does not count as complete.
            self._over(job, transfer.error if transfer.poll() else ChannelBroken("closed"))
        self._post(self._ended)

    def _ended(self) -> None:
        """On the control loop's thread, which may have submitted jobs until it heard that the channel is broken."""
        while self._jobs:
            self._tiers.written(self, self._jobs.popleft(), ChannelBroken("closed"))
        self._tiers.sender_ended(self)

    def _serve(self, scheme: str, channel: Channel, under_way: list[tuple[Job, Transfer]]) -> None:
        region = self._tiers.regions.regions[scheme]
        if are_digests_due(self._tiers.config.digests, region):
            self._digesting = ThreadPoolExecutor(1, thread_name_prefix="pdx-digest")
        try:
            while True:
                self._event.clear()
                if self._closing:
                    return
                self._write_all(channel, under_way)
                self._collect(under_way)
                self._event.wait(POLL_S if region.is_polled and under_way else 1.0)
        finally:
            if self._digesting is not None:
                self._digesting.shutdown(cancel_futures=True)

    def _write_all(self, channel: Channel, under_way: list[tuple[Job, Transfer]]) -> None:
        while self._jobs and not self._closing:
            job = self._jobs[0]  # stays there until it is being written, so that it is reported whatever fails
            if job.number in self._aborted:
                self._done(self._jobs.popleft(), TransferAborted("the copy was given up"))
                continue
            notify = self._notification(job)
            if len(self._jobs) > 1:
                self._digest(self._jobs[1])  # a channel may copy within `write`
            job.start_ns = time.monotonic_ns()
            under_way.append((job, channel.write([piece(part) for part in job.parts], notify)))
            self._jobs.popleft()
            self._collect(under_way)

    def _notification(self, job: Job) -> bytes:
        """The notification of this job's write: its slices, with digests if they are due."""
        if self._digesting is None:
            return encode(Landed(job.number, [slices(part) for part in job.parts]))
        self._digest(job)
        assert self._begun is not None
        future = self._begun[1]
        self._begun = None
        return future.result()

    def _digest(self, job: Job) -> None:
        """Start to make the digests of the next job, on a thread of their own, while another job is written."""
        if self._digesting is not None and (self._begun is None or self._begun[0] is not job):
            self._begun = (job, self._digesting.submit(self._digested, job))

    def _digested(self, job: Job) -> bytes:
        memory = self._tiers.regions.arena
        return encode(Landed(job.number, [slices(part, digests(memory, spans(part))) for part in job.parts]))

    def _collect(self, under_way: list[tuple[Job, Transfer]]) -> None:
        left = []
        for job, transfer in under_way:
            if transfer.poll():
                self._over(job, transfer.error)
                continue
            if job.number in self._aborted:
                transfer.abort()
            left.append((job, transfer))
        under_way[:] = left

    def _over(self, job: Job, error: ChannelError | None) -> None:
        job.end_ns = time.monotonic_ns()
        self._done(job, error)

    def _done(self, job: Job, error: ChannelError | None) -> None:
        self._post(lambda: self._tiers.written(self, job, error))

    # ---- choosing ---------------------------------------------------------------------------

    def _choose(self) -> tuple[str, Channel]:
        """Choose the first channel that connects, or the fastest of those that do.

        :raises ChannelBroken: none connects; the text says why, scheme by scheme.
        """
        connected: dict[str, Channel] = {}
        best = ""
        try:
            best, rates = self._best(connected)
        finally:
            for scheme, channel in connected.items():
                if scheme != best:
                    channel.close()
        self._post(lambda: self._tiers.channel_chosen(self, best, rates))
        return best, connected[best]

    def _best(self, connected: dict[str, Channel]) -> tuple[str, dict[str, float]]:
        """The scheme to use, and the measured GB/s by scheme. Adds all channels that connect to `connected`."""
        why: list[str] = []
        for scheme in self._order:
            is_enough = not self._is_measuring or self._preferred in connected
            if self._closing or (connected and is_enough):
                break
            try:
                region, timeout_s = self._tiers.regions.regions[scheme], self._tiers.config.peer_timeout_s
                connected[scheme] = region.connect(self._remotes[scheme], timeout_s=timeout_s, wake=self._event)
                self._try(connected[scheme])
            except ChannelError as error:
                why.append(self._without(scheme, error))
                if (channel := connected.pop(scheme, None)) is not None:
                    channel.close()
        rates = self._measure(connected, why) if len(connected) > 1 else {}
        if not connected:
            raise ChannelBroken(f"no channel to {self.tier.name}: {'; '.join(why) or 'none in common'}")
        return max(connected, key=lambda scheme: rates.get(scheme, 0.0)), rates

    def _without(self, scheme: str, error: ChannelError) -> str:
        # A scheme from the settings should work; among all schemes, some never work with some peers.
        level = logging.INFO if self._is_measuring else logging.WARNING
        log.log(level, "no %s to %s: %s", scheme, self.tier.name, error)
        self.missing[scheme] = str(error)
        return f"{scheme}: {error}"

    def _measure(self, connected: dict[str, Channel], why: list[str]) -> dict[str, float]:
        """The best GB/s of each channel, round by round so that a disturbance affects all. Drops channels that fail."""
        rates: dict[str, float] = {}
        for _ in range(PROBE_ROUNDS if self._probe is not None else 0):
            for scheme, channel in list(connected.items()):
                assert self._probe is not None
                try:
                    rates[scheme] = max(rates.get(scheme, 0.0), self._rate(channel, self._probe))
                except ChannelError as error:
                    why.append(self._without(scheme, error))
                    rates.pop(scheme, None)
                    connected.pop(scheme).close()
        return rates

    def _rate(self, channel: Channel, probe: Slot) -> float:
        """GB/s of a few concurrent writes to the peer's probe slot, as in a push."""
        nbytes = min(probe.nbytes, self._tiers.regions.arena.nbytes - self._tiers.regions.probe.offset)
        seconds = self._write_probe(channel, probe, nbytes, PROBE_WRITES, PROBE_S)
        return PROBE_WRITES * nbytes / seconds / 1e9

    def _try(self, channel: Channel) -> None:
        """Write a few bytes to the peer's probe slot, because a channel may connect and still not work.
        :raises ChannelError: the write fails."""
        if self._probe is not None:
            nbytes = min(TRY_BYTES, self._probe.nbytes)
            self._write_probe(channel, self._probe, nbytes, 1, self._tiers.config.peer_timeout_s)

    def _write_probe(self, channel: Channel, probe: Slot, nbytes: int, count: int, limit_s: float) -> float:
        """Make `count` concurrent writes; return the seconds they took."""
        notify = encode(Landed(0, []))
        piece = Piece(self._tiers.regions.probe.offset, probe.offset, nbytes)
        start = time.perf_counter()
        transfers = [channel.write([piece], notify) for _ in range(count)]
        while not all([transfer.poll() for transfer in transfers]):
            if time.perf_counter() - start > limit_s or self._closing:
                for transfer in transfers:
                    transfer.abort()
                raise ChannelBroken(f"took longer than {limit_s:g} s to write {count * nbytes} bytes")
            self._event.wait(POLL_S)
            self._event.clear()
        for transfer in transfers:
            if transfer.error is not None:
                raise transfer.error
        return time.perf_counter() - start


def slices(part: Part, its_digests: bytes = b"") -> Slices:
    """One part of a write as its notification describes it."""
    assert part.remote is not None
    return Slices(part.remote.offset, part.remote.generation, part.first_layer, part.count, its_digests)


def spans(part: Part) -> list[tuple[int, int]]:
    """The (offset, bytes) in the arena of each slice."""
    of_slices = (slice_span(part.slot.nbytes, part.layers, part.first_layer + at, 1) for at in range(part.count))
    return [(part.slot.offset + start, nbytes) for start, nbytes in of_slices]


def piece(part: Part) -> Piece:
    """One part of a write as the channel copies it."""
    assert part.remote is not None
    start, nbytes = part.span
    return Piece(part.slot.offset + start, part.remote.offset + start, nbytes)
