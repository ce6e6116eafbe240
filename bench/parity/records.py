"""Cases and their answers, in memory and as stored in a file."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from pdx.errors import ConfigError

VERSION = 1  # of the file; other versions are rejected
_KINDS = {"Content-Type": "application/json"}
_CURL_BYTES = 4096  # longer bodies and headers are not written out in a command


class Way(StrEnum):
    """How a request is sent, and how long its client stays."""

    WHOLE = "whole"  # until the end of the answer
    CHUNKED = "chunked"  # likewise, with a body whose length is not announced
    LEAVES = "leaves"  # the client disconnects when the answer has begun, and then sends `Case.then`
    UNREAD = "unread"  # likewise, but it does not wait for the answer
    UNSENT = "unsent"  # likewise, but before the end of its body


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a client library: `openai.AsyncOpenAI(…).chat.completions.create(**fields)`."""

    library: str
    method: str
    fields: dict[str, Any] = {}


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. `name` is unique and tells what is special about it."""

    name: str
    endpoint: str  # the report counts answers by it
    path: str = ""
    method: str = "POST"
    headers: dict[str, str] = {}
    content: bytes | None = None
    way: Way = Way.WHOLE
    then: bytes = b""  # body of the next request, after the client has disconnected; its answer is compared
    is_random: bool = False  # answers are never equal: only their form is compared
    call: Call | None = None  # instead of the fields above

    def shell_command(self, url: str) -> str:
        """A shell command that repeats the request."""
        if self.call is not None:
            return self._in_python(url)
        words = ["curl", "-sS", "-i", "-X", self.method] if self.method != "HEAD" else ["curl", "-sS", "-I"]
        for name, value in self.headers.items():
            words += ["-H", f"{name}: {value}" if len(value) < _CURL_BYTES else f"{name}: … {len(value)} bytes"]
        if self.way is Way.CHUNKED:
            words += ["-H", "Transfer-Encoding: chunked"]
        if self.way in (Way.LEAVES, Way.UNREAD, Way.UNSENT):
            words += ["--max-time", "0.1"]
        if self.content is not None:
            words += ["--data-binary", _said(self.content)]
        return shlex.join([*words, url + self.path])

    def _in_python(self, url: str) -> str:
        assert self.call is not None
        library, name = self.call.library, {"openai": "OpenAI", "anthropic": "Anthropic"}[self.call.library]
        base = f"{url}/v1" if library == "openai" else url
        client = f"{library}.{name}(base_url={base!r}, api_key='none', max_retries=0)"
        fields = ", ".join(f"{key}={value!r}" for key, value in self.call.fields.items())
        return f"python -c {shlex.quote(f'import {library}; print({client}.{self.call.method}({fields}))')}"


def _said(content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    return text if len(content) <= _CURL_BYTES and text.isprintable() else f"… {len(content)} bytes, in the --json file"


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer. `fault`: why it is missing or incomplete."""

    status: int = 0
    headers: dict[str, str] = {}
    content: bytes = b""
    fault: str = ""
    left: str = ""  # what the server still counts as running although its client has disconnected


class Asked(msgspec.Struct, kw_only=True):
    """A case and both answers of the plain server to it."""

    case: Case
    first: Answer
    second: Answer


class Recording(msgspec.Struct, kw_only=True):
    """The answers of a plain server to all cases."""

    url: str
    model: str
    seed: int
    asked: list[Asked]
    unasked: dict[str, str] = {}  # groups of cases that were not run, and why
    version: int = VERSION

    def write(self, path: Path) -> None:
        """:raises ConfigError: the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(self))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> Recording:
        """:raises ConfigError: the file cannot be read, or is not a recording of this version."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is no recording of `pdx parity --record`: {error}") from error
        if found.version != VERSION:
            raise ConfigError(f"{path} is of another version of PDX; record it anew")
        return found


def body(fields: Any) -> bytes:
    """A JSON body."""
    return json.dumps(fields).encode()


def posted(name: str, endpoint: str, fields: Any, **more: Any) -> Case:
    """A case with a JSON body, or with bytes that claim to be JSON."""
    content = fields if isinstance(fields, bytes) else body(fields)
    path = more.pop("path", endpoint)
    headers = {**_KINDS, **more.pop("headers", {})}
    return Case(name=name, endpoint=endpoint, path=path, headers=headers, content=content, **more)
