"""Options: fields of settings with their help, from which command line, configuration files and docs are derived."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Meta
from msgspec.inspect import EnumType, LiteralType

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Option(NamedTuple):
    """A field of settings that users can set."""

    field: msgspec.structs.FieldInfo
    kind: msgspec.inspect.Type  # with its bounds
    help: str
    section: str  # the heading under which it is listed
    flag: str  # on the command line and in TOML, without leading dashes
    name: str  # in `kv_connector_extra_config`, and of the command's argument
    metavar: str
    default: str  # shown instead of the field's default; empty: that one
    for_engines: bool  # accepted by the connector, and by every command that starts a node

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes, which users write with a unit."""
        return self.metavar == "SIZE"

    @property
    def choices(self) -> list[str]:
        """All words that it takes, in the order of the settings; empty if it takes any."""
        if isinstance(self.kind, EnumType):
            return [each.value for each in self.kind.cls]
        return [*get_args(get_args(self.field.type)[0])] if isinstance(self.kind, LiteralType) else []


def option(help: str, **facts: Any) -> Meta:
    """An annotation that makes a field an option.

    `facts` are the fields of `Option` that do not follow from the field's name and type; `section` and `for_engines`
    apply to the following options, too.
    """
    return Meta(description=help, extra=facts)


def shown_as(metavar: str) -> Meta:
    """An annotation with the placeholder for values of this type in help texts."""
    return Meta(extra={"metavar": metavar})


@functools.cache
def options_of(kind: type) -> Mapping[str, Option]:
    """The options among the fields of `kind`, in order, by `Option.name`."""
    found: dict[str, Option] = {}
    section, for_engines = "", False
    for field in msgspec.structs.fields(kind):
        about = msgspec.inspect.type_info(field.type)
        if not isinstance(about, msgspec.inspect.Metadata) or not about.extra_json_schema:
            continue
        facts = about.extra or {}
        section, for_engines = facts.get("section", section), facts.get("for_engines", for_engines)
        flag = facts.get("flag", field.name.removesuffix("_bytes").removesuffix("_s").replace("_", "-"))
        name = facts.get("name", flag.replace("-", "_"))
        metavar, default = facts.get("metavar", ""), facts.get("default", "")
        text = about.extra_json_schema["description"]
        found[name] = Option(field, about.type, text, section, flag, name, metavar, default, for_engines)
    return found


def shown_default(each: Option) -> str:
    """The default as shown in help and docs; empty if none is shown."""
    value = each.field.default
    if each.default or value in ((), "", msgspec.NODEFAULT):
        return each.default
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not each.is_size:
        return str(value)
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if value and value % _UNITS[unit] == 0), "")
    return f"{value // _UNITS[unit]}{unit}" if unit else str(value)


def table(kind: type, *, flags: bool = True) -> str:
    """The options of `kind` as a Markdown list for the docs: by flag and `Option.name`, or by field name only."""
    rows = []
    for name, each in options_of(kind).items():
        words = f"`--{each.flag}`" if flags else f"`{each.field.name}`"
        words += f", `{name}`" if each.for_engines else ""
        default = f" ({shown})" if (shown := shown_default(each)) else ""
        rows.append(f"- {words}{default}: {each.help}")
    return "\n".join(rows)
