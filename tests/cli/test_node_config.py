"""`--config FILE`: the words of the command line in a file, for every command that starts a node."""

from __future__ import annotations

import json
import os
import tomllib

import msgspec
import pytest
from click.testing import CliRunner

from pdx.cli import up
from pdx.cli.main import main
from pdx.config import NodeConfig, connector_config, parse
from pdx.errors import ConfigError
from pdx.options import options_of


def pdx(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def run(monkeypatch):
    """The settings of the nodes that would have been run."""
    ran: list[NodeConfig] = []
    monkeypatch.setattr("pdx.node.daemon.run", ran.append)
    return ran


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "node.toml"
        path.write_text(text)
        return str(path)

    return write


ALL = """
arena = "2GiB"
gpu = ["0", "1"]
gpu-arena = "1GiB"
disk = ["/a", "/b"]
disk-limit = "500GiB"
disk_reserve = 1048576
remote = "valkey://h:6379"
remote-ttl = 60
remote-timeout = 20
remote_lookup_timeout = 1.5
fetch-timeout = 9
pin-share = 0
tenant-lease-share = 0.5
lease_max_s = 60
store = "write-back"
policy = "s3fifo"
numa = "none"
metrics = "127.0.0.1:9400"
name = "here"
digests = "always"
channel = ["tcp"]
trusted-network = true
"""


def test_a_file_has_the_words_of_the_command_line(run, file):
    pdx("node", "--node", "ipc:///run/x/node.sock", "--config", file(ALL))
    words = tomllib.loads(ALL)
    said = [(f"--{word.replace('_', '-')}", each) for word, value in words.items() for each in as_list(value)]
    pdx(
        "node",
        "--node",
        "ipc:///run/x/node.sock",
        *(str(each) for pair in said for each in pair if each is not True),
    )
    by_file, by_command = map(msgspec.structs.asdict, run)
    default = msgspec.structs.asdict(NodeConfig(address="ipc:///run/x/node.sock"))
    assert by_file == by_command
    assert sum(by_file[name] != default[name] for name in default) == len(words) + 1, "of two GPUs each has its arena"


def as_list(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arenas = 1", "'arenas' is no option of pdx node; there are "),
        ("status = true", "'status' is no option of pdx node"),
        ("fetch_s = 1", "'fetch_s' is no option of pdx node"),
        ("arena = [1, 2]", "is not what --arena takes"),
        ("[disk]\npath = 'x'", "is not what --disk takes"),
        ("arena = ", "is not TOML"),
        ("digests = 'sometimes'", "sometimes"),
        ("pin-share = 1.5", "1.5 is not in the range 0.0<=x<=1.0"),
        ("disk = ['/a', '/b', '/a']", "each folder has its own part; name each once"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_word(run, file, text, said):
    path = file(text) if text else "/nonexistent.toml"
    result = pdx("node", "--node", "ipc:///run/x/node.sock", "--config", path)
    assert result.exit_code != 0
    assert said in " ".join(result.output.split()), result.output
    assert run == []


@pytest.mark.parametrize(
    "command",
    [["up", "MODEL", "--node", "ipc:///x", "--config"], ["serve", "both", "M", "--no-start-node", "--node-config"]],
)
def test_a_command_that_starts_no_node_refuses_what_a_file_says_of_one(command, file):
    result = pdx(*command, file('disk = "/a"'))
    assert result.exit_code == 1
    assert "--disk is for a node that this command starts" in result.output


def test_up_and_serve_take_of_a_file_what_they_take_on_the_command_line(file, monkeypatch):
    result = pdx("up", "MODEL", "--config", file('name = "here"'))
    assert result.exit_code == 1
    assert "'name' is no option of pdx up; there are prefill, decode, " in result.output
    executed = []
    monkeypatch.setattr("os.execvp", lambda name, command: executed.append(command))
    path = file('disk = ["/a", "/b"]\npolicy = "gittins"')
    result = pdx("serve", "both", "MODEL", "--node-config", path, "--port", "8100")
    assert result.exit_code == 0, result.output
    (command,) = executed
    settings = command[command.index("--kv-transfer-config") + 1]
    assert '"disk": ["/a", "/b"]' in settings
    assert '"policy": "gittins"' in settings


def of_node(run, monkeypatch, *options):
    assert pdx("node", "--node", "ipc:///run/x/node.sock", *options).exit_code == 0
    return run[-1]


def of_serve(run, monkeypatch, *options):
    executed = []
    monkeypatch.setattr("os.execvp", lambda name, command: executed.append(command))
    assert pdx("serve", "both", "MODEL", *options).exit_code == 0
    (command,) = executed
    said = json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    return parse(NodeConfig, {"address": "ipc:///x", **connector_config(said).of_node})


def of_up(run, monkeypatch, *options):
    """By way of the command line that `pdx up` makes for its node."""
    started = []

    def nodes_of(*arguments):
        started.extend(made(*arguments))
        raise ConfigError("enough is known")

    made = up.nodes_of
    monkeypatch.setattr(up, "nodes_of", nodes_of)
    assert "enough is known" in pdx("up", "MODEL", *options).output
    (node,) = started
    return of_node(run, monkeypatch, *node.options)


# Of each option of a node a value that is not its default; what is asserted is the setting.
SAID = {
    "arena": ("1GiB", 1 << 30), "gpus": ("0,1", ["0", "1"]), "gpu_arena": ("2GiB", 2 << 30), "numa": ("none", "none"),
    "policy": ("s3fifo", "s3fifo"), "salt_quota": ("0.5", 0.5), "pin_share": ("0", 0.0),
    "tenant_lease_share": ("0", 0.0), "lease_max_s": ("30", 30.0), "disk": ("cache", [os.path.abspath("cache")]),
    "disk_limit": ("2GiB", 2 << 30), "disk_reserve": ("2GiB", 2 << 30), "disk_codec": ("lossless", "lossless"),
    "disk_policy": ("gittins", "gittins"),
    "remote": ("rediss://[fd00::1]:6380/2?prefix=team",) * 2, "remote_codec": ("lossless", "lossless"),
    "remote_ttl": ("3600", 3600.0), "remote_ca": ("ca.pem", os.path.abspath("ca.pem")),
    "remote_credentials": ("secret.toml", os.path.abspath("secret.toml")), "remote_timeout": ("30", 30.0),
    "remote_lookup_timeout": ("1.5", 1.5), "fetch_timeout": ("9", 9.0), "peer_lookup_timeout": ("0.01", 0.01),
    "store": ("write-back", "write-back"),
    "store_window": ("0.3", 0.3), "metrics": ("127.0.0.1:9400",) * 2,
    "metrics_token_file": ("/run/token",) * 2, "events": ("tcp://10.0.0.1:5557",) * 2,
    "events_replay": ("ipc:///run/x/r.sock",) * 2, "events_topic": ("kv", "kv"), "events_hashes": ("bytes", "bytes"),
    "events_media": ("tiers", "tiers"), "events_open": (None, True),
}  # fmt: skip


@pytest.mark.parametrize("settings_of", [of_node, of_serve, of_up])
def test_every_command_that_starts_a_node_gives_it_what_is_said(run, monkeypatch, settings_of):
    known = {name: each for name, each in options_of(NodeConfig).items() if each.for_engines}
    assert SAID.keys() == known.keys()
    said = [word for name, (value, _) in SAID.items() for word in (f"--{known[name].flag}", value) if word is not None]
    config, default = settings_of(run, monkeypatch, *said), NodeConfig(address="ipc:///x")
    for name, (_, wanted) in SAID.items():
        field = known[name].field.name
        assert getattr(config, field) == wanted != getattr(default, field), name


def test_where_only_gpus_are_named_the_first_arena_is_one_of_theirs(run, monkeypatch):
    config = of_up(run, monkeypatch, "--gpu", "0", "--gpu", "1", "--gpu-arena", "2GiB")
    assert (config.gpu, config.more_gpus, config.arena_bytes) == ("0", ["1"], 2 << 30)


@pytest.mark.parametrize("command", [["node"], ["serve", "both", "MODEL"], ["up", "MODEL"]])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--fetch-timeout", "nan"),
        ("--pin-share", "1.5"),
        ("--store", "sometimes"),
        ("--disk-limit", "much"),
        ("--gpu", "0,0"),
    ],
)
def test_a_value_out_of_range_is_refused_before_anything_starts(run, monkeypatch, command, option, value):
    monkeypatch.setattr("os.execvp", lambda name, command: pytest.fail("started"))
    result = pdx(*command, option, value)
    assert (result.exit_code in (1, 2), run) == (True, [])
    assert any(word in result.output for word in (option.strip("-"), option.strip("-").replace("-", "_"), "'much'"))


def test_the_defaults_of_the_command_line_are_those_of_the_settings(run):
    pdx("node", "--node", "ipc:///run/x/node.sock", "--proxy", "")
    assert run == [NodeConfig(address="ipc:///run/x/node.sock")]
