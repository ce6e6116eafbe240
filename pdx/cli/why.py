"""`pdx why`: for one request, where each chunk came from, or why it was missing."""

from __future__ import annotations

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

from pdx.cli.options import node_option, option
from pdx.cli.tables import duration, table, to_json
from pdx.config import default_node
from pdx.errors import PdxError
from pdx.wire.status import Explained, Explanation


@click.command()
@click.argument("request", default="")
@node_option
@option("--json", "as_json", is_flag=True, help="One JSON object for each request.")
def why(request: str, address: str | None, as_json: bool) -> None:
    """Why were the chunks of REQUEST hits, or not? REQUEST is a part of its id; without it, the latest requests are
    listed.

    The id is the engine's: vLLM's contains the X-Request-Id of the HTTP request and the "id" of the answer. Ask the
    node of the engine in question; for a handoff, either side knows.
    """
    from pdx.client.api import connect

    address = address or default_node()
    with connect(address) as node:
        explained = node.why(request)
    if not explained.requests:
        if not request and not explained.remembered:
            raise PdxError(
                f"no request has asked the node at {address} for chunks yet: send one, with a prompt of a block at "
                "least, to an engine that is attached (pdx node --status lists them)"
            )
        known = f"it remembers {explained.remembered} others" if explained.remembered else "nobody has asked it yet"
        raise PdxError(
            f"the node at {address} was not asked about a request whose id contains {request!r} ({known}); either "
            f"it has no full block, or its engine runs without the node: see pdx node --status, and the engine's log"
        )
    if as_json:
        for each in explained.requests:
            click.echo(to_json(each))
    else:
        Console().print(_one(explained.requests[0]) if request else _list(explained), soft_wrap=not request)


def _list(explained: Explained) -> RenderableType:
    """Each request's id has a line of its own, so that it can be copied."""
    lines = [
        f"{one.request}\n    {one.hits} of {one.chunks} chunks hit, {duration(one.age_s)} ago, engine {one.engine}"
        for one in explained.requests
    ]
    return Text("\n".join(["requests, the last one first:", *lines]))


def _one(one: Explanation) -> RenderableType:
    waited = f", after {one.waited_s:.3f} s of waiting" if one.waited_s >= 0.001 else ""
    rows = []
    for reason in one.reasons:
        last = reason.first + reason.count - 1
        span = str(last) if reason.count == 1 else f"{reason.first}-{last}"
        rows.append((span, "hit" if reason.is_hit else "missing", reason.text))
    return Group(
        Text(f"request {one.request} of engine {one.engine}, {duration(one.age_s)} ago"),
        Text(f"{one.hits} of {one.chunks} chunks were hits{waited}"),
        table("", ("chunks", "", "why"), rows),
        *map(Text, one.notes),
        *(Text(f"hint {each.field}: {each.told}") for each in one.verdicts),
    )
