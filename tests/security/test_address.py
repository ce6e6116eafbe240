"""Where nodes and proxies meet, and how engines' URLs are spelled and compared."""

from __future__ import annotations

import pytest

from pdx.errors import ConfigError
from pdx.security.address import (
    address_host,
    base_url,
    check_address,
    is_loopback,
    is_wildcard,
    reachable_url,
    url_host,
)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7600", "tcp://127.8.9.1:0", "tcp://[::1]:7600"])
def test_loopback_needs_keys_where_nodes_report(address):
    """Any user of this host could report an engine of its own, and get prompts with their keys."""
    with pytest.raises(ConfigError, match="every user of this host"):
        check_address(address, has_keys=False, listens=True, is_control=True)
    check_address(address, has_keys=True, listens=True, is_control=True)


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:7600", "tcp://0.0.0.0:7600", "nonsense"])
def test_a_proxys_address_is_checked_like_any_other(address):
    with pytest.raises(ConfigError, match=r"beyond this host|all interfaces|not an address"):
        check_address(address, has_keys=False, listens=True, is_control=True)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.1:8100/", "http://10.0.0.1:8100"),
        ("HTTP://Node7.Example:08100", "http://node7.example:8100"),
        ("http://[0:0::1]:8100", "http://[::1]:8100"),
        ("http://[::ffff:10.0.0.1]:1", "http://10.0.0.1:1"),
        ("http://a:80/", "http://a"),
        ("https://a:443", "https://a"),
        ("https://a:80/v/", "https://a:80/v"),
    ],
)
def test_an_engine_has_one_identity_however_its_url_is_spelled(text, url):
    assert base_url(text) == url
    assert base_url(url) == url


def test_what_is_no_url_of_an_engine_is_named_unless_a_password_is_in_it():
    with pytest.raises(ConfigError, match="'localhost:8000'; write http://HOST:PORT"):
        base_url("localhost:8000")
    with pytest.raises(ConfigError, match="'http://x:99999'; write http://HOST:PORT"):
        base_url("http://x:99999")
    with pytest.raises(ConfigError, match="^not an engine's URL; write"):
        base_url("http://user:secret@host:8000")
    with pytest.raises(ConfigError, match="^not an engine's URL; write"):
        base_url("http://host:8000/?key=secret")


def test_hosts_are_compared_as_they_are_written():
    assert url_host("http://10.0.0.1:8100") == address_host("tcp://10.0.0.1:7700")
    assert url_host("http://[::1]:8100") == address_host("tcp://[0::1]:7700")
    assert address_host("ipc:///run/x") == "localhost"
    assert [is_loopback(host) for host in ("localhost", "127.9.0.1", "::1", "10.0.0.1", "127.1", "a")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert [is_wildcard(host) for host in ("", "0", "0.0.0.0", "::", "127.0.0.1", "a")] == [
        True, True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("url", "listen", "told"),
    [
        ("http://0.0.0.0:8100", "tcp://10.0.0.1:7700", "http://10.0.0.1:8100"),
        ("https://[::]:8100/v", "tcp://[fd00::1]:7700", "https://[fd00::1]:8100/v"),
        ("http://0.0.0.0:8100", "ipc:///run/node.sock.peers", "http://127.0.0.1:8100"),
        ("http://10.0.0.9:8100", "tcp://10.0.0.1:7700", "http://10.0.0.9:8100"),
        ("nonsense", "tcp://10.0.0.1:7700", "nonsense"),
        ("", "tcp://10.0.0.1:7700", ""),
    ],
)
def test_an_engine_on_all_interfaces_is_reached_where_its_node_is(url, listen, told):
    assert reachable_url(url, listen) == told
