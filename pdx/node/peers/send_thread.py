"""One thread per peer that writes to it: chooses the channel, makes digests, submits writes, watches them end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import ChannelBroken, ChannelError, TransferAborted
from pdx.memory.slot import Slot
from pdx.node.peers.notifications import Notifications, are_digests_due, piece
from pdx.store.tier import Job
from pdx.transports.channel import Channel, Piece, RemoteRegion, Transfer
from pdx.wire.messages import Landed, encode

if TYPE_CHECKING:
    from pdx.node.peers.connection import PeerConnection
    from pdx.node.peers.peer_tiers import PeerTier, PeerTiers

log = logging.getLogger("pdx.node")

PROBE_S = 1.0  # a scheme that takes longer than that for a few megabytes is not worth waiting for
PROBE_ROUNDS = 5
PROBE_WRITES = 4  # at a time
POLL_S = 0.0002  # between looks at channels that cannot wake us


class Target(msgspec.Struct, frozen=True):
    """Where a sender may write: the peer's regions by scheme, in the order to try or to measure them."""

    remotes: Mapping[str, RemoteRegion]
    order: Sequence[str]
    measure: bool  # use the fastest instead of the first
    probe: Slot | None  # the peer's, to be written to for measuring
    preferred: str = ""  # used without measuring if it connects


