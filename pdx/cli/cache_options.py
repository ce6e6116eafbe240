"""What the commands of `pdx cache` share: how to reach nodes, and which chunks a command applies to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pdx.cli.options import option
from pdx.errors import ConfigError, SelectionError
from pdx.security.secret_file import load_token
from pdx.wire.prompt import Prompt

if TYPE_CHECKING:
    from pdx.client.controller import Controller

SALT = "PDX_CACHE_SALT"
_FILE = click.Path(path_type=Path)
_MAX_FILE_BYTES = 256 << 20

_REACH = (
    option(
        "--node",
        "addresses",
        multiple=True,
        help="A node's socket on this host; repeatable. [default: $PDX_NODE, else this user's socket]",
    ),
    option("--proxy", default="", metavar="URL", help="All nodes of this proxy: its --admin, http://… or a /path."),
    option("--token-file", type=_FILE, metavar="FILE", help="File with the token that the proxy requires."),
    option(
        "--timeout",
        "timeout_s",
        default=10.0,
        type=click.FloatRange(0.0, 3600.0, min_open=True),
        metavar="SECONDS",
        help="Time limit for each node's answer.",
    ),
    option("--json", "as_json", is_flag=True, help="One JSON object."),
)
_WHOSE = (
    option("--ids", default="", metavar="1,2,…", help="The prompt's token ids."),
    option("--text", metavar="TEXT", help="The prompt; an engine tokenizes it."),
    option("--file", type=_FILE, metavar="FILE", help="A JSON list of ids, or the prompt as text."),
    option("--request", default="", metavar="ID", help="Part of the id of a request with that prompt."),
    option(
        "--codec",
        default="",
        metavar="NAME",
        help="Chunks of requests with this lossy codec, fp8 or int8, which have other keys.",
    ),
    option("--model", default="", metavar="NAME", help="An engine's name or URL, or the beginning of its model."),
    option(
        "--salt-file", type=_FILE, metavar="FILE", help=f"Holds the requests' cache_salt. [default: ${SALT}, else none]"
    ),
)
dry_run = option("--dry-run", is_flag=True, help="Only show what would be done.")
_DETACH = option("--detach", is_flag=True, help="Do not wait: print the job's name.")


def reaching(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of every command, which become the arguments of `controller`, and `as_json`."""
    return _with(_REACH, command)


def choosing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that select a prompt, which become the arguments of `prompt`."""
    return _with(_WHOSE, command)


def starting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a command that starts a job on a prompt's chunks."""
    return _with((*_WHOSE, dry_run, _DETACH, *_REACH), command)


def _with(options: tuple[Callable[..., Any], ...], command: Callable[..., Any]) -> Callable[..., Any]:
    for each in reversed(options):
        command = each(command)
    return command


def controller(
    addresses: tuple[str, ...], proxy: str, token_file: Path | None, timeout_s: float, **_: Any
) -> Controller:
    """A controller for the nodes that the options select.

    :raises ConfigError: the options contradict each other, or the file has no token.
    """
    from pdx.client.controller import Controller

    if proxy and addresses:
        raise ConfigError("--node names nodes of this host and --proxy those of a proxy; choose one of them")
    if token_file is not None and not proxy:
        raise ConfigError("--token-file is for a --proxy; a node of this host knows this user by its socket")
    token = load_token(token_file) if token_file is not None else ""
    return Controller(*addresses, proxy=proxy, token=token, timeout_s=timeout_s)


def prompt(
    ids: str,
    text: str | None,
    file: Path | None,
    request: str,
    model: str,
    salt_file: Path | None,
    codec: str = "",
    **_: Any,
) -> Prompt:
    """The prompt that the options select. :raises SelectionError: none, several, or a file without one."""
    ways = {"--ids": ids, "--text": text, "--file": file, "--request": request}
    given = [name for name, said in ways.items() if said not in (None, "")]
    if len(given) != 1:
        raise SelectionError(
            f"name a prompt by one of --ids, --text, --file and --request, not by {' and '.join(given) or 'none'}"
        )
    salt = _read(salt_file, "--salt-file").rstrip("\r\n") if salt_file is not None else os.environ.get(SALT, "")
    if request:
        return Prompt(request=request, model=model)
    if file is not None:
        return msgspec.structs.replace(_of_file(file, model, salt), codec=codec)
    if text is not None:
        return Prompt(text=text, model=model, salt=salt, codec=codec)
    return Prompt(tokens=_ids(ids), model=model, salt=salt, codec=codec)


def _ids(text: str) -> list[int]:
    found = []
    for at, word in enumerate(text.split(",")):
        try:
            found.append(int(word))
        except ValueError:
            raise SelectionError(f"--ids: {word.strip()!r:.50}, number {at} of them, is no id of a token") from None
    return found


def _of_file(file: Path, model: str, salt: str) -> Prompt:
    text = _read(file, "--file")
    if not text.strip():
        raise SelectionError(f"--file {file} is empty")
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        ids = None
    if isinstance(ids, list):
        return Prompt(tokens=ids, model=model, salt=salt)
    return Prompt(text=text, model=model, salt=salt)


def _read(file: Path, name: str) -> str:
    try:
        # Does not wait for a writer of a FIFO; data that was written to one is read to its end.
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            os.set_blocking(opened.fileno(), True)
            data = opened.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise SelectionError(f"{name} {file} has more than {_MAX_FILE_BYTES >> 20} MiB")
        return data.decode()
    except OSError as error:
        raise SelectionError(f"{name} {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SelectionError(f"{name} {file} is no text in UTF-8: {error}") from error
