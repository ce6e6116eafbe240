"""Addresses and the roster file: what may be listened on or dialled, by whom, and what a wrong file says."""

from __future__ import annotations

import re

import pytest
from connection_stage import settled

from pdx.discovery.discovery import MAX_FOUND
from pdx.errors import ConfigError, PeerUnknown
from pdx.security.address import check_address, is_found_address, needs_ipv6
from pdx.security.curve_keys import KeyPair
from pdx.security.roster import Found, Roster, RosterEntry, RosterFile
from pdx.wire.proxy import PeerEntry

# Always the same, so that the tests have the same names in each process.
KEYS = [
    ")6q8r8-+Gb4--!7Cb@ep5+Ai]>-#=4Q.2e@QER<Z",
    "^uHN>/64<BR:xwKL^xCEdKwjNw.:27e}50plQ=ts",
    "GiG2+OElT6Lv6Ia[M%D*jC:.T9.-zKS=M<BVTkBf",
]
HERE = ["ipc:///run/pdx/a.sock", "tcp://127.0.0.1:7700", "tcp://[::1]:7700", "tcp://127.8.9.1:1"]
BEYOND = ["tcp://10.0.0.1:7700", "tcp://[fe80::1]:7700", "tcp://192.168.1.1:65535", "tcp://[::ffff:10.0.0.1]:1"]
NAMES = ["tcp://node7:7700", "tcp://node-7.cluster.example:1", "tcp://localhost:1"]
WILDCARDS = ["tcp://0.0.0.0:7700", "tcp://*:7700", "tcp://[::]:7700", "tcp://[::ffff:0.0.0.0]:7700", "tcp://0:7700"]
NONSENSE = [
    "", "tcp://", "tcp://:1", "tcp://10.0.0.1", "tcp://10.0.0.1:", "tcp://10.0.0.1:99999", "tcp://10.0.0.1:-1",
    "tcp://10.0.0.1:1;10.0.0.2:2", "tcp://user@10.0.0.1:1", "tcp://10.0.0.1:1/x", "tcp://10.0.0.1:1\n",
    "http://10.0.0.1:1",
    "tcp://10.1:1", "tcp://0x7f.1:1", "tcp://2130706433:1", "tcp://[10.0.0.1]:1x", "tcp://::1:7", "tcp://[zz]:1",
    "ipc://relative", "ipc://@abstract", "ipc:///" + "x" * 120, "inproc://x", "udp://10.0.0.1:1",
    "tcp://-a:1", "tcp://a b:1",
    "tcp://eth0;10.0.0.1:1", "tcp://10.0.0.1:*", "ipc://*",
]  # fmt: skip


# ---- addresses ----------------------------------------------------------------------------------


def both(address, *, has_keys):
    """What is said of dialling this and of listening there; empty: it may be."""
    said = []
    for listens in (False, True):
        try:
            check_address(address, has_keys=has_keys, listens=listens)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


