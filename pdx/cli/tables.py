"""How the commands show what they know: tables, bars, JSON, sizes and durations; and a node's status on one page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from pdx.telemetry.faults import printable
from pdx.wire.status import NodeStatus, TierStatus

_MAX_ESCAPE = 10  # characters for one: \U and eight digits


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[RenderableType]],
    *,
    header: bool = True,
    is_wide: bool = False,
) -> Table:
    """Columns whose name begins with ">" hold numbers. Text of others is no markup, and is folded, not cut.

    `is_wide`: without lines, so that many columns have room on a terminal of 80.
    """
    made = Table(title=title, title_justify="left", show_header=header, pad_edge=not is_wide)
    if is_wide:
        made.box = None
        made.padding = (0, 1, 0, 0)
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(_escaped(cell)) if isinstance(cell, str) else cell for cell in row))
    return made


def _escaped(text: str) -> str:
    """What others wrote, as peers, stores and engines do, steers no terminal; lines stay lines."""
    return "\n".join(printable(line, len(line) * _MAX_ESCAPE) for line in text.split("\n"))


def progress(*columns: ProgressColumn, console: Console | None = None, hidden: bool = False) -> Progress:
    """Bars beside the output, which are gone afterwards; `columns` come behind how many of how many."""
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns)
    return Progress(*shown, console=console or Console(stderr=True), transient=True, disable=hidden)


def to_json(value: Any) -> bytes:
    """JSON of messages as objects of their fields; on the wire they are arrays."""
    return msgspec.json.encode(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def size(nbytes: int) -> str:
    """`nbytes` with a binary unit, three digits or so."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def view(status: NodeStatus, address: str) -> RenderableType:
    attached = [
        (one.engine[:8] or one.name, one.kind, str(one.shard), one.role, one.url, str(one.pid), str(one.running))
        + (f"{one.silent_s:.1f} s",)
        for one in sorted(status.attached, key=lambda a: (a.engine, a.kind, a.shard, a.pid))
    ]
    apart = [
        Text(_escaped(f"engine {one.engine} shares no chunks {one.unshared}"))
        for one in status.attached
        if one.unshared
    ]
    chunks = [(state, str(count), size(status.chunk_bytes.get(state, 0))) for state, count in status.chunks.items()]
    counters = [
        (name, size(value) if name.endswith("bytes") else f"{value:,}")
        for name, value in sorted(status.counters.items())
    ]
    return Group(
        _head(status, address),
        table(
            "attached",
            ("engine", "kind", ">shard", "role", "url", ">pid", ">running", ">silent"),
            attached,
            is_wide=True,
        ),
        *apart,
        *([_peers(status)] if status.peers else []),
        table("chunks", ("state", ">chunks", ">bytes"), chunks),
        table("counters", ("name", ">value"), counters, header=False),
    )


def _head(status: NodeStatus, address: str) -> Text:
    used = status.arena_bytes - status.free_bytes
    share = used / status.arena_bytes if status.arena_bytes else 0.0
    place = f" on {status.gpu}" if status.gpu and len(status.arenas) < 2 else ""
    return Text.assemble(
        ("node ", "bold"),
        f"{status.name}{', ' if status.name else ''}{address}, pid {status.pid}, up {duration(status.uptime_s)}\n",
        f"peers connect to {status.listen}\n" if status.listen else "",
        f"arena {size(status.arena_bytes)}{place}, used {size(used)} ({share:.0%}); "
        f"{status.leases} leases, {status.pins} pins ({size(status.pinned_bytes)}), "
        f"{status.transfers} transfers under way",
        f"; {status.mapped} blocks of GPU memory mapped" if status.mapped else "",
        *(
            f"\n  {f'GPU {one.gpu}' if one.gpu else 'host memory'}: {size(one.total_bytes)}, "
            f"used {size(one.total_bytes - one.free_bytes)}"
            for one in (status.arenas if len(status.arenas) > 1 else [])
        ),
        *(f"\n{_escaped(_tier(tier))}" for tier in status.tiers),
    )


def _tier(tier: TierStatus) -> str:
    held = f": {tier.chunks} chunks, {size(tier.used_bytes)} of {size(tier.limit_bytes)}" if tier.limit_bytes else ""
    rates = [
        f"{verb} {rate:.2f} GB/s" for verb, rate in (("loads", tier.load_gb_s), ("stores", tier.store_gb_s)) if rate
    ]
    under_way = [f"{tier.copies} copies under way"] if tier.copies else []
    state = [tier.state] if tier.state != "ok" else []
    now = "; ".join([f"{tier.name} {tier.place}{held}", *rates, *under_way, *state])
    counts = [f"{count} {what}" for what, count in (("dropped", tier.dropped), ("errors", tier.errors)) if count]
    since = [
        f"{tier.hits} hits, {tier.misses} misses",
        f"loaded {tier.loads}, {_moved(tier.loaded_bytes, tier.read_bytes)}",
        f"stored {tier.stores}, {_moved(tier.stored_bytes, tier.written_bytes)}",
        *counts,
    ]
    return f"{now}\n    {'; '.join(since)}"


def _moved(nbytes: int, coded_bytes: int) -> str:
    return f"{size(nbytes)} in {size(coded_bytes)}" if 0 < coded_bytes < nbytes else size(nbytes)


def _peers(status: NodeStatus) -> Table:
    rows = []
    for peer in sorted(status.peers, key=lambda p: p.name):
        rates = " ".join(f"{scheme} {rate:.2f}" for scheme, rate in sorted(peer.rates.items()))
        counts = (str(peer.pushes), str(peer.landing), size(peer.sent_bytes), size(peer.landed_bytes))
        rows.append((peer.name, peer.state, peer.channel, rates, *counts, peer.why))
    columns = ("peer", "connection", "channel", "GB/s", ">pushes", ">landing", ">sent", ">landed", "why")
    return table("peers", columns, rows, is_wide=True)
