"""The table of jobs, without a node."""

from __future__ import annotations

from collections import Counter

from pdx.node.control import jobs as module
from pdx.node.control.jobs import Job, JobTable


def test_many_jobs_share_what_one_turn_of_the_loop_may_take():
    """However many there are, messages wait no longer; and each job has its turn."""
    now, steps = [0.0], Counter()

    def work(name):
        while True:
            now[0] += module.TURN_S / 4
            steps[name] += 1
            yield

    table = JobTable(1, lambda: now[0])
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
    assert not table._of_key
