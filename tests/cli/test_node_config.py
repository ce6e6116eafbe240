"""`--node-config FILE`: the words of the command line in a file, for every command that starts a node."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pdx.cli.main import main
from pdx.config import ConnectorConfig, NodeConfig, NodeOptions, parse


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
policy = "s3fifo"
numa = "none"
metrics = "127.0.0.1:9400"
name = "here"
digests = "always"
channel = ["tcp"]
trusted-network = true
"""


def test_a_file_has_the_words_of_the_command_line(run, file):
    result = pdx("node", "--address", "ipc:///run/x/node.sock", "--node-config", file(ALL))
    assert result.exit_code == 0, result.output
    (config,) = run
    assert (config.arena_bytes, config.more_gpus, config.gpu_arena_bytes) == (2 << 30, ["0", "1"], 1 << 30)
    assert (config.disks, config.disk_limit_bytes, config.disk_reserve_bytes) == (["/a", "/b"], 500 << 30, 1 << 20)
    assert (config.remote, config.remote_ttl_s, config.policy, config.numa) == (
        "valkey://h:6379",
        60.0,
        "s3fifo",
        "none",
    )
    assert (config.metrics, config.name, config.digests) == ("127.0.0.1:9400", "here", "always")
    assert (config.channels, config.trusted_network) == (["tcp"], True)


def test_the_command_line_comes_first(run, file):
    path = file('arena = "2GiB"\ndisk = "/a"\npolicy = "fifo"')
    pdx("node", "--address", "ipc:///run/x/node.sock", "--arena", "1GiB", "--node-config", path, "--disk", "/c")
    (config,) = run
    assert (config.arena_bytes, config.disks, config.policy) == (1 << 30, ["/c"], "fifo")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arenas = 1", "'arenas' is no option of a node; there are "),
        ("status = true", "'status' is no option of a node"),
        ("node-config = 'x'", "'node-config' is no option of a node"),
        ("arena = [1, 2]", "is not one value, as --arena takes"),
        ("[disk]\npath = 'x'", "is not one value, as --disk takes"),
        ("arena = ", "is not TOML"),
        ("digests = 'sometimes'", "sometimes"),
        ("arena = 'much'", "'much' is not a size"),
        ("disk = ['/a', '/b', '/a']", "each folder has its own part; name each once"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_word(run, file, text, said):
    result = pdx("node", "--address", "ipc:///run/x/node.sock", "--node-config", file(text))
    assert result.exit_code != 0
    assert said in " ".join(result.output.split()), result.output
    assert run == []


def test_a_file_that_is_not_there_is_refused(run, tmp_path):
    result = pdx("node", "--node-config", str(tmp_path / "none.toml"))
    assert result.exit_code == 1
    assert "cannot be read: No such file or directory" in result.output


@pytest.mark.parametrize("command", [["up", "MODEL", "--node", "ipc:///x"], ["serve", "both", "M", "--no-start-node"]])
def test_a_command_that_starts_no_node_refuses_what_a_file_says_of_one(command, file):
    result = pdx(*command, "--node-config", file('disk = "/a"'))
    assert result.exit_code == 1
    assert "--disk is for a node that this command starts" in result.output


def test_up_and_serve_take_of_a_file_what_they_take_on_the_command_line(file, monkeypatch):
    result = pdx("up", "MODEL", "--node-config", file('name = "here"'))
    assert result.exit_code == 1
    assert "'name' is no option of a node; there are arena, gpu, " in result.output
    executed = []
    monkeypatch.setattr("os.execvp", lambda name, command: executed.append(command))
    path = file('disk = ["/a", "/b"]\npolicy = "lfu"')
    result = pdx("serve", "both", "MODEL", "--node-config", path, "--port", "8100")
    assert result.exit_code == 0, result.output
    (command,) = executed
    settings = command[command.index("--kv-transfer-config") + 1]
    assert '"disk": ["/a", "/b"]' in settings
    assert '"policy": "lfu"' in settings


def test_the_connector_takes_one_folder_or_several():
    for disk, folders in (("/a", ["/a"]), (["/a", "/b"], ["/a", "/b"]), ("", []), ([], [])):
        config = parse(ConnectorConfig, {"disk": disk})
        assert config.settings()["disks"] == folders
    assert parse(NodeOptions, {"disk": ["/a"]}).settings()["disks"] == ["/a"]
