"""An OpenAI server as the demo sees it: waited for, asked."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from pdx.bench.demo.workload import Request
from pdx.bench.harness.ask import Answer, AskFailed, ask, session
from pdx.cli.processes import Process, ProcessState, last_lines

START_S = 600.0


class Failed(Exception):
    """A server ended, never became ready, or answered with an error; the text holds its words."""


def wait(process: Process, say: Callable[[str], None]) -> None:
    """Until `process` is ready; says every ten seconds what was last logged beside its log.

    :raises Failed: it ended, or took longer than `START_S`.
    """
    started_at = said_at = time.monotonic()
    while process.look() is not ProcessState.READY:
        now = time.monotonic()
        if process.state is ProcessState.DIED or now - started_at > START_S:
            raise Failed(f"{process.name} is {process.state}:\n" + "\n".join(process.tail(30)))
        if now - said_at >= 10:
            said_at = now
            newest = max(process.log.parent.glob("*.log"), key=lambda log: log.stat().st_mtime)
            say(f"  {newest.stem}: {' '.join(last_lines(newest, 1))[:110]}")
        time.sleep(0.2)


def ask_at_once(url: str, requests: Sequence[Request]) -> list[Answer]:
    """Post all requests together and read their streams to the end.

    :raises Failed: the server says that it could not answer.
    """

    async def together() -> list[Answer]:
        async with session() as http:
            asked = (ask(http, url, each.body, secrets.token_hex(8), path=each.path) for each in requests)
            return list(await asyncio.gather(*asked))

    try:
        return asyncio.run(together())
    except AskFailed as error:
        raise Failed(f"{', '.join(each.name for each in requests)}: {error}") from error
