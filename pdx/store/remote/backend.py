"""What a store that several nodes share has to do: a few calls that wait, for the threads of `pdx.store.remote.tier`.

An address names it:

    valkey://host[:port][/database]   redis://…    valkeys:// or rediss:// with TLS    ?prefix=… before every name
    s3://bucket[/prefix]

Credentials never stand in the address, which everybody on the host can read in a list of processes.
"""

from __future__ import annotations

import os
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Meta

from pdx.errors import ConfigError
from pdx.extras import install
from pdx.security.secret_file import check_private

REDIS_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}  # whether with TLS
SCHEMES = {*REDIS_SCHEMES, "s3"}
_Text = Annotated[str, Meta(max_length=4096)]


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach it. A call that takes longer than `timeout_s`, or `lookup_s` for headers, fails: all of it, with the
    connection that it needs, however its bytes come."""

    url: str
    timeout_s: float
    lookup_s: float
    ttl_s: float = 0.0  # what is older is not found any more; 0: never
    ca: str = ""  # file with the certificates of who may sign the server's; empty: the system's
    credentials: str = ""  # file, see `Credentials`; empty: the environment has them
    codec: str = "none"  # by which chunks are encoded whose requests ask for none of their own


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of TOML with mode 0600: `user` and `password`, or what S3 calls its own."""

    user: _Text = ""
    password: _Text = ""
    access_key_id: _Text = ""
    secret_access_key: _Text = ""
    session_token: _Text = ""


class Found(msgspec.Struct, frozen=True):
    """The beginning of what is under a name, and the bytes of all of it."""

    head: memoryview
    nbytes: int


class Backend(ABC):
    """Any thread may call any method. Each waits as long as `RemoteSettings` say.

    :raises TierError: it could not be done; `kind` says why: "unreachable", "timeout", "denied", "untrusted", "full",
        "read_only", "failed".
    """

    place: str  # the address, for people
    batch = 64  # names of one question in one call of `heads` …
    most = 1024  # … and of all questions

    @abstractmethod
    def connect(self, count: int) -> None:
        """Whether it answers, and lets us in. So many calls at once then find a connection open."""

    @abstractmethod
    def heads(self, names: Sequence[str], nbytes: int) -> list[Found | None]:
        """The first `nbytes` of each; None: there is nothing of that name."""

    @abstractmethod
    def read(self, name: str, into: Sequence[memoryview]) -> int | None:
        """Fill this memory, one piece after the other, with what is there, as far as it goes; the bytes of all that is
        there. None: there is nothing of that name. The memory is that of chunks: nothing writes to it any more when
        this returns or raises."""

    @abstractmethod
    def write(self, name: str, data: Sequence[memoryview]) -> None:
        """Put these pieces there, one behind the other, in place of what is there. They are of the chunk's own memory,
        which is read until this returns or raises, and not afterwards."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """These are there no more; some may not have been."""

    @abstractmethod
    def close(self) -> None:
        """End all connections. Idempotent."""


def fill(into: Sequence[memoryview], data: memoryview | bytes) -> int:
    """For backends whose client has memory of its own: copy what was read; the bytes of all that."""
    used = 0
    for piece in into:
        some = memoryview(data)[used : used + len(piece)]
        piece[: len(some)] = some
        used += len(some)
    return len(data)


def open_backend(settings: RemoteSettings) -> Backend:
    """What the address names; connects to nothing yet.

    :raises ConfigError: the address, a file or a needed package is not what it should be.
    """
    parts = urlsplit(settings.url)
    if parts.username or parts.password:
        raise ConfigError(
            f"the address of the remote store at {parts.hostname} has a user or password in it, which everybody on "
            f"this host can read; set PDX_REMOTE_USER and PDX_REMOTE_PASSWORD, or name a file with --remote-credentials"
        )
    if settings.ca and not Path(settings.ca).is_file():
        raise ConfigError(f"there is no file {settings.ca} of certificates (--remote-ca)")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    credentials = _credentials(settings.credentials)
    try:
        if parts.scheme in REDIS_SCHEMES and parts.hostname and set(query) <= {"prefix"}:
            from pdx.store.remote.redis_backend import RedisBackend

            database = parts.path.strip("/") or "0"
            if database.isdigit():
                return RedisBackend(settings, credentials, query.get("prefix", "pdx"), int(database))
        elif parts.scheme == "s3" and parts.hostname and not query:
            from pdx.store.remote.s3_backend import S3Backend

            return S3Backend(settings, credentials, parts.netloc, parts.path.strip("/"))
    except ModuleNotFoundError as error:
        extra = "s3" if parts.scheme == "s3" else "redis"
        raise ConfigError(f"{error.name} is needed for {settings.url}: {install(extra)}") from error
    except ValueError as error:  # a port that is none
        raise ConfigError(f"{settings.url!r} is no address of a remote store: {error}") from error
    raise ConfigError(
        f"{settings.url!r} is no address of a remote store; write valkey://host:6379, "
        f"rediss://host:6380/0?prefix=team, s3://bucket/prefix, or a scheme that an installed package adds (pdx.tiers)"
    )


def _credentials(name: str) -> Credentials:
    """Of the file, else of the environment.

    :raises ConfigError: the file is not this user's alone, or says something else.
    """
    if not name:
        return Credentials(
            user=os.environ.get("PDX_REMOTE_USER", ""), password=os.environ.get("PDX_REMOTE_PASSWORD", "")
        )
    try:
        with open(name, "rb") as file:
            info = os.fstat(file.fileno())
            check_private(info, "file of credentials", name)
            return msgspec.convert(tomllib.load(file), Credentials)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror} (--remote-credentials)") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is no TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}; it may have {', '.join(Credentials.__struct_fields__)}") from error
