"""CURVE key pairs: made, kept in files, and set on sockets. The roster decides which keys are admitted.

Files have the form of ZMQ certificates: NAME.key_secret, which no other user may read, and NAME.key, to be passed on.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from pdx.errors import ConfigError
from pdx.security.secret_file import check_private, read

KEY_CHARS = 40  # 32 bytes in Z85
_MAX_FILE_BYTES = 64 << 10
_SECRET = re.compile(r'^\s*secret-key\s*=\s*"([^"\n]*)"\s*$', re.MULTILINE)


class KeyPair(msgspec.Struct, frozen=True):
    """A public and a secret key, both as Z85 text. `repr` does not show the secret."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"<KeyPair {self.public}>"

    def show(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket prove this key; call it before the socket binds or connects."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode("ascii"))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode("ascii"))

    @classmethod
    def make(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    @classmethod
    def load(cls, path: str | Path) -> KeyPair:
        """Load a pair from a secret key file.

        :raises ConfigError: it cannot be read, others may read it, or there is no key in it.
        """
        text, info = read(path, "secret key file", "`pdx keygen`", _MAX_FILE_BYTES)
        match = _SECRET.search(text)
        if match is None:
            raise ConfigError(f"{path} holds no secret key; name the file NAME.key_secret that `pdx keygen` made")
        check_private(info, "secret key file", path)
        check_key(match[1], str(path))
        return cls(zmq.curve_public(match[1].encode()).decode("ascii"), match[1])

    def save(self, folder: Path, name: str, *, force: bool = False) -> tuple[Path, Path]:
        """Write NAME.key_secret and NAME.key into `folder`, which is made with mode 0700; return both paths.

        :raises ConfigError: one of them exists and `force` is not set, or they cannot be written.
        """
        secret, public = folder / f"{name}.key_secret", folder / f"{name}.key"
        taken = [str(path) for path in (secret, public) if os.path.lexists(path)]
        if taken and not force:
            raise ConfigError(
                f"{' and '.join(taken)} exists already; --force replaces it; then every roster needs the new public key"
            )
        head = f'# ZeroMQ CURVE certificate of {name}, made by pdx keygen\nmetadata\n    name = "{name}"\ncurve\n'
        head += f'    public-key = "{self.public}"\n'
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_new(secret, f'{head}    secret-key = "{self.secret}"\n', 0o600)
            _write_new(public, head, 0o644)
        except OSError as error:
            raise ConfigError(f"keys cannot be written to {folder}: {error}") from error
        return secret, public


def check_key(key: str, where: str) -> None:
    """:raises ConfigError: not a Z85 key; the message says `where` it was found, but not the key."""
    try:
        is_key = len(key) == KEY_CHARS and len(z85.decode(key.encode("ascii"))) == 32
    except (KeyError, UnicodeEncodeError, struct.error):
        is_key = False
    if not is_key:
        raise ConfigError(f"{where}: not a CURVE key, which has {KEY_CHARS} characters of Z85")


def secure_client(socket: zmq.Socket[bytes], *, own: KeyPair | None, server_key: str | None) -> None:
    """Have a socket prove `own` to a server that proves `server_key`; call it before it connects. No-op with neither.

    :raises ConfigError: one is given without the other.
    """
    if own is None and not server_key:
        return
    if own is None:
        raise ConfigError("the other side has a key, so this one needs its own: name a secret key file (--keys)")
    if not server_key:
        raise ConfigError("the other side's key is not known; it has to be in the roster (--roster)")
    own.show(socket)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode("ascii"))


def _write_new(path: Path, text: str, mode: int) -> None:
    """Replace a file by one that never had a wider mode than this."""
    fd, fresh = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, mode)
            file.write(text)
        os.replace(fresh, path)
    except OSError:
        os.unlink(fresh)
        raise
