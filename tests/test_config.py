"""Settings: sizes, ranges, unknown names, addresses and private folders."""

import os
from pathlib import Path

import pytest

from pdx import config
from pdx.config import (
    ConnectorConfig,
    NodeConfig,
    connector_config,
    disk_names,
    node_name,
    parse,
    parse_bytes,
    private_folder,
    socket_path,
)
from pdx.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1073741824", 1 << 30),
        (4096, 4096),
        ("0", 0),
        ("512K", 512 << 10),
        ("512m", 512 << 20),
        ("4GiB", 4 << 30),
        ("4GB", 4 << 30),
        (" 1.5 TiB ", 3 << 39),
        ("16B", 16),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "4 gigs", "-1G", "1e9", "GiB", "0x10", "4G G", "nan", "1.G", "2.5", "\u0664", "9" * 400, "0." + "9" * 400],
)
def test_what_is_not_a_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="4GiB"):
        parse_bytes(text)


def test_an_unknown_setting_names_itself_and_the_known_ones():
    with pytest.raises(ConfigError) as refused:
        connector_config({"chunk_token": 256})
    assert "chunk_token`" in str(refused.value)
    known = str(refused.value).partition("settings of ConnectorConfig: ")[2].removesuffix(")").split(", ")
    assert {"chunk_tokens", "lookup_s", "node", "arena", "disk", "gpus", "store"} <= set(known)
    assert "of_node" not in known, "those of a node that it starts are said by themselves"


def test_a_word_that_a_setting_does_not_take_is_answered_with_those_that_it_takes():
    with pytest.raises(ConfigError, match="^store: all, twice-seen or write-back, and not 'some'$"):
        connector_config({"store": "some"})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"address": "ipc:///tmp/x", "arena_bytes": 1 << 60},
        {"address": "ipc:///tmp/x", "arena_bytes": "4GiB"},
        {"address": "ipc:///tmp/x", "max_lease_s": float("nan")},
        {"address": "ipc:///tmp/x", "reserve_s": -1.0},
        {"address": 7},
    ],
)
def test_node_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match="settings of NodeConfig"):
        parse(NodeConfig, settings)


def test_defaults_are_valid():
    assert parse(NodeConfig, {"address": "ipc:///tmp/x"}) == NodeConfig(address="ipc:///tmp/x")
    assert connector_config({}) == ConnectorConfig()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "ipc://relative", "ipc://@abstract", ""])
def test_only_absolute_unix_sockets_are_addresses(address):
    with pytest.raises(ConfigError, match="ipc:///absolute/path"):
        socket_path(address)


def test_a_path_too_long_for_a_unix_socket_is_refused_before_bind_is_tried():
    assert socket_path("ipc:///" + "x" * 99)
    with pytest.raises(ConfigError, match="too long"):
        socket_path("ipc:///" + "x" * 100)
    with pytest.raises(ConfigError, match="too long"):
        socket_path("ipc:///" + "é" * 50)


def test_a_private_folder_is_made_for_this_user_alone(tmp_path):
    folder = tmp_path / "a" / "b"
    private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    private_folder(folder)


