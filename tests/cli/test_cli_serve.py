"""`pdx serve`: what vLLM is started with."""

from __future__ import annotations

import json
import os
import sys

import pytest
from click.testing import CliRunner

from pdx.cli import serve as module
from pdx.cli.serve import engine_command, serve
from pdx.config import ConnectorConfig, connector_config
from pdx.errors import ConfigError


@pytest.fixture(autouse=True)
def _vllm_is_there(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())


def command(*flags: str, **changes: str) -> list[str]:
    settings = {"role": "prefill", "node": "ipc:///n", "arena": "1GiB", "proxy": "", **changes}
    return engine_command("some/model", flags, **settings)


def connector(argv: list[str]) -> dict:
    return json.loads(argv[argv.index("--kv-transfer-config") + 1])


def test_the_connector_is_set_up():
    config = connector(command())
    settings = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "PdxConnector",
        "kv_connector_module_path": "pdx.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert connector_config(settings) == ConnectorConfig(
        node="ipc:///n", of_node={"arena_bytes": 1 << 30}, proxy="", role="prefill", url="http://0.0.0.0:8000"
    )


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (["--port=8100", "--host=10.0.0.7"], "http://10.0.0.7:8100"),
        (["--host", "0.0.0.0", "--port", "1", "--port", "2"], "http://0.0.0.0:2"),
        (["--host", "::", "--port", "8100"], "http://[::]:8100"),
        (["--host", "beta", "--ssl-certfile", "c.pem", "--ssl-keyfile=k.pem"], "https://beta:8000"),
        (["--por", "8100", "--hos=10.0.0.7", "--ssl-certf", "c.pem"], "https://10.0.0.7:8100"),
    ],
)
def test_the_url_is_where_vllm_will_serve(flags, url):
    """For all interfaces it says so: the node knows how its host is reached, see `address.reachable_url`."""
    assert connector(command(*flags))["kv_connector_extra_config"]["url"] == url


@pytest.mark.parametrize(
    "flags", [["--uds", "/run/vllm.sock"], ["--uds=/x"], ["--ud", "/x"], ["--config", "vllm.yaml"]]
)
def test_where_vllm_serves_has_to_be_said_if_the_flags_do_not(flags):
    with pytest.raises(ConfigError, match=r"--url"):
        command(*flags)
    assert connector(command(*flags, url="http://10.0.0.7:8100/"))["kv_connector_extra_config"]["url"] == (
        "http://10.0.0.7:8100"
    )


@pytest.mark.parametrize("changes", [{"url": "10.0.0.7:8100"}, {"url": "http://user:secret@a:1"}])
def test_a_url_that_is_none_is_refused(changes):
    with pytest.raises(ConfigError, match=r"http://HOST:PORT") as caught:
        command(**changes)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("flags", [["--port", "80a"], ["--host", "a b"], ["--port=0"]])
def test_a_host_or_a_port_that_is_none_is_refused(flags):
    with pytest.raises(ConfigError, match=r"--host|--port"):
        command(*flags)


@pytest.mark.parametrize(
    ("options", "starts", "url"),
    [([], True, "http://0.0.0.0:8100"), (["--no-start-node", "--url", "https://a:1"], False, "https://a:1")],
)
def test_flags_reach_vllm_unchanged_and_in_order(monkeypatch, options, starts, url):
    executed = []
    monkeypatch.setattr(os, "execvp", lambda file, argv: executed.append((file, argv)))
    flags = ["--port", "8100", "-tp", "2", "--disk-cache", "x", "--override=a b", "--node-rank", "0"]
    result = CliRunner().invoke(serve, ["decode", "some/model", "--node", "ipc:///n", *options, *flags])
    assert result.exit_code == 0, result.output
    [(file, argv)] = executed
    assert file == sys.executable
    assert argv[:6] == [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", "some/model"]
    assert argv[-len(flags) :] == flags
    settings = connector(argv)["kv_connector_extra_config"]
    assert (settings["role"], settings["start_node"], settings["url"]) == ("decode", starts, url)


@pytest.mark.parametrize("said", [[], ["--moved"]])
def test_tokens_are_told_where_that_is_asked_for(monkeypatch, said):
    executed = []
    monkeypatch.setattr(os, "execvp", lambda file, argv: executed.append(argv))
    result = CliRunner().invoke(serve, ["both", "some/model", *said, "--port", "8100"])
    assert result.exit_code == 0, result.output
    ((*argv, flag, port),) = executed
    assert (flag, port) == ("--port", "8100")
    assert connector_config(connector(argv)["kv_connector_extra_config"]).moved == bool(said)


@pytest.mark.parametrize("flag", ["--kv_transfer_config", "--kv-tr"])
def test_a_connector_of_the_users_own_is_refused(flag):
    with pytest.raises(ConfigError, match="itself"):
        command(flag, "{}")
    with pytest.raises(ConfigError, match="itself"):
        command(f"{flag}={{}}")
    with pytest.raises(ConfigError, match="itself"):
        command(f"{flag}.kv_role=kv_both")  # to vLLM that is all of it


def test_without_vllm_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install vllm"):
        command()


@pytest.mark.parametrize("model", ["/no/such/model", "./nothing", "~/nothing-at-all"])
def test_a_model_at_a_path_where_nothing_is_starts_nothing(model, tmp_path):
    with pytest.raises(ConfigError, match=f"there is no model at {model}"):
        engine_command(model, (), role="prefill", node="ipc:///n", proxy="")
    assert str(tmp_path) in engine_command(str(tmp_path), (), role="prefill", node="ipc:///n", proxy="")