KINDS = {"here": HERE, "beyond": BEYOND, "a name": NAMES, "all interfaces": WILDCARDS, "nonsense": NONSENSE}
SAID = {  # without keys, and with them, of dialling and of listening
    "here": ("", "", "", ""),
    "beyond": ("beyond this host", "beyond this host", "", ""),
    "a name": ("beyond this host", "name an IP address", "", "name an IP address"),
    "all interfaces": ("all interfaces",) * 4,
    "nonsense": (".",) * 4,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_be_dialled_or_listened_on(kind):
    """CVE-2025-32444, -47277, -30202, CVE-2026-103765, -107205: nothing is open to others without authentication, or on
    all interfaces."""
    for address in KINDS[kind]:
        found = [*both(address, has_keys=False), *both(address, has_keys=True)]
        for text, expected in zip(found, SAID[kind], strict=True):
            assert re.search(expected, text) if expected else not text, (address, found)


def test_port_0_is_for_listening_and_which_need_ipv6():
    dialled, listened = both("tcp://127.0.0.1:0", has_keys=False)
    assert ("no port" in dialled, listened) == (True, "")
    assert [needs_ipv6(address) for address in HERE] == [False, False, True, False]


# ---- the file -----------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def put(text, mode=0o644):
        path = tmp_path / "roster.toml"
        path.write_text(text)
        path.chmod(mode)
        return str(settled(path))

    return put


def entry(name, address="tcp://10.0.0.1:7700", key=KEYS[0]):
    return f'[{name}]\naddress = "{address}"\nkey = "{key}"\n'


def test_of_several_proxies_each_has_its_key(write):
    second = "tcp://10.0.0.3:7600"
    text = entry("proxy", "tcp://10.0.0.1:7600", KEYS[0]) + entry("proxies.second", second, KEYS[1])
    roster = Roster(write(text), has_keys=True)
    found = [roster.proxy_at(address).key for address in (second, "tcp://10.0.0.1:7600", "tcp://elsewhere:1")]
    assert found == [KEYS[1], KEYS[0], KEYS[0]]
    with pytest.raises(ConfigError, match="have the same key"):
        RosterFile.load(write(text.replace(KEYS[1], KEYS[0])), has_keys=True)


def test_a_file_is_read(write):
    text = entry("nodes.alpha") + entry('nodes."b.c"', "tcp://[fe80::1]:1", KEYS[1]) + entry("proxy", key=KEYS[2])
    file = RosterFile.load(write(text), has_keys=True)
    assert sorted(file.nodes) == ["alpha", "b.c"]
    assert file.nodes["alpha"].address == "tcp://10.0.0.1:7700"
    assert file.proxy.key == KEYS[2]
    roster = Roster(write(text), has_keys=True)
    assert roster.entry("alpha") == RosterEntry("tcp://10.0.0.1:7700", KEYS[0])
    assert [roster.name_of(key) for key in (*KEYS, "", "x")] == ["alpha", "b.c", None, None, None]
    assert RosterFile.load(write(""), has_keys=True) == RosterFile({}, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nodes = 3", "nodes is not"),
        ("[peers.alpha]\n", "peers is not"),
        ("[nodes]\nalpha = 3", "nodes.alpha: "),
        ("[nodes.alpha]\n", "nodes.alpha: a key is missing"),
        (f'[nodes.alpha]\nkey = "{KEYS[0]}"\nengine_hosts = ["10.0.0.1/8"]\n', "not a network"),
        (entry("nodes.alpha") + 'port = "3"\n', "nodes.alpha: .*port"),
        (entry("nodes.alpha", "tcp://0.0.0.0:1"), "nodes.alpha: .*all interfaces"),
        (entry("nodes.alpha", "x" * 257), "nodes.alpha: "),
        (entry("nodes.alpha", key="short"), "nodes.alpha: not a CURVE key"),
        (entry("proxy", key=""), "proxy: a key is missing"),
        (entry('nodes.""'), "1 to 256"),
        (entry(f'nodes."{"n" * 257}"'), "1 to 256"),
        (entry("nodes.alpha") + entry("nodes.beta"), "nodes.alpha and nodes.beta have the same key"),
        (entry("nodes.alpha") + entry("proxy"), "nodes.alpha and proxy have the same key"),
        ("".join(f"[nodes.n{number}]\n" for number in range(1025)), "at most 1024"),
        ("#" * (1 << 20) + "\n", "more than"),
        ("\0", ""),
        ("readers = 1\n", "readers is not"),
        ("[readers.router]\n", "missing required field `key`"),
        ('[readers.router]\nkey = "x"', "not a CURVE key"),
        (f'[readers.router]\nkey = "{KEYS[1]}"\naddress = "ipc:///x"', "unknown field"),
        (entry("nodes.a") + f'[readers.router]\nkey = "{KEYS[0]}"', "nodes.a and readers.router have the same key"),
        ("".join(f"[readers.r{number}]\n" for number in range(257)), "257 readers; at most 256"),
    ],
)
def test_a_wrong_file_is_refused_naming_file_and_entry(write, text, why):
    with pytest.raises(ConfigError, match=f"roster /.*roster.toml: .*{why}"):
        RosterFile.load(write(text), has_keys=True)


def test_without_keys_a_file_names_addresses_of_this_host(write):
    file = RosterFile.load(write('[nodes.alpha]\naddress = "ipc:///run/a.sock"\n'), has_keys=False)
    assert file.nodes["alpha"].key == ""
    with pytest.raises(ConfigError, match="nodes.alpha: .*beyond this host"):
        RosterFile.load(write(entry("nodes.alpha")), has_keys=False)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_is_refused(write, mode):
    """CVE-2026-92972: who may write the list of members is one."""
    with pytest.raises(ConfigError, match="chmod go-w"):
        RosterFile.load(write(entry("nodes.alpha"), mode), has_keys=True)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Roster(str(tmp_path / "none"), has_keys=True)
    with pytest.raises(ConfigError, match="keys need a roster"):
        Roster("", has_keys=True)


