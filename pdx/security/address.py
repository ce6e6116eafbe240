"""Addresses of nodes and proxies: which may be listened on or dialled, and which need keys; and engines' URLs.

    ipc:///absolute/path        this user alone
    tcp://127.0.0.1:7700        this host; also tcp://[::1]:7700
    tcp://10.0.0.1:7700         any host, so with CURVE keys only
    http://10.0.0.1:8100        an engine

An address of all interfaces is never listened on. Between a node and its proxy every tcp address needs keys.
Hosts are compared as they are written; no name is looked up.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from pdx.config import socket_path
from pdx.errors import ConfigError

_TCP = re.compile(r"tcp://(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:/;@\s]+)):(?P<port>[0-9]{1,5})")
_HOST = re.compile(r"(?=.{1,253}\Z)(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z][A-Za-z0-9-]{0,62}")
_WILDCARDS = ("*", "0")
_URL_HOST = re.compile(r"[0-9A-Za-z._-]{1,253}")  # names with underscores are those of containers
_PLAIN_PORTS = {"http": 80, "https": 443}


def check_address(address: str, *, has_keys: bool, listens: bool = False, is_control: bool = False) -> None:
    """Check that an address may be dialled or, with `listens`, be listened on, where port 0 is any free one.

    `is_control`: it is between a node and its proxy. A process that reports an engine to a proxy gets its clients'
    prompts, and loopback is open to every user of the host, so every tcp address needs keys.

    :raises ConfigError: not an address, one of all interfaces, or one that needs keys.
    """
    if address.startswith("ipc://"):
        socket_path(address)
        return
    ip, port = _endpoint(address)
    if listens and isinstance(ip, str):
        raise ConfigError(f"{address!r}: to listen, name an IP address of this host instead of {ip!r}")
    if not listens and not port:
        raise ConfigError(f"{address!r} has no port")
    if not has_keys and (isinstance(ip, str) or not ip.is_loopback):
        raise ConfigError(
            f"{address!r} is beyond this host, which needs keys and a roster (see `pdx keygen`); "
            "without them use ipc:///path, tcp://127.0.0.1:PORT or tcp://[::1]:PORT"
        )
    if not has_keys and is_control:
        raise ConfigError(
            f"{address!r} is open to every user of this host, and who reports an engine there gets prompts; "
            "use ipc:///path, or keys and a roster (see `pdx keygen`)"
        )


@functools.lru_cache(4096)  # nodes report the same ones every second
def base_url(text: str) -> str:
    """The URL at which an engine serves, in the one spelling that is its identity.

    :raises ConfigError: it is not a plain http(s) base URL; credentials in it would end up in logs and metrics.
    """
    shown = "" if {"@", "?"} & set(text) else f": {text!r:.100}"  # an error must not quote a password or a token
    wrong = ConfigError(f"not an engine's URL{shown}; write http://HOST:PORT, without user, query or fragment")
    try:
        parts = urlsplit(text.rstrip("/"))
        host = parts.hostname or ""
        is_host = _ip(host) is not None or _URL_HOST.fullmatch(host) is not None
        plain = parts.scheme in _PLAIN_PORTS and is_host and parts.port != 0
    except ValueError as error:
        raise wrong from error
    if not plain or parts.username or parts.password or parts.query or parts.fragment:
        raise wrong
    port = "" if parts.port in (None, _PLAIN_PORTS[parts.scheme]) else f":{parts.port}"
    return f"{parts.scheme}://{bracketed(spelled(host))}{port}{parts.path}"


def url_host(url: str) -> str:
    """The host in a `base_url`, spelled as `address_host` spells it."""
    return spelled(urlsplit(url).hostname or "")


def address_host(address: str) -> str:
    """The host in an address of a node or a proxy; that of `ipc://` is `localhost`."""
    return "localhost" if address.startswith("ipc://") else spelled(str(_endpoint(address)[0]))


@functools.lru_cache(1 << 14)  # more than a cluster lists, which it does again and again
def is_found_address(address: str) -> bool:
    """Whether an address from elsewhere than the roster may be dialled, where a key is proved: if it is an IP address,
    as names would have to be looked up."""
    try:
        host, port = _endpoint(address)
    except ConfigError:
        return False
    return port > 0 and not isinstance(host, str)


def check_hosts(hosts: Iterable[str]) -> None:
    """:raises ConfigError: one of them has the form of a network, but is not one."""
    for each in hosts:
        if "/" in each:
            try:
                ip_network(each)
            except ValueError as error:
                raise ConfigError(f"{each!r} is not a network; write for example 10.8.0.0/16") from error


def is_among(host: str, hosts: Iterable[str]) -> bool:
    """Whether a host, as `spelled`, is one of these hosts or in one of these networks."""
    ip = _ip(host)
    return any(ip is not None and ip in ip_network(each) if "/" in each else host == spelled(each) for each in hosts)


def is_ip(host: str) -> bool:
    """Whether a host is an IP address, and not a name, which could be made to lead elsewhere."""
    return _ip(host) is not None


def is_loopback(host: str) -> bool:
    """Whether a host, as `spelled`, means this host."""
    ip = _ip(host)
    return ip.is_loopback if ip is not None else host == "localhost"


def worker_address(address: str, number: int) -> str:
    """The address of worker `number` of a proxy whose worker 0 is at `address`: the socket's name plus `.number`, or
    the port plus `number`. An address may also be HOST:PORT, or the path of a socket."""
    if not number or not address:
        return address
    host, _, port = address.rpartition(":")
    if address.startswith(("ipc://", "/")) or not port.isdigit():
        return f"{address}.{number}"
    return f"{host}:{int(port) + number}"


def is_wildcard(host: str) -> bool:
    """Whether a host means all interfaces."""
    ip = _ip(host)
    return ip.is_unspecified if ip is not None else host in ("", *_WILDCARDS)


def reachable_url(url: str, address: str) -> str:
    """`url`, with the host of a node's `address` in place of a host that means all interfaces."""
    try:
        plain = base_url(url)
    except ConfigError:
        return url
    host = url_host(plain)
    return plain.replace(bracketed(host), bracketed(data_host(address)), 1) if is_wildcard(host) else plain


