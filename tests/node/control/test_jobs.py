"""The table of jobs, without a node."""

from __future__ import annotations

import itertools
from collections import Counter

from pdx.node.control import jobs as module
from pdx.node.control.jobs import Job, JobTable
from pdx.telemetry.env import Env


def test_many_jobs_share_what_one_turn_of_the_loop_may_take():
    """However many there are, messages wait no longer; and each job has its turn."""
    now, steps = [0.0], Counter()

    def work(name):
        while True:
            now[0] += module.TURN_S / 4
            steps[name] += 1
            yield

    table = JobTable("a", 1, Env(lambda: now[0]))
    for number in range(module.MAX_RUNNING):
        table.start(Job("move", str(number), [bytes([number])], 1, 1), work(number))
    steps.clear()
    for _ in range(module.MAX_RUNNING):
        before = now[0]
        table.turn()
        assert now[0] - before <= 1.25 * module.TURN_S
    assert max(steps.values()) - min(steps.values()) <= 1
    assert len(steps) == module.MAX_RUNNING
    table.close()
    assert not len(table)
    table.check([bytes([number]) for number in range(module.MAX_RUNNING)])


def test_what_is_done_between_two_steps_counts_as_well():
    """A tier tells of a chunk when it is done, which is seldom within a step of the job."""
    now = [0.0]
    table = JobTable("a", 1, Env(lambda: now[0]))
    job = Job("recode", "many chunks", [b"k"], 10, 10)

    def wait():
        while job.chunks_done < job.chunks:
            yield

    name = table.start(job, wait()).job
    for _ in range(9):
        now[0] += module.STALLED_S / 2
        job.did(1, 1)
        table.turn()
        assert table.status(name).state == "running"
    job.did(1, 1)
    table.turn()
    assert table.status(name).state == "done"


def test_a_job_of_which_nothing_is_done_fails():
    now = [0.0]
    table = JobTable("a", 1, Env(lambda: now[0]))
    job = Job("move", "one chunk", [b"k"], 1, 1)
    name = table.start(job, (None for _ in itertools.count())).job
    now[0] += module.STALLED_S
    table.turn()
    assert table.status(name).state == "running"
    now[0] += 0.1
    table.turn()
    assert (table.status(name).state, table.status(name).why) == ("failed", "nothing has moved for 30 s")