def test_a_file_that_changes_is_read_again_and_a_wrong_one_changes_nothing(write, tmp_path):
    roster = Roster(write(entry("nodes.alpha")), has_keys=True)
    assert not roster.refresh()
    write(entry("nodes.beta") + "# longer")
    assert roster.refresh()
    assert not roster.refresh()
    assert (roster.name_of(KEYS[0]), roster.admits_name("alpha")) == ("beta", False)
    write("[nodes.")
    assert not roster.refresh()
    (tmp_path / "roster.toml").unlink()
    assert not roster.refresh()
    assert roster.entry("beta").keys == (KEYS[0],)
    write("")
    assert not roster.refresh(), "somebody has begun to write it, or found no room"
    write(entry("nodes.gamma", key=KEYS[1]))
    assert roster.refresh()
    with pytest.raises(PeerUnknown):
        roster.entry("beta")


def test_a_node_may_have_two_keys_and_nobody_else(write):
    both = entry("nodes.alpha") + f'next_key = "{KEYS[1]}"\n'
    roster = Roster(write(both + entry("nodes.beta", key=KEYS[2])), has_keys=True)
    assert roster.entry("alpha").keys == (KEYS[0], KEYS[1])
    assert [roster.name_of(key) for key in KEYS] == ["alpha", "alpha", "beta"]
    assert roster.listeners == {*KEYS}
    for key in KEYS[:2]:
        assert roster.is_named("alpha", key, roster.entry("alpha").address)
        assert roster.is_named("alpha", key, "")
        assert not roster.check_self("alpha", key, roster.entry("alpha").address)
    assert not roster.is_named("alpha", KEYS[2], "")
    for wrong, why in (
        (both + entry("nodes.beta", key=KEYS[1]), "nodes.alpha and nodes.beta have the same key"),
        (entry("nodes.alpha") + 'next_key = "short"\n', "not a CURVE key"),
        (entry("proxy") + f'next_key = "{KEYS[1]}"\n', "only nodes have a next_key"),
        (entry("proxies.one") + f'next_key = "{KEYS[1]}"\n', "only nodes have a next_key"),
    ):
        with pytest.raises(ConfigError, match=why):
            RosterFile.load(write(wrong), has_keys=True)


def test_a_list_of_the_proxy_replaces_the_one_before():
    roster = Roster("", has_keys=False)
    roster.take_proxy_list([PeerEntry("a", "tcp://127.0.0.1:1"), PeerEntry("b", "ipc:///b")])
    roster.take_proxy_list([PeerEntry("b", "ipc:///b2"), PeerEntry("", "ipc:///c"), PeerEntry("d", "")])
    assert roster.entry("b").address == "ipc:///b2"
    for name in ("a", "", "d"):
        with pytest.raises(PeerUnknown):
            roster.entry(name)
    assert roster.admits_name("whoever can reach the socket")
    assert not roster.refresh()
    assert roster.proxy_at("tcp://10.0.0.1:7600") is None


# ---- this node's own entry ----------------------------------------------------------------------


@pytest.fixture
def own_roster(write):
    return Roster(write(entry("nodes.alpha") + entry("nodes.beta", "tcp://10.0.0.2:7700", KEYS[1])), has_keys=True)


@pytest.mark.parametrize(
    ("name", "key", "why"),
    [("betta", 1, "is that of 'beta', not of 'betta'"), ("beta", 0, "is that of 'alpha'"), ("beta", 2, "another key")],
)
def test_a_node_whom_no_peer_would_let_in_is_refused_at_once(own_roster, name, key, why):
    with pytest.raises(ConfigError, match=why):
        own_roster.check_self(name, KEYS[key], "tcp://10.0.0.2:7700")


def test_a_node_that_the_roster_does_not_name_or_names_elsewhere_is_warned(own_roster):
    assert own_roster.check_self("alpha", KEYS[0], "tcp://10.0.0.1:7700") == ""
    assert "does not name this node" in own_roster.check_self("gamma", KEYS[2], "tcp://10.0.0.3:7700")
    assert "listens at tcp://10.0.0.1:7701" in own_roster.check_self("alpha", KEYS[0], "tcp://10.0.0.1:7701")


