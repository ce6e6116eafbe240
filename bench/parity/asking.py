"""Sends cases to a server: as plain HTTP with aiohttp, or with the client libraries of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import aiohttp

from pdx.bench.parity.records import Answer, Call, Case, Way
from pdx.errors import ConfigError
from pdx.telemetry.faults import printable

LIBRARIES = ("openai", "anthropic")
_KEEPALIVE_S = 2.0  # below the 5 s after which vLLM's server closes idle connections: no request meets a closed one
_IDLE_S = 10.0  # by then the server must have dropped a request whose client has disconnected
_POLL_S = 0.02
_RUNNING = re.compile(rb"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)
_PATIENCE_S = 0.05  # after which a client disconnects without an answer
_PIECE = 64
_MOST_BYTES = 8 << 20  # per answer


class Server:
    """One of the two servers. `key`: the bearer token for `Authorization`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, timeout_s: float, key: str = "") -> None:
        self.url = url
        self._session = session
        self._timeout_s = timeout_s
        self._key = key
        self._clients: dict[str, Any] = {}

    async def models(self) -> list[dict[str, Any]]:
        """Return the cards of the models that the server has.

        :raises ConfigError: the server does not answer with a list of models.
        """
        answer = await self.ask(Case(name="models", endpoint="/v1/models", path="/v1/models", method="GET"))
        with suppress(ValueError, KeyError, TypeError):
            found = json.loads(answer.content)["data"]
            if found and all(isinstance(each, dict) and isinstance(each["id"], str) for each in found):
                return list(found)
        said = answer.fault or f"status {answer.status}: {printable(answer.content[:200].decode(errors='replace'))}"
        raise ConfigError(f"no OpenAI server answers at {self.url}/v1/models ({said}); is it up, and ready?")

    async def ask(self, case: Case) -> Answer:
        """Send a case and return the answer. Faults do not raise: they are in `Answer.fault`."""
        answer = Answer()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(case, answer)
        except TimeoutError:
            answer.fault = f"no whole answer within {self._timeout_s:g} s"
        except aiohttp.ClientPayloadError:
            answer.fault = "the answer broke off"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            answer.fault = f"{'no answer' if not answer.status else 'the answer broke off'}: {type(error).__name__}"
        return answer

    async def _ask(self, case: Case, answer: Answer) -> None:
        if case.call is not None:
            await self._call(case.call, answer)
            return
        if case.way in (Way.LEAVES, Way.UNREAD, Way.UNSENT):
            await self._send_and_disconnect(case)
            async with self._request(case, case.then) as response:
                await _read(response, answer)
            answer.left = await self._wait_until_idle()
            return
        content = _pieces(case.content or b"") if case.way is Way.CHUNKED else case.content
        async with self._request(case, content) as response:
            await _read(response, answer)

    def _request(self, case: Case, content: Any, *, gives_up_s: float | None = None) -> Any:
        headers = dict(case.headers)
        if self._key:
            headers.setdefault("Authorization", f"Bearer {self._key}")
        return self._session.request(
            case.method,
            self.url + case.path,
            data=content,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=["Content-Type"],
            timeout=aiohttp.ClientTimeout(sock_read=gives_up_s),
        )

    async def _send_and_disconnect(self, case: Case) -> None:
        """Send a request and disconnect early; the server notices that the connection is closed."""
        content = _pieces(case.content or b"", is_whole=False) if case.way is Way.UNSENT else case.content
        gives_up_s = _PATIENCE_S if case.way is Way.UNREAD else None
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._request(case, content, gives_up_s=gives_up_s) as response:
                await response.content.readany()
                response.close()

    async def _wait_until_idle(self) -> str:
        """Wait up to `_IDLE_S` until the server counts no requests; return what it still counts then."""
        deadline = asyncio.get_running_loop().time() + _IDLE_S
        while True:
            load = await self._server_load()
            if not load or asyncio.get_running_loop().time() > deadline:
                return load
            await asyncio.sleep(_POLL_S)  # the server does not notify of changes

    async def _server_load(self) -> str:
        for path in ("/load", "/metrics"):
            async with self._session.get(self.url + path) as response:
                page = await response.read()
            if response.status != 200:
                continue
            counts = [float(each) for each in _RUNNING.findall(page)]
            with suppress(ValueError, KeyError, TypeError):
                counts = [float(json.loads(page)["server_load"])]
            if sum(counts):
                return f"{path} counts {sum(counts):g} requests"
        return ""

    # ---- client libraries -------------------------------------------------------------------

    async def _call(self, call: Call, answer: Answer) -> None:
        """Call a client library and store its result as JSON or an event stream; or else the error that it raised."""
        answer.headers = {"content-type": "application/json"}
        try:
            found = await self._client(call.library, call.method)(**call.fields)
            if hasattr(found, "model_dump"):
                answer.content = _dumped(found)
                return
            answer.headers = {"content-type": "text/event-stream"}
            async for each in found:
                answer.content += b"data: " + _dumped(each) + b"\n\n"
        except Exception as error:  # noqa: BLE001 - the error is the answer
            raised = {"raises": type(error).__name__, "body": getattr(error, "body", None)}
            answer.status = getattr(error, "status_code", None) or 0
            answer.content += json.dumps(raised).encode()

    def _client(self, library: str, method: str) -> Any:
        if library not in self._clients:
            module = import_module(library)
            made, base = (module.AsyncOpenAI, "/v1") if library == "openai" else (module.AsyncAnthropic, "")
            # vLLM expects a bearer token, which is Anthropic's `auth_token`.
            keys = {"api_key" if library == "openai" else "auth_token": self._key or "none"}
            self._clients[library] = made(base_url=self.url + base, max_retries=0, timeout=self._timeout_s, **keys)
        found = self._clients[library]
        for name in method.split("."):
            found = getattr(found, name)
        return found

    async def close(self) -> None:
        """Close the connections of the client libraries."""
        for client in self._clients.values():
            await client.close()


@asynccontextmanager
async def connected(*urls: str, timeout_s: float, key: str = "") -> AsyncIterator[list[Server]]:
    """Yield one server per URL; all of them share one HTTP session."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", "User-Agent": "pdx-parity"},
        timeout=aiohttp.ClientTimeout(total=None),
        max_field_size=1 << 20,
        max_line_size=1 << 20,
    ) as session:
        servers = [Server(url, session, timeout_s=timeout_s, key=key) for url in urls]
        try:
            yield servers
        finally:
            for each in servers:
                await each.close()


def missing_libraries() -> list[str]:
    """Client libraries that are not installed here."""
    return [name for name in LIBRARIES if find_spec(name) is None]


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    answer.status = response.status
    answer.headers = {name.lower(): value for name, value in response.headers.items()}
    content = bytearray()
    try:
        async for part in response.content.iter_any():
            content += part
            if len(content) > _MOST_BYTES:
                raise ValueError("the answer has no end")
    finally:
        answer.content = bytes(content)


async def _pieces(content: bytes, *, is_whole: bool = True) -> AsyncIterator[bytes]:
    """Yield a body piece by piece, so that its length is not announced; unless `is_whole`, abort before its end."""
    for at in range(0, len(content), max(_PIECE, len(content) // 16)):
        yield content[at : at + max(_PIECE, len(content) // 16)]
    if not is_whole:
        raise ConnectionAbortedError("the client is gone")


def _dumped(value: Any) -> bytes:
    return json.dumps(value.model_dump(mode="json", warnings=False)).encode()
