"""Options that several commands share."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource
from click.types import OptionHelpExtra

from pdx.config import LEAST_S, MOST_S, CodecChoice, HashForm, NodeOptions, StoreChoice
from pdx.errors import ConfigError

FOLDER = click.Path(path_type=Path, file_okay=False)
_SECONDS = click.FloatRange(LEAST_S, MOST_S)  # pdx.config.PositiveSeconds
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://.*")


class _Option(click.Option):
    """Its range is said in words, and not as a formula; what Kubernetes puts into the environment is no port."""

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """See `click.Option`. In a pod, NAME_PORT is the address of the Service of that name, if there is one."""
        value = super().value_from_envvar(ctx)
        name = str(self.envvar)
        if not name.endswith("_PORT") or not isinstance(value, str) or _SERVICE_LINK.fullmatch(value) is None:
            return value
        service = name.removesuffix("_PORT").replace("_", "-").lower()
        text = f"{name}={value} is ignored: Kubernetes sets it for a Service named {service}, and it is no port"
        click.echo(f"warning: {text}; {self.opts[0]} names one", err=True)
        return None

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """See `click.Option`."""
        extra = super().get_help_extra(ctx)
        if "range" in extra and isinstance(self.type, click.IntRange | click.FloatRange):
            least = "" if self.type.min is None else f"{'above' if self.type.min_open else 'from'} {self.type.min:g}"
            most = "" if self.type.max is None else f"up to {self.type.max:.10g}"
            extra["range"] = " ".join(part for part in (least, most) if part)
        return extra


def option(*names: str, **settings: Any) -> Callable[..., Any]:
    """`click.option`, whose help shows the default where there is something to show that it does not say itself."""
    if isinstance(settings.get("type"), click.IntRange | click.FloatRange):
        settings.setdefault("metavar", "NUMBER")
    is_said = settings.get("default") in (None, "") or "[default:" in settings.get("help", "")
    return click.option(*names, cls=_Option, **{"show_default": not is_said, **settings})


# Under which heading options are listed, by the names of their arguments.
_SECTIONS = {
    "Memory": ("arena", "gpus", "gpu_arena", "numa", "policy", "salt_quota", "pin_share", "tenant_lease_share")
    + ("lease_max_s",),
    "Disks": ("disk", "disk_limit", "disk_reserve", "disk_codec"),
    "Remote store": ("remote", "remote_codec", "remote_ttl", "remote_ca", "remote_credentials", "remote_timeout")
    + ("remote_lookup_timeout",),
    "Disks and remote store": ("fetch_timeout", "store", "store_window"),
    "Metrics and events": ("metrics", "events", "events_replay", "events_topic", "events_hashes", "events_open"),
    "Engines": ("prefill", "decode", "engine_ca"),
    "Peers and channels": ("name", "listen", "channels", "channel", "wire_codec", "digests"),
    "Trust": ("keys", "roster", "trusted_network"),
    "Requests": ("forward", "min_split_tokens", "client_priority", "max_body_bytes", "max_bodies_bytes")
    + ("allowed_origins", "debug_headers"),
    "Time limits": ("first_byte_timeout_s", "answer_timeout_s", "idle_timeout_s", "drain_s"),
    "Administration": ("admin", "cache_token_file", "chunk_index", "chunk_index_limit"),
    "A running node": ("status", "as_json", "watch", "stop", "force"),
}
_SECTION_OF = {name: section for section, names in _SECTIONS.items() for name in names}


class Sectioned(click.Command):
    """A command whose options are listed under headings; those that have none come first."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """See `click.Command`, which keeps what the first caller's context says."""
        return ["-h", "--help"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Command`."""
        found: dict[str, list[tuple[str, str]]] = {"Options": []}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                found.setdefault(_SECTION_OF.get(each.name or "", "Options"), []).append(record)
        for section, records in found.items():
            with formatter.section(section):
                formatter.write_dl(records)


def _each(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[str]:
    return [word.strip() for text in value for word in text.split(",")]


def _listed(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[str]:
    return list(value)


_NOT_OF_A_FILE = frozenset({"node_config", "config", "status", "as_json", "watch", "stop", "force"})


def _read_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """What the file says stands in for what the command line does not say.

    :raises ConfigError: it cannot be read, or has a word that is no option of a node's, or of this command.
    """
    if value is None:
        return
    file = f"{param.opts[0]} {value}"
    try:
        words = tomllib.loads(value.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    what, is_all = ("node", ctx.command.name == "node") if param.name == "node_config" else (ctx.command.name, True)
    known = {
        each.opts[0].removeprefix("--"): each
        for each in ctx.command.params
        if isinstance(each, click.Option) and (is_all or each.name in NodeOptions.__struct_fields__)
        if each.name not in _NOT_OF_A_FILE
    }
    settings: dict[str, Any] = {}
    for word, said in words.items():
        found = known.get(word.replace("_", "-"))
        if found is None or found.name is None:
            raise ConfigError(f"{file}: {word!r} is no option of a {what}; there are {', '.join(known)}")
        if isinstance(said, dict) or (isinstance(said, list) and not found.multiple):
            raise ConfigError(f"{file}: {word} = {said!r} is not one value, as --{word} takes")
        settings[found.name] = [said] if found.multiple and not isinstance(said, list) else said
    ctx.default_map = {**(ctx.default_map or {}), **settings}


def file_option(name: str, example: str) -> Callable[..., Any]:
    """The option that names a file with the words of the command line."""
    return option(
        name,
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        metavar="FILE",
        help=f"TOML with the same words, as {example}; what the command line says comes first.",
    )


_OF_NODES = (
    file_option("--node-config", "disk-limit = '500GiB'"),
    option("--arena", default="", metavar="SIZE", help="Host memory for chunks. [default: 4GiB; none with --gpu]"),
    option(
        "--gpu",
        "gpus",
        multiple=True,
        callback=_each,
        metavar="WHICH",
        help="Memory for chunks on this GPU, 0, 1, … or a UUID: for the engines there. Repeatable, or a list: 0,1.",
    ),
    option("--gpu-arena", default="4GiB", metavar="SIZE", help="Of each GPU."),
    option(
        "--disk",
        multiple=True,
        callback=_listed,
        metavar="FOLDER",
        help="Keep chunks there, too, also when the node ends. Repeatable: each folder has its part.",
    ),
    option("--disk-limit", default="100GiB", metavar="SIZE", help="The most that they take of each of these disks."),
    option("--disk-reserve", default="1GiB", metavar="SIZE", help="So much of each of these disks is left to others."),
    option(
        "--disk-codec",
        default="none",
        type=click.Choice(get_args(CodecChoice)),
        help="Encode chunks for these disks: they take less there, and time of a core. They come back as they were.",
    ),
    option(
        "--remote", default="", metavar="URL", help="Share chunks there: valkey://, rediss:// or s3://BUCKET/PREFIX."
    ),
    option(
        "--remote-codec",
        default="none",
        type=click.Choice(get_args(CodecChoice)),
        help="Encode chunks for the remote store, as with --disk-codec.",
    ),
    option("--remote-ttl", default=0.0, metavar="SECONDS", help="What is older there is not used. [default: no limit]"),
    option("--remote-ca", default="", metavar="FILE", help="Certificates that sign the remote store's own."),
    option("--remote-credentials", default="", metavar="FILE", help="For the remote store; else the environment's."),
    option(
        "--remote-timeout",
        default=5.0,
        type=_SECONDS,
        metavar="SECONDS",
        help="A load from the remote store, or a store there, that takes longer has failed.",
    ),
    option(
        "--remote-lookup-timeout",
        default=0.25,
        type=_SECONDS,
        metavar="SECONDS",
        help="A question whether chunks are there that takes longer has failed. More, for a store that is far away.",
    ),
    option(
        "--fetch-timeout",
        default=5.0,
        type=_SECONDS,
        metavar="SECONDS",
        help="A request waits this long for chunks from a disk, the remote store or another node.",
    ),
    option(
        "--store",
        default="all",
        type=click.Choice(get_args(StoreChoice)),
        help="What goes to --disk and --remote: all chunks, those that a second request has found or computed again, "
        "or those that leave memory next.",
    ),
    option(
        "--store-window",
        default=0.1,
        type=click.FloatRange(0.0, 1.0, min_open=True),
        metavar="SHARE",
        help="With --store write-back: so much of memory is free or stored.",
    ),
    option(
        "--policy",
        default="lru",
        metavar="NAME",
        help="Which chunks leave memory first: lru, s3fifo, gittins, age:SECONDS or idle:SECONDS.",
    ),
    option(
        "--salt-quota",
        default=1.0,
        type=click.FloatRange(0.0, 1.0, min_open=True),
        metavar="SHARE",
        help="Where memory is full, chunks of one cache salt that take more than this share of it go first.",
    ),
    option(
        "--pin-share",
        default=0.8,
        type=click.FloatRange(0.0, 1.0),
        metavar="SHARE",
        help="So much of memory may pins, and tenants' leases, keep; a pin of more is refused.",
    ),
    option(
        "--tenant-lease-share",
        default=0.1,
        type=click.FloatRange(0.0, 1.0),
        metavar="SHARE",
        help="So much of memory may the leases of one cache salt keep; 0: none.",
    ),
    option(
        "--lease-max-s",
        default=600.0,
        type=_SECONDS,
        metavar="SECONDS",
        help="The longest time that a request may lease its chunks for.",
    ),
    option(
        "--numa",
        default="auto",
        metavar="auto|none|N",
        help="NUMA node for host memory and threads; auto: that of the GPU, or of all GPUs if they have the same.",
    ),
    option(
        "--metrics",
        default="",
        metavar="HOST:PORT",
        help="Prometheus metrics of the node at /metrics; beyond this host with --keys. [default: nowhere]",
    ),
    option(
        "--events",
        default="",
        metavar="ADDRESS",
        help="Publish there which blocks came and went, as vLLM does: ipc:///path or tcp://IP:PORT. [default: nowhere]",
    ),
    option(
        "--events-replay",
        default="",
        metavar="ADDRESS",
        help="Who has missed some of --events asks there. [default: nowhere]",
    ),
    option("--events-topic", default="", metavar="TOPIC", help="Of what --events publishes."),
    option(
        "--events-hashes",
        default="int",
        type=click.Choice(get_args(HashForm)),
        help="How --events names blocks: by 64 bits of the engine's hash, vLLM's default, or by 16 bytes.",
    ),
    option(
        "--events-open",
        is_flag=True,
        help="Readers of --events on other hosts need no keys: whoever gets there learns which blocks are where.",
    ),
)


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that starts a node: `pdx.config.NodeOptions`, as keywords of those names."""
    for each in reversed(_OF_NODES):
        command = each(command)
    return command


_SAID = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def refuse_node_options(why: str) -> None:
    """:raises ConfigError: the command line says something of a node that the running command starts no node for."""
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        of_node = parameter.name in NodeOptions.__struct_fields__
        if of_node and ctx.get_parameter_source(parameter.name or "") in _SAID:
            raise ConfigError(f"{parameter.opts[0]} is for a node that this command starts, {why}; choose one of them")


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """The command line that gives `node_options` these values."""
    flags: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}" if name != "gpus" else "--gpu"
        if isinstance(value, bool):
            flags += [flag] * value
            continue
        for each in value if isinstance(value, list) else [] if value == "" else [value]:
            flags += [flag, str(each)]
    return flags