class SendThread:
    """Of one connection to a peer. All methods belong to the control loop's thread, on which `PeerTiers` is told what
    came of it: `channel_chosen`, `written` once for each job, `channel_broken`, and at last `sender_ended`."""

    def __init__(self, tiers: PeerTiers, tier: PeerTier, peer: PeerConnection, target: Target) -> None:
        self.tier = tier
        self.peer = peer
        self.missing: dict[str, str] = {}  # why a scheme does not lead there; whole when the channel is chosen
        self._tiers = tiers
        self._target = target
        self._jobs: deque[Job] = deque()
        self._event = threading.Event()
        self._closing = False
        self._aborted: set[int] = set()  # copies, by number
        self._thread = threading.Thread(target=self._run, name=f"pdx-push-{tier.name}"[:15], daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Write it, in the order of submission."""
        self._jobs.append(job)
        self._event.set()

    def abort(self, copy: int) -> None:
        """End the jobs of a copy as soon as possible."""
        self._aborted.add(copy)
        self._event.set()

    def forget(self, copy: int) -> None:
        """No job of this copy is left."""
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
        """Whatever was asked for is answered, and no local byte is read any more."""
        if channel is not None:
            channel.close()
        for job, transfer in under_way:
            # Not sent at all, or not known to have arrived: the push will not be taken as complete either way.
            self._over(job, transfer.error if transfer.poll() else ChannelBroken("closed"))
        self._post(self._ended)

    def _ended(self) -> None:
        """On the control loop's thread: it may have submitted until it heard that the channel is broken."""
        while self._jobs:
            self._tiers.written(self, self._jobs.popleft(), ChannelBroken("closed"))
        self._tiers.sender_ended(self)

    def _serve(self, scheme: str, channel: Channel, under_way: list[tuple[Job, Transfer]]) -> None:
        region = self._tiers.regions.regions[scheme]
        is_digested = are_digests_due(self._tiers.config.digests, region)
        with Notifications(self._tiers.regions.arena, digested=is_digested) as announcer:
            while True:
                self._event.clear()
                if self._closing:
                    return
                self._write_all(channel, announcer, under_way)
                self._collect(under_way)
                self._event.wait(POLL_S if region.is_polled and under_way else 1.0)

    def _write_all(self, channel: Channel, announcer: Notifications, under_way: list[tuple[Job, Transfer]]) -> None:
        while self._jobs and not self._closing:
            job = self._jobs[0]  # stays there until it is under way: whatever fails, it is answered
            if job.number in self._aborted:
                self._done(self._jobs.popleft(), TransferAborted("the copy was given up"))
                continue
            notify = announcer.take(job)
            if len(self._jobs) > 1:
                announcer.begin(self._jobs[1])  # a channel may copy within `write`
            job.start_ns = time.monotonic_ns()
            under_way.append((job, channel.write([piece(part) for part in job.parts], notify)))
            self._jobs.popleft()
            self._collect(under_way)

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
        """The channel to use: the first that connects, or the fastest of those that do.

        :raises ChannelBroken: none connects; the text says why, scheme by scheme.
        """
        connected: dict[str, Channel] = {}
        try:
            best, rates = self._best(connected)
        except BaseException:
            self._close_but("", connected)
            raise
        self._close_but(best, connected)
        self._post(lambda: self._tiers.channel_chosen(self, best, rates))
        return best, connected[best]

    def _close_but(self, kept: str, connected: Mapping[str, Channel]) -> None:
        for scheme, channel in connected.items():
            if scheme != kept:
                channel.close()

    def _best(self, connected: dict[str, Channel]) -> tuple[str, dict[str, float]]:
        """The scheme to use, and GB/s by scheme where they were measured. All that connect are in `connected`."""
        why: list[str] = []
        for scheme in self._target.order:
            is_enough = not self._target.measure or self._target.preferred in connected
            if self._closing or (connected and is_enough):
                break
            try:
                remote = self._target.remotes[scheme]
                region, timeout_s = self._tiers.regions.regions[scheme], self._tiers.config.peer_timeout_s
                connected[scheme] = region.connect(remote, timeout_s=timeout_s, wake=self._event)
            except ChannelError as error:
                why.append(self._without(scheme, error))
        rates = self._measure(connected, why) if len(connected) > 1 else {}
        if not connected:
            raise ChannelBroken(f"no channel to {self.tier.name}: {'; '.join(why) or 'none in common'}")
        return max(connected, key=lambda scheme: rates.get(scheme, 0.0)), rates

    def _without(self, scheme: str, error: ChannelError) -> str:
        # Asked for by name, it should work; among all there are, some never lead to some peers.
        log.log(
            logging.INFO if self._target.measure else logging.WARNING, "no %s to %s: %s", scheme, self.tier.name, error
        )
        self.missing[scheme] = str(error)
        return f"{scheme}: {error}"

    def _measure(self, connected: dict[str, Channel], why: list[str]) -> dict[str, float]:
        """GB/s of each channel at its best; round by round, so that what disturbs one disturbs all. Drops those that
        fail."""
        rates: dict[str, float] = {}
        probe = self._target.probe
        for _ in range(PROBE_ROUNDS if probe is not None else 0):
            for scheme, channel in list(connected.items()):
                assert probe is not None
                try:
                    rates[scheme] = max(rates.get(scheme, 0.0), self._rate(channel, probe))
                except ChannelError as error:
                    why.append(self._without(scheme, error))
                    rates.pop(scheme, None)
                    connected.pop(scheme).close()
        return rates

    def _rate(self, channel: Channel, probe: Slot) -> float:
        """GB/s of a few writes to the peer's probe slot at a time, as in a push."""
        notify = encode(Landed(0, []))
        nbytes = min(probe.nbytes, self._tiers.regions.arena.nbytes - self._tiers.regions.probe.offset)
        piece = Piece(self._tiers.regions.probe.offset, probe.offset, nbytes)
        start = time.perf_counter()
        transfers = [channel.write([piece], notify) for _ in range(PROBE_WRITES)]
        while not all([transfer.poll() for transfer in transfers]):
            if time.perf_counter() - start > PROBE_S or self._closing:
                for transfer in transfers:
                    transfer.abort()
                raise ChannelBroken(f"took longer than {PROBE_S} s to write {PROBE_WRITES * nbytes} bytes")
            self._event.wait(POLL_S)
            self._event.clear()
        for transfer in transfers:
            if transfer.error is not None:
                raise transfer.error
        return PROBE_WRITES * nbytes / (time.perf_counter() - start) / 1e9
