"""`pdx proxy`: the OpenAI-compatible proxy in front of prefill and decode engines."""

from __future__ import annotations

from typing import Any

import click

from pdx.cli.options import PROXY_ENV, Sectioned, file_option, log_format, option, said, settings_of
from pdx.config import from_words, parse
from pdx.proxy.config import ProxyConfig
from pdx.telemetry import logs


@click.command(cls=Sectioned)
@file_option("--config", "max-body = '128M'")
@settings_of(ProxyConfig, env=PROXY_ENV)
@option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
)
@log_format
def proxy(log_level: str, **settings: Any) -> None:
    """Serve the OpenAI API, splitting each request into a prefill and a decode leg."""
    from pdx.proxy.workers import run

    logs.set_up(log_level)
    try:
        run(parse(ProxyConfig, from_words(ProxyConfig, said(settings))))
    except OSError as error:
        raise click.ClickException(str(error)) from error
