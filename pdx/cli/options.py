"""Options shared by several commands, and where their values come from.

`--max-body` of `pdx proxy` is read from the command line, else from PDX_PROXY_MAX_BODY, else from the --config file.
Options of a node or the proxy have one environment variable in all commands: for `pdx up --arena`, too, it is
PDX_NODE_ARENA.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.types import OptionHelpExtra
from msgspec.inspect import BoolType, FloatType, IntType, ListType, VarTupleType

from pdx.config import NodeConfig
from pdx.errors import ConfigError
from pdx.options import Option, options_of, shown_default
from pdx.telemetry import logs

FOLDER = click.Path(path_type=Path, file_okay=False)
UNBOUNDED = 1e9  # upper bound of values in messages; not shown in help
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://.*")


class _Option(click.Option):
    """Its range is shown in words, and its environment variable is derived from its name on the command line."""

    def __init__(self, *names: Any, section: str = "", shown: str = "", **settings: Any) -> None:
        """`section`: the heading that lists it. `shown`: the default that its help names."""
        super().__init__(*names, **settings)
        self.section = section
        self._shown = shown

    def variable(self, ctx: click.Context) -> str:
        """The environment variable's name; empty if the option is an action and not a setting."""
        if self.envvar or not self.allow_from_autoenv or ctx.auto_envvar_prefix is None:
            return str(self.envvar or "")
        return f"{ctx.auto_envvar_prefix}_{self.opts[0].lstrip('-').replace('-', '_').upper()}"

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """See `click.Option`, which would use the names of Python's arguments."""
        return os.environ.get(self.variable(ctx)) or None

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """See `click.Option`. In a pod, NAME_PORT holds the address of the Service of that name, if there is one."""
        value = super().value_from_envvar(ctx)
        name = self.variable(ctx)
        if not name.endswith("_PORT") or not isinstance(value, str) or _SERVICE_LINK.fullmatch(value) is None:
            return value
        service = name.removesuffix("_PORT").replace("_", "-").lower()
        text = f"{name}={value} is ignored: Kubernetes sets it for a Service named {service}, and it is no port"
        click.echo(f"warning: {text}; {self.opts[0]} names one", err=True)
        return None

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        extra = super().get_help_extra(ctx)
        if self._shown:
            extra["default"] = self._shown
        if "range" in extra and isinstance(self.type, click.IntRange | click.FloatRange):
            least = "" if self.type.min is None else f"{'above' if self.type.min_open else 'from'} {self.type.min:g}"
            most = "" if self.type.max is None else f"up to {self.type.max:.10g}"
            extra["range"] = " ".join(part for part in (least, most) if part)
        return extra


def option(*names: str, **settings: Any) -> Callable[..., Any]:
    """`click.option`, whose help shows the default unless it is trivial or the help text already gives it."""
    if isinstance(settings.get("type"), click.IntRange | click.FloatRange):
        settings.setdefault("metavar", "NUMBER")
    is_said = settings.get("default") in (None, "") or "[default:" in settings.get("help", "")
    return click.option(*names, cls=_Option, **{"show_default": not is_said, **settings})


def _set_format(ctx: click.Context, param: click.Parameter, value: str) -> None:
    os.environ[logs.VARIABLE] = value


# For all commands that connect to a node.
node_option = option(
    "--node", "address", help="The node's socket. [default: $PDX_NODE, else this user's socket on this host]"
)
# For each command that logs, and the processes it starts.
log_format = option(
    "--log-format",
    type=click.Choice(logs.FORMATS),
    default=logs.FORMATS[0],
    envvar=logs.VARIABLE,
    expose_value=False,
    callback=_set_format,
    help="PDX logs human-readable lines, or one JSON object per line.",
)


