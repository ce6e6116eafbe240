"""Ports for servers that are about to start."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pdx.errors import ConfigError

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports without a listener. All are held until all are known, so that no two are equal."""
    with ExitStack() as held:
        found: list[int] = []
        for port in (*_candidates(), *[0] * count):  # 0: any free port
            listener = held.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(listener.getsockname()[1])
            if len(found) == count:
                break
        return found


@contextmanager
def held_port(host: str, port: int) -> Iterator[Callable[[], None]]:
    """Reserve a port for a server that this command starts later: nobody else can have it meanwhile.

    Nobody listens there, so clients are refused at once. Returns a function to call before that server starts; it must
    bind with SO_REUSEADDR, as servers do.

    :raises ConfigError: the port is unavailable at `host`; the message says why.
    """
    with ExitStack() as stack:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:  # a name may be too long to be resolved
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--host {host!r} is no host: {why}; name an IP address of this one") from error
        held: list[socket.socket] = []
        failed: OSError | None = None
        for family, kind, number, _, where in dict.fromkeys(found):  # a host may list an address twice
            try:
                held.append(stack.enter_context(_bound(family, kind, number, where)))
            except OSError as error:
                failed = error
                if error.errno not in _NOT_HERE:  # one of several addresses may belong to a disabled family
                    raise _unavailable(host, port, error) from error
        if not held:
            assert failed is not None
            raise _unavailable(host, port, failed) from failed

        def share() -> None:
            for each in held:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        yield share


def _bound(family: int, kind: int, number: int, where: tuple[object, ...]) -> socket.socket:
    """A socket bound to that address, exclusively, although another socket had it a moment ago."""
    made = socket.socket(family, kind, number)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        made.close()
        raise
    return made


def _unavailable(host: str, port: int, error: OSError) -> ConfigError:
    known = {
        errno.EADDRINUSE: f"port {port} on {host} is in use; choose another with --port",
        errno.EADDRNOTAVAIL: f"--host {host} is no address of this host; `ip address` lists them",
        errno.EACCES: f"port {port} is for the system's own servers; choose one above 1023 with --port",
    }
    return ConfigError(known.get(error.errno or 0, f"port {port} on {host} cannot be had: {error.strerror}"))


def _candidates() -> list[int]:
    """Ports that the kernel does not assign automatically: servers bind theirs only after their imports."""
    lowest = int(EPHEMERAL.read_text().split()[0])
    ports = range(max(1024, lowest - 12_000), lowest)
    return random.sample(ports, min(100, len(ports)))