def test_a_node_whose_host_the_roster_has_by_name_tells_that_name(write):
    """A node listens at an IP address. What it told once, that address, no other node or proxy believed."""
    roster = Roster(write(entry("nodes.alpha", "tcp://alpha.pods.svc:7700")), has_keys=True)
    assert roster.published_address("alpha", "tcp://10.0.0.7:7700") == "tcp://alpha.pods.svc:7700"
    assert roster.check_self("alpha", KEYS[0], "tcp://10.0.0.7:7700") == ""
    assert roster.published_address("alpha", "tcp://10.0.0.7:7701") == "tcp://10.0.0.7:7701"
    assert roster.published_address("beta", "tcp://10.0.0.7:7700") == "tcp://10.0.0.7:7700"


# ---- readers of events ---------------------------------------------------------------------------


def test_readers_have_keys_of_their_own_and_hear_events_alone(write):
    text = entry("nodes.a")
    roster = Roster(write(f'{text}[readers.router]\nkey = "{KEYS[1]}"\n'), has_keys=True)
    assert roster.name_of(KEYS[1]) is None, "a reader is no node"
    assert (roster.names, roster.listeners) == (["a"], {KEYS[0], KEYS[1]})
    write(text)
    assert roster.refresh()
    assert roster.listeners == {KEYS[0]}


# ---- addresses that the file leaves out -----------------------------------------------------------

LEFT_OUT = f'[nodes.a]\nkey = "{KEYS[0]}"\n[proxies.p]\nkey = "{KEYS[1]}"\n' + entry(
    "nodes.b", "tcp://10.0.0.2:7700", KEYS[2]
)


@pytest.fixture
def left_out(write):
    return Roster(write(LEFT_OUT), has_keys=True)


def test_without_keys_nobody_may_leave_an_address_out(write):
    with pytest.raises(ConfigError, match="nodes.a: .*not an address"):
        Roster(write("[nodes.a]\n"), has_keys=False)


def test_where_the_file_has_no_address_a_cluster_or_a_proxy_says_it(left_out):
    assert (left_out.names, left_out.members) == (["b"], {"a", "b"})
    assert left_out.admits_name("a")
    with pytest.raises(PeerUnknown):
        left_out.entry("a")
    assert left_out.check_self("a", KEYS[0], "tcp://10.0.0.1:7700") == ""
    assert left_out.published_address("a", "tcp://10.0.0.1:7700") == "tcp://10.0.0.1:7700"
    everywhere = dict.fromkeys(("a", "b", "stranger"), "tcp://10.0.0.9:1")
    left_out.find(Found(everywhere, everywhere))
    assert left_out.entry("a") == RosterEntry("tcp://10.0.0.9:1", KEYS[0])
    assert left_out.entry("b").address == "tcp://10.0.0.2:7700", "the file decides"
    assert sorted(left_out.names) == ["a", "b"]
    assert left_out.proxies == [], "none of its names"
    left_out.take_proxy_list([PeerEntry("a", "tcp://10.0.0.8:1", KEYS[0]), PeerEntry("stranger", "tcp://10.0.0.8:2")])
    assert left_out.entry("a").address == "tcp://10.0.0.8:1", "it says so itself, and now"
    left_out.take_proxy_list([PeerEntry("a", "tcp://10.0.0.7:1", KEYS[2])])
    assert left_out.entry("a").address == "tcp://10.0.0.9:1", "with another key it is another one"
    left_out.find(Found())
    assert left_out.entry("a").address == "tcp://10.0.0.9:1", "a cluster that names nobody errs, or the node is gone"
    left_out.find(Found({"a": "tcp://10.0.0.7:1"}))
    assert left_out.entry("a").address == "tcp://10.0.0.7:1"


def test_of_what_a_cluster_says_only_what_changed_is_looked_at(write):
    """Thousands that are no addresses, and one other: it took 77 ms of the node's loop each time."""
    roster = Roster(write(f'[proxy]\nkey = "{KEYS[0]}"\n[nodes.a]\nkey = "{KEYS[1]}"\n'), has_keys=True)
    told = {f"p{number}": f"tcp://host-{number}.example:1" for number in range(MAX_FOUND)}
    roster.find(Found(told, told))
    before = is_found_address.cache_info().misses
    for number in range(3):
        told = told | {"p7": f"tcp://another-{number}.example:1", "a": f"tcp://10.0.0.{number + 1}:1"}
        roster.find(Found(told, told))
        assert roster.address_of("a") == f"tcp://10.0.0.{number + 1}:1"
    assert is_found_address.cache_info().misses <= before + 6