def bracketed(host: str) -> str:
    """A host as written in a URL."""
    return f"[{host}]" if ":" in host else host


def spelled(host: str) -> str:
    """A host's name or IP address in the one spelling in which hosts are compared."""
    return str(_ip(host) or host.lower())


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        ip = ip_address(host)
    except ValueError:
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip


def data_host(address: str) -> str:
    """The host on which a node that listens at this address opens its data channels: the same interface, no other."""
    return "127.0.0.1" if address.startswith("ipc://") else str(_endpoint(address)[0])


def tcp_endpoint(address: str) -> tuple[str, int]:
    """The host and the port of a tcp address. :raises ConfigError: it is not one."""
    host, port = _endpoint(address)
    return str(host), port


def by_name(address: str, bound: str) -> bool:
    """Whether an address has a host name and the port of `bound`, which is listened at; the name is not looked up."""
    if "ipc:" in (address[:4], bound[:4]):
        return False
    (host, port), (_, bound_port) = _endpoint(address), _endpoint(bound)
    return isinstance(host, str) and port == bound_port


def needs_ipv6(address: str) -> bool:
    """Whether ZMQ must be told to use IPv6 for it."""
    return address.startswith("tcp://[")


def _endpoint(address: str) -> tuple[IPv4Address | IPv6Address | str, int]:
    """The IP address, or the host's name, and the port of a tcp address."""
    match = _TCP.fullmatch(address)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(
            f"{address!r} is not an address; write ipc:///absolute/path, tcp://IP:PORT or tcp://[IP]:PORT"
        )
    host = match["six"] or match["host"]
    ip = _ip(host)
    if ip is None:
        if host in _WILDCARDS:
            raise _wildcard(address)
        if match["six"] or _HOST.fullmatch(host) is None:
            raise ConfigError(f"{address!r} names no host: {host!r}")
        return host, int(match["port"])
    if ip.is_unspecified:
        raise _wildcard(address)
    return ip, int(match["port"])


def _wildcard(address: str) -> ConfigError:
    return ConfigError(
        f"{address!r} means all interfaces, which is never listened on or dialled; name one IP address, or ipc:///path"
    )
