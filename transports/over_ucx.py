"""What channels over UCX have in common, whichever library contains UCX: settings, and details under a code, which only
a holder of the session's token can make.

Native libraries parse what is inside (addresses, keys of memory); they are not made for altered bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

import msgspec

from pdx.errors import ChannelBroken
from pdx.transports.channel import RemoteRegion

_MAC_BYTES = 32


def settings_for(host: str, **more: str) -> dict[str, str]:
    """UCX's settings: it listens only on the loopback interface if `host` is a loopback address, else on every
    interface; it notices a dead process of this host after two keepalive intervals."""
    is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    return {"KEEPALIVE_INTERVAL": "1s", **({"NET_DEVICES": "lo"} if is_loopback else {}), **more}


def sealed(remote: RemoteRegion) -> RemoteRegion:
    """The same region, with its detail under a code made with the token."""
    return msgspec.structs.replace(remote, detail=_code(remote, remote.detail) + remote.detail)


def unsealed(remote: RemoteRegion) -> bytes:
    """The detail of a sealed region.

    :raises ChannelBroken: it was altered, or made with another token or by another scheme.
    """
    code, detail = remote.detail[:_MAC_BYTES], remote.detail[_MAC_BYTES:]
    if not hmac.compare_digest(code, _code(remote, detail)):
        raise ChannelBroken(f"this is no detail of a {remote.scheme} region under that token")
    return detail


def _code(remote: RemoteRegion, detail: bytes) -> bytes:
    person = remote.scheme.encode()[:16]
    return hashlib.blake2b(detail, digest_size=_MAC_BYTES, key=remote.token, person=person).digest()
