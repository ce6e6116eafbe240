"""Chunks in S3-compatible object storage, by obstore.

The endpoint, the region and the credentials are those of the AWS_… environment variables, as every client of S3 has
them; a file may have the credentials instead.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import S3Store

from pdx.errors import ConfigError, TierError
from pdx.store.remote.backend import Backend, Credentials, Found, RemoteSettings

_KINDS = (
    (r"certificate|UnknownIssuer", "untrusted"),
    (r"timed out|operation timeout|deadline", "timeout"),
    (r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|403|401|credential", "denied"),
    (r"EntityTooLarge|InsufficientStorage|QuotaExceeded|\b507\b", "full"),
    (r"connect|dns|tcp|connection|sending request", "unreachable"),
)


class S3Backend(Backend):
    """See `Backend`. What is older than `ttl_s` is not found; the bucket's own lifecycle removes it."""

    batch = 16

    def __init__(self, settings: RemoteSettings, credentials: Credentials, bucket: str, prefix: str) -> None:
        """:raises ConfigError: the environment or the address is not what the client needs."""
        self.place = settings.url
        self._ttl_s = settings.ttl_s
        if settings.ca:  # the client has no option for it, and reads this variable
            os.environ["SSL_CERT_FILE"] = settings.ca
        own: dict[str, Any] = {
            "access_key_id": credentials.access_key_id,
            "secret_access_key": credentials.secret_access_key,
            "session_token": credentials.session_token,
        }
        config = {name: value for name, value in own.items() if value}
        is_http = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://")

        def opened(timeout_s: float) -> S3Store:
            span = timedelta(seconds=timeout_s)
            return S3Store(
                bucket,
                prefix=prefix or None,
                client_options={"timeout": span, "connect_timeout": span, "allow_http": is_http},
                retry_config={"max_retries": 1, "retry_timeout": span},
                **config,
            )

        try:
            self._stores = {"reads": opened(settings.timeout_s), "looks": opened(settings.lookup_s)}
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigError(f"{settings.url}: {error}") from error
        self._pool = ThreadPoolExecutor(self.batch, "pdx-s3")

    def ping(self) -> None:
        """See `Backend.ping`."""
        with self._errors():
            next(iter(obstore.list(self._stores["looks"], chunk_size=1)), None)

    def heads(self, names: Sequence[str], nbytes: int) -> list[Found | None]:
        """See `Backend.heads`."""
        return list(self._pool.map(lambda name: self._head(name, nbytes), names))

    def _head(self, name: str, nbytes: int) -> Found | None:
        with self._errors():
            try:
                found = obstore.get(self._stores["looks"], name, options={"range": (0, nbytes)})
                return None if self._is_old(found.meta) else Found(memoryview(found.bytes()), found.meta["size"])
            except FileNotFoundError:
                return None
            except exceptions.BaseError as error:
                if re.search(r"\b416\b", str(error)) is None:
                    raise
                return Found(memoryview(b""), 0)  # it has no byte

    def _is_old(self, meta: Any) -> bool:
        return bool(self._ttl_s) and meta["last_modified"] + timedelta(seconds=self._ttl_s) < datetime.now(UTC)

    def read(self, name: str) -> memoryview | None:
        """See `Backend.read`."""
        with self._errors():
            try:
                found = obstore.get(self._stores["reads"], name)
                return None if self._is_old(found.meta) else memoryview(found.bytes())
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """See `Backend.write`."""
        with self._errors():
            obstore.put(self._stores["reads"], name, data, use_multipart=False)

    def remove(self, names: Sequence[str]) -> None:
        """See `Backend.remove`."""
        with self._errors():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._stores["reads"], name)

    def close(self) -> None:
        """See `Backend.close`."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._stores.clear()  # their connections end with them

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (exceptions.BaseError, OSError, ValueError) as error:
            text = str(error)
            kind = next((kind for pattern, kind in _KINDS if re.search(pattern, text, re.IGNORECASE)), "failed")
            first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
            raise TierError(f"{self.place}: {first[:300]}", kind) from error
