"""Addresses of nodes and proxies: which may be listened on, which may be dialled, and by whom.

    ipc:///absolute/path        this user alone
    tcp://127.0.0.1:7700        this host; also tcp://[::1]:7700
    tcp://10.0.0.1:7700         anybody, so with CURVE keys only

An address of all interfaces is never listened on.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from pdx.config import socket_path
from pdx.errors import ConfigError

_TCP = re.compile(r"tcp://(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:/;@\s]+)):(?P<port>[0-9]{1,5})")
_HOST = re.compile(r"(?=.{1,253}\Z)(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z][A-Za-z0-9-]{0,62}")
_WILDCARDS = ("*", "0")


def check_listen(address: str, *, has_keys: bool) -> None:
    """Whether this may be listened on; port 0 is any free one.

    :raises ConfigError: not an address, one of all interfaces, or beyond this host without keys.
    """
    if address.startswith("ipc://"):
        socket_path(address)
        return
    ip, _ = _endpoint(address)
    if isinstance(ip, str):
        raise ConfigError(f"{address!r}: to listen, name an IP address of this host instead of {ip!r}")
    _check_reach(address, ip, has_keys=has_keys)


def check_address(address: str, has_keys: bool) -> None:
    """Whether this may be dialled.

    :raises ConfigError: not an address, one of all interfaces, or beyond this host without keys.
    """
    if address.startswith("ipc://"):
        socket_path(address)
        return
    ip, port = _endpoint(address)
    if not port:
        raise ConfigError(f"{address!r} has no port")
    _check_reach(address, ip, has_keys=has_keys)


def data_host(address: str) -> str:
    """Where data channels of a node that listens at this address listen, too: the same interface, never another."""
    return "127.0.0.1" if address.startswith("ipc://") else str(_endpoint(address)[0])


def tcp_endpoint(address: str) -> tuple[str, int]:
    """The host and the port of a tcp address.

    :raises ConfigError: it is none.
    """
    host, port = _endpoint(address)
    return str(host), port


def needs_ipv6(address: str) -> bool:
    """Whether ZMQ has to be told to use IPv6 for it."""
    return address.startswith("tcp://[")


def _check_reach(address: str, ip: IPv4Address | IPv6Address | str, *, has_keys: bool) -> None:
    if not has_keys and (isinstance(ip, str) or not ip.is_loopback):
        raise ConfigError(
            f"{address!r} is beyond this host, which needs keys and a roster (see `pdx keygen`); "
            "without them use ipc:///path, tcp://127.0.0.1:PORT or tcp://[::1]:PORT"
        )


def _endpoint(address: str) -> tuple[IPv4Address | IPv6Address | str, int]:
    """The IP address, or the host's name, and the port of a tcp address."""
    match = _TCP.fullmatch(address)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(
            f"{address!r} is not an address; write ipc:///absolute/path, tcp://IP:PORT or tcp://[IP]:PORT"
        )
    host = match["six"] or match["host"]
    try:
        ip = ip_address(host)
    except ValueError:
        if host in _WILDCARDS:
            raise _wildcard(address) from None
        if match["six"] or _HOST.fullmatch(host) is None:
            raise ConfigError(f"{address!r} names no host: {host!r}") from None
        return host, int(match["port"])
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_unspecified:
        raise _wildcard(address)
    return ip, int(match["port"])


def _wildcard(address: str) -> ConfigError:
    return ConfigError(
        f"{address!r} means all interfaces, which is never listened on or dialled; name one IP address, or ipc:///path"
    )
