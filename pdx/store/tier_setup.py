"""Opens the tiers below a node's arena from its settings. Disks, Redis and S3 are built in; others are entry points in
the group `pdx.tiers`, named like the scheme of the `--remote` address.

    [project.entry-points."pdx.tiers"]
    mine = "mypackage.mymodule:make"

`make(host, settings)` returns a `pdx.store.tier.Tier`: its own, or `RemoteTier(host, backend, settings.codec)` with its
own `pdx.store.remote.backend.Backend`. The conformance suite is `pdx.testing.tier_conformance`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from pdx.config import NodeConfig, disk_names
from pdx.errors import ConfigError
from pdx.store.disk.tier import DiskTier
from pdx.store.policies import by_name
from pdx.store.remote.backend import SCHEMES, RemoteSettings, open_backend
from pdx.store.remote.tier import RemoteTier
from pdx.store.tier import Tier, TierHost

GROUP = "pdx.tiers"


def open_below(config: NodeConfig, host: TierHost) -> list[list[Tier]]:
    """Open the levels below the first arena, the fastest first.

    :raises ConfigError: a folder cannot be this node's alone, or an address, file or policy is invalid.
    """
    levels: list[list[Tier]] = []
    by_name.find(config.disk_policy, option="--disk-policy")
    for option, value in (("--disk", " ".join(config.disks)), ("--remote", config.remote)):
        if value and host.memory[0].gpu:
            raise ConfigError(
                f"{option} {value} keeps chunks of host memory, and this node has none for them; give it "
                f"--arena 8GiB beside --gpu"
            )
    with ExitStack() as undo:  # if one cannot be opened, release the folders
        disks: list[DiskTier] = []
        for folder, name in zip(config.disks, disk_names(config), strict=True):
            disk = DiskTier(
                host,
                Path(folder),
                config.disk_limit_bytes,
                reserve_bytes=config.disk_reserve_bytes,
                codec=config.disk_codec,
                name=name,
                policy=config.disk_policy,
            )
            disks.append(disk)
            undo.callback(disk.close)
        for disk in disks:
            disk.siblings = [each for each in disks if each is not disk]
        if disks:
            levels.append(list(disks))
        if config.remote:
            settings = RemoteSettings(
                url=config.remote,
                timeout_s=config.remote_s,
                lookup_s=config.remote_lookup_s,
                ttl_s=config.remote_ttl_s,
                ca=config.remote_ca,
                credentials=config.remote_credentials,
                codec=config.remote_codec,
            )
            levels.append([open_remote(host, settings)])
        undo.pop_all()
    return levels


def open_remote(host: TierHost, settings: RemoteSettings) -> Tier:
    """Open the tier of an address.

    :raises ConfigError: there is none, or its package cannot be imported.
    """
    scheme = urlsplit(settings.url).scheme
    point = next((point for point in entry_points(group=GROUP) if point.name == scheme), None)
    if scheme in SCHEMES or point is None:
        return RemoteTier(host, open_backend(settings), settings.codec)
    try:
        make = cast("Callable[[TierHost, RemoteSettings], Tier]", point.load())
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--remote {settings.url}: {point.value} cannot be had: {error}") from error
    return make(host, settings)
