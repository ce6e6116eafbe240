"""How `pdx node --status` shows a `NodeStatus`: tables, nothing else."""

from __future__ import annotations

import os

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdx.wire.messages import NodeStatus

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def view(status: NodeStatus, address: str) -> RenderableType:
    """Everything in `status` on one page."""
    used = status.arena_bytes - status.free_bytes
    share = used / status.arena_bytes if status.arena_bytes else 0.0
    place = f" on {status.gpu}" if status.gpu and len(status.arenas) < 2 else ""
    disk = status.disk
    head = Text.assemble(
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
        f"\ndisk {disk.folder}: {disk.chunks} chunks, {size(disk.used_bytes)} of {size(disk.limit_bytes)}"
        if disk
        else "",
    )
    peers = [_peers(status)] if status.peers else []
    apart = [Text(f"engine {one.engine} shares no chunks {one.unshared}") for one in status.attached if one.unshared]
    return Group(head, _attached(status), *apart, *peers, _chunks(status), _counters(status))


def without_self(status: NodeStatus) -> NodeStatus:
    """`status` without the process that asked for it: its session of this process that was heard last."""
    own = [one for one in status.attached if one.pid == os.getpid() and one.kind == "client"]
    asked = min(own, key=lambda one: one.silent_s, default=None)
    return msgspec.structs.replace(status, attached=[one for one in status.attached if one is not asked])


def as_object(status: NodeStatus) -> bytes:
    """The same as one JSON object; on the wire it is an array."""
    return msgspec.json.encode({name: getattr(status, name) for name in status.__struct_fields__})


def _attached(status: NodeStatus) -> Table:
    table = Table(title="attached", title_justify="left")
    for column in ("engine", "kind", "shard", "role", "url", "pid", "running", "silent"):
        table.add_column(column, justify="right" if column in ("shard", "pid", "running", "silent") else "left")
    for one in sorted(status.attached, key=lambda a: (a.engine, a.kind, a.shard, a.pid)):
        table.add_row(
            one.engine[:8] or one.name,
            one.kind,
            str(one.shard),
            one.role,
            one.url,
            str(one.pid),
            str(one.running),
            f"{one.silent_s:.1f} s",
        )
    return table


def _peers(status: NodeStatus) -> Table:
    table = Table(title="peers", title_justify="left")
    for column in ("peer", "link", "channel", "GB/s", "pushes", "landing", "sent", "landed", "why"):
        is_number = column in ("pushes", "landing", "sent", "landed")
        table.add_column(column, justify="right" if is_number else "left")
    for peer in sorted(status.peers, key=lambda p: p.name):
        table.add_row(
            Text(peer.name),
            peer.state,
            peer.channel,
            " ".join(f"{scheme} {rate:.2f}" for scheme, rate in sorted(peer.rates.items())),
            str(peer.pushes),
            str(peer.landing),
            size(peer.sent_bytes),
            size(peer.landed_bytes),
            Text(peer.why),
        )
    return table


def _chunks(status: NodeStatus) -> Table:
    table = Table(title="chunks", title_justify="left")
    table.add_column("state")
    table.add_column("chunks", justify="right")
    table.add_column("bytes", justify="right")
    for state, count in status.chunks.items():
        table.add_row(state, str(count), size(status.chunk_bytes.get(state, 0)))
    return table


def _counters(status: NodeStatus) -> Table:
    table = Table(title="counters", title_justify="left", show_header=False)
    table.add_column("name")
    table.add_column("value", justify="right")
    for name, value in sorted(status.counters.items()):
        table.add_row(name, size(value) if name.endswith("bytes") else f"{value:,}")
    return table


def size(nbytes: int) -> str:
    """`nbytes` with a binary unit, three digits or so."""
    value = float(nbytes)
    for unit in _UNITS[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, without leading zeros."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
