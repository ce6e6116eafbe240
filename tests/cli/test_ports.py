"""Ports for servers that start later: nobody else is given them meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdx.cli import ports
from pdx.errors import ConfigError


def test_they_are_none_that_the_kernel_gives_away() -> None:
    found = ports.free_ports(5)
    assert len(set(found)) == 5
    assert all(1024 <= port < int(ports.EPHEMERAL.read_text().split()[0]) for port in found)


def test_any_port_will_do_where_all_are_given_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    assert len(set(ports.free_ports(5))) == 5


def test_a_held_port_is_nobody_elses_until_it_is_shared() -> None:
    """Not even with SO_REUSEADDR, and clients are refused meanwhile instead of waiting."""
    (port,) = ports.free_ports(1)
    with ports.held_port("127.0.0.1", port) as share:
        for reuses in (False, True):
            with pytest.raises(OSError, match="in use"), listening(port, reuses=reuses):
                pass
        with pytest.raises(ConfigError, match="--port"), ports.held_port("127.0.0.1", port):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        share()
        with listening(port, reuses=True), socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_port_whose_last_connections_linger_can_be_held() -> None:
    (port,) = ports.free_ports(1)
    with listening(port, reuses=True) as server, socket.create_connection(("127.0.0.1", port)):
        server.accept()[0].close()
    with ports.held_port("127.0.0.1", port) as share:
        share()
        listening(port, reuses=True).close()


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("nosuchhost.invalid", 8000, "'nosuchhost.invalid' is no host"),
        ("", 8000, "'' is no host"),
        ("203.0.113.7", 8000, "203.0.113.7 is no address of this host"),
    ],
)
def test_why_a_port_cannot_be_held(host: str, port: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why), ports.held_port(host, port):
        pass


def test_a_host_that_names_one_address_twice_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/hosts may do so, on several lines."""
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found(*args, **kwargs) * 2)
    (port,) = ports.free_ports(1)
    with ports.held_port("127.0.0.1", port):
        pass


def listening(port: int, *, reuses: bool) -> socket.socket:
    made = socket.socket()
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuses))
        made.bind(("127.0.0.1", port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made
