"""`pdx proxy`: the OpenAI-compatible proxy in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import logging

import click


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve HTTP on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65_535), help="0: any.")
@click.option("--prefill", multiple=True, metavar="URL", help="An engine that prefills; may be repeated.")
@click.option("--decode", multiple=True, metavar="URL", help="An engine that decodes; may be repeated.")
@click.option(
    "--control",
    default="",
    metavar="ADDRESS",
    help="Where nodes report: ipc:///path or tcp://IP:PORT (default: PDX_PROXY, else ipc://...).",
)
@click.option("--keys", default="", metavar="FILE", help="Secret key of `pdx keygen`, for nodes on other hosts.")
@click.option("--roster", default="", metavar="FILE", help="TOML file that names the nodes and their public keys.")
@click.option(
    "--forward/--no-forward",
    default=True,
    show_default=True,
    help="Send a completion's first token to the client as soon as the prefill engine has it.",
)
@click.option(
    "--min-split-tokens",
    default=16,
    show_default=True,
    type=click.IntRange(0),
    metavar="TOKENS",
    help="A shorter prompt goes to one engine; of text, four bytes count as a token.",
)
@click.option(
    "--first-byte-timeout",
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an engine may take to prefill, and to begin a stream.",
)
@click.option(
    "--answer-timeout",
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an engine may take for an answer that is not streamed: it comes as a whole.",
)
@click.option(
    "--idle-timeout",
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an answer that has begun may pause, and a client may take nothing of it.",
)
@click.option("--max-body", default="8M", show_default=True, metavar="SIZE", help="Largest request accepted.")
@click.option(
    "--admin",
    default="",
    metavar="ADDRESS",
    help="Serve /metrics and /pdx/requests, without a key, at HOST:PORT or a Unix socket's /path. [default: nowhere]",
)
@click.option(
    "--debug-headers",
    is_flag=True,
    help="Say in headers x-pdx-transfer-id and x-pdx-mode how an answer came about.",
)
@click.option(
    "--allowed-origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let in scripts of web pages from there, as https://example.org; *: all; may be repeated. [default: none]",
)
@click.option(
    "--drain",
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="After SIGTERM, requests under way have so long; a second signal ends them at once.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
)
def proxy(
    host: str,
    port: int,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    control: str,
    keys: str,
    roster: str,
    forward: bool,
    min_split_tokens: int,
    first_byte_timeout: float,
    answer_timeout: float,
    idle_timeout: float,
    max_body: str,
    admin: str,
    debug_headers: bool,
    allowed_origins: tuple[str, ...],
    drain: float,
    log_level: str,
) -> None:
    """Serve the OpenAI API, splitting each request into a prefill and a decode leg."""
    from pdx.config import parse, parse_bytes
    from pdx.errors import ConfigError
    from pdx.proxy.app import serve
    from pdx.proxy.config import ProxyConfig

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = parse(
            ProxyConfig,
            {
                "host": host,
                "port": port,
                "prefill": prefill,
                "decode": decode,
                "control": control,
                "keys": keys,
                "roster": roster,
                "forward": forward,
                "min_split_tokens": min_split_tokens,
                "first_byte_timeout_s": first_byte_timeout,
                "answer_timeout_s": answer_timeout,
                "idle_timeout_s": idle_timeout,
                "max_body_bytes": parse_bytes(max_body),
                "admin": admin,
                "debug_headers": debug_headers,
                "allowed_origins": allowed_origins,
                "drain_s": drain,
            },
        )
        asyncio.run(serve(config))
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from error