class Sectioned(click.Command):
    """A command whose options are listed under headings; those without one come first."""

    def __init__(self, *args: Any, sections: Mapping[str, str] | None = None, **settings: Any) -> None:
        """`sections`: the option that starts each heading, for options that name no heading."""
        super().__init__(*args, **settings)
        self._sections = {"--help": "Options", **(sections or {})}

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        """See `click.Command`, which caches what the first caller's context says."""
        return ["-h", "--help"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[str, list[tuple[str, str]]] = {"Options": []}
        heading = "Options"
        for each in self.get_params(ctx):
            heading = next((self._sections[word] for word in each.opts if word in self._sections), heading)
            if isinstance(each, click.Option) and (record := each.get_help_record(ctx)) is not None:
                found.setdefault(getattr(each, "section", "") or heading, []).append(record)
        for section, records in found.items():
            with formatter.section(section):
                formatter.write_dl(records)


def _split(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[str]:
    return [word.strip() for text in value for word in text.split(",")]


def _listed(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[str]:
    return list(value)


_FOR_ENGINES = frozenset(name for name, each in options_of(NodeConfig).items() if each.for_engines)


def _read_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Use the file's values for options given neither on the command line nor in the environment.

    :raises ConfigError: it cannot be read, or has a key that is neither an option of a node nor of this command.
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
    what = "a node" if param.name == "node_config" else f"pdx {ctx.command.name}"
    known = {
        each.opts[0].removeprefix("--"): each
        for each in ctx.command.params
        if isinstance(each, click.Option) and each.allow_from_autoenv and each is not param
        if param.name != "node_config" or each.name in _FOR_ENGINES
    }
    settings: dict[str, Any] = {}
    for word, said in words.items():
        found = known.get(word.replace("_", "-"))
        if found is None or found.name is None:
            raise ConfigError(f"{file}: {word!r} is no option of {what}; there are {', '.join(known)}")
        items = said if isinstance(said, list) and found.multiple else [said]
        if not all(isinstance(item, str | int | float) and isinstance(item, bool) is found.is_flag for item in items):
            raise ConfigError(f"{file}: {word} = {said!r} is not what --{word} takes")
        settings[found.name] = items if found.multiple else said
    ctx.default_map = {**(ctx.default_map or {}), **settings}


def file_option(name: str, example: str) -> Callable[..., Any]:
    """An option that names a file whose keys are those of the command line."""
    return option(
        name,
        type=click.Path(path_type=Path, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        metavar="FILE",
        help=f"TOML with the same words, as {example}; the command line and the environment come first.",
    )


def setting(each: Option, *, envvar: str | None = None) -> Callable[..., Any]:
    """The command line option for this setting. An option that is not given is None, or an empty list."""
    kind, default = each.kind, each.field.default
    names = [f"--{each.flag}"]
    settings: dict[str, Any] = {"help": each.help, "section": each.section, "envvar": envvar}
    if isinstance(kind, BoolType) and default:
        names = [f"--{each.flag}/--no-{each.flag}"]
    elif isinstance(kind, BoolType):
        settings["is_flag"] = True
    elif isinstance(kind, ListType | VarTupleType):
        settings |= {"multiple": True, "callback": _split if each.name == "gpus" else _listed, "shown": each.default}
    else:
        settings["shown"] = shown_default(each)
        settings["type"] = _type(each)
    if each.metavar:
        settings["metavar"] = each.metavar
    return option(*names, each.name, default=None, **settings)


def _type(each: Option) -> Any:
    kind = each.kind
    if each.choices:
        return click.Choice(each.choices)
    if each.is_size or not isinstance(kind, IntType | FloatType):
        return None
    most = None if kind.le is None or kind.le >= UNBOUNDED else kind.le
    if isinstance(kind, IntType):
        return click.IntRange(kind.ge, int(most) if most is not None else None)
    return click.FloatRange(kind.ge if kind.gt is None else kind.gt, most, min_open=kind.gt is not None)


def settings_of(kind: type, *, env: str, only: Collection[str] | None = None, section: str = "") -> Callable[..., Any]:
    """Adds the options of `kind` to a command, as keyword arguments of the same names.

    `env`: the prefix of their environment variables. `only`: restricts them to these names. `section`: the heading that
    lists them, instead of their own.
    """

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, each in reversed(list(options_of(kind).items())):
            if only is None or name in only:
                word = each.flag.replace("-", "_").upper()
                listed = each._replace(section=section or each.section)
                command = setting(listed, envvar=f"{env}{word}")(command)
        return command

    return decorated


def said(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given on the command line, in a file or in the environment."""
    return {name: value for name, value in settings.items() if value not in (None, [])}


NODE_EXAMPLE = "disk-limit = '500GiB'"
NODE_ENV, PROXY_ENV = "PDX_NODE_", "PDX_PROXY_"
# Of every command that starts a node for engines.
node_options = settings_of(NodeConfig, env=NODE_ENV, only=_FOR_ENGINES)
_SAID = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def refuse_node_options(why: str) -> None:
    """:raises ConfigError: the command line has options of a node, and this command does not start one because of
    `why`."""
    ctx = click.get_current_context()
    for parameter in ctx.command.params:
        of_node = parameter.name in _FOR_ENGINES
        if of_node and ctx.get_parameter_source(parameter.name or "") in _SAID:
            raise ConfigError(f"{parameter.opts[0]} is for a node that this command starts, {why}; choose one of them")


def as_flags(kind: type, said: Mapping[str, Any]) -> list[str]:
    """The command line that sets the options of `kind` to these values, by `Option.name`."""
    flags: list[str] = []
    for name, value in said.items():
        flag = options_of(kind)[name].flag
        if isinstance(value, bool):
            flags += [f"--{flag}" if value else f"--no-{flag}"] * (value or options_of(kind)[name].field.default)
            continue
        for each in value if isinstance(value, list) else [value]:
            flags += [f"--{flag}", str(each)]
    return flags
