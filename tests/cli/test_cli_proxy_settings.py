"""`pdx proxy`: where its settings come from."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pdx.cli.main import main
from pdx.proxy.config import ProxyConfig


@pytest.fixture
def settings(monkeypatch):
    """What `pdx proxy` would serve with, given these arguments."""
    found: list[ProxyConfig] = []

    monkeypatch.setattr("pdx.proxy.workers.run", found.append)

    def run(*arguments: str) -> ProxyConfig:
        result = CliRunner().invoke(main, ["proxy", *arguments])
        assert result.exit_code == 0, result.output
        run.output = result.output
        return found.pop()

    return run


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(settings, tmp_path, monkeypatch):
    file = tmp_path / "proxy.toml"
    file.write_text(
        'port = 1\nmax-body = "1M"\nidle-timeout = 7\nforward = false\ndecode = ["http://a:1", "http://b:2"]\n'
    )
    monkeypatch.setenv("PDX_PROXY_PORT", "2")
    monkeypatch.setenv("PDX_PROXY_MAX_BODY", "2M")
    monkeypatch.setenv("PDX_PROXY_PREFILL", "http://c:3 http://d:4")
    found = settings("--config", str(file), "--port", "3")
    assert (found.port, found.max_body_bytes, found.idle_timeout_s, found.forward) == (3, 2 << 20, 7.0, False)
    assert found.decode == ("http://a:1", "http://b:2")
    assert found.prefill == ("http://c:3", "http://d:4")


OF_KUBERNETES = {  # in every pod of a namespace with a Service named pdx-proxy
    "PDX_PROXY_SERVICE_HOST": "10.0.0.1",
    "PDX_PROXY_SERVICE_PORT": "8000",
    "PDX_PROXY_SERVICE_PORT_HTTP": "8000",
    "PDX_PROXY_PORT": "tcp://10.0.0.1:8000",
    "PDX_PROXY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "PDX_PROXY_PORT_8000_TCP_PROTO": "tcp",
    "PDX_PROXY_PORT_8000_TCP_PORT": "8000",
    "PDX_PROXY_PORT_8000_TCP_ADDR": "10.0.0.1",
}


@pytest.mark.parametrize(("arguments", "port"), [([], 8000), (["--port", "3"], 3), (["--config"], 1)], ids=str)
def test_what_kubernetes_puts_into_the_environment_is_no_port(settings, tmp_path, monkeypatch, arguments, port):
    for name, value in OF_KUBERNETES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "proxy.toml").write_text("port = 1")
    file = [str(tmp_path / "proxy.toml")] if "--config" in arguments else []
    assert settings(*arguments, *file) == ProxyConfig(port=port)
    said = settings.output.count("PDX_PROXY_PORT=tcp://10.0.0.1:8000 is ignored: Kubernetes sets it for a Service")
    assert said == (0 if arguments == ["--port", "3"] else 1)


def test_other_nonsense_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("PDX_PROXY_PORT", "http://a")
    result = CliRunner().invoke(main, ["proxy"])
    assert result.exit_code == 2
    assert "'http://a' is not a valid integer" in result.output


def test_a_way_of_routing_that_there_is_not_is_answered_with_those_that_there_are():
    result = CliRunner().invoke(main, ["proxy", "--routing", "load"])
    assert result.exit_code == 2
    assert "'round-robin', 'least-loaded', 'session', 'prefix'" in result.output


@pytest.mark.parametrize(
    "text",
    [
        *("prot = 1", "port = [1]", "port =", "port = true", "port = 2020-01-01", 'prefill = [["http://a:1"]]'),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text):
    file = tmp_path / "proxy.toml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["proxy", "--config", str(file)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: --config {file}")
