"""A workload, sent to one server or in turns to two: what `pdx bench serve` measures.

Everything runs on one event loop. What was answered is kept from block to block, so that an interrupted run has all
that it measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from pdx.bench.breakdown.records import Found
from pdx.bench.serve import client as serve_engines
from pdx.bench.serve.client import Client, Dialogue, Question, Server
from pdx.bench.serve.goodput import Output
from pdx.bench.serve.workloads import Passage, Session, Shape, Writer, blocks, plan
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.bench.serve.progress import ServeProgress

LAG_STEP_S = 0.02  # between looks at how late the event loop is


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was sent and is over."""

    session: int
    round: int
    late_s: float  # sent after it was due; waiting for a place among --concurrency is not lateness
    output: Output


@dataclass(slots=True)
class Block:
    """What one server did with one block of sessions."""

    planned: int  # requests
    is_over: bool = False  # it was not cut short
    answers: list[Answer] = field(default_factory=list)
    duration_s: float = 0.0
    cpu_s: float = 0.0  # of this process
    lags_s: list[float] = field(default_factory=list)  # of the event loop: timers fired so late
    found: dict[str, Found] = field(default_factory=dict)  # tokens of prompts, by the URL of the engine that had them


@dataclass(slots=True)
class Tally:
    """One server's blocks so far."""

    server: Server
    blocks: list[Block] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        """Of all blocks."""
        return [answer for block in self.blocks for answer in block.answers]

    @property
    def found(self) -> dict[str, Found]:
        """Where each engine found the tokens of prompts, in all blocks."""
        each = {url for block in self.blocks for url in block.found}
        return {url: serve_engines.total([b.found[url] for b in self.blocks if url in b.found]) for url in sorted(each)}

    @property
    def duration_s(self) -> float:
        """Of all blocks; the time in which the other server had its turn does not count."""
        return sum(block.duration_s for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a workload is sent."""

    shape: Shape
    api: str  # completions or chat
    concurrency: int | None = None  # most requests of ours under way
    blocks: int = 1
    warmups: int = 1
    salt: str = ""  # other salts give other texts
    reset_cache: bool = False  # empty the engines' own prefix caches before each block


class Run:
    """A workload under way. `go` may be called once."""

    def __init__(self, settings: Settings, servers: Sequence[Server], client: Client, watcher: ServeProgress) -> None:
        self.tallies = [Tally(server) for server in servers]
        self.is_complete = False
        self._settings = settings
        self._client = client
        self._watcher = watcher
        self._texts: Mapping[str, str] = {}
        self._places: contextlib.AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(settings.concurrency) if settings.concurrency else contextlib.nullcontext()
        )

    def write(self, writer: Writer) -> list[Session]:
        """Write all texts, which may take a while; returns the plan."""
        settings = self._settings
        sessions = plan(settings.shape)
        passages = [turn.message for session in sessions for turn in session.turns]
        passages += [session.system for session in sessions if session.system is not None]
        passages += [_warmup(settings, number, tally.server) for tally in self.tallies for number in self._warmups()]
        sizes = {passage.name: passage.tokens for passage in passages}
        self._texts = {name: writer.text(name, tokens) for name, tokens in sizes.items()}
        return sessions

    async def go(self, sessions: Sequence[Session], on_block: Callable[[], None]) -> None:
        """Send everything, block by block, each to every server. SIGINT or SIGTERM ends it early and keeps the rest.

        :raises ConfigError: a server does not answer the first request.
        :raises CacheNotReset: an engine's prefix cache is to be emptied, and is not.
        """
        with _stopped_by_signals() as stop:
            async with self._client.session() as http:
                work = asyncio.create_task(self._all_blocks(http, sessions, on_block))
                stopped = asyncio.create_task(stop.wait())
                await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                if not work.done():
                    self._watcher.say("interrupted; what was answered is kept")
                    work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
        self.is_complete = not work.cancelled()

    async def _all_blocks(
        self, http: aiohttp.ClientSession, sessions: Sequence[Session], on_block: Callable[[], None]
    ) -> None:
        for tally in self.tallies:
            await self._warm_up(http, tally.server)
        parts = blocks(sessions, self._settings.blocks)
        for number, part in enumerate(parts):
            first = number % len(self.tallies)  # no server is always the first to get a block
            for tally in self.tallies[first:] + self.tallies[:first]:
                block = Block(planned=sum(len(session.turns) for session in part))
                if self._settings.reset_cache:
                    await serve_engines.empty_caches(tally.server.engines)
                counted = await serve_engines.read(tally.server.engines)
                tally.blocks.append(block)
                self._watcher.begin(tally.server, number + 1, len(parts), block.planned)
                async with _measured(block):
                    await self._send(http, tally.server, part, block)
                asked = sum(answer.output.prompt_len for answer in block.answers if answer.output.success)
                block.found = await serve_engines.found_since(counted, asked)
                block.is_over = True
                on_block()

    async def _warm_up(self, http: aiohttp.ClientSession, server: Server) -> None:
        """Requests that do not count. The first one also shows that the server understands us."""
        for number in self._warmups():
            passage = _warmup(self._settings, number, server)
            output = await self._client.ask(http, self._question(server, Dialogue(), passage, f"warm-up-{number}"))
            if not output.success:
                raise ConfigError(f"{server.url} does not answer the first request: {output.error}")

    def _warmups(self) -> range:
        return range(self._settings.warmups)

    async def _send(
        self, http: aiohttp.ClientSession, server: Server, sessions: Sequence[Session], block: Block
    ) -> None:
        """All sessions of a block; each is a task of its own."""
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(self._converse(http, server, session, start_s + session.start_s, block))

    async def _converse(
        self, http: aiohttp.ClientSession, server: Server, session: Session, due_s: float, block: Block
    ) -> None:
        """One session's requests, one after the other; after a failure the rest is not sent."""
        dialogue = Dialogue(self._texts[session.system.name] if session.system else "")
        before = session.system.tokens if session.system else 0
        for number, turn in enumerate(session.turns):
            due_s = due_s if number == 0 else time.perf_counter() + turn.think_s
            await asyncio.sleep(due_s - time.perf_counter())
            late_s = time.perf_counter() - due_s
            question = self._question(server, dialogue, turn.message, f"{session.index}-{number}", before)
            arrived_s = time.perf_counter()
            async with self._places:
                self._watcher.sent()
                output = await self._client.ask(http, question)
            output.client_queue_time = output.start_time - arrived_s
            block.answers.append(Answer(session.index, number, late_s, output))
            self._watcher.answered(output)
            if not output.success:
                return
            dialogue.answers.append(output.generated_text)
            before = question.prompt_tokens + question.output_tokens

    def _question(self, server: Server, dialogue: Dialogue, message: Passage, name: str, before: int = 0) -> Question:
        """The dialogue, gone on by this message. `before`: tokens of what was said so far."""
        dialogue.messages.append(self._texts[message.name])
        place = [tally.server for tally in self.tallies].index(server)
        return Question(
            server=server,
            api=self._settings.api,
            dialogue=dialogue,
            prompt_tokens=before + message.tokens,
            output_tokens=self._settings.shape.output_tokens,
            request_id=f"bench-{self._settings.salt}-{place}-{name}",
        )


def check_limits(shape: Shape, servers: Sequence[Server]) -> None:
    """:raises ConfigError: the longest prompt with its answer does not fit."""
    for server in servers:
        if server.max_tokens is not None and shape.most_tokens > server.max_tokens:
            raise ConfigError(
                f"the longest prompt with its answer has {shape.most_tokens:,} tokens, and {server.url} takes "
                f"{server.max_tokens:,}: lower --input-len, --output-len or --rounds, or raise its --max-model-len"
            )


def _warmup(settings: Settings, number: int, server: Server) -> Passage:
    return Passage(f"warm-up {number} {server.label}", settings.shape.input_tokens)


@contextlib.asynccontextmanager
async def _measured(block: Block) -> AsyncIterator[None]:
    """Time the block, also if it is cut short, and what this process needs for it.

    Meanwhile the garbage collector does not look at what was there before: that could take longer than a token.
    """
    gc.freeze()
    watch = asyncio.create_task(_watch_lag(block.lags_s))
    start_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        block.duration_s = time.perf_counter() - start_s
        block.cpu_s = time.process_time() - cpu_s
        watch.cancel()
        gc.unfreeze()


async def _watch_lag(lags_s: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + LAG_STEP_S
        await asyncio.sleep(LAG_STEP_S)
        lags_s.append(max(0.0, time.perf_counter() - due_s))


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets. The second signal does what it always does."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def release() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        release()
        stop.set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        release()
