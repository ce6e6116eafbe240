"""Options in the environment: by one rule, of all commands."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner
from command_tree import commands

from pdx.cli import up as up_module
from pdx.cli.main import main
from pdx.cli.options import NODE_ENV, PROXY_ENV
from pdx.cli.ports import free_ports
from pdx.config import NodeConfig
from pdx.options import options_of
from pdx.proxy.config import ProxyConfig
from pdx.telemetry import logs

# What is done, or destroyed, is said on the command line alone.
NO_SETTINGS = {
    ("node", "--status"), ("node", "--json"), ("node", "--watch"), ("node", "--stop"), ("node", "--force"),
    ("keygen", "--force"), ("cache", "clear", "--everything"), ("cache", "verify", "--remove"),
}  # fmt: skip
ARGUMENTS = {"up": ["M"], "serve": ["both", "M"], "keygen": ["n"]}


def context(path: tuple[str, ...], arguments: list[str] | None = None) -> click.Context:
    """Of a command as `pdx` finds it; with `arguments` its options have values."""
    found, command = click.Context(main, info_name="pdx", **main.context_settings), main
    for name in path:
        command = command.get_command(found, name)
        if arguments is not None and name == path[-1]:
            return command.make_context(name, list(arguments), parent=found)
        found = click.Context(command, parent=found, info_name=name)
    return found


def variables() -> Iterator[tuple[tuple[str, ...], str, str]]:
    for path in commands():
        ctx = context(path)
        for each in ctx.command.params:
            if isinstance(each, click.Option):
                yield path, each.opts[0], each.variable(ctx)


def of(env: str, kind: type, *, for_engines: bool = False) -> set[str]:
    """The variables of a part."""
    found = options_of(kind).values()
    return {f"{env}{each.flag.replace('-', '_').upper()}" for each in found if each.for_engines or not for_engines}


def test_each_setting_has_a_variable_named_after_the_command_or_the_part_it_belongs_to():
    of_parts = of(NODE_ENV, NodeConfig) | of(PROXY_ENV, ProxyConfig) | {logs.VARIABLE}
    for path, word, variable in variables():
        own = word.lstrip("-").replace("-", "_").upper()
        if (*path, word) in NO_SETTINGS:
            assert variable == ""
        elif variable != "_".join(("PDX", *path, own)).replace("-", "_").upper():
            assert variable in of_parts
            assert variable.endswith(f"_{own}")


def test_a_nodes_variables_are_the_same_whoever_starts_it():
    for command in ("node", "up", "serve"):
        named = {variable for path, _, variable in variables() if path == (command,)}
        assert of(NODE_ENV, NodeConfig, for_engines=True) <= named


@pytest.mark.parametrize(
    ("command", "variable", "text", "name", "value"),
    [
        ("proxy", "PDX_PROXY_MAX_BODY", "2M", "max_body", "2M"),
        ("proxy", "PDX_PROXY_FORWARD", "no", "forward", False),
        ("proxy", "PDX_PROXY_PREFILL", "http://c:3 http://d:4", "prefill", ["http://c:3", "http://d:4"]),
        ("node", "PDX_NODE_TRUSTED_NETWORK", "1", "trusted_network", True),
        ("node", "PDX_NODE_STOP", "1", "stop", False),
        ("up", "PDX_NODE_DISK", "/a /b", "disk", ["/a", "/b"]),
        ("up", "PDX_PROXY_PORT", "8001", "port", 8001),
        ("up", "PDX_UP_WAIT", "5", "wait", 5.0),
        ("serve", "PDX_SERVE_START_NODE", "0", "start_node", False),
        ("doctor", "PDX_DOCTOR_TIMEOUT", "", "timeout", 30.0),
        ("bench serve", "PDX_BENCH_SERVE_RATE", "2", "rate", 2.0),
        ("cache health", "PDX_CACHE_HEALTH_TIMEOUT", "2", "timeout_s", 2.0),
    ],
)  # fmt: skip
def test_what_the_environment_says(command, variable, text, name, value, monkeypatch):
    monkeypatch.setenv(variable, text)
    path = tuple(command.split())
    assert context(path, ARGUMENTS.get(command, [])).params[name] == value


@pytest.mark.parametrize("way", ["option", "variable"])
def test_the_command_line_before_the_environment_before_the_file(way, tmp_path, monkeypatch):
    ran: list[NodeConfig] = []
    monkeypatch.setattr("pdx.node.daemon.run", ran.append)
    (tmp_path / "node.toml").write_text("peer-lookup-timeout = 1")
    config = str(tmp_path / "node.toml")
    command = ["node", "--node", "ipc:///run/x/node.sock", *(["--config", config] if way == "option" else [])]
    file = {} if way == "option" else {"PDX_NODE_CONFIG": config}
    said = {"PDX_NODE_PEER_LOOKUP_TIMEOUT": "2"}
    for environment, flags in ((file, []), (file | said, []), (file | said, ["--peer-lookup-timeout", "3"])):
        result = CliRunner().invoke(main, [*command, *flags], env=environment)
        assert result.exit_code == 0, result.output
    assert [config.peer_lookup_s for config in ran] == [1.0, 2.0, 3.0]


def test_what_up_is_told_of_its_parts_it_tells_them(place, monkeypatch):
    """By the command line, which comes before the same variables in their own environment."""
    place.chmod(0o700)
    started: list[list[str]] = []

    def run(self, stages, serves, share_port) -> int:
        started.extend(list(each.command) for stage in stages for each in stage)
        return 0

    monkeypatch.setattr(up_module._Up, "run", run)
    said = {"PDX_PROXY_WORKERS": "2", "PDX_PROXY_FORWARD": "0", "PDX_NODE_ARENA": "1GiB", "XDG_RUNTIME_DIR": str(place)}
    words = ["up", "some/model", "--port", str(free_ports(1)[0]), "--logs", str(place / "logs"), "--moved"]
    result = CliRunner().invoke(main, words, env={**os.environ, **said})
    assert result.exit_code == 0, result.output
    node, prefill, decode, proxy = (" ".join(command) for command in started)
    assert "--arena 1GiB" in node
    assert ("--workers 2" in proxy, "--no-forward" in proxy) == (True, True)
    assert ['"moved": true' in engine for engine in (prefill, decode)] == [True, True]


def test_a_variable_that_is_called_as_a_version_changes_no_command():
    result = CliRunner().invoke(main, ["keygen", "-h"], env={"PDX_VERSION": "1"})
    assert result.output.startswith("Usage:")


def test_up_starts_no_proxy_whose_answer_it_would_not_understand():
    result = CliRunner().invoke(main, ["up", "some/model"], env={"PDX_PROXY_TLS_CERT": "/x"})
    assert result.output.startswith("Error: PDX_PROXY_TLS_CERT: ")
