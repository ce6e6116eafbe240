"""The threads of a tier: what they begin and what they do not."""

import threading
import time

from pdx.store.store_tier import Threads, Work, WorkQueue
from pdx.telemetry.env import Env


class Owner:
    """A tier whose work lasts until it may go on."""

    def __init__(self):
        self.env, self.begun, self.is_begun, self.goes_on = Env(), [], threading.Event(), threading.Event()

    def perform(self, work):
        self.begun.append(work)
        self.is_begun.set()
        self.goes_on.wait(30)

    def performed(self, work):
        pass


def test_what_waits_when_it_closes_is_not_begun():
    """Though a thread is idle, which closing wakes."""
    owner, queue, first, second = Owner(), WorkQueue(1), Work(), Work()

    class Late(Threads):
        def take_back(self, *queues):
            time.sleep(0.2)
            owner.goes_on.set()
            return super().take_back(*queues)

    threads = Late("test", 2, owner, [queue])
    threads.give(first, queue)
    assert owner.is_begun.wait(30)
    threads.give(second, queue)
    assert threads.close()
    assert owner.begun == [first]
    assert second.error.kind == "cancelled"