@pytest.mark.parametrize(
    "address", ["tcp://somewhere:1", "ipc:///run/a", "tcp://0.0.0.0:1", "10.0.0.1:1", "", "x" * 300]
)
def test_an_address_that_is_found_is_an_ip_address_and_a_port(left_out, address):
    left_out.find(Found({"a": address}, {"p": address}, is_assigned=True))
    left_out.take_proxy_list([PeerEntry("a", address)])
    assert (left_out.names, left_out.proxies, left_out.host_of("a")) == (["b"], [], "")


def test_proxies_are_found_by_name_or_by_the_key_that_all_have(left_out, write):
    left_out.find(Found({}, {"p": "tcp://10.0.0.6:7600", "q": "tcp://10.0.0.7:7600"}))
    assert left_out.proxies == ["tcp://10.0.0.6:7600"]
    assert left_out.proxy_at("tcp://10.0.0.6:7600").key == KEYS[1]
    assert left_out.proxy_at("tcp://10.0.0.7:7600") is None
    assert (left_out.proxy_name(KEYS[1]), left_out.proxy_name(KEYS[0])) == ("p", "")
    more = KeyPair.make().public
    write(f'{LEFT_OUT}[proxy]\nkey = "{more}"\n')
    assert left_out.refresh()
    assert left_out.proxies == ["tcp://10.0.0.6:7600", "tcp://10.0.0.7:7600"]
    assert left_out.proxy_at("tcp://10.0.0.7:7600").key == more
    left_out.find(Found({}, {f"n{number}": f"tcp://10.0.0.7:{number + 1}" for number in range(100)}))
    assert len(left_out.proxies) == 64


def test_a_proxy_at_a_named_address_is_not_replaced_by_one_that_is_found_there(write):
    text = LEFT_OUT + f'[proxy]\naddress = "tcp://10.0.0.6:7600"\nkey = "{KeyPair.make().public}"\n'
    roster = Roster(write(text), has_keys=True)
    before = roster.proxy_at("tcp://10.0.0.6:7600").key
    roster.find(Found({}, {"p": "tcp://10.0.0.6:7600"}))
    assert roster.proxy_at("tcp://10.0.0.6:7600").key == before
    roster.find(Found({}, {"q": "tcp://10.0.0.8:7600"}))
    assert roster.proxies == [], "the roster says where the one is whose key q could have"


def test_a_connection_outlives_an_address_that_was_found_and_not_a_key(left_out, write):
    left_out.find(Found({"a": "tcp://10.0.0.9:1"}))
    assert left_out.is_named("a", KEYS[0], "tcp://10.0.0.9:1")
    left_out.find(Found({"a": "tcp://10.0.0.8:1"}))
    assert left_out.is_named("a", KEYS[0], "tcp://10.0.0.9:1")
    assert not left_out.is_named("a", KEYS[1], "tcp://10.0.0.8:1")
    write(entry("nodes.b", "tcp://10.0.0.2:7700", KEYS[2]))
    assert left_out.refresh()
    assert not left_out.is_named("a", KEYS[0], "tcp://10.0.0.8:1")


def test_the_word_of_a_cluster_for_a_host_counts_only_where_it_gives_out_addresses(left_out):
    assert (left_out.host_of("a"), left_out.host_of("b"), left_out.host_of("c")) == ("", "10.0.0.2", "")
    found = {"a": "tcp://10.0.0.9:1", "b": "tcp://10.0.0.9:1", "c": "tcp://10.0.0.9:1"}
    left_out.take_proxy_list([PeerEntry("a", "tcp://10.0.0.8:1", KEYS[0])])
    left_out.find(Found(found))
    assert left_out.host_of("a") == "", "a node that says where it is may say anything"
    for each in (Found(found, is_assigned=True), Found(is_assigned=True)):
        left_out.find(each)
        assert (left_out.host_of("a"), left_out.host_of("b"), left_out.host_of("c")) == ("10.0.0.9", "10.0.0.2", "")
