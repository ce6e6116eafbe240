"""`pdx proxy`: the OpenAI-compatible proxy in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import click

from pdx.cli.options import Sectioned, file_option, option


def _option(*names: str, **settings: Any) -> Callable[..., Any]:
    """An option that the environment may give, too."""
    word = names[0].partition("/")[0].removeprefix("--").replace("-", "_").upper()
    return option(*names, envvar=f"PDX_PROXY_{word}", **settings)


@click.command(cls=Sectioned)
@file_option("--config", "max-body = '128M'")
@_option("--host", default="127.0.0.1", help="Address to serve HTTP on.")
@_option("--port", default=8000, type=click.IntRange(0, 65_535), help="0: any.")
@_option("--prefill", multiple=True, metavar="URL", help="An engine that prefills; may be repeated.")
@_option("--decode", multiple=True, metavar="URL", help="An engine that decodes; may be repeated.")
@_option(
    "--engine-ca",
    metavar="FILE",
    help="Certificates that sign those of engines with TLS. [default: the system's, or $SSL_CERT_FILE]",
)
@_option(
    "--control",
    metavar="ADDRESS",
    help="Where nodes report: ipc:///path or tcp://IP:PORT. [default: $PDX_PROXY, else this user's socket]",
)
@_option("--keys", metavar="FILE", help="Secret key of `pdx keygen`, for nodes on other hosts.")
@_option("--roster", metavar="FILE", help="TOML file that names the nodes and their public keys.")
@_option(
    "--forward/--no-forward",
    default=True,
    help="Send a completion's first token to the client as soon as the prefill engine has it.",
)
@_option(
    "--min-split-tokens",
    default=16,
    type=click.IntRange(0),
    metavar="TOKENS",
    help="A shorter prompt goes to one engine; of text, four bytes count as a token.",
)
@_option(
    "--client-priority",
    default=9,
    type=click.IntRange(0, 9),
    metavar="N",
    help="The most priority that a client may give its chunks; more is clipped.",
)
@_option(
    "--first-byte-timeout",
    "first_byte_timeout_s",
    default=600.0,
    metavar="SECONDS",
    help="How long an engine may take to prefill, and to begin a stream.",
)
@_option(
    "--answer-timeout",
    "answer_timeout_s",
    default=3600.0,
    metavar="SECONDS",
    help="How long an engine may take for an answer that is not streamed: it comes as a whole.",
)
@_option(
    "--idle-timeout",
    "idle_timeout_s",
    default=120.0,
    metavar="SECONDS",
    help="How long an answer that has begun may pause, and a client may take nothing of it.",
)
@_option("--max-body", "max_body_bytes", default="64M", metavar="SIZE", help="The largest body of a request.")
@_option("--max-bodies", "max_bodies_bytes", default="512M", metavar="SIZE", help="Of all requests under way together.")
@_option(
    "--admin",
    metavar="ADDRESS",
    help="Serve /metrics and /pdx/requests, without a key, at HOST:PORT or a Unix socket's /path; /cache, too, at a "
    "Unix socket or with --cache-token-file. [default: nowhere]",
)
@_option(
    "--cache-token-file",
    metavar="FILE",
    help="Whoever shows the token in it may say cache verbs at --admin. [default: none; at a Unix socket alone]",
)
@_option(
    "--debug-headers", is_flag=True, help="Say in headers x-pdx-transfer-id and x-pdx-mode how an answer came about."
)
@_option(
    "--allowed-origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let in scripts of web pages from there, as https://example.org; *: all; may be repeated. [default: none]",
)
@_option(
    "--drain",
    "drain_s",
    default=30.0,
    metavar="SECONDS",
    help="After SIGTERM, requests under way have so long; a second signal ends them at once.",
)
@_option("--chunk-index", is_flag=True, help="Know which node has which chunks in which tier, as nodes tell.")
@_option(
    "--chunk-index-limit",
    default=10_000_000,
    type=click.IntRange(1, 1 << 31),
    metavar="CHUNKS",
    help="Of so many chunks; each takes about 110 bytes.",
)
@_option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False))
def proxy(log_level: str, max_body_bytes: str, max_bodies_bytes: str, **settings: Any) -> None:
    """Serve the OpenAI API, splitting each request into a prefill and a decode leg.

    Each option is also read from the environment: --max-body from PDX_PROXY_MAX_BODY. The command line comes before the
    environment, and that before the file of --config.
    """
    from pdx.config import parse, parse_bytes
    from pdx.proxy.app import serve
    from pdx.proxy.config import ProxyConfig

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        given["max_body_bytes"] = parse_bytes(max_body_bytes)
        given["max_bodies_bytes"] = parse_bytes(max_bodies_bytes)
        asyncio.run(serve(parse(ProxyConfig, given)))
    except OSError as error:
        raise click.ClickException(str(error)) from error
