"""A signal that comes at a bad moment leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import pytest

from pdx.bench.harness.interrupts import Interrupts, Steps, run, shielded

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
    with pytest.raises(KeyboardInterrupt), Interrupts(), shielded(recorded(events, at_start=number)):
        events.append("used")
    assert events == ["started", "ended"]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_end_that_is_interrupted_is_finished(number: int) -> None:
    events: list[str] = []
    with pytest.raises(KeyboardInterrupt), Interrupts(), shielded(recorded(events, at_end=number)):
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
        steps.step("three")
        signal.raise_signal(number)
        steps.step("never")
    assert steps.was_interrupted
    assert capsys.readouterr().err.splitlines() == ["[1/3] one", "[2/3] three"]
    assert [signal.getsignal(each) for each in NUMBERS] == before


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
            run(wait(), runner=runner.run)
        assert runner.run(close()) == 7
