"""The interface to a remote store: a few blocking calls, for the threads of `pdx.store.remote.tier`.

Its address is one of:

    valkey://host[:port][/database]   redis://…    valkeys:// or rediss:// with TLS    ?prefix=… before every name
    s3://bucket[/prefix]

Credentials are never in the address, which every user of the host can read in the list of processes.
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

REDIS_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}  # -> with TLS
SCHEMES = {*REDIS_SCHEMES, "s3"}
_Text = Annotated[str, Meta(max_length=4096)]


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the store. A call fails after `timeout_s`, or `lookup_s` for headers. The limit is for the whole
    call, including the connection that it needs, even while bytes still come."""

    url: str
    timeout_s: float
    lookup_s: float
    ttl_s: float = 0.0  # older chunks are not found; 0: no limit
    ca: str = ""  # file with the CA certificates for the server's; empty: the system's
    credentials: str = ""  # file, see `Credentials`; empty: from the environment
    codec: str = "none"  # for chunks whose requests ask for none of their own


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a TOML file with mode 0600: `user` and `password`, or the fields that S3 uses."""

    user: _Text = ""
    password: _Text = ""
    access_key_id: _Text = ""
    secret_access_key: _Text = ""
    session_token: _Text = ""


class Found(msgspec.Struct, frozen=True):
    """The beginning of an object, and its size."""

    head: memoryview
    nbytes: int


class Backend(ABC):
    """A client of one store. Thread-safe. Each method waits at most as long as `RemoteSettings` says.

    :raises TierError: the call failed; `kind` is one of "unreachable", "timeout", "denied", "untrusted", "full",
        "read_only", "failed".
    """

    place: str  # the address, for messages
    batch = 64  # names per question in one call of `heads` …
    most = 1024  # … and in all

    @abstractmethod
    def connect(self, count: int) -> None:
        """Check that the store answers and lets us in, and open connections for `count` concurrent calls."""

    @abstractmethod
    def heads(self, names: Sequence[str], nbytes: int) -> list[Found | None]:
        """The first `nbytes` of each object; None if there is none of that name."""

    @abstractmethod
    def read(self, name: str, into: Sequence[memoryview]) -> int | None:
        """Read an object into these buffers, one after the other, as far as they go; return the object's size, or None
        if there is none of that name. The buffers are chunks' own memory: they must not be written after this returns
        or raises."""

    @abstractmethod
    def write(self, name: str, data: Sequence[memoryview]) -> None:
        """Write or replace an object with these consecutive buffers. They are the chunk's own memory, which must not be
        read after this returns or raises."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove these objects; missing ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """End all connections. Idempotent."""


def fill(into: Sequence[memoryview], data: memoryview | bytes) -> int:
    """Copy data from a client's own memory into these buffers, as far as they go; return the size of all the data."""
    used = 0
    for piece in into:
        some = memoryview(data)[used : used + len(piece)]
        piece[: len(some)] = some
        used += len(some)
    return len(data)


def open_backend(settings: RemoteSettings) -> Backend:
    """Make the backend for an address, without connecting yet.

    :raises ConfigError: the address or a file is invalid, or a needed package is missing.
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
    except ValueError as error:  # an invalid port
        raise ConfigError(f"{settings.url!r} is no address of a remote store: {error}") from error
    raise ConfigError(
        f"{settings.url!r} is no address of a remote store; write valkey://host:6379, "
        f"rediss://host:6380/0?prefix=team, s3://bucket/prefix, or a scheme that an installed package adds (pdx.tiers)"
    )


def _credentials(name: str) -> Credentials:
    """The credentials from a file, or without one from the environment.

    :raises ConfigError: the file is not private to this user, or invalid.
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
