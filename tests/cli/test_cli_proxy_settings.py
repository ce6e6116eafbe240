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

    async def serve(config: ProxyConfig) -> None:
        found.append(config)

    monkeypatch.setattr("pdx.proxy.app.serve", serve)

    def run(*arguments: str) -> ProxyConfig:
        result = CliRunner().invoke(main, ["proxy", *arguments])
        assert result.exit_code == 0, result.output
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


def test_without_any_of_them_defaults_hold(settings):
    assert settings() == ProxyConfig()


@pytest.mark.parametrize("text", ["prot = 1", 'config = "x"', "port = [1]", "port ="])
def test_a_file_that_is_wrong(tmp_path, text):
    file = tmp_path / "proxy.toml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["proxy", "--config", str(file)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: --config {file}")
