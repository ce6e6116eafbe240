"""Files with secrets: who may read one besides its owner; and the token in one that a controller shows to a proxy."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pdx.errors import ConfigError

MIN_TOKEN_CHARS = 32  # so many can be guessed at any rate: 16 bytes in hex
_MAX_TOKEN_CHARS = 1024
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what RFC 6750 allows in the header
_OTHERS, _GROUP_CHANGES = 0o007, 0o030


def read(path: str | Path, what: str, hint: str, most_bytes: int) -> tuple[str, os.stat_result]:
    """The text of a file, or its first bytes, and what `check_private` asks for. `what` it is called, `hint` how one is
    made. :raises ConfigError: it cannot be read.
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
    """`info` is of the open file, `what` it is called in the message.

    Its owner is this user or root, and nobody else reads it; or it is root's and a group of this process reads it, as
    Kubernetes mounts a Secret for a pod with an `fsGroup`.

    :raises ConfigError: it is otherwise.
    """
    mode, groups = stat.S_IMODE(info.st_mode), {os.getgid(), os.getegid(), *os.getgroups()}
    is_own = not mode & 0o077 and info.st_uid in (os.getuid(), 0)
    is_of_group = info.st_uid == 0 and not mode & (_OTHERS | _GROUP_CHANGES) and info.st_gid in groups
    if not stat.S_ISREG(info.st_mode) or not (is_own or is_of_group):
        raise ConfigError(
            f"{what} {path} has mode {mode:04o} and belongs to user {info.st_uid}, group {info.st_gid}; nobody but "
            f"user {os.getuid()} may read it (chmod 600 {path}), or it is root's and a group of this process may (0440)"
        )
