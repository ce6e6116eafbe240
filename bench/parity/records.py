"""What is asked and what is answered, as it is kept in a file."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from pdx.errors import ConfigError

VERSION = 1  # of the file; an older one is not read
_KINDS = {"Content-Type": "application/json"}
_CURL_BYTES = 4096  # of a body that is written out


class Way(StrEnum):
    """How a request is sent, and how long its client stays."""

    WHOLE = "whole"  # to the end of the answer
    CHUNKED = "chunked"  # likewise; the body's length is not announced
    LEAVES = "leaves"  # the client goes when the answer has begun, and then sends `Case.then`
    UNREAD = "unread"  # it goes before the answer
    UNSENT = "unsent"  # it goes in the midst of its body


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a client library: `openai.AsyncOpenAI(…).chat.completions.create(**fields)`."""

    library: str
    method: str
    fields: dict[str, Any] = {}


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. `name` is unique, and says what is special about it."""

    name: str
    endpoint: str  # by which answers are counted
    path: str = ""
    method: str = "POST"
    headers: dict[str, str] = {}
    content: bytes | None = None
    way: Way = Way.WHOLE
    then: bytes = b""  # what is asked of the same path after the client has left; its answer is compared
    is_random: bool = False  # no two answers are equal, only alike
    call: Call | None = None  # instead of all that

    def again(self, url: str) -> str:
        """A line of shell that repeats it."""
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
    """What came back. `fault`: why there is no answer, or no whole one."""

    status: int = 0
    headers: dict[str, str] = {}
    content: bytes = b""
    fault: str = ""
    left: str = ""  # what a request that its client has left still keeps busy


class Asked(msgspec.Struct, kw_only=True):
    """A case and what the plain server answered to it, twice."""

    case: Case
    first: Answer
    second: Answer


class Recording(msgspec.Struct, kw_only=True):
    """What a plain server answered to all cases."""

    url: str
    model: str
    seed: int
    asked: list[Asked]
    unasked: dict[str, str] = {}  # groups of cases that were not run, and why
    version: int = VERSION

    def write(self, path: Path) -> None:
        """:raises ConfigError: it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(self))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> Recording:
        """:raises ConfigError: it is no recording of this version."""
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
    """A body of JSON."""
    return json.dumps(fields).encode()


def posted(name: str, endpoint: str, fields: Any, **more: Any) -> Case:
    """A case with a body of JSON, or with bytes that claim to be that."""
    content = fields if isinstance(fields, bytes) else body(fields)
    path = more.pop("path", endpoint)
    headers = {**_KINDS, **more.pop("headers", {})}
    return Case(name=name, endpoint=endpoint, path=path, headers=headers, content=content, **more)
