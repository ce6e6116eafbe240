"""The backend for Valkey and Redis, a single server or a cluster, using redis-py."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from pdx.errors import ConfigError, TierError
from pdx.store.remote.backend import REDIS_SCHEMES, Backend, Credentials, Found, RemoteSettings, fill

PORT = 6379
SUPPORTED = "redis[hiredis]>=5.2,<9"  # as in pyproject.toml; `_Bounded` overrides an undocumented method
MOST_BYTES = 512 << 20  # a server's default limit of a value, beyond which it closes the connection
_NO_WRITES = ("MISCONF ", "NOREPLICAS ")  # the server cannot save to its disk, or has too few replicas
_this = threading.local()  # `ends_at`: the deadline of this thread's call, by CLOCK_MONOTONIC


def _left_s() -> float:
    """Seconds until this thread's call must end. :raises TimeoutError: none are left."""
    if (left := getattr(_this, "ends_at", float("inf")) - time.monotonic()) <= 0:
        raise TimeoutError("the call has no time left")
    return float(left)


class _Socket:
    """A connection's socket, on which reads and writes end at the deadline of the thread's call.

    The client's own timeout is per read: a server that sends a byte now and then could keep a call going forever.
    """

    def __init__(self, whole: socket.socket, limit_s: float) -> None:
        self._whole = whole
        self._limit_s: float | None = limit_s

    def settimeout(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._whole.settimeout(limit_s)

    def _bounded(self) -> socket.socket:
        if self._limit_s != 0:  # 0: non-blocking
            left_s = _left_s()
            self._whole.settimeout(left_s if self._limit_s is None else min(left_s, self._limit_s))
        return self._whole

    def recv(self, *settings: Any) -> bytes:
        return self._bounded().recv(*settings)

    def recv_into(self, *settings: Any) -> int:
        return self._bounded().recv_into(*settings)

    def sendall(self, data: Any) -> None:
        self._bounded().sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _limit(name: str) -> property:
    """A timeout of the client, stored as `name`. While it connects, no more than the time left to the call."""

    def given(self: Any) -> float:
        own_s: float = getattr(self, name)
        return min(_left_s(), own_s) if self.is_connecting else own_s

    def give(self: Any, limit_s: float) -> None:
        setattr(self, name, limit_s)

    return property(given, give)


class _Bounded:
    """A connection that is also established by the deadline of its thread's call, including attempts for several
    addresses of a name and the TLS handshake."""

    is_connecting = False
    socket_timeout = _limit("_socket_timeout")
    socket_connect_timeout = _limit("_socket_connect_timeout")

    def _connect(self: Any) -> _Socket:  # overrides redis-py
        self.is_connecting = True
        try:
            whole = super()._connect()  # type: ignore[misc]
        finally:
            self.is_connecting = False
        return _Socket(whole, self.socket_timeout)


class _Plain(_Bounded, redis.Connection):
    pass


class _Tls(_Bounded, redis.SSLConnection):
    pass


class RedisBackend(Backend):
    """See `Backend`. Values expire after `ttl_s`, if that is set; else the server evicts by its own policy."""

    def __init__(self, settings: RemoteSettings, credentials: Credentials, prefix: str, database: int) -> None:
        """:raises ConfigError: calls of this release of the client cannot be bounded in time."""
        if not hasattr(redis.Connection, "_connect"):
            raise ConfigError(
                f"redis-py {redis.__version__} does not make its connections by Connection._connect, where PDX bounds "
                f"the time of its calls; install another: pip install '{SUPPORTED}'"
            )
        parts = urlsplit(settings.url)
        self.place = settings.url
        self._ttl_s = settings.ttl_s
        self._prefix = prefix
        self._database = database
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        self._where = f"redis://{host}:{parts.port or PORT}"  # raises ValueError for an invalid port
        self._settings: dict[str, Any] = {
            "username": credentials.user or None,
            "password": credentials.password or None,
            "client_name": "pdx",
            "connection_class": _Plain,
            "protocol": 2,  # needs fewer round trips on a new connection, which its first question waits for
            "socket_timeout": settings.timeout_s,  # a call may have less, see `_Socket`
            "socket_connect_timeout": settings.timeout_s,
        }
        if REDIS_SCHEMES[parts.scheme]:
            self._settings |= {
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_ca_certs": settings.ca or None,
            }
            self._settings["connection_class"] = _Tls
        self._timeout_s, self._lookup_s = settings.timeout_s, settings.lookup_s
        self._client: Any = None
        self._lock = threading.Lock()

    def _connected(self) -> Any:
        """The client; the first call makes it.

        :raises TimeoutError: another call is making it, and this one's time is over.
        """
        if not self._lock.acquire(timeout=_left_s()):
            raise TimeoutError("another call is connecting")
        try:
            if self._client is None:
                self._client = self._made()
            return self._client
        finally:
            self._lock.release()

    def _made(self) -> Any:
        # One retry, at once, is for a connection that the server has closed; more would keep requests waiting.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        pool = redis.ConnectionPool.from_url(self._where, **self._settings, retry=retry, db=self._database)
        client = redis.Redis.from_pool(pool)
        try:
            is_cluster = bool(client.info("cluster").get("cluster_enabled"))
        except redis.exceptions.NoPermissionError:
            is_cluster = False
        if not is_cluster:
            return client
        client.close()
        return RedisCluster(url=self._where, **self._settings, retry=retry)

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def connect(self, count: int) -> None:
        with self._call(self._timeout_s) as client:  # no request waits for it
            try:
                client.ping()
            except redis.ResponseError as error:
                if _kind(error) != "read_only":  # some servers refuse PING like writes, but still answer reads
                    raise
            servers = [client]
            if isinstance(client, RedisCluster):
                found = client.get_primaries()  # type: ignore[no-untyped-call]
                servers = [client.get_redis_connection(each) for each in found]
            for each in servers:  # best effort: one may take no more connections, or is just being replaced
                with contextlib.suppress(redis.RedisError, OSError):
                    _open(each, count)

    def heads(self, names: Sequence[str], nbytes: int) -> list[Found | None]:
        with self._call(self._lookup_s) as client:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.getrange(self._name(name), 0, nbytes - 1)
                pipeline.strlen(self._name(name))
                pipeline.exists(self._name(name))
            answers = pipeline.execute(raise_on_error=False)
            for error in answers:
                if isinstance(error, Exception) and not _is_of_type(error):
                    raise error
        triples = zip(answers[::3], answers[1::3], answers[2::3], strict=True)
        return [_found(*triple) for triple in triples]

    def read(self, name: str, into: Sequence[memoryview]) -> int | None:
        with self._call(self._timeout_s) as client:
            try:
                data = client.get(self._name(name))
            except redis.ResponseError as error:
                if not _is_of_type(error):
                    raise
                data = b""
        return fill(into, data) if data is not None else None

    def write(self, name: str, data: Sequence[memoryview]) -> None:
        whole = b"".join(data)
        try:
            with self._call(self._timeout_s) as client:
                client.set(self._name(name), whole, px=int(self._ttl_s * 1000) or None)
        except TierError as error:
            if len(whole) <= MOST_BYTES:
                raise
            what = f"{len(whole) >> 20} MiB may be more than it takes (proto-max-bulk-len)"
            raise TierError(f"{error}; {what}: choose a smaller chunk_tokens", "full") from error

    def remove(self, names: Sequence[str]) -> None:
        with self._call(self._timeout_s) as client:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.unlink(self._name(name))
            pipeline.execute()

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if hasattr(client, "disconnect_connection_pools"):  # a cluster's client does not close them itself
            client.disconnect_connection_pools()
        if client is not None:
            client.close()

    @contextlib.contextmanager
    def _call(self, timeout_s: float) -> Iterator[Any]:
        """The client for one call, which ends at its deadline even while bytes still come."""
        _this.ends_at = time.monotonic() + timeout_s
        try:
            yield self._connected()
        except (
            redis.RedisError,
            redis.exceptions.RedisClusterException,
            OSError,
        ) as error:  # OSError: from the resolver, for example
            kind = _kind(error) if time.monotonic() < _this.ends_at else "timeout"
            raise TierError(f"{self.place}: {str(error) or type(error).__name__}", kind) from error
        finally:
            del _this.ends_at


def _open(client: redis.Redis, count: int) -> None:
    """Open `count` connections, and leave them idle in the client's pool."""
    pool = client.connection_pool
    with contextlib.ExitStack() as taken:
        for _ in range(count):
            taken.callback(pool.release, pool.get_connection())


def _is_of_type(error: Exception) -> bool:
    """Whether the name has a value of another type, such as a list. It counts as an empty object, so that a chunk
    replaces it, and not as an error of the store."""
    return isinstance(error, redis.ResponseError) and "WRONGTYPE" in str(error)


def _found(head: bytes | Exception, size: int | Exception, is_there: int) -> Found | None:
    if isinstance(head, Exception) or isinstance(size, Exception):
        head, size = b"", 0
    return Found(memoryview(head), size) if is_there else None


def _kind(error: Exception) -> str:
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
    if str(error).startswith(_NO_WRITES):
        return "read_only"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "untrusted"
    of_connections = OSError | redis.exceptions.ConnectionError | redis.exceptions.RedisClusterException
    return "unreachable" if isinstance(error, of_connections) else "failed"
