"""Hints of clients: taken out of their requests, and advice about sessions for all nodes.

Names of sessions are clients' own words. Engines and nodes are told digests of them, so that the header `X-Session-ID`
and the envelope mean the same session by the same name.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from pdx.errors import RequestRefused
from pdx.proxy.plan import Body
from pdx.wire.hints import OWN, Envelope, Verdict, parse
from pdx.wire.messages import Advise, Advised

FIELD = "pdx_hints"  # of a request's body
HEADER = "X-PDX-Hints"  # of its answer
ADVISE_S = 1.0  # that advice may wait for what nodes say
MAX_BYTES = 16 << 10  # of an envelope
_SALT = "cache_salt"
_SALT_BYTES = 64 << 10
_NOT_READ: list[Any] = []  # no envelope, which is refused as a whole


def digest(session: str) -> str:
    """What nodes and engines call the session: of one length, and not what a client may have put into its name."""
    return hashlib.blake2b(session.encode(errors="surrogateescape"), digest_size=16).hexdigest() if session else ""


def take(body: Body, session: str) -> tuple[Body, Envelope]:
    """A client's body without its envelope, and that, with digests for names. `session`: by its header, if it names
    one; an envelope may name another one."""
    said = body.get(FIELD)
    if FIELD in body:
        body = {name: value for name, value in body.items() if name != FIELD}
    return body, _hidden(parse(_read(said, MAX_BYTES, _NOT_READ), _salt(body)), session)


def _salt(body: Body) -> str:
    salt = _read(body.get(_SALT), _SALT_BYTES, "")
    return salt if isinstance(salt, str) else ""


def _read(value: Any, most: int, otherwise: Any) -> Any:
    """The value of a field that nobody has looked at yet."""
    if not isinstance(value, Raw):
        return value
    try:
        return json.loads(bytes(value)) if len(memoryview(value)) <= most else otherwise
    except (ValueError, RecursionError):
        return otherwise


def _hidden(envelope: Envelope, session: str) -> Envelope:
    hints = envelope.hints
    told = msgspec.structs.replace(
        hints,
        session=digest(hints.session or session),
        prefetch=[digest(name) if name != OWN else OWN for name in hints.prefetch],
        demote=[digest(name) if name != OWN else OWN for name in hints.demote],
    )
    return msgspec.structs.replace(envelope, hints=told)


class Advice:
    """Tells all nodes what an application says of a session. All calls on one event loop."""

    def __init__(self, tell: Callable[[Advise], int]) -> None:
        """`tell` tells all nodes, without waiting, and returns how many there are."""
        self._tell = tell
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[dict[str, list[Verdict]], int, asyncio.Event]] = {}

    def told(self, node: str, advised: Advised) -> None:
        """A node has answered."""
        if advised.number in self._asked:
            answers, most, is_whole = self._asked[advised.number]
            answers[node] = advised.verdicts
            if len(answers) >= most:
                is_whole.set()

    async def give(self, raw: bytes) -> dict[str, dict[str, str]]:
        """What became of each field, by node: of the nodes that answer in time. `raw`: an envelope as JSON, which names
        a session, and beside that its `cache_salt`.

        :raises RequestRefused: it is none.
        """
        envelope = _advice(raw)
        answers: dict[str, list[Verdict]] = {}
        number, is_whole = next(self._numbers), asyncio.Event()
        self._asked[number] = answers, self._tell(Advise(envelope.hints, number=number)), is_whole
        try:
            if self._asked[number][1]:
                async with asyncio.timeout(ADVISE_S):
                    await is_whole.wait()
        except TimeoutError:
            pass  # the others are silent
        finally:
            del self._asked[number]
        return {
            node: {verdict.field: verdict.told for verdict in envelope.answer(verdicts)}
            for node, verdicts in answers.items()
        }


def _advice(raw: bytes) -> Envelope:
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "the advice is not valid JSON") from error
    if not isinstance(said, dict):
        raise RequestRefused(400, "the advice is not a JSON object")
    salt = said.pop(_SALT, "")
    if not isinstance(salt, str):
        raise RequestRefused(400, f"{_SALT} is not a text")
    envelope = parse(said, salt)  # of any priority: it is the word of who runs this proxy
    whole = next((verdict for verdict in envelope.decided if verdict.field == "version"), None)
    if whole is not None:
        raise RequestRefused(400, f"the envelope is refused: {whole.text}")
    if not envelope.hints.session:
        raise RequestRefused(400, "the advice names no session: the proxy knows no chunks")
    return _hidden(envelope, "")
