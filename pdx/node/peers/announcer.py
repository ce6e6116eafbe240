"""What is said with each write: which slices it carries, with their digests where they are due."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import msgspec

from pdx.memory.digest import Readable, digests
from pdx.node.peers.job import Job
from pdx.transports.channel import Region
from pdx.wire.peer_messages import Landed, encode_landed


def are_digests_due(setting: str, region: Region) -> bool:
    """Whether what this region's channels write carries digests, and must; `setting`: `NodeConfig.digests`."""
    return setting == "always" or (setting == "wire" and region.crosses_wire)


class Announcer:
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
            return encode_landed(Landed(job.push, list(job.slices)))
        self.begin(job)
        assert self._begun is not None
        future = self._begun[1]
        self._begun = None
        return future.result()

    def _digested(self, job: Job) -> bytes:
        slices = [
            msgspec.structs.replace(one, digests=digests(self._memory, spans))
            for one, spans in zip(job.slices, job.spans, strict=True)
        ]
        return encode_landed(Landed(job.push, slices))

    def __enter__(self) -> Announcer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