@pytest.mark.parametrize("mode", [0o701, 0o720, 0o755])
def test_a_folder_others_can_enter_is_refused(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode 0700 .*mode {mode:04o}"):
        private_folder(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65_534, 65_534)
    with pytest.raises(ConfigError, match="user 65534"):
        private_folder(folder)


def test_where_the_node_is(monkeypatch, tmp_path):
    monkeypatch.delenv("PDX_NODE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert config.default_node() == f"ipc://{tmp_path}/pdx/node.sock"
    assert (tmp_path / "pdx").stat().st_mode & 0o777 == 0o700
    assert ConnectorConfig().node_address() == f"ipc://{tmp_path}/pdx/node.sock"
    monkeypatch.setenv("PDX_NODE", "ipc:///run/other.sock")
    assert config.default_node() == "ipc:///run/other.sock"
    assert ConnectorConfig(node="ipc:///run/mine.sock").node_address() == "ipc:///run/mine.sock"


def test_the_runtime_folder_without_xdg_is_per_user(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(config.tempfile, "gettempdir", lambda: str(tmp_path))
    assert config.runtime_folder() == tmp_path / f"pdx-{os.getuid()}"


def test_without_a_writable_folder_for_sockets_tmpdir_is_asked_for(monkeypatch):
    def none_found():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(config.tempfile, "gettempdir", none_found)
    with pytest.raises(ConfigError, match=r"found in \['/tmp'\]; name a writable folder in TMPDIR"):
        config.runtime_folder()


def test_a_folder_that_cannot_be_looked_at_is_said_to_be_so(monkeypatch, tmp_path):
    """As after `su`, which leaves XDG_RUNTIME_DIR with the folder of the user before."""

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "lstat", denied)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/x cannot be used: Permission denied; name another folder$"):
        private_folder(tmp_path / "x")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=f"XDG_RUNTIME_DIR={tmp_path} is another user's, after su perhaps.* unset it"):
        config.default_node()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_in_the_place_of_a_private_folder_is_not_followed(tmp_path, is_there):
    """In /tmp another user may have put it there."""
    if is_there:
        private_folder(tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    words = f"{tmp_path}/link is a symbolic link, which is not followed; name the folder itself: {tmp_path}/mine"
    with pytest.raises(ConfigError, match=f"^{words}$"):
        private_folder(tmp_path / "link")
    assert (tmp_path / "mine").exists() is is_there


@pytest.mark.parametrize("name", ["host", "remote", "disk /mnt/a"])
def test_no_node_is_called_like_a_tier(name):
    with pytest.raises(ConfigError, match="cannot be named"):
        node_name(NodeConfig(address="ipc:///x", name=name))


@pytest.mark.parametrize("name", ["n" * 257, "a b", "a/b", "a\x1b[2J", "a\x85b"])
def test_a_name_can_be_shown_and_said_and_sent(name):
    with pytest.raises(ConfigError, match="--name: a name has 1 to 256 characters"):
        node_name(NodeConfig(address="ipc:///x", name=name))


@pytest.mark.parametrize("field", ["listen", "proxy"])
def test_an_address_is_no_longer_than_messages_have_it(field):
    with pytest.raises(ConfigError, match=field):
        parse(NodeConfig, {"address": "ipc:///x", field: "tcp://" + "h" * 300 + ":1"})


def test_several_disks_have_paths_that_are_names():
    long = "/" + "d" * 300
    assert disk_names(NodeConfig(address="ipc:///x", disks=[long])) == ["disk"]
    assert disk_names(NodeConfig(address="ipc:///x", disks=["/a b", "/c"])) == ["disk /a b", "disk /c"]
    for disk in (long, "/a\nb"):
        with pytest.raises(ConfigError, match="--disk .* at most 251 characters"):
            disk_names(NodeConfig(address="ipc:///x", disks=["/a", disk]))


@pytest.mark.parametrize("size", ["", 2.5])  # empty, as a variable has it that is not set
@pytest.mark.parametrize("name", ["gpu_arena", "disk_limit"])
def test_what_is_no_size_is_said_whether_it_is_used_or_not(size, name):
    with pytest.raises(ConfigError, match="is not a size"):
        connector_config({name: size})


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e300])
def test_a_time_limit_is_one(seconds):
    for field in ("grant_s", "remote_s", "lease_max_s"):
        with pytest.raises(ConfigError, match=field):
            parse(NodeConfig, {"address": "ipc:///x", field: seconds})
    if not 0 <= seconds <= 1:
        with pytest.raises(ConfigError, match="exit_when_idle_s"):
            parse(NodeConfig, {"address": "ipc:///x", "exit_when_idle_s": seconds})


@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ({"disk": "/a"}, {"disks": ["/a"]}),
        ({"disk": ["/a", "/b"]}, {"disks": ["/a", "/b"]}),
        ({"disk": ""}, {"disks": []}),
        ({"disk": ["", "/a", ""]}, {"disks": ["/a"]}),
        ({"gpus": "0, 1"}, {"arena_bytes": 4 << 30, "gpu": "0", "more_gpus": ["1"]}),
        ({"gpus": ""}, {"more_gpus": []}),
        ({"arena": ""}, {}),  # as if it were not said
    ],
)
def test_the_connector_takes_one_folder_or_several_and_empty_words(said, settings):
    assert connector_config(said).of_node == settings


@pytest.mark.parametrize("said", [None, [], "disk"])
def test_what_is_no_table_of_settings_is_said(said):
    with pytest.raises(ConfigError, match="kv_connector_extra_config is a table of settings, and not"):
        connector_config(said)


def test_the_connector_has_no_setting_of_the_name_of_a_field_that_is_made():
    with pytest.raises(ConfigError, match="'of_node' is no setting"):
        connector_config({"of_node": {"disk": "/a"}})
