"""The token that a controller shows to a proxy, in a file that nobody else may read."""

from __future__ import annotations

import re
from pathlib import Path

from pdx.errors import ConfigError
from pdx.security.secret_file import read

MIN_CHARS = 32  # so many can be guessed at any rate: 16 bytes in hex
_MAX_CHARS = 1024
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what RFC 6750 allows in the header


def load(path: str | Path) -> str:
    """The token in a file.

    :raises ConfigError: it cannot be read, others may read it, or there is no token in it.
    """
    make = f"(umask 077; openssl rand -hex 32 > {path})"
    text = read(path, "token file", make, _MAX_CHARS + 2).strip()
    if not MIN_CHARS <= len(text) <= _MAX_CHARS or _TOKEN.fullmatch(text) is None:
        raise ConfigError(
            f"token file {path} holds no token, which has {MIN_CHARS} to {_MAX_CHARS} letters, digits and ._~+/=-; "
            f"{make} makes one"
        )
    return text
