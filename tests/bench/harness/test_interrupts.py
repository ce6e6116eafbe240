"""A signal that comes at a bad moment leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import pytest

from pdx.bench.breakdown.observer import Asker
from pdx.bench.harness.interrupts import Interrupts, Steps, run, whole

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@contextlib.contextmanager
def recorded(events: list[str], *, at_start: int = 0, at_end: int = 0) -> Iterator[None]:
    """Says when it has started and ended; signals this process in the middle of it."""
    if at_start:
        signal.raise_signal(at_start)
    events.append("started")
    try:
        yield
    finally:
        if at_end:
            signal.raise_signal(at_end)
        events.append("ended")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_start_that_is_interrupted_is_finished_and_undone(number: int) -> None:
    events: list[str] = []
    with pytest.raises(KeyboardInterrupt), Interrupts(), whole(recorded(events, at_start=number)):
        events.append("used")
    assert events == ["started", "ended"]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_end_that_is_interrupted_is_finished(number: int) -> None:
    events: list[str] = []
    with pytest.raises(KeyboardInterrupt), Interrupts(), whole(recorded(events, at_end=number)):
        events.append("used")
    assert events == ["started", "used", "ended"]


def interrupted_twice(events: list[str]) -> None:
    with Interrupts():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)
            events.append("cleaned up")


def test_only_the_first_signal_interrupts() -> None:
    events: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(events)
    assert events == ["cleaned up"]


@pytest.mark.parametrize("number", NUMBERS)
def test_steps_end_without_an_error_and_handlers_are_as_before(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    with Steps(3) as steps:
        steps.step("one")
        steps.skip(1)
        steps.step("three")
        signal.raise_signal(number)
        steps.step("never")
    assert steps.was_interrupted
    assert capsys.readouterr().err.splitlines() == ["[1/3] one", "[3/3] three"]
    assert [signal.getsignal(each) for each in NUMBERS] == before


def test_errors_are_no_interrupts() -> None:
    steps = Steps(1)
    with pytest.raises(ValueError, match="broken"), steps:
        raise ValueError("broken")
    assert not steps.was_interrupted


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_inside_a_loop_cancels_and_comes_out_behind_it(number: int) -> None:
    events: list[str] = []

    async def client() -> None:
        signal.raise_signal(number)
        await asyncio.Event().wait()

    async def work() -> None:
        tasks = [asyncio.create_task(client()) for _ in range(3)]
        try:
            await asyncio.gather(*tasks)
        finally:
            signal.raise_signal(number)  # a second one does not cut the end short
            await asyncio.sleep(0)
            events.append("ended")

    with pytest.raises(KeyboardInterrupt), Interrupts():
        run(work())
    assert events == ["ended"]


class SignalledPolicy(asyncio.DefaultEventLoopPolicy):
    """Its loops get a signal when they are made, and when they have closed."""

    def __init__(self, *, at_start: int = 0, at_end: int = 0) -> None:
        super().__init__()
        self.loops: list[asyncio.AbstractEventLoop] = []
        self._at_start, self._at_end = at_start, at_end

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        self.loops.append(loop)
        really_close = loop.close

        def close() -> None:
            really_close()
            if self._at_end:
                signal.raise_signal(self._at_end)

        loop.close = close  # type: ignore[method-assign]
        if self._at_start:
            signal.raise_signal(self._at_start)
        return loop


@contextlib.contextmanager
def loops(*, at_start: int = 0, at_end: int = 0) -> Iterator[list[asyncio.AbstractEventLoop]]:
    """Signals this process around each loop in this context."""
    policy = SignalledPolicy(at_start=at_start, at_end=at_end)
    asyncio.set_event_loop_policy(policy)
    try:
        yield policy.loops
    finally:
        asyncio.set_event_loop_policy(None)
        for loop in policy.loops:
            if not loop.is_closed():
                loop.close()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_the_loop_is_made_cancels_at_the_first_wait_and_leaves_no_loop_open(number: int) -> None:
    events: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            events.append("went on")
        finally:
            events.append("ended")

    with loops(at_start=number) as made:
        with pytest.raises(KeyboardInterrupt), Interrupts():
            run(work())
        assert [loop.is_closed() for loop in made] == [True]
    assert events == ["ended"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_when_the_loop_has_closed_interrupts_what_comes_next(number: int) -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    with loops(at_end=number) as made:
        with pytest.raises(KeyboardInterrupt), Interrupts():
            run(work())
        assert [loop.is_closed() for loop in made] == [True]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_client_that_is_interrupted_while_it_starts_or_ends_leaves_no_loop_open(number: int) -> None:
    for where in ("at_start", "at_end"):
        with loops(**{where: number}) as made:
            with pytest.raises(KeyboardInterrupt), Interrupts(), whole(Asker()):
                pass
            assert [loop.is_closed() for loop in made] == [True]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_loop_that_is_interrupted_can_be_used_again(number: int) -> None:
    async def wait() -> None:
        signal.raise_signal(number)
        await asyncio.Event().wait()

    async def close() -> int:
        await asyncio.sleep(0)
        return 7

    with asyncio.Runner() as runner:
        with pytest.raises(KeyboardInterrupt), Interrupts():
            run(wait(), by=runner.run)
        assert runner.run(close()) == 7


def test_without_a_signal_a_coroutine_just_runs() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]

    async def work() -> int:
        return 7

    assert run(work()) == 7
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_in_another_thread_a_coroutine_just_runs() -> None:
    async def work() -> int:
        return 7

    async def in_a_thread() -> int:
        return await asyncio.to_thread(run, work())

    assert asyncio.run(in_a_thread()) == 7
