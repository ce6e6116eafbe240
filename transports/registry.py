"""Channels by name. PDX's own are listed here; others come by an entry point of the group `pdx.channels`.

    [project.entry-points."pdx.channels"]
    myscheme = "mypackage.mymodule:MyRegion"

A backend is imported when it is first asked for, never before.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from pdx.errors import ChannelUnavailable, ConfigError
from pdx.transports.channel import Region

GROUP = "pdx.channels"
_OURS = {
    "shm": "pdx.transports.shm:ShmRegion",
    "cuda_ipc": "pdx.transports.cuda_ipc:CudaIpcRegion",
    "tcp": "pdx.transports.tcp:TcpRegion",
    "tls": "pdx.transports.tls:TlsRegion",
    "nixl": "pdx.transports.nixl.region:NixlRegion",
    "ucx": "pdx.transports.ucx.region:UcxRegion",
}
# Not opened together unless both are named: each brings a UCX of its own, and a process with both has crashed.
CLASHES = {"ucx": "nixl"}
BY_NAME = {"tls"}  # chosen only if named
FOR_GPUS = "cuda_ipc"  # comes first for a GPU's memory


def schemes(*, on_gpu: bool = False) -> list[str]:
    """All names, PDX's own first, in the order in which to try them for memory of the host or of a GPU."""
    found = {point.name for point in entry_points(group=GROUP)}
    names = [*_OURS, *sorted(found - _OURS.keys())]
    return sorted(names, key=lambda name: name != FOR_GPUS) if on_gpu else names


def find(scheme: str) -> type[Region]:
    """The class behind a name.

    :raises ConfigError: there is no such channel.
    :raises ChannelUnavailable: its module does not import, or has no such class.
    """
    target = _OURS.get(scheme)
    if target is None:
        target = next((point.value for point in entry_points(group=GROUP) if point.name == scheme), None)
    if target is None:
        raise ConfigError(f"no channel is named {scheme!r}; there are {', '.join(schemes())}")
    module, _, name = target.partition(":")
    try:
        region: type[Region] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ChannelUnavailable(f"channel {scheme}: {target} cannot be had: {error}") from error
    return region
