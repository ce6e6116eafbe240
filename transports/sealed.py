"""Details of a region that only who holds the session's token could have made, and that arrived as they were made.

Native libraries parse what is inside (addresses, keys of memory); they are not made for bytes that somebody changed.
"""

from __future__ import annotations

import hashlib
import hmac

from pdx.errors import ChannelBroken, ChannelUnavailable
from pdx.transports.channel import RemoteRegion

_MAC_BYTES = 32


def seal(scheme: str, nbytes: int, token: bytes, body: bytes) -> RemoteRegion:
    """A region of `nbytes` whose detail is `body` under a code made with the token."""
    return RemoteRegion(scheme, nbytes, token, _code(scheme, token, body) + body)


def unseal(scheme: str, remote: RemoteRegion) -> bytes:
    """The body again.

    :raises ChannelUnavailable: another scheme made it.
    :raises ChannelBroken: it is not as it was made, or was made with another token.
    """
    if remote.scheme != scheme:
        raise ChannelUnavailable(f"a region of scheme {remote.scheme!r} cannot be reached by {scheme}")
    code, body = remote.detail[:_MAC_BYTES], remote.detail[_MAC_BYTES:]
    if not hmac.compare_digest(code, _code(scheme, remote.token, body)):
        raise ChannelBroken(f"this is no detail of a {scheme} region under that token")
    return body


def _code(scheme: str, token: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=token, person=scheme.encode()[:16]).digest()
