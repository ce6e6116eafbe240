"""How commands present data: tables, bars, JSON, sizes and durations; and a node's status on one page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from pdx.telemetry.faults import printable
from pdx.wire.status import NodeStatus, TierStatus

_MAX_ESCAPE = 10  # characters of the longest escape: \U and eight digits


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[RenderableType]],
    *,
    header: bool = True,
    is_wide: bool = False,
) -> Table:
    """A table. Columns whose name begins with ">" hold numbers, which are never broken. Other columns hold plain text
    without markup; it is folded and not cut, unless it is `clipped`.

    `is_wide`: without lines, so that many columns fit on a terminal of 80 columns.
    """
    made = Table(title=title or None, title_justify="left", show_header=header, pad_edge=not is_wide)
    if is_wide:
        made.box = None
        made.padding = (0, 1, 0, 0)
    for name in columns:
        is_number, head = name.startswith(">"), name.removeprefix(">")
        justify: JustifyMethod = "right" if is_number else "left"
        made.add_column(head, justify=justify, overflow="fold", no_wrap=is_number)
    for row in rows:
        made.add_row(*(Text(escaped(cell)) if isinstance(cell, str) else cell for cell in row))
    return made


def clipped(text: str, style: str = "") -> Text:
    """Text on one line, as much as fits in its column."""
    return Text(escaped(text), style=style, no_wrap=True, overflow="ellipsis")


def escaped(text: str) -> str:
    """Escape text from peers, stores and engines, so that it cannot control the terminal; line breaks stay."""
    return "\n".join(printable(line, len(line) * _MAX_ESCAPE) for line in text.split("\n"))


def progress(*columns: ProgressColumn, console: Console | None = None, hidden: bool = False) -> Progress:
    """Progress bars beside the output, removed at the end; `columns` follow the count."""
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns)
    return Progress(*shown, console=console or Console(stderr=True), transient=True, disable=hidden)


def to_json(value: Any) -> bytes:
    """JSON of messages, as objects with named fields; on the wire they are arrays."""
    return msgspec.json.encode(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def size(nbytes: int) -> str:
    """`nbytes` with a binary unit and about three digits."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def milliseconds(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s" if ms < 60_000 else duration(ms / 1000)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def view(status: NodeStatus, address: str) -> RenderableType:
    attached = [
        (one.engine[:8] or one.name, one.kind, str(one.shard), one.role, str(one.pid), str(one.running))
        + (f"{one.silent_s:.1f} s", one.url.removeprefix("http://"))
        for one in sorted(status.attached, key=lambda a: (a.engine, a.kind, a.shard, a.pid))
    ]
    apart = [
        Text(escaped(f"engine {one.engine} shares no chunks {one.unshared}")) for one in status.attached if one.unshared
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
            ("engine", "kind", ">shard", "role", ">pid", ">running", ">silent", "url"),
            attached,
            is_wide=True,
        ),
        *apart,
        *_peers(status),
        table("chunks", ("state", ">chunks", ">bytes"), chunks),
        table("counters", ("name", ">value"), counters, header=False),
    )


def _head(status: NodeStatus, address: str) -> Text:
    used = status.arena_bytes - status.free_bytes
    share = used / status.arena_bytes if status.arena_bytes else 0.0
    place = f" on {status.gpu}" if status.gpu and len(status.arenas) < 2 else ""
    return Text.assemble(
        ("node ", "bold"),
        f"{status.name}{', ' if status.name else ''}{address}\nprocess {status.pid}, up {duration(status.uptime_s)}\n",
        f"peers connect to {status.listen}\n" if status.listen else "",
        f"arena {size(status.arena_bytes)}{place}, used {size(used)} ({share:.0%})\n"
        f"{status.leases} leases, {status.pins} pins ({size(status.pinned_bytes)}), "
        f"{status.transfers} transfers under way",
        f"; {status.mapped} blocks of GPU memory mapped" if status.mapped else "",
        *(
            f"\n  {f'GPU {one.gpu}' if one.gpu else 'host memory'}: {size(one.total_bytes)}, "
            f"used {size(one.total_bytes - one.free_bytes)}"
            for one in (status.arenas if len(status.arenas) > 1 else [])
        ),
        *(f"\n{escaped(_tier(tier))}" for tier in status.tiers),
    )


def _tier(tier: TierStatus) -> str:
    held = f": {tier.chunks} chunks, {size(tier.used_bytes)} of {size(tier.limit_bytes)}" if tier.limit_bytes else ""
    rates = [
        f"{verb} {rate:.2f} GB/s" for verb, rate in (("loads", tier.load_gb_s), ("stores", tier.store_gb_s)) if rate
    ]
    under_way = [f"{tier.copies} copies under way"] if tier.copies else []
    state = [tier.state] if tier.state != "ok" else []
    counts = [f"{count} {what}" for what, count in (("dropped", tier.dropped), ("errors", tier.errors)) if count]
    lines = [
        "; ".join([f"{tier.name} {tier.place}{held}", *state]),
        "; ".join([*rates, *under_way]),
        "; ".join([f"{tier.hits} hits, {tier.misses} misses", *counts]),
        f"loaded {tier.loads}, {_moved(tier.loaded_bytes, tier.read_bytes)}; "
        f"stored {tier.stores}, {_moved(tier.stored_bytes, tier.written_bytes)}",
    ]
    return "\n    ".join(line for line in lines if line)


def _moved(nbytes: int, coded_bytes: int) -> str:
    return f"{size(nbytes)} in {size(coded_bytes)}" if 0 < coded_bytes < nbytes else size(nbytes)


def _peers(status: NodeStatus) -> list[RenderableType]:
    """A row per peer; details that are too long follow below."""
    rows, more = [], []
    for peer in sorted(status.peers, key=lambda each: each.name):
        rate = f"{peer.rates[peer.channel]:.2f}" if peer.channel in peer.rates else ""
        counts = (str(peer.pushes), str(peer.landing), size(peer.sent_bytes), size(peer.landed_bytes))
        rows.append((peer.name, peer.state, peer.channel, rate, *counts))
        others = [f"{scheme} {gb_s:.2f} GB/s" for scheme, gb_s in sorted(peer.rates.items()) if scheme != peer.channel]
        if notes := [*([peer.why] if peer.why else []), *others]:
            more.append(Text(escaped(f"peer {peer.name}: {'; '.join(notes)}")))
    columns = ("peer", "is", "channel", ">GB/s", ">pushes", ">landing", ">sent", ">landed")
    return [table("peers", columns, rows, is_wide=True), *more] if rows else []
