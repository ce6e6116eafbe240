"""The backend for S3-compatible object storage, using obstore.

Endpoint, region and credentials come from the usual AWS_… environment variables; a file may have the credentials
instead.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from datetime import UTC, datetime, timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import S3Store

from pdx.errors import ConfigError, TierError
from pdx.store.remote.backend import Backend, Credentials, Found, RemoteSettings, fill

SOON = 0.05  # of a call's time: a failure within this is retried, once, after as long a wait
_FULL = ("EntityTooLarge", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull")  # codes of S3, besides 507
_KINDS = (  # of errors without a status, by the client's words
    (r"certificate|UnknownIssuer", "untrusted"),
    (r"timed out|TimedOut|operation timeout|deadline", "timeout"),
    (r"credential|AccessDenied", "denied"),  # the latter in an answer for some of several names
    (r"connect|dns|tcp|connection|sending request", "unreachable"),
)


class S3Backend(Backend):
    """See `Backend`. Objects older than `ttl_s` are not found; removing them is left to the bucket's lifecycle."""

    batch = 16
    most = 64  # each name is a request, with a thread

    def __init__(self, settings: RemoteSettings, credentials: Credentials, bucket: str, prefix: str) -> None:
        """:raises ConfigError: the client does not accept the environment or the address."""
        self.place = settings.url
        self._ttl_s = settings.ttl_s
        own: dict[str, Any] = {
            "access_key_id": credentials.access_key_id,
            "secret_access_key": credentials.secret_access_key,
            "session_token": credentials.session_token,
        }
        config = {name: value for name, value in own.items() if value}
        endpoints = [os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")]
        is_http = any(each.startswith("http://") for each in endpoints)

        self._timeout_s, self._lookup_s = settings.timeout_s, settings.lookup_s
        # The client's timeouts are per attempt. Only early failures are retried: a later retry would end after the
        # call's time.
        span, soon = timedelta(seconds=(1 - 2 * SOON) * self._timeout_s), timedelta(seconds=SOON * self._timeout_s)
        try:
            with _certificates(settings.ca):
                self._store: S3Store | None = S3Store(
                    bucket,
                    prefix=prefix or None,
                    client_options={"timeout": span, "connect_timeout": span, "allow_http": is_http},
                    retry_config={
                        "max_retries": 1,
                        "retry_timeout": soon,
                        "backoff": {"init_backoff": soon, "max_backoff": soon},
                    },
                    **config,
                )
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigError(f"{settings.url}: {error}") from error
        self._pool = futures.ThreadPoolExecutor(self.most, "pdx-s3")

    def connect(self, count: int) -> None:
        """See `Backend.connect`. The client opens a connection for each concurrent request."""
        list(self._pool.map(lambda _: self._first(), range(count)))

    def _first(self) -> None:
        with self._call() as store:  # no request waits for it
            next(iter(obstore.list(store, chunk_size=1)), None)

    def heads(self, names: Sequence[str], nbytes: int) -> list[Found | None]:
        # The limit includes the wait for a thread. A late request goes on: if it were cancelled, the client would close
        # its connection, and a new one may take longer than a question has.
        try:
            return list(self._pool.map(lambda name: self._head(name, nbytes), names, timeout=self._lookup_s))
        except futures.TimeoutError as error:
            text = f"{self.place}: no answer to all of a question in {self._lookup_s:g} s"
            raise TierError(text, "timeout") from error

    def _head(self, name: str, nbytes: int) -> Found | None:
        with self._call() as store:
            try:
                found = obstore.get(store, name, options={"range": (0, nbytes)})
                return None if self._is_old(found.meta) else Found(memoryview(found.bytes()), found.meta["size"])
            except FileNotFoundError:
                return None
            except exceptions.BaseError as error:
                if re.search(r"\b416\b", str(error)) is None:
                    raise
                return Found(memoryview(b""), 0)  # the object is empty

    def _is_old(self, meta: Any) -> bool:
        return bool(self._ttl_s) and meta["last_modified"] + timedelta(seconds=self._ttl_s) < datetime.now(UTC)

    def read(self, name: str, into: Sequence[memoryview]) -> int | None:
        with self._call() as store:
            try:
                found = obstore.get(store, name)
                return None if self._is_old(found.meta) else fill(into, memoryview(found.bytes()))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: Sequence[memoryview]) -> None:
        whole = b"".join(data)
        with self._call() as store:
            obstore.put(store, name, whole, use_multipart=False)

    def remove(self, names: Sequence[str]) -> None:
        with self._call() as store, contextlib.suppress(FileNotFoundError):
            obstore.delete(store, list(names))  # one request per 1000

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._store = None  # which closes its connections

    @contextlib.contextmanager
    def _call(self) -> Iterator[S3Store]:
        """The client for one request, which the client ends at its deadline, including the one retry."""
        ends_at, store = time.monotonic() + self._timeout_s, self._store
        if store is None:
            raise TierError(f"{self.place} is closed", "cancelled")
        try:
            yield store
        except (exceptions.BaseError, OSError, ValueError) as error:
            kind, text = _told(error)
            if kind == "unreachable" and time.monotonic() >= ends_at:
                kind = "timeout"  # the client's text only says that it was sending the request
            raise TierError(f"{self.place}: {text[:300]}", kind) from error


@contextlib.contextmanager
def _certificates(file: str) -> Iterator[None]:
    """Within this, new clients trust only these certificates: they have no option for it, and read a variable."""
    before = os.environ.get("SSL_CERT_FILE")
    if file:
        os.environ["SSL_CERT_FILE"] = file
    try:
        yield
    finally:
        if file:
            del os.environ["SSL_CERT_FILE"]
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before


def _told(error: Exception) -> tuple[str, str]:
    """The kind of an error, and the text to report."""
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if status := re.search(r"status code: (\d{3})", text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        name = code[1] if code else status[1]
        is_full = status[1] == "507" or name in _FULL
        kind = "full" if is_full else "denied" if status[1] in ("401", "403") else "failed"
        return kind, f"{name}: {first.partition(': <?xml')[0]}"
    words = re.sub(r"https?://\S+", "", text)  # a bucket or a key may have any of them
    return next((kind for pattern, kind in _KINDS if re.search(pattern, words, re.IGNORECASE)), "failed"), first
