"""What to install for a part of PDX that needs more packages: by name, because PDX itself is in no index yet."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

_NAME = "pdx-transport"


def install(extra: str) -> str:
    """The command that installs what an extra of `pyproject.toml` names."""
    try:
        found = requires(_NAME) or []
    except PackageNotFoundError:
        return f"pip install '.[{extra}]', in PDX's folder"
    named = [line.partition(";") for line in found]
    wanted = [name.strip() for name, _, marker in named if f'extra == "{extra}"' in marker.replace("'", '"')]
    return f"pip install {' '.join(repr(name) for name in sorted(wanted))}"


def own_version() -> str:
    """PDX's; `unknown` where it is not installed but found by PYTHONPATH."""
    try:
        return version(_NAME)
    except PackageNotFoundError:
        return "unknown"
