"""What is said with each write: which slices it carries, with their digests where they are due."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from pdx.memory.digest import Readable, digests
from pdx.memory.layout import slice_span
from pdx.store.tier import Job, Part
from pdx.transports.channel import Piece, Region
from pdx.wire.messages import Landed, Slices, encode


def are_digests_due(setting: str, region: Region) -> bool:
    """Whether what this region's channels write carries digests, and must; `setting`: `NodeConfig.digests`."""
    return setting == "always" or (setting == "wire" and region.crosses_wire)


class Notifications:
    """Makes notifications, digests on a thread of its own: those of the next write while one is written.

    For one thread, which takes what it began, or does not.
    """

    def __init__(self, memory: Readable, *, digested: bool) -> None:
        self._memory = memory
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pdx-digest") if digested else None
        self._begun: tuple[Job, Future[bytes]] | None = None

    def begin(self, job: Job) -> None:
        """This job is next."""
        if self._pool is not None and (self._begun is None or self._begun[0] is not job):
            self._begun = (job, self._pool.submit(self._digested, job))

    def take(self, job: Job) -> bytes:
        """The notification of this job; waits for its digests."""
        if self._pool is None:
            return encode(Landed(job.number, [slices(part) for part in job.parts]))
        self.begin(job)
        assert self._begun is not None
        future = self._begun[1]
        self._begun = None
        return future.result()

    def _digested(self, job: Job) -> bytes:
        return encode(Landed(job.number, [slices(part, digests(self._memory, spans(part))) for part in job.parts]))

    def __enter__(self) -> Notifications:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def slices(part: Part, its_digests: bytes = b"") -> Slices:
    """What the notification of a write says of one part of it."""
    assert part.remote is not None
    return Slices(part.remote.offset, part.remote.generation, part.first_layer, part.count, its_digests)


def spans(part: Part) -> list[tuple[int, int]]:
    """Where each slice lies in the arena: (offset, bytes)."""
    of_slices = (slice_span(part.slot.nbytes, part.layers, part.first_layer + at, 1) for at in range(part.count))
    return [(part.slot.offset + start, nbytes) for start, nbytes in of_slices]


def piece(part: Part) -> Piece:
    """What a channel copies for one part of a write."""
    assert part.remote is not None
    start, nbytes = part.span
    return Piece(part.slot.offset + start, part.remote.offset + start, nbytes)
