"""Plays sessions to a running engine, each request when it is due, and keeps what the client saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from pdx.bench.harness.ask import AskFailed, ask, completion
from pdx.bench.harness.prompts import Prompts
from pdx.bench.reuse.records import Asked
from pdx.bench.reuse.workload import Passage, Session


class Player:
    """Of one run. What was said in a session before, answers included, is the beginning of its next prompt, as tokens.

    State: how many requests were sent. To be used on one event loop.
    """

    def __init__(self, prompts: Prompts, model: str, output_tokens: int) -> None:
        self._prompts = prompts
        self._model = model
        self._output_tokens = output_tokens
        self._num_sent = 0

    async def play(
        self,
        client: aiohttp.ClientSession,
        url: str,
        sessions: Sequence[Session],
        *,
        is_alone: bool,
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[Asked]:
        """Everything, in the order of sessions and turns. `is_alone`: one request after the other, without pauses.

        :raises AskFailed: a request was not answered as asked; those under way are then given up.
        """
        start_s = time.monotonic()
        if is_alone:
            each = [
                await self._converse(client, url, session, time.monotonic() - start_s, start_s, on_answer)
                for session in sessions
            ]
            return sum(each, [])
        tasks = [
            asyncio.ensure_future(self._converse(client, url, session, session.start_s, start_s, on_answer))
            for session in sessions
        ]
        try:
            return sum(await asyncio.gather(*tasks), [])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _converse(
        self,
        client: aiohttp.ClientSession,
        url: str,
        session: Session,
        due_s: float,
        start_s: float,
        on_answer: Callable[[], None],
    ) -> list[Asked]:
        said = self._ids(session.document) if session.document else []
        asked: list[Asked] = []
        for number, turn in enumerate(session.messages):
            if number:
                due_s = time.monotonic() - start_s + turn.think_s
            said += self._ids(turn.passage)
            await asyncio.sleep(start_s + due_s - time.monotonic())
            self._num_sent += 1
            body = completion(self._model, said, self._output_tokens, wants_ids=True)
            answer = await ask(client, url, body, f"pdx-bench-reuse-{self._num_sent}")
            if (answer.prompt_tokens, len(answer.token_ids)) != (len(said), self._output_tokens):
                raise AskFailed(
                    f"asked for {len(said)} tokens of prompt and {self._output_tokens} of answer, got "
                    f"{answer.prompt_tokens} and {len(answer.token_ids)}"
                )
            asked.append(
                Asked(
                    session=session.index,
                    turn=number,
                    due_s=due_s,
                    end_s=time.monotonic() - start_s,
                    ttft_ms=answer.ttft_ms + (answer.sent_ns / 1e9 - start_s - due_s) * 1e3,  # from when it was due
                    itl_ms=answer.itl_ms,
                    prompt_tokens=len(said),
                    token_ids=answer.token_ids,
                )
            )
            said += answer.token_ids
            on_answer()
        return asked

    def _ids(self, passage: Passage) -> list[int]:
        made = self._prompts.make(passage.tokens, passage.name)
        assert isinstance(made, list)
        return list(made)
