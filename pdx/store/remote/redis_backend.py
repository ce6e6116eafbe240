"""Chunks in Valkey or Redis, one server or a cluster, by redis-py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from pdx.errors import TierError
from pdx.store.remote.backend import REDIS_SCHEMES, Backend, Credentials, Found, RemoteSettings

PORT = 6379


class RedisBackend(Backend):
    """See `Backend`. What it stores expires after `ttl_s`, if that is set; else the server evicts by its own policy."""

    def __init__(self, settings: RemoteSettings, credentials: Credentials, prefix: str, database: int) -> None:
        parts = urlsplit(settings.url)
        self.place = settings.url
        self._ttl_s = settings.ttl_s
        self._prefix = prefix
        self._database = database
        self._settings: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or PORT,
            "username": credentials.user or None,
            "password": credentials.password or None,
            "client_name": "pdx",
        }
        if REDIS_SCHEMES[parts.scheme]:
            self._settings |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_ca_certs": settings.ca or None}
        self._timeouts = {"reads": settings.timeout_s, "looks": settings.lookup_s}
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()

    def _client(self, which: str) -> Any:
        with self._lock:
            if which not in self._clients:
                self._clients[which] = self._connected(self._timeouts[which])
            return self._clients[which]

    def _connected(self, timeout_s: float) -> Any:
        # One more try at once is for a connection that the server has closed meanwhile; who waits is not kept longer.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        settings = self._settings | {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": retry}
        client = redis.Redis(**settings, db=self._database)
        try:
            is_cluster = bool(client.info("cluster").get("cluster_enabled"))
        except redis.exceptions.NoPermissionError:
            is_cluster = False
        if not is_cluster:
            return client
        client.close()
        return RedisCluster(**settings)

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def ping(self) -> None:
        """See `Backend.ping`."""
        with self._errors():
            self._client("looks").ping()

    def heads(self, names: Sequence[str], nbytes: int) -> list[Found | None]:
        """See `Backend.heads`."""
        with self._errors():
            pipeline = self._client("looks").pipeline(transaction=False)
            for name in names:
                pipeline.getrange(self._name(name), 0, nbytes - 1)
                pipeline.strlen(self._name(name))
                pipeline.exists(self._name(name))
            answers = pipeline.execute()
        triples = zip(answers[::3], answers[1::3], answers[2::3], strict=True)
        return [Found(memoryview(head), size) if is_there else None for head, size, is_there in triples]

    def read(self, name: str) -> memoryview | None:
        """See `Backend.read`."""
        with self._errors():
            data = self._client("reads").get(self._name(name))
        return memoryview(data) if data is not None else None

    def write(self, name: str, data: bytes) -> None:
        """See `Backend.write`."""
        with self._errors():
            self._client("reads").set(self._name(name), data, px=int(self._ttl_s * 1000) or None)

    def remove(self, names: Sequence[str]) -> None:
        """See `Backend.remove`."""
        with self._errors():
            pipeline = self._client("reads").pipeline(transaction=False)
            for name in names:
                pipeline.unlink(self._name(name))
            pipeline.execute()

    def close(self) -> None:
        """See `Backend.close`."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            raise TierError(f"{self.place}: {_text(error)}", _kind(error)) from error
        except OSError as error:  # a library's own thread or resolver
            raise TierError(f"{self.place}: {error}", "unreachable") from error


def _kind(error: redis.RedisError) -> str:
    by_class = {
        redis.exceptions.OutOfMemoryError: "full",
        redis.exceptions.AuthenticationError: "denied",
        redis.exceptions.NoPermissionError: "denied",
        redis.exceptions.ReadOnlyError: "read_only",
        redis.exceptions.TimeoutError: "timeout",
    }
    for kind, name in by_class.items():
        if isinstance(error, kind):
            return name
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "untrusted"
    is_off = isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.RedisClusterException)
    return "unreachable" if is_off else "failed"


def _text(error: redis.RedisError) -> str:
    return str(error) or type(error).__name__
