"""`pdx keygen`: a CURVE key pair for a node, the proxy or a reader of events; needed beyond a single host."""

from __future__ import annotations

import re
from pathlib import Path

import click

from pdx.cli.options import FOLDER, option
from pdx.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@click.command()
@click.argument("name")
@option(
    "--folder",
    default="keys",
    metavar="DIR",
    type=FOLDER,
    help="Folder for NAME.key_secret and NAME.key; created with mode 0700.",
)
@option("--force", is_flag=True, allow_from_autoenv=False, help="Replace existing keys of that name.")
@option("--reader", is_flag=True, help="For a reader of nodes' events, which has no other rights.")
def keygen(name: str, folder: Path, force: bool, reader: bool) -> None:
    """Create a key pair for the node NAME, or for the proxy if NAME is "proxy".

    NAME.key_secret stays on that host (`--keys`). The printed lines go into the roster file (`--roster`), which is the
    same on every host; fill in the address.
    """
    from pdx.security.curve_keys import KeyPair

    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is not a name for a key: letters, digits, '.', '_' and '-', at most 64")
    keys = KeyPair.make()
    secret, public = keys.save(folder, name, force=force)
    click.echo(
        f"# {secret} (keep it secret) and {public} are written. For the roster file, the same on every host:", err=True
    )
    if reader:
        click.echo(f'[readers."{name}"]')
    else:
        click.echo("[proxy]" if name == "proxy" else f'[nodes."{name}"]')
        click.echo('address = "tcp://IP:PORT"')
    click.echo(f'key = "{keys.public}"')
