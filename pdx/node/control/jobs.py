"""Controllers' long verbs: jobs that run in small steps, between the messages of the control loop.

A job is a generator: it does a little, and yields until it can go on. It ends by itself, by an error, or because it is
cancelled; then its `finally` gives back what it holds. Its name contains the node's name and epoch, so that a job of an
earlier life of the node can be told from one that never existed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Generator, Sequence
from typing import Literal

import msgspec

from pdx.errors import JobConflict, JobUnknown, NodeError, PdxError
from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.wire.verbs import JobStatus

log = logging.getLogger("pdx.node")

Steps = Generator[None, None, None]

MAX_RUNNING = 64
MAX_REMEMBERED = 256  # jobs that are over
LOOK_S = 0.02  # between two steps of jobs that wait for something that does not wake the control loop
TURN_S = 0.01  # of a turn of the control loop, for all jobs together; the last step may take longer
STALLED_S = 30.0  # a job without progress for so long has failed


class Job(msgspec.Struct, eq=False):
    """One job. Its steps count `chunks_done` and `bytes_done`, and advance `moved_at` while a chunk makes progress."""

    verb: str
    what: str
    keys: Sequence[bytes]  # on which no other job may work meanwhile
    chunks: int  # to do, of one shard each; without those found to be `lacking`
    nbytes: int
    chunks_done: int = 0
    bytes_done: int = 0
    lacking: int = 0  # keys that a remote store turned out not to have
    name: str = ""
    state: Literal["running", "done", "failed", "cancelled"] = "running"
    why: str = ""
    begun_at: float = 0.0
    moved_at: float = 0.0  # when it last made progress …
    seen: tuple[int, int] = (0, 0)  # … and the chunks and bytes done by then
    ended_at: float = 0.0
    steps: Steps | None = None

    def did(self, chunks: int, nbytes: int) -> None:
        self.chunks_done += chunks
        self.bytes_done += nbytes

    def status(self, now: float) -> JobStatus:
        until = self.ended_at if self.state != "running" else now
        return JobStatus(
            self.name,
            self.verb,
            self.state,
            self.chunks,
            min(self.chunks_done, self.chunks),
            self.nbytes,
            self.bytes_done,
            age_s=max(0.0, now - self.begun_at),
            seconds=max(0.0, until - self.begun_at),
            what=printable(self.what, 1000),
            why=printable(self.why, 1000),
        )


class JobTable:
    """A node's running jobs, and the last that have ended. Owned by the control loop."""

    def __init__(self, node: str, epoch: int, env: Env) -> None:
        self._life = f"{node}:{epoch:x}"
        self._clock = env.clock
        self._count = 0
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._running: list[Job] = []
        self._of_key: dict[bytes, Job] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def due_in(self) -> float:
        """Seconds until the next step is due, even if nothing happens before."""
        return LOOK_S if self._running else float("inf")

    def check(self, keys: Sequence[bytes]) -> None:
        """:raises JobConflict: another job works on one of these chunks."""
        busy = next((self._of_key[key] for key in keys if key in self._of_key), None)
        if busy is not None:
            raise JobConflict(
                f"job {busy.name} ({busy.what}) works on one of these chunks: wait for it, or cancel it "
                f"(pdx cache cancel {busy.name})"
            )

    def start(self, job: Job, steps: Steps) -> JobStatus:
        """Start a job.

        :raises JobConflict: see `check`. :raises NodeError: too many jobs are running.
        """
        self.check(job.keys)
        if len(self._running) >= MAX_RUNNING:
            raise NodeError(f"{MAX_RUNNING} jobs run on this node already; wait for one, or cancel one")
        self._count += 1
        job.name, job.steps = f"{self._life}-{self._count}", steps
        job.begun_at = job.moved_at = self._clock()
        self._jobs[job.name] = job
        self._running.append(job)
        self._of_key.update(dict.fromkeys(job.keys, job))
        self._step(job)
        return job.status(self._clock())

    def turn(self) -> None:
        """Take a step of as many jobs as there is time for; call it after each turn of the control loop."""
        until = self._clock() + TURN_S
        for job in list(self._running):
            self._step(job)
            if job.state == "running":  # at the end: the others come first next time
                self._running.remove(job)
                self._running.append(job)
            if self._clock() >= until:
                break

    def _step(self, job: Job) -> None:
        try:
            assert job.steps is not None
            next(job.steps)
        except StopIteration:
            self._end(job, "done")
        except PdxError as error:
            self._end(job, "failed", str(error))
        except Exception as error:  # only the job fails, not the node
            log.exception("job %s failed", job.name)
            self._end(job, "failed", f"{type(error).__name__}: see the node's log")
        else:
            now, done = self._clock(), (job.chunks_done, job.bytes_done)
            if done != job.seen:  # in this step or since the last one: tiers report at any time
                job.seen, job.moved_at = done, now
            elif now - job.moved_at > STALLED_S:
                job.steps.close()
                self._end(job, "failed", f"nothing has moved for {STALLED_S:g} s")

    def _end(self, job: Job, state: Literal["done", "failed", "cancelled"], why: str = "") -> None:
        job.state, job.why, job.ended_at, job.steps = state, why or job.why, self._clock(), None
        self._running.remove(job)
        for key in job.keys:
            self._of_key.pop(key, None)
        job.keys = ()
        level = logging.WARNING if state == "failed" else logging.INFO
        log.log(
            level, "job %s (%s) is %s%s", job.name, printable(job.what), state, f": {printable(why)}" if why else ""
        )
        over = [name for name, each in self._jobs.items() if each.state != "running"]
        for name in over[: max(0, len(over) - MAX_REMEMBERED)]:
            del self._jobs[name]

    def cancel(self, name: str) -> JobStatus:
        """End a job; no-op for one that is over.

        :raises JobUnknown: there is no such job.
        """
        job = self._get(name)
        if job.steps is not None:
            job.steps.close()
            self._end(job, "cancelled")
        return job.status(self._clock())

    def status(self, name: str) -> JobStatus:
        """:raises JobUnknown: there is no such job."""
        return self._get(name).status(self._clock())

    def all(self) -> list[JobStatus]:
        """All remembered jobs, the newest first."""
        now = self._clock()
        return [job.status(now) for job in reversed(self._jobs.values())]

    def _get(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is not None:
            return job
        life, _, number = name.rpartition("-")
        if life != self._life:
            why = "it is of another life of this node, or of another node: nothing of it runs here"
        elif number.isdecimal() and 0 < int(number) <= self._count:
            why = f"it is over, and {MAX_REMEMBERED} others have ended since"
        else:
            why = "there never was one of that name"
        raise JobUnknown(f"no job {name!r:.80} is known: {why}")

    def close(self) -> None:
        """Cancel all jobs. Idempotent."""
        for job in list(self._running):
            self.cancel(job.name)
