"""Files with secrets: which other users may read them; and tokens in files, which clients show to a proxy or a node."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from pathlib import Path

from pdx.errors import ConfigError
from pdx.security.reread import stamp

MIN_TOKEN_CHARS = 32  # 16 bytes in hex: a shorter token could be guessed
_MAX_TOKEN_CHARS = 1024
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what RFC 6750 allows in the header
_OTHERS, _GROUP_CHANGES = 0o007, 0o030


def read(path: str | Path, what: str, hint: str, most_bytes: int) -> tuple[str, os.stat_result]:
    """The text of a file, at most its first bytes, and its stat for `check_private`. For the message, `what` names the
    file and `hint` says how to make one. :raises ConfigError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            text = file.read(most_bytes).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}; {hint} makes one") from error
    return text, info


def load_token(path: str | Path) -> str:
    """The token in a file. :raises ConfigError: it cannot be read, others may read it, or there is no token in it."""
    make = f"(umask 077; openssl rand -hex 32 > {path})"
    text, info = read(path, "token file", make, _MAX_TOKEN_CHARS + 2)
    check_private(info, "token file", path)
    text = text.strip()
    if not MIN_TOKEN_CHARS <= len(text) <= _MAX_TOKEN_CHARS or _TOKEN.fullmatch(text) is None:
        raise ConfigError(
            f"token file {path} holds no token, which has {MIN_TOKEN_CHARS} to {_MAX_TOKEN_CHARS} letters, digits and "
            f"._~+/=-; {make} makes one"
        )
    return text


def check_private(info: os.stat_result, what: str, path: object) -> None:
    """Check who may read a file. `info`: of the open file; `what`: its name in the message.

    Its owner must be this user or root, and no other user may read it; or it is root's and a group of this process may
    read it, as when Kubernetes mounts a Secret for a pod with an `fsGroup`.

    :raises ConfigError: neither is the case.
    """
    mode, groups = stat.S_IMODE(info.st_mode), {os.getgid(), os.getegid(), *os.getgroups()}
    is_own = not mode & 0o077 and info.st_uid in (os.getuid(), 0)
    is_of_group = info.st_uid == 0 and not mode & (_OTHERS | _GROUP_CHANGES) and info.st_gid in groups
    if not stat.S_ISREG(info.st_mode) or not (is_own or is_of_group):
        raise ConfigError(
            f"{what} {path} has mode {mode:04o} and belongs to user {info.st_uid}, group {info.st_gid}; nobody but "
            f"user {os.getuid()} may read it (chmod 600 {path}), or it is root's and a group of this process may (0440)"
        )


class Token:
    """The token in a file, which is read again when it has changed. Not thread-safe."""

    def __init__(self, path: str) -> None:
        """:raises ConfigError: it cannot be read, others may read it, or there is no token in it."""
        self._path = path
        self._stamp = stamp(path)
        self._digest = _digest(load_token(path))

    def is_shown(self, token: str) -> bool:
        """Whether this is the token that is in the file now; takes a time that does not depend on it.

        :raises ConfigError: there is no valid token (any more), so nothing is admitted.
        """
        found = stamp(self._path)
        if found != self._stamp or not self._digest:
            self._digest = b""
            self._digest = _digest(load_token(self._path))
            self._stamp = found
        return hmac.compare_digest(self._digest, _digest(token))


def _digest(token: str) -> bytes:
    return hashlib.blake2b(token.encode("utf-8", "surrogateescape"), digest_size=32).digest()
