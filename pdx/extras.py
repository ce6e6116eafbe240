"""How to install the packages of PDX's extras: by their names, because PDX itself is not in a package index yet."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

_NAME = "pdx-transport"


def install(extra: str) -> str:
    """The command that installs the packages of an extra in `pyproject.toml`."""
    try:
        found = requires(_NAME) or []
    except PackageNotFoundError:
        return f"pip install '.[{extra}]', in PDX's folder"
    named = [line.partition(";") for line in found]
    wanted = [name.strip() for name, _, marker in named if f'extra == "{extra}"' in marker.replace("'", '"')]
    return f"pip install {' '.join(repr(name) for name in sorted(wanted))}"


def own_version() -> str:
    """PDX's version; `unknown` if it is not installed but on PYTHONPATH."""
    try:
        return version(_NAME)
    except PackageNotFoundError:
        return "unknown"
